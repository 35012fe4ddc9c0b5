"""A Prefect server as `make serve` and other commands start one: its command line, its secret and where that is kept,
and who listens in its place.

Nothing here imports Prefect, which reads its settings when it is imported.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from urllib.parse import quote

from launcher.errors import ConfigProblem
from litgpt_demo import PYTHON
from litgpt_demo.storage.private import write_private

CHECKOUT = Path(__file__).resolve().parents[1]
AUTH = "PREFECT_API_AUTH_STRING"
SERVER_AUTH = "PREFECT_SERVER_API_AUTH_STRING"
ORIGINS = "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"
LOOPBACK = ("127.0.0.1", "localhost")
ENTER = "/enter"
"""The path of the page that logs a browser in."""


def serving_home() -> Path:
    """Return the folder of the server that `make serve` starts: PREFECT_HOME or, without one, next to the code."""
    return Path(os.environ.get("PREFECT_HOME") or CHECKOUT / ".prefect").expanduser().absolute()


def environment_file(home: Path) -> Path:
    """Return the file with the settings that a shell needs to use the server of `make serve`, its secret among them."""
    return home / "serve" / "environment"


def settings_in(file: Path) -> dict[str, str]:
    """Return the settings of such a file; {} where there is none that we can read."""
    try:
        words = shlex.split(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, PermissionError, ValueError):  # the last where somebody edited it
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def write_settings(file: Path, settings: Mapping[str, str]) -> None:
    """Write such a file for its owner alone, so that a reader sees all of it or none."""
    write_private(file, "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items()))


def server_command(port: int, *, log_level: str, of_command: bool = False) -> list[str]:
    """Return the command line of a Prefect server behind our door, which only this machine can reach.

    Args:
        of_command: it ends when its standard input does, which a command keeps open as long as it lives.
    """
    application = "application_of_a_command" if of_command else "application"
    program = [*PYTHON, "-m", "uvicorn", "--app-dir", str(CHECKOUT), "--factory"]
    options = ["--lifespan", "on", "--log-level", log_level, "--host", "127.0.0.1", "--port", str(port)]
    return [*program, f"flows.front_door:{application}", *options]


def server_environment(port: int, secret: str) -> dict[str, str]:
    """Return the settings of such a server."""
    return {
        SERVER_AUTH: secret,
        ORIGINS: ",".join(origins_at(port)),
        "PREFECT__SERVER_FINAL": "1",  # there is one server in the process, which saves 50 MB
    }


def new_secret() -> str:
    """Return a user name and a random password, the form that HTTP's basic authentication has."""
    return f"litgpt:{secrets.token_urlsafe(32)}"


def origins_at(port: int) -> list[str]:
    """Return the origins of the UI of a server on this machine."""
    return [f"http://{name}:{port}" for name in LOOPBACK]


def login_link(port: int, secret: str) -> str:
    """Return the address that logs a browser in. It is a secret too, hence nothing for a command line."""
    return f"http://127.0.0.1:{port}{ENTER}#{quote(secret, safe='')}"


# --- other users of this machine --------------------------------------------------------------------------------------


def require_no_stranger(port: int) -> None:
    """See that no other user of this machine listens where our server does.

    Raises:
        ConfigProblem: one does.
    """
    if (stranger := stranger_at(port)) is not None:
        raise ConfigProblem(
            f"port {port} of this machine is taken by the user {stranger}, whose server could learn our secret and "
            "decide what our worker runs; choose another port: python -m deployments.bootstrap serve --port 4300"
        )


def stranger_at(port: int) -> str | None:
    """Return the user, neither us nor root, who listens at a port that this machine's own programs reach.

    None also where the system does not tell: only Linux has the tables in /proc/net.
    """
    for uid in _listeners(port):
        if uid not in {0, os.geteuid()}:
            with suppress(KeyError):
                return pwd.getpwuid(uid).pw_name
            return str(uid)
    return None


def _listeners(port: int) -> Iterator[int]:
    """Yield the ids of the users who listen there (https://www.kernel.org/doc/html/latest/networking/proc_net_tcp.html)."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, uid, *_ = line.split()
                address, _, its_port = local.partition(":")
                if state == "0A" and int(its_port, 16) == port and _is_reached_from_here(address):
                    yield int(uid)


def _is_reached_from_here(address: str) -> bool:
    """Return whether an address of the kernel's, in words of 32 bits in the machine's order, is a loopback or any."""
    words = (int(address[at : at + 8], 16) for at in range(0, len(address), 8))
    found = ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    found = (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found
    return found.is_loopback or found.is_unspecified
