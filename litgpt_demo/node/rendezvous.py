"""The rank of a node in its job, and the address of its peers: by flags, or by the platform's environment.

`python -m litgpt_demo node --spec eyJhcmd2Ijpb…` is such a command line as one word. Some launchers join the words of a
command for a shell, some keep them (Run:ai of 2.13 and 2.18). A word without blanks, quotes and `$` suits both.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from litgpt_demo.errors import Finding, NetworkError, UserError
from litgpt_demo.node.network import NO_NETWORK_PROFILE, NodeNetwork, job_network

PYTORCHJOB = "pytorchjob"
"""The value of --node-rank and --master that takes them from a PyTorchJob's variables, which every Run:ai sets."""

_POD = re.compile(r".*-(?P<role>master|worker)-(?P<index>\d+)")
_SHOWN = re.compile(r"(PET_|MASTER_)\w+|RANK|WORLD_SIZE|RUNAI_NUM_OF_GPUS|HOSTNAME")


@dataclass(frozen=True, kw_only=True)
class Node:
    """The task of one node."""

    nodes: int
    node_rank: int
    host: str
    """Address of node 0 for every node. There is no default: a node that falls back to localhost trains by itself."""
    port: int
    run_id: str
    """One per attempt: a peer of an earlier one must not be able to join (pytorch#116974)."""
    processes: int
    """Ranks on this node."""
    directory: Path
    """The folder of the attempt; its nodes may share it."""
    program: tuple[str, ...]
    stage: tuple[str, ...] = ()
    code: str | None = None
    """Address of the archive of the user's own code, which contains the program."""
    grace: int = 30
    log_uri: str | None = None
    """The address to which logs and error files are copied, if `directory` does not outlive the machine."""
    log_every: float = 60.0
    network: NodeNetwork = NO_NETWORK_PROFILE
    by_pytorchjob: bool = False
    """The number comes from a PyTorchJob, and is checked against the submission."""

    @property
    def own(self) -> Path:
        """The part of the directory to which only this node writes."""
        return self.directory / f"node-{self.node_rank}"

    @property
    def is_ours(self) -> bool:
        """Return True if its program is our trainer."""
        return self.program[:2] == ("-m", "litgpt_demo")


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Node:
    """Parse a command line. A value `env:NAME` is read from the environment, so that one command line serves every node
    of a platform that numbers its pods (`--node-rank env:JOB_COMPLETION_INDEX`).
    """
    parser = argparse.ArgumentParser(
        prog="python -m litgpt_demo node",
        usage="%(prog)s --nodes N --node-rank R --processes P --master HOST:PORT --run-id ID --directory DIR -- …",
        description="Run one node of a job. A value env:NAME is read from the environment; --node-rank and --master "
        "may be `pytorchjob`: by Run:ai's and Kubeflow's variables, checked against --nodes and --processes.",
    )
    parser.add_argument("--nodes", required=True, help="nodes of the job")
    parser.add_argument("--node-rank", required=True, help="number of this node, from 0")
    parser.add_argument("--processes", required=True, help="ranks on this node")
    parser.add_argument("--master", required=True, metavar="HOST:PORT", help="address where node 0 listens")
    parser.add_argument("--run-id", required=True, help="name of the attempt, the same on every node")
    parser.add_argument("--directory", required=True, help="local folder for logs and error files")
    parser.add_argument("--log-uri", metavar="ADDRESS", help="folder or gs:// address to copy the logs to, as it runs")
    parser.add_argument("--log-every", type=float, default=60.0, help="seconds between two copies (default: 60)")
    parser.add_argument("--stage", action="append", default=[], metavar="ADDRESS", help="a dataset to copy here first")
    parser.add_argument("--code", metavar="ADDRESS", help="an archive <sha256>.tar to unpack and start in")
    parser.add_argument("--grace", type=int, default=30, help="seconds for ranks to save after SIGTERM (default: 30)")

    split = list(argv).index("--") if "--" in argv else len(argv)
    flags = parser.parse_args(list(argv[:split]))
    program = tuple(argv[split + 1 :])
    if not program:
        raise UserError("no program given", fix="end the command line with `-- script.py …` or `-- -m module …`")

    def resolve(flag: str, value: str, *names: str) -> str:
        """Return a flag's value, read from the variable that it names or from the first of a PyTorchJob's `names`."""
        if value.startswith("env:"):
            names = (value.removeprefix("env:"),)
        elif value != PYTORCHJOB or not names:
            return value
        for name in names:
            if environ.get(name):
                return environ[name]
        what = f"{flag}={value} cannot be resolved: {' or '.join(names)} is not in the environment"
        fix = "give the value itself, or submit the job as a PyTorch training with a master"
        raise UserError(what, fix=f"{fix}. The platform's variables are\n{_table(environ)}")

    def number(flag: str, value: str, *names: str) -> int:
        resolved = resolve(flag, value, *names)
        if not resolved.isdecimal():
            raise UserError(f"{flag}={resolved!r} is not a whole number", fix="give one such as 0 or 8")
        return int(resolved)

    # Node 0's address is never guessed, because then each node would train by itself.
    master = resolve("--master", flags.master, "PET_MASTER_ADDR", "MASTER_ADDR")
    if flags.master == PYTORCHJOB:
        port = environ.get("PET_MASTER_PORT") or environ.get("MASTER_PORT") or "23456"  # the operator's default
        master = f"{master}:{port}"
    host, _, port = master.rpartition(":")
    if not host:
        raise UserError(f"--master={master!r} has no port", fix="give HOST:PORT, for example 10.0.0.5:29500")
    return Node(
        nodes=number("--nodes", flags.nodes),
        # RANK is the node's in older Run:ai, but a process's under torchrun.
        node_rank=number("--node-rank", flags.node_rank, "PET_NODE_RANK", "RANK"),
        host=host,
        port=number("--master's port", port),
        run_id=resolve("--run-id", flags.run_id),
        processes=number("--processes", flags.processes),
        directory=Path(flags.directory).absolute(),
        program=program,
        stage=tuple(flags.stage),
        code=flags.code,
        grace=flags.grace,
        log_uri=flags.log_uri,
        log_every=flags.log_every,
        network=job_network(environ),
        by_pytorchjob=flags.node_rank == PYTORCHJOB,
    )


