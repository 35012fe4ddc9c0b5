"""The rank of a node in its job, and the address of its peers: by flags, or by the platform's environment."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from litgpt_demo.errors import NetworkError, UserError
from litgpt_demo.findings import Finding
from litgpt_demo.node import pytorchjob
from litgpt_demo.node.network import UNTOLD, NodeNetwork, job_network
from litgpt_demo.node.torchrun import Rendezvous

# Seconds that peers have to come up, and their names to resolve: as long as torchrun's own rendezvous waits
# (torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py).
PATIENCE = 600.0

# Where platforms tell a node its number, the number of nodes, and where node 0 is. The first that is there counts.
# JOB_COMPLETION_INDEX: Indexed Jobs and JobSets. PET_*: Kubeflow's trainers and Run:ai; torchrun reads them by itself.
# RANK is the node's in older Run:ai, and a process's under torchrun.
NODE_RANKS = ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK")
NODE_COUNTS = ("PET_NNODES", "WORLD_SIZE")
MASTERS = (("PET_MASTER_ADDR", "PET_MASTER_PORT"), ("MASTER_ADDR", "MASTER_PORT"))

# What torchrun gives to each of its ranks; a platform's own would be taken for that by whatever reads it before.
OF_RANKS = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
)

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Node:
    """The task of one node."""

    meet: Rendezvous
    processes: int
    """Ranks on this node."""
    directory: Path
    """The folder of the attempt; its nodes may share it."""
    program: tuple[str, ...]
    stage: tuple[str, ...] = ()
    """Addresses of datasets to bring here."""
    code: str | None = None
    """Address of the archive of the user's own code, which the program is then part of."""
    grace: int = 30
    """Seconds that the ranks have to finish a step and save when the node is asked to leave."""
    log_uri: str | None = None
    """The address to which logs and error files are copied, because `directory` goes with the machine."""
    log_every: float = 60.0
    """Seconds between two such copies."""
    network: NodeNetwork = UNTOLD
    by_pytorchjob: bool = False
    """Its number is what a PyTorchJob told, which is then checked against what was submitted."""

    @property
    def own(self) -> Path:
        """The part of the directory that no other node writes to."""
        return self.directory / f"node-{self.meet.node_rank}"


# --- the command line -------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Node:
    """The node that a command line asks for. A value `env:NAME` is read from the environment, so that one command line
    serves every node of a platform that numbers its pods (`--node-rank env:JOB_COMPLETION_INDEX`); `auto` takes what
    the platform is known to tell.

    Raises:
        UserError: a number that is none, an address without a port, a variable that is not there, no program.
    """
    split = list(argv).index("--") if "--" in argv else len(argv)
    flags = _parser().parse_args(list(argv[:split]))
    program = tuple(argv[split + 1 :])
    if not program:
        raise UserError("no program given; end the command line with `-- script.py …` or `-- -m module …`")
    return Node(
        meet=rendezvous(flags, environ),
        processes=_number("--processes", flags.processes, environ),
        directory=Path(flags.directory).absolute(),
        program=program,
        stage=tuple(flags.stage),
        code=flags.code,
        grace=flags.grace,
        log_uri=flags.log_uri,
        log_every=flags.log_every,
        network=job_network(environ),
        by_pytorchjob=flags.node_rank == pytorchjob.TOLD,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m litgpt_demo node",
        usage="%(prog)s --nodes N --node-rank R --processes P --master HOST:PORT --run-id ID --directory DIR -- …",
        description="Run one node of a job. A value env:NAME is read from the environment; --nodes, --node-rank and "
        "--master may be `auto`: as PET_*, JOB_COMPLETION_INDEX, or RANK, WORLD_SIZE and MASTER_ADDR say; --node-rank "
        "and --master may be `pytorchjob`: as Run:ai and Kubeflow say, checked against --nodes and --processes.",
    )
    parser.add_argument("--nodes", required=True, help="nodes of the job")
    parser.add_argument("--node-rank", required=True, help="number of this one, from 0")
    parser.add_argument("--processes", required=True, help="ranks on this node")
    parser.add_argument("--master", required=True, metavar="HOST:PORT", help="where node 0 listens")
    parser.add_argument("--run-id", required=True, help="one per attempt, the same on every node")
    parser.add_argument("--directory", required=True, help="local folder for logs and error files")
    parser.add_argument("--log-uri", metavar="ADDRESS", help="a folder or gs:// that those are copied to while it runs")
    parser.add_argument("--log-every", type=float, default=60.0, help="seconds between two copies (default: 60)")
    parser.add_argument("--stage", action="append", default=[], metavar="ADDRESS", help="a dataset to bring here first")
    parser.add_argument("--code", metavar="ADDRESS", help="an archive <sha256>.tar to unpack and to start in")
    parser.add_argument("--grace", type=int, default=30, help="seconds ranks have to save on SIGTERM (default: 30)")
    return parser


