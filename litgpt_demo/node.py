"""One node of a job: learn rank and peers, check the machine, stage the data in, run torchrun, say how it ended.

    python -m litgpt_demo node --nodes 2 --node-rank 0 --processes 8 --master 10.0.0.5:29500 --run-id owt-1a2b-1 \\
        --directory /runs/owt-1a2b/attempts/1 -- train.py --steps 100

Any script or module can stand behind the `--`. The exit code is that of the fault's class (litgpt_demo.faults), which
torchrun's never is; what happened is left in `<directory>/node-<rank>.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from litgpt_demo.faults import (
    EXIT_CODES,
    Fault,
    LitgptDemoError,
    Preempted,
    RankFailure,
    UserError,
    decisive,
    fault_of_exception,
)
from litgpt_demo.heartbeat import NODE_DIRECTORY, Beat, ask_for_stacks, clear_beats, overdue, read_beats
from litgpt_demo.torchrun import FAILURES, Rendezvous, agent_failure, read_failures, torchrun_command

# Seconds between two looks at the ranks' signs of life.
_LOOK = 1.0


@dataclass(frozen=True, kw_only=True)
class Node:
    """What one node is asked to do."""

    meet: Rendezvous
    processes: int
    """Ranks on this node."""
    directory: Path
    """Of the attempt; its nodes may share it."""
    program: tuple[str, ...]
    stage: tuple[str, ...] = ()
    """Addresses of datasets to bring here."""
    grace: int = 30
    """Seconds that the ranks have to finish a step and save when the node is asked to leave."""

    @property
    def own(self) -> Path:
        """The part of the directory that no other node writes to."""
        return self.directory / f"node-{self.meet.node_rank}"


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something about this machine or this call that will not work; `str` is the line in the node's log."""

    fault: Fault
    code: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"error [{self.code}] {self.what} -> {self.fix}"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How torchrun ended, and whether it had been asked to."""

    exit_code: int
    asked: float | None
    """When SIGTERM or SIGINT came, seconds since the epoch."""
    host_ran_out_of_memory: bool
    failures: tuple[RankFailure, ...] = ()
    agent: str | None = None
    """The exception that torchrun itself fell over."""


@dataclass
class _Leave:
    """What the signal handler and the waiting code share."""

    torchrun: subprocess.Popen[bytes] | None = None
    asked: float | None = None


# --- what to do -------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Node:
    """The node that a command line asks for. A value `env:NAME` is read from the environment, so that one command line
    serves every node of a platform that numbers its pods (`--node-rank env:JOB_COMPLETION_INDEX`).

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
        grace=flags.grace,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m litgpt_demo node",
        usage="%(prog)s --nodes N --node-rank R --processes P --master HOST:PORT --run-id ID --directory DIR -- …",
        description="Run one node of a job. A value env:NAME is read from the environment.",
    )
    parser.add_argument("--nodes", required=True, help="nodes of the job")
    parser.add_argument("--node-rank", required=True, help="number of this one, from 0")
    parser.add_argument("--processes", required=True, help="ranks on this node")
    parser.add_argument("--master", required=True, metavar="HOST:PORT", help="where node 0 listens")
    parser.add_argument("--run-id", required=True, help="one per attempt, the same on every node")
    parser.add_argument("--directory", required=True, help="local folder for logs and error files")
    parser.add_argument("--stage", action="append", default=[], metavar="ADDRESS", help="a dataset to bring here first")
    parser.add_argument("--grace", type=int, default=30, help="seconds ranks have to save on SIGTERM (default: 30)")
    return parser


def rendezvous(flags: argparse.Namespace, environ: Mapping[str, str]) -> Rendezvous:
    """Where rank and peers come from: the flags, or the environment variables that they name.

    Raises:
        UserError: see `parse`.
    """
    master = _value("--master", flags.master, environ)
    host, _, port = master.rpartition(":")
    if not host:
        raise UserError(f"--master={master!r} has no port; give HOST:PORT, for example 10.0.0.5:29500")
    return Rendezvous(
        nodes=_number("--nodes", flags.nodes, environ),
        node_rank=_number("--node-rank", flags.node_rank, environ),
        host=host,
        port=_number("--master's port", port, environ),
        run_id=_value("--run-id", flags.run_id, environ),
    )


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


# --- checks and environment -------------------------------------------------------------------------------------------


