"""What `docker run` makes of a container's options. Flags that it does not know end it with 125, as docker does."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

SHM = 64 * 2**20
_VALUED = frozenset(
    {
        "--network", "--net", "--shm-size", "--ulimit", "--stop-timeout", "--env-file", "--runtime", "--gpus", "--ipc",
        "--workdir", "--user", "--env", "-e", "--volume", "-v", "--hostname", "--cpus", "--memory",
        "--cap-drop", "--cap-add", "--security-opt",
    }
)  # fmt: skip
_PLAIN = frozenset({"--privileged", "--rm", "--init", "-i", "-t"})


class UnknownFlagError(Exception):
    """Exit code 125."""


@dataclass
class Options:
    """As the engine understood them."""

    shm: int = SHM
    stop_timeout: float = 10.0
    env_files: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    host_network: bool = False
    privileged: bool = False
    dropped: set[str] = field(default_factory=set)
    """Capabilities that are taken away; `ALL` is every one."""
    no_new_privileges: bool = False
    runtime: str = "runc"
    gpus: bool = False
    workdir: str = "/"


def parsed(text: str) -> Options:
    """
    Raises:
        UnknownFlagError: docker would not start.
    """
    words, made = shlex.split(text), Options()
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name in _PLAIN and not equals:
            made.privileged |= name == "--privileged"
            continue
        if name not in _VALUED:
            raise UnknownFlagError(f"unknown flag: {name}")
        if not equals:
            if not words:
                raise UnknownFlagError(f"flag needs an argument: {name}")
            value = words.pop(0)
        _set(made, name, value)
    return made


def _set(made: Options, name: str, value: str) -> None:
    match name:
        case "--network" | "--net":
            made.host_network = value == "host"
        case "--shm-size":
            made.shm = size(value)
        case "--stop-timeout":
            made.stop_timeout = float(value)
        case "--env-file":
            made.env_files.append(value)
        case "--env" | "-e":
            key, _, content = value.partition("=")
            made.environment[key] = content
        case "--cap-drop":
            made.dropped.add(value)
        case "--security-opt":
            if value != "no-new-privileges":
                raise UnknownFlagError(f"invalid --security-opt: {value!r}")
            made.no_new_privileges = True
        case "--runtime":
            made.runtime = value
        case "--gpus":
            made.gpus = True
        case "--workdir":
            made.workdir = value


def size(text: str) -> int:
    """`4gb`, `64m`, `1073741824`."""
    digits = text.rstrip("bkmgBKMG")
    unit = text[len(digits) :].lower().removesuffix("b")
    if not digits.isdigit() or unit not in ("", "k", "m", "g"):
        raise UnknownFlagError(f'invalid argument "{text}" for "--shm-size" flag: invalid size')
    return int(digits) * {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}[unit]


def env_file(text: str) -> Mapping[str, str]:
    """Lines as they are: docker takes quotes for a part of the value."""
    pairs = (line.partition("=") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: value for name, equals, value in pairs if equals}
