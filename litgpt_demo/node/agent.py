"""The ranks of a node: started under torchrun, watched, ended, and what they left read."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import psutil

from litgpt_demo import PYTHON
from litgpt_demo.errors import FailureClass, Preempted, RankFailure, fault_of_exception, root_cause
from litgpt_demo.heartbeat import (
    BEATS,
    NODE_DIRECTORY,
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
    asked: float | None = None
    """When SIGTERM or SIGINT came, seconds since the epoch."""
    host_ran_out_of_memory: bool = False
    failures: tuple[RankFailure, ...] = ()
    agent: str | None = None
    """The exception that torchrun itself fell over."""
    stopped: tuple[int, ...] = ()
    """The local ranks that were stopped because of the others, and had failed at nothing."""
    traces: tuple[Trace, ...] = ()

    @property
    def cause(self) -> str:
        """What explains it; empty where nothing is known."""
        failure = root_cause(self.failures)
        return str(failure) if failure else self.agent or ""


@dataclass
class ShutdownState:
    """State that the signal handler and the waiting code share."""

    torchrun: subprocess.Popen[bytes] | None = None
    asked: float | None = None


def torchrun_command(node: Node, *, log_dir: str) -> list[str]:
    """The argument list that starts this node's ranks: a script, or `-m` and a module, then its arguments. In `log_dir`
    torchrun keeps one directory per rank with its output and error file.

    The rendezvous is static: ranks follow from `node_rank` alone, and no host has to recognise its own name
    (pytorch#73656). torchrun's own restarts stay off, because a gang cannot heal in part: a new attempt restarts all.
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
        # Without it torchrun takes the program's own options for abbreviations of its own: --run for --run-path.
        "--",
        # torchrun takes `$$` for `$` and `${local_rank}` for the rank (torch.distributed.elastic.utils.api.macros).
        *(word.replace("$", "$$") for word in node.program[len(module):]),
    ]  # fmt: skip


def run_ranks(
    node: Node, environ: Mapping[str, str], shutdown: ShutdownState, *, folder: str = "ranks", place: int | None = None
) -> TorchrunResult:
    """Start torchrun, wait, and read what its ranks left in `folder`. Strays are found by NODE_DIRECTORY.

    `place` is the node's number among the ranks, where that is another than its own.
    """
    logs = node.own / folder
    # What an earlier life of this node has left.
    for left in (logs / FAILURES, *node.own.glob(f"{BEATS}/*.json"), *node.own.glob(f"{RECORDER}*")):
        left.unlink(missing_ok=True)
    place = node.node_rank if place is None else place
    command = torchrun_command(replace(node, node_rank=place), log_dir=str(logs))
    kills_before, began = out_of_memory_kills(), time.time()
    shutdown.torchrun = subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL)
    use = NetworkUse(node.network, logs, nodes=node.nodes, cards=environ.get("NCCL_IB_HCA", ""))
    wrong = _watched(shutdown.torchrun, node, use)
    exit_code = shutdown.torchrun.wait()
    if exit_code == 0:
        return TorchrunResult(asked=shutdown.asked)
    kill_by_env_marker(NODE_DIRECTORY, str(node.own), grace=0)  # ranks outlive a torchrun that was killed
    killed = out_of_memory_kills() - kills_before
    failures, agent = read_failures(logs)
    steps = {beat.local_rank: beat.step for beat in read_beats(node.own, living=False)}
    failures = [replace(one, step=steps.get(one.local_rank)) for one in ([wrong] if wrong is not None else failures)]
    failed, folders = {one.local_rank for one in failures}, rank_folders(logs)
    of_ranks = {place * node.processes + local: folder for local, folder in folders.items()}
    return TorchrunResult(
        exit_code=exit_code,
        asked=shutdown.asked,
        host_ran_out_of_memory=killed > 0,
        failures=tuple(failures),
        agent=agent,
        stopped=tuple(local for local in folders if local not in failed),
        traces=tuple(gather(of_ranks, recorders=node.own, since=began, killed=killed)),
    )