def troubles(node: Node) -> Iterator[Trouble]:
    """What would make this node fail, as far as a moment's look can tell."""
    meet = node.meet
    if meet.node_rank >= meet.nodes:
        what = f"--node-rank={meet.node_rank} is not one of --nodes={meet.nodes}"
        yield Trouble(fault=Fault.USER, code="node.rank", what=what, fix=f"nodes are numbered 0 to {meet.nodes - 1}")
    if node.processes < 1:
        what = f"--processes={node.processes} leaves nothing to run"
        yield Trouble(fault=Fault.USER, code="node.processes", what=what, fix="give one per GPU, or at least 1")
    script = node.program[0]
    if not script.startswith("-") and not Path(script).is_file():
        what = f"the program {script} is no file in {Path.cwd()}"
        yield Trouble(fault=Fault.USER, code="node.program", what=what, fix="give its absolute path, or `-m module`")
    try:
        node.own.mkdir(parents=True, exist_ok=True)
        (node.own / ".writable").touch()
    except OSError as error:
        what = f"--directory={node.directory} cannot be written: {error.strerror}"
        yield Trouble(fault=Fault.NODE, code="node.directory", what=what, fix="mount or create a folder that can")
    if meet.node_rank == 0 and not port_is_free(meet.port):
        what = f"port {meet.port} of --master={meet.host}:{meet.port} is taken on this node"
        yield Trouble(
            fault=Fault.NODE, code="node.port", what=what, fix="end what listens there, or choose another port"
        )


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this TCP port of this machine now; connections that linger do not count."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPU cores this process may use: its affinity, and its container's quota (cgroup v2), which affinity hides."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = cpu_max.read_text().split() if cpu_max.exists() else ("max", "")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def exports(node: Node, datasets: Sequence[Path], environ: Mapping[str, str], *, cores: int) -> dict[str, str]:
    """The environment of torchrun and its ranks: ours, and what they need to know.

    torchrun reads a `PET_<FLAG>` for every flag that it is not given, so a platform's own would change what we ask for.
    """
    mine = {name: value for name, value in environ.items() if not name.startswith("PET_")}
    mine.setdefault("OMP_NUM_THREADS", str(max(1, cores // node.processes)))
    mine[NODE_DIRECTORY] = str(node.own)
    # torchrun's tail of its ranks' output must not be held back, and says which rank of the whole job it is.
    mine["PYTHONUNBUFFERED"] = "1"
    mine["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[${role_name}${rank}]:"
    if datasets:
        mine["LITGPT_DATASET"] = str(datasets[0])
    return mine


def stage_all(node: Node) -> list[Path]:
    """The node's datasets in local folders, verified.

    Raises:
        DataError: one is not what its manifest says.
    """
    if not node.stage:
        return []
    from litgpt_demo.dataset import stage

    return [stage(address, node.own / "data") for address in node.stage]


# --- the ranks --------------------------------------------------------------------------------------------------------


def run_ranks(node: Node, environ: Mapping[str, str], leave: _Leave) -> Ending:
    """Start torchrun in this process's group, pass signals on to it, wait, and read what its ranks left.

    NODE_DIRECTORY in the environment of all its processes is how strays are found.
    """
    logs = node.own / "ranks"
    (logs / FAILURES).unlink(missing_ok=True)
    clear_beats(node.own)
    command = torchrun_command(
        node.meet, processes=node.processes, program=node.program, log_dir=str(logs), grace=node.grace
    )
    kills_before = _out_of_memory_kills()
    leave.torchrun = subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL)
    hung = _watched(leave.torchrun, node)
    exit_code = leave.torchrun.wait()
    if exit_code != 0:
        end_marked(NODE_DIRECTORY, str(node.own), grace=0)  # ranks outlive a torchrun that was killed
    return Ending(
        exit_code=exit_code,
        asked=leave.asked,
        host_ran_out_of_memory=_out_of_memory_kills() > kills_before,
        failures=hung or (tuple(read_failures(logs)) if exit_code != 0 else ()),
        agent=agent_failure(logs),
    )


def _watched(torchrun: subprocess.Popen[bytes], node: Node) -> tuple[RankFailure, ...]:
    """Return when torchrun has ended; if a rank falls silent before, have all of them write their stacks, and kill it.

    Returns:
        What is told of the silence; nothing where torchrun ended by itself.
    """
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            torchrun.wait(_LOOK)
            return ()
        beats = read_beats(node.own)
        if silent := overdue(beats, time.monotonic()):
            ask_for_stacks(beats)
            end_marked(NODE_DIRECTORY, str(node.own), grace=0)
            return (hang_of(silent),)


def hang_of(silent: Sequence[Beat]) -> RankFailure:
    """What is told of ranks that fell silent, the likeliest cause being the first."""
    beat, peers = silent[0], [f"rank {peer.rank} ({peer.doing}, step {peer.step})" for peer in silent[1:]]
    message = (
        f"Hung: rank {beat.rank} has given no sign of life for {beat.silent_for(time.monotonic()):.0f} s, which may be "
        f"{beat.allow:g} s (train.hang_after); it had done {beat.step} steps and was {beat.doing}"
        + (f"; silent too: {', '.join(peers)}" if peers else "")
        + f". The stacks of all its threads are in {beat.stacks}, those of its peers in files beside it"
    )
    stacks = Path(beat.stacks).read_text(errors="replace").splitlines()
    return RankFailure(
        local_rank=beat.local_rank, exit_code=None, message=message, traceback=tuple(stacks[-40:]), time=beat.time
    )


def _out_of_memory_kills(events: Path = Path("/sys/fs/cgroup/memory.events")) -> int:
    """How often the kernel killed a process of this container for want of memory (cgroup v2; else 0)."""
    words = events.read_text().split() if events.exists() else []
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def _pass_signals_on(leave: _Leave, *, grace: int) -> None:
    """From here on SIGTERM and SIGINT ask the ranks to save and leave; who outstays `grace` by far is killed."""

    def kill() -> None:
        if leave.torchrun is not None:
            leave.torchrun.kill()

    def ask(number: int, _frame: FrameType | None) -> None:
        first, leave.asked = leave.asked is None, leave.asked or time.time()
        if leave.torchrun is None:
            raise Preempted("asked to leave before the ranks were started")
        if first:
            # torchrun itself kills ranks that outstay `grace`; this is for a torchrun that hangs.
            timer = threading.Timer(grace + 10, kill)
            timer.daemon = True
            timer.start()
        # A terminal sends its Ctrl-C to the whole group, torchrun included.
        if number == signal.SIGTERM or not os.isatty(0):
            leave.torchrun.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)


def marked(name: str, value: str) -> list[psutil.Process]:
    """The processes of this machine, but for the calling one, in whose environment `name` is `value`."""
    found = []
    for process in psutil.process_iter():
        # Gone in the meantime, a zombie, or another user's, whose environment is none of ours.
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
    return found


def end_marked(name: str, value: str, *, grace: float) -> list[psutil.Process]:
    """End every process marked so: SIGTERM, SIGKILL after `grace` seconds. Returns who would not go in 10 more.

    It looks again until it finds none, because a process can start another between the look and the kill.
    """
    kill_at = time.monotonic() + grace
    told: set[psutil.Process] = set()
    while (left := marked(name, value)) and time.monotonic() < kill_at + 10:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                if time.monotonic() >= kill_at:
                    process.kill()
                elif process not in told:
                    told.add(process)
                    process.terminate()
        time.sleep(0.1)
    return left


# --- the outcome ------------------------------------------------------------------------------------------------------


def fault_of(ending: Ending) -> Fault | None:
    """Why the node's ranks ended; None if they ended well."""
    if ending.exit_code == 0:
        return None
    cause = decisive(ending.failures)
    if cause is not None and not cause.bystander:
        killed = cause.exit_code == -signal.SIGKILL and cause.fault is Fault.NODE
        return Fault.OUT_OF_MEMORY if killed and ending.host_ran_out_of_memory else cause.fault
    # Peers that are asked to leave together lose each other; what counts is which came first.
    if ending.asked is not None and (cause is None or cause.time >= int(ending.asked)):
        return Fault.PREEMPTED
    if cause is not None:
        return cause.fault
    if ending.agent is not None:
        return _fault_of_agent(ending.agent)
    return Fault.NODE if ending.exit_code < 0 else Fault.UNKNOWN


def _fault_of_agent(error: str) -> Fault:
    """The class of torchrun's own exception; meeting its peers is most of what it can fail at."""
    fault = fault_of_exception(error)
    return Fault.NETWORK if fault is Fault.UNKNOWN and "rendezvous" in error.lower() else fault


def report(node: Node, fault: Fault | None, message: str, failures: Sequence[RankFailure]) -> dict[str, Any]:
    """What `node-<rank>.json` says; of its ranks, the one that explains the others comes first."""
    first = node.meet.node_rank * node.processes
    cause = decisive(failures)
    return {
        "node": node.meet.node_rank,
        "host": socket.gethostname(),
        "exit_code": 0 if fault is None else EXIT_CODES[fault],
        "fault": fault,
        "message": message,
        "ended": time.time(),
        "ranks": [
            {"rank": first + one.local_rank, **asdict(one), "fault": one.fault, "bystander": one.bystander}
            for one in sorted(failures, key=lambda one: one is not cause)
        ],
    }


def write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file so that a reader sees all of it or none."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(content, indent=1))
    aside.replace(path)


def run(node: Node) -> dict[str, Any]:
    """Everything from the checks to the report."""
    leave = _Leave()
    _pass_signals_on(leave, grace=node.grace)
    try:
        found = list(troubles(node))
        for trouble in found:
            print(trouble, flush=True)
        if found:
            return report(node, found[0].fault, str(found[0]), ())
        datasets = stage_all(node)
        ending = run_ranks(node, exports(node, datasets, os.environ, cores=usable_cores()), leave)
    except Exception as error:
        end_marked(
            NODE_DIRECTORY, str(node.own), grace=0
        )  # a signal can fall between torchrun's start and our hold on it
        if not isinstance(error, LitgptDemoError):
            traceback.print_exc()
        return report(node, fault_of_exception(error), f"{type(error).__name__}: {error}", ())
    cause = decisive(ending.failures)
    return report(node, fault_of(ending), str(cause) if cause else ending.agent or "", ending.failures)


def main(argv: Sequence[str]) -> int:
    """`python -m litgpt_demo node`: the exit code is 0 or that of the fault's class."""
    node = parse(argv, os.environ)
    outcome = run(node)
    with contextlib.suppress(OSError):  # the findings already said that the directory cannot be written
        write_whole(node.directory / f"node-{node.meet.node_rank}.json", outcome)
    if outcome["fault"]:
        print(f"node {node.meet.node_rank} ends with {outcome['exit_code']} ({outcome['fault']}): {outcome['message']}")
    shutil.rmtree(node.own / "data", ignore_errors=True)
    return int(outcome["exit_code"])