def rendezvous(flags: argparse.Namespace, environ: Mapping[str, str]) -> Rendezvous:
    """Return rank and peers: from the flags, or from the environment variables that they name.

    Raises:
        UserError: see `parse`.
    """
    if flags.master == pytorchjob.TOLD:
        master = pytorchjob.master(environ)
    else:
        master = told_master(environ) if flags.master == AUTO else _value("--master", flags.master, environ)
    host, _, port = master.rpartition(":")
    if not host:
        raise UserError(f"--master={master!r} has no port; give HOST:PORT, for example 10.0.0.5:29500")
    nodes = told("--nodes", NODE_COUNTS, environ) if flags.nodes == AUTO else flags.nodes
    rank = told("--node-rank", NODE_RANKS, environ) if flags.node_rank == AUTO else flags.node_rank
    count = _number("--nodes", nodes, environ)
    if rank == pytorchjob.TOLD:
        rank = str(pytorchjob.node_rank(environ))
    return Rendezvous(
        nodes=count,
        node_rank=_number("--node-rank", rank, environ),
        host=host,
        port=_number("--master's port", port, environ),
        run_id=_value("--run-id", flags.run_id, environ),
    )


def told(flag: str, names: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the value of the first of these variables that the platform sets.

    Raises:
        UserError: it sets none.
    """
    for name in names:
        if environ.get(name):
            return environ[name]
    raise UserError(f"{flag}=auto finds none of {', '.join(names)} in the environment; give the value itself")


def told_master(environ: Mapping[str, str]) -> str:
    """Return the address of node 0 that the platform gives, as HOST:PORT.

    Raises:
        UserError: it does not say.
    """
    for host, port in MASTERS:
        if environ.get(host):
            return f"{environ[host]}:{environ.get(port, '29500')}"
    names = ", ".join(host for host, _ in MASTERS)
    raise UserError(f"--master=auto finds none of {names} in the environment; give HOST:PORT itself")


def _value(flag: str, given: str, environ: Mapping[str, str]) -> str:
    if not given.startswith("env:"):
        return given
    name = given.removeprefix("env:")
    if name not in environ:
        raise UserError(f"{flag}={given} is not to be had: {name} is not in the environment; give the value itself")
    return environ[name]


def _number(flag: str, given: str, environ: Mapping[str, str]) -> int:
    value = _value(flag, given, environ)
    if not value.isdecimal():
        raise UserError(f"{flag}={value!r} is not a whole number; give one such as 0 or 8")
    return int(value)


# --- what the platform says of it -------------------------------------------------------------------------------------


def without_leftovers(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would change torchrun's mind: it reads a `PET_<FLAG>` for every flag that it is not
    given, and scripts take a platform's RANK and WORLD_SIZE, which count nodes, for its own, which count processes."""
    return {name: value for name, value in environ.items() if not name.startswith("PET_") and name not in OF_RANKS}


def contradictions(node: Node, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield where the platform's variables contradict what was submitted. Two nodes that take themselves for
    the same one wait for each other forever; a world that is too small trains alone and does not say so."""
    if node.by_pytorchjob:
        for problem in pytorchjob.problems(environ, nodes=node.meet.nodes, processes=node.processes):
            fix = "see that nobody changed the number of workers (pods are workers + 1). The platform tells this pod"
            fix = f"{fix}\n{pytorchjob.table(environ)}"
            yield Finding("error", "node.contradiction", problem, fix)
        return
    ranks = node.meet.nodes * node.processes
    allowed = {
        "PET_NODE_RANK": (node.meet.node_rank,),
        "JOB_COMPLETION_INDEX": (node.meet.node_rank,),
        "PET_NNODES": (node.meet.nodes,),
        # Nodes in older Run:ai and plain Kubeflow, processes since (kubeflow/trainer, PyTorchJob v1).
        "WORLD_SIZE": (node.meet.nodes, ranks),
    }
    for name, values in allowed.items():
        given = environ.get(name)
        if given is None or given in {str(value) for value in values}:
            continue
        flag = "--node-rank" if name in NODE_RANKS else "--nodes"
        value = node.meet.node_rank if name in NODE_RANKS else node.meet.nodes
        of = f" of {node.processes} ranks" if name == "WORLD_SIZE" else ""
        # A shell may have one left from another job; the others are set by a platform for this very pod.
        loose = name == "WORLD_SIZE" and "PET_NNODES" not in environ
        yield Finding(
            "warning" if loose else "error",
            "node.contradiction",
            what=f"{name}={given} does not agree with {flag}={value}{of}",
            fix=f"submit as many nodes as the job is told of, or take {name} out of the environment",
        )


def await_name(
    host: str,
    *,
    limit: float = PATIENCE,
    lookup: Callable[[str], object] = lambda host: socket.getaddrinfo(host, None),
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when node 0's name resolves: a headless Service knows its pods only once they are there.

    Raises:
        NetworkError: it does not within `limit` seconds.
    """
    deadline, pause = time.monotonic() + limit, 0.5
    while True:
        try:
            lookup(host.strip("[]"))
            return
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise NetworkError(
                    f"node 0's name {host} did not resolve for {limit:.0f} s ({error}); look whether its pod is there "
                    "(pending, or its image not pulled), and whether the job's headless Service is"
                ) from error
        sleep(pause)
        pause = min(pause * 2, 5.0)


def machine_name() -> str:
    """The machine that this node is: what the platform calls it, for verdicts and exclusions, or the host name."""
    return os.environ.get("LITGPT_HOST") or socket.gethostname()