def _watched(torchrun: subprocess.Popen[bytes], node: Node, use: NetworkUse) -> RankFailure | None:
    """Return when torchrun has ended; with what is wrong, if it was killed for silent ranks, or for another network."""
    watcher = Watcher()
    while True:
        paused = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            torchrun.wait(1.0)
            return None
        now, beats = time.monotonic(), read_beats(node.own)
        wrong: RankFailure | None
        if silent := watcher.overdue(beats, paused=paused, now=now):
            held = {beat for beat in silent if is_stopped(beat)}  # asked for its stacks, a stopped process goes on
            ask_for_stacks(beats)
            # The likeliest cause is one that was held by the kernel, or whose stacks show no wait for the others.
            waiting = {beat: beat not in held and waits_for_peers(beat) for beat in silent}
            beat = min(silent, key=waiting.__getitem__)
            peers = [f"rank {peer.rank} ({peer.doing}, step {peer.step})" for peer in silent if peer is not beat]
            message = (
                f"Hung: rank {beat.rank} has given no sign of life for {time.monotonic() - beat.ticks:.0f} s, which "
                f"may be {beat.max_silence:g} s (train.hang_after); it had done {beat.step} steps and was {beat.doing}"
                + (f"; silent too: {', '.join(peers)}" if peers else "")
                + f". The stacks of all its threads are in {beat.stacks}, those of its peers in files next to it"
            )
            wrong = RankFailure(
                local_rank=beat.local_rank,
                exit_code=None,
                message=message,
                traceback=tuple(Path(beat.stacks).read_text(errors="replace").splitlines()[-40:]),
                time=beat.time,
                waits=waiting[beat],
                held=beat in held,
            )
        else:
            steps, sends = (max((getattr(beat, name) for beat in beats), default=0) for name in ("step", "sends"))
            if (wrong := use.look(steps=steps, sends=sends)) is None:
                continue
        kill_by_env_marker(NODE_DIRECTORY, str(node.own), grace=0)
        return wrong


def forward_signals(shutdown: ShutdownState, *, grace: int) -> None:
    """Let SIGTERM and SIGINT ask the ranks to save and leave; a rank that outstays `grace` by far is killed."""

    def ask(number: int, _frame: FrameType | None) -> None:
        first, shutdown.asked = shutdown.asked is None, shutdown.asked or time.time()
        if shutdown.torchrun is None:
            raise Preempted("asked to leave before the ranks were started")
        if first:
            # torchrun itself kills ranks that outstay `grace`; this is for a torchrun that hangs.
            timer = threading.Timer(grace + 10, shutdown.torchrun.kill)
            timer.daemon = True
            timer.start()
        # A terminal sends its Ctrl-C to the whole group, torchrun included.
        if number == signal.SIGTERM or not os.isatty(0):
            shutdown.torchrun.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)


def processes_with_env(name: str, value: str) -> list[psutil.Process]:
    """The processes of this machine, but for the calling one, in whose environment `name` is `value`."""
    found = []
    for process in psutil.process_iter():
        # Gone in the meantime, a zombie, or another user's, whose environment is none of ours.
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
    return found


def kill_by_env_marker(name: str, value: str, *, grace: float) -> list[psutil.Process]:
    """End every process marked so: SIGTERM, SIGKILL after `grace` seconds. Returns who would not go in 10 more."""
    kill_at = time.monotonic() + grace
    told: set[psutil.Process] = set()
    # Until there are none, because a process can start another between the look and the kill.
    while (left := processes_with_env(name, value)) and time.monotonic() < kill_at + 10:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                if time.monotonic() >= kill_at:
                    process.kill()
                elif process not in told:
                    told.add(process)
                    process.terminate()
        time.sleep(0.1)
    return left


def fault_of(ending: TorchrunResult) -> FailureClass | None:
    """Return why the node's ranks ended; None if they ended well."""
    if ending.exit_code == 0:
        return None
    cause = root_cause(ending.failures)
    if cause is not None and not cause.secondary:
        killed = cause.exit_code == -signal.SIGKILL and cause.fault is FailureClass.NODE
        return FailureClass.OUT_OF_MEMORY if killed and ending.host_ran_out_of_memory else cause.fault
    # Peers that are asked to leave together lose each other; what counts is which came first.
    if ending.asked is not None and (cause is None or cause.time >= int(ending.asked)):
        return FailureClass.PREEMPTED
    if cause is not None:
        return cause.fault
    if ending.agent is not None:  # torchrun's own exception; meeting its peers is most of what it can fail at
        fault = fault_of_exception(ending.agent)
        return FailureClass.NETWORK if fault is FailureClass.UNKNOWN and "rendezvous" in ending.agent.lower() else fault
    if ending.exit_code == FailureClass.DISK_FULL.exit_code:  # there was no room for torchrun's findings
        return FailureClass.DISK_FULL
    return FailureClass.NODE if ending.exit_code < 0 else FailureClass.UNKNOWN
