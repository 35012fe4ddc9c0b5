"""The ranks of a node: started under torchrun, watched and ended; the results of a failed one are collected."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import psutil

from litgpt_demo import PYTHON
from litgpt_demo.errors import FailureClass, Preempted, RankFailure, fault_of_exception, root_cause
from litgpt_demo.heartbeat import (
    BEATS,
    NODE_DIRECTORY,
    Beat,
    Watcher,
    ask_for_stacks,
    is_stopped,
    read_beats,
    waits_for_peers,
)
from litgpt_demo.node.evidence import RECORDER, Trace, gather, out_of_memory_kills, rank_folders, read_failures
from litgpt_demo.node.network import NetworkUse
from litgpt_demo.node.rendezvous import Node
from litgpt_demo.node.torchrun import FAILURES


@dataclass(frozen=True, kw_only=True)
class TorchrunResult:
    """The end of torchrun; by default, of one that was not started."""

    exit_code: int = 0
    signalled_at: float | None = None
    """When SIGTERM or SIGINT came, seconds since the epoch."""
    host_ran_out_of_memory: bool = False
    failures: tuple[RankFailure, ...] = ()
    agent: str | None = None
    """The exception that ended torchrun itself."""
    stopped: tuple[int, ...] = ()
    """The local ranks that did not fail, but were stopped because of others."""
    traces: tuple[Trace, ...] = ()

    @property
    def cause(self) -> str:
        """The root cause; empty if nothing is known."""
        failure = root_cause(self.failures)
        return str(failure) if failure else self.agent or ""


@dataclass
class ShutdownState:
    """State that the signal handler and the waiting code share."""

    torchrun: subprocess.Popen[bytes] | None = None
    signalled_at: float | None = None


def torchrun_command(node: Node, *, log_dir: str) -> list[str]:
    """Return the arguments that start this node's ranks: a script, or `-m` and a module, then its arguments.

    In `log_dir` torchrun keeps one directory per rank with its output and error file. The rendezvous is static: ranks
    follow only from `node_rank`, and no host has to recognise its own name (pytorch#73656). torchrun's own restarts
    stay off, because part of a gang cannot be restarted: a new attempt restarts all ranks.
    """
    module = ("-m",) if node.program[0] == "-m" else ()
    return [
        *PYTHON, "-m", "litgpt_demo.node.torchrun",
        f"--nnodes={node.nodes}",
        f"--node-rank={node.node_rank}",
        f"--nproc-per-node={node.processes}",
        f"--master-addr={node.host}",
        f"--master-port={node.port}",
        f"--rdzv-id={node.run_id}",
        "--max-restarts=0",
        f"--log-dir={log_dir}",
        "--tee=3",
        "--role=rank",
        *module,
        # Without it torchrun reads the program's own options as abbreviations of its own: --run as --run-path.
        "--",
        # torchrun replaces `$$` by `$` and `${local_rank}` by the rank (torch.distributed.elastic.utils.api.macros).
        *(word.replace("$", "$$") for word in node.program[len(module):]),
    ]  # fmt: skip


def run_ranks(
    node: Node, environ: Mapping[str, str], shutdown: ShutdownState, *, folder: str = "ranks", place: int | None = None
) -> TorchrunResult:
    """Start torchrun, wait, and collect the files of its ranks in `folder`. NODE_DIRECTORY marks every process.

    `place` is the node rank for torchrun, if nodes were reordered by topology.
    """
    logs = node.own / folder
    # Files of an earlier start of this node.
    for file in (logs / FAILURES, *node.own.glob(f"{BEATS}/*.json"), *node.own.glob(f"{RECORDER}*")):
        file.unlink(missing_ok=True)
    if place is None:
        place = node.node_rank
    command = torchrun_command(replace(node, node_rank=place), log_dir=str(logs))
    kills_before, started_at = out_of_memory_kills(), time.time()
    shutdown.torchrun = subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL)
    use = NetworkUse(node.network, logs, nodes=node.nodes, cards=environ.get("NCCL_IB_HCA", ""))
    failure = _watch(shutdown.torchrun, node, use)
    exit_code = shutdown.torchrun.wait()
    if exit_code == 0:
        return TorchrunResult(signalled_at=shutdown.signalled_at)
    # Ranks outlive a torchrun that was killed, or that got SIGTERM while it was starting them. Those may still save.
    grace = 0.0 if shutdown.signalled_at is None else max(0.0, shutdown.signalled_at + node.grace - time.time())
    kill_by_env_marker(NODE_DIRECTORY, str(node.own), grace=grace)
    killed = out_of_memory_kills() - kills_before
    failures, agent = read_failures(logs)
    if failure is not None:
        failures = [failure]
    steps = {beat.local_rank: beat.step for beat in read_beats(node.own, living=False)}
    failures = [replace(failure, step=steps.get(failure.local_rank)) for failure in failures]
    failed = {failure.local_rank for failure in failures}
    folders = rank_folders(logs)
    folder_of_rank = {place * node.processes + local_rank: folder for local_rank, folder in folders.items()}
    return TorchrunResult(
        exit_code=exit_code,
        signalled_at=shutdown.signalled_at,
        host_ran_out_of_memory=killed > 0,
        failures=tuple(failures),
        agent=agent,
        stopped=tuple(local_rank for local_rank in folders if local_rank not in failed),
        traces=tuple(gather(folder_of_rank, recorders=node.own, since=started_at, killed=killed)),
    )


def _watch(torchrun: subprocess.Popen[bytes], node: Node, use: NetworkUse) -> RankFailure | None:
    """Wait for torchrun's end. Kill it if ranks are silent or use another network, and return that failure."""
    watcher = Watcher()
    while True:
        paused = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            torchrun.wait(1.0)
            return None
        now = time.monotonic()  # before heartbeats are read, which can take long without a pause of this process
        beats = read_beats(node.own)
        silent = watcher.overdue(beats, paused=paused, now=now)
        if silent:
            failure: RankFailure | None = _hang(silent, beats)
        else:
            steps = max((beat.step for beat in beats), default=0)
            sends = max((beat.sends for beat in beats), default=0)
            failure = use.look(steps=steps, sends=sends)
        if failure is not None:
            kill_by_env_marker(NODE_DIRECTORY, str(node.own), grace=0)
            return failure


def _hang(silent: Sequence[Beat], beats: Sequence[Beat]) -> RankFailure:
    """Return the failure of the likeliest culprit: a stopped rank, or one whose stacks show no wait for the others."""
    stopped = {beat for beat in silent if is_stopped(beat)}  # before `ask_for_stacks` continues them
    ask_for_stacks(beats)
    waiting = {beat: beat not in stopped and waits_for_peers(beat) for beat in silent}
    culprit = min(silent, key=waiting.__getitem__)
    peers = [f"rank {peer.rank} ({peer.doing}, step {peer.step})" for peer in silent if peer is not culprit]
    also_silent = f"; silent too: {', '.join(peers)}" if peers else ""
    message = (
        f"Hung: rank {culprit.rank} has sent no heartbeat for {time.monotonic() - culprit.ticks:.0f} s, "
        f"but the limit is {culprit.max_silence:g} s (train.hang_timeout for a step, max_silence for a script); "
        f"it had done {culprit.step} steps and was {culprit.doing}"
        f"{also_silent}. The stacks of all its threads are in {culprit.stacks}, those of its peers in files next to it"
    )
    return RankFailure(
        local_rank=culprit.local_rank,
        exit_code=None,
        message=message,
        traceback=tuple(Path(culprit.stacks).read_text(errors="replace").splitlines()[-40:]),
        time=culprit.time,
        waits=waiting[culprit],
        held=culprit in stopped,
    )


def forward_signals(shutdown: ShutdownState, *, grace: int) -> None:
    """Forward SIGTERM and SIGINT to the ranks, so that they save and leave; kill them long after `grace` seconds."""

    def handle(number: int, _frame: FrameType | None) -> None:
        is_first = shutdown.signalled_at is None
        shutdown.signalled_at = shutdown.signalled_at or time.time()
        if shutdown.torchrun is None:
            raise Preempted("the node was stopped before the ranks were started")
        if is_first:
            # torchrun itself kills ranks after `grace`. This is for a torchrun that hangs.
            timer = threading.Timer(grace + 10, shutdown.torchrun.kill)
            timer.daemon = True
            timer.start()
        # A terminal sends its Ctrl-C to the whole group, torchrun included.
        if number == signal.SIGTERM or not os.isatty(0):
            shutdown.torchrun.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def processes_with_env(name: str, value: str) -> list[psutil.Process]:
    """Return the processes of this machine, except the calling one, in whose environment `name` is `value`."""
    found = []
    for process in psutil.process_iter():
        # It has ended, is a zombie, or belongs to another user, whose environment cannot be read.
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
    return found


def kill_by_env_marker(name: str, value: str, *, grace: float) -> list[psutil.Process]:
    """Send SIGTERM to all marked processes, and SIGKILL after `grace` seconds; return those alive 10 s later."""
    kill_at = time.monotonic() + grace
    terminated: set[psutil.Process] = set()
    # Until there are none, because a process can start another between the list and the kill.
    while True:
        processes = processes_with_env(name, value)
        if not processes or time.monotonic() >= kill_at + 10:
            return processes
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if time.monotonic() >= kill_at:
                    process.kill()
                elif process not in terminated:
                    terminated.add(process)
                    process.terminate()
        time.sleep(0.1)


def fault_of(result: TorchrunResult) -> FailureClass | None:
    """Return the class of the failure of the node's ranks; None if they succeeded."""
    if result.exit_code == 0:
        return None
    cause = root_cause(result.failures)
    if cause is not None and not cause.secondary:
        is_killed = cause.exit_code == -signal.SIGKILL and cause.fault is FailureClass.NODE
        return FailureClass.OUT_OF_MEMORY if is_killed and result.host_ran_out_of_memory else cause.fault
    # Peers that leave together lose each other. The first event counts.
    if result.signalled_at is not None and (cause is None or cause.time >= int(result.signalled_at)):
        return FailureClass.PREEMPTED
    if cause is not None:
        return cause.fault
    if result.agent is not None:  # torchrun's own exception, which is mostly a failed rendezvous
        fault = fault_of_exception(result.agent)
        is_rendezvous = fault is FailureClass.UNKNOWN and "rendezvous" in result.agent.lower()
        return FailureClass.NETWORK if is_rendezvous else fault
    if result.exit_code == FailureClass.DISK_FULL.exit_code:  # there was no room for torchrun's findings
        return FailureClass.DISK_FULL
    return FailureClass.NODE if result.exit_code < 0 else FailureClass.UNKNOWN