SPEC = "--spec"


def plain(word: str) -> bool:
    """Return True if no shell, and no flag that splits its value at commas, changes the word."""
    return re.fullmatch(r"[A-Za-z0-9_@%+=:./-]+", word) is not None


def pack(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return arguments and variables to set before them as one word of letters, digits, `-`, `_` and `=`."""
    document = {"argv": list(argv), "env": dict(environ)}
    return base64.urlsafe_b64encode(json.dumps(document, separators=(",", ":")).encode()).decode()


def unpack(argv: Sequence[str], environ: MutableMapping[str, str]) -> list[str]:
    """Return the arguments of a packed command line, and set its variables in `environ`; others are not changed."""
    if not argv or argv[0] != SPEC:
        return list(argv)
    word = argv[1] if len(argv) == 2 else ""
    try:
        document = json.loads(base64.urlsafe_b64decode(word))
        arguments, variables = [*map(str, document["argv"])], dict(document["env"])
    except (binascii.Error, ValueError, KeyError, TypeError) as error:
        what = f"{SPEC} {word[:40]!r}… was not written by the launcher ({type(error).__name__}: {error})"
        raise UserError(what, fix="copy the whole command that `train-litgpt render` prints") from error
    environ.update(variables)
    return arguments


def contradictions(node: Node, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the platform's variables that contradict the submission. Two nodes with the same number wait for each other
    forever. A world that is too small trains by itself, silently.

    WORLD_SIZE means pods in one version and GPUs in another: Kubeflow multiplies by nprocPerNode where that is a number
    (https://github.com/kubeflow/trainer/blob/v1.9.0/pkg/controller.v1/pytorch/envvar.go), Run:ai of 2.13 counts pods
    and Run:ai of 2.18 counts GPUs (https://github.com/epfml/getting-started/blob/5b3f69d/docs/multinode.md).
    """
    nodes, rank = node.nodes, node.node_rank
    world_sizes = {nodes, nodes * node.processes}
    allowed = {
        "PET_NODE_RANK": {rank},
        "JOB_COMPLETION_INDEX": {rank},
        "PET_NNODES": {nodes},
        "WORLD_SIZE": world_sizes,
    }
    variables = dict(environ)
    if node.by_pytorchjob:
        allowed["RANK"] = {rank}
        # A pod may have more GPUs than it has ranks.
        gpus = (environ.get(name, "") for name in ("RUNAI_NUM_OF_GPUS", "PET_NPROC_PER_NODE"))
        world_sizes |= {nodes * int(count) for count in gpus if count.isdecimal()}
        pod = _POD.fullmatch(environ.get("HOSTNAME", ""))
        if pod:  # `<job>-master-0` is node 0, `<job>-worker-<i>` i + 1
            name = f"the pod's name {pod[0]}: node"
            variables[name] = "0" if pod["role"] == "master" else str(int(pod["index"]) + 1)
            allowed[name] = {rank}
    for name, values in allowed.items():
        value = variables.get(name)
        if not value or value in map(str, values):
            continue
        # A shell may have a WORLD_SIZE of another job. The platform sets the others for this very node.
        is_leftover = name == "WORLD_SIZE" and "PET_NNODES" not in environ and not node.by_pytorchjob
        yield Finding(
            "warning" if is_leftover else "error",
            "node.contradiction",
            what=f"{name}={value} does not agree with --nodes={nodes} --node-rank={rank} --processes={node.processes}",
            fix="submit as many nodes as the platform reports (a PyTorchJob's are workers + 1), or remove the variable "
            f"from the environment. The platform's variables are\n{_table(environ)}",
        )


def _table(environ: Mapping[str, str]) -> str:
    return "\n".join(f"  {name}={environ[name]}" for name in sorted(filter(_SHOWN.fullmatch, environ))) or "  nothing"


def await_name(host: str) -> None:
    """Wait until node 0's name resolves: a headless Service lists its pods only after their start."""
    limit = 600.0  # seconds: as torchrun's own rendezvous waits (elastic/rendezvous/static_tcp_rendezvous.py)
    deadline = time.monotonic() + limit
    while True:
        try:
            socket.getaddrinfo(host.strip("[]"), None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                what = f"node 0's name {host} did not resolve for {limit:.0f} s ({error})"
                fix = (
                    "check whether node 0 is pending or pulls its image, and that a headless Service resolves its name"
                )
                raise NetworkError(what, fix=fix) from error
        time.sleep(1.0)


def machine_name() -> str:
    """Return the machine's name on the platform, for diagnoses and exclusions; otherwise the host name."""
    return os.environ.get("LITGPT_HOST") or socket.gethostname()
