"""Heartbeats: a rank writes one after every step, and its node detects a rank that has fallen silent.

Any script under `python -m litgpt_demo node` can write them (docs/howto/heartbeat.md); one that never does is not
watched. A heartbeat is a small file in the node's folder. A rank that has begun also answers SIGUSR1 with the stacks
of all its threads, even if it hangs in native code: the answer comes from a signal handler and not from Python.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import psutil

from litgpt_demo import timeouts
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError, is_gpu_error
from litgpt_demo.storage.local import translate_os_errors

NODE_DIRECTORY = "LITGPT_NODE_DIRECTORY"
"""The environment variable of every process below a node with the node's own folder."""

BEATS = "heartbeats"
_LENGTH = 1024  # bytes: each heartbeat replaces the last one, in one write and blanks to this length


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One heartbeat of a rank."""

    rank: int
    """The rank within the whole job."""
    local_rank: int
    pid: int
    started: float
    """The beginning of that process (`started`)."""
    step: int
    doing: str
    time: float
    """Seconds since the epoch, for people."""
    ticks: float
    """Seconds on the machine's monotonic clock, which cannot be set: silence is measured by it."""
    max_silence: float
    """Seconds of silence after which the rank counts as hung."""
    sends: float = 0.0
    """Bytes that its node must send to the others in a step; 0 if that is not known."""
    stacks: str
    """The file to which the stacks are written after SIGUSR1."""


class Heartbeat:
    """Writes the heartbeats of a rank; without a node above it, it does nothing."""

    def __init__(self, *, max_silence: float, environ: Mapping[str, str] | None = None) -> None:
        """A rank counts as hung after `max_silence` seconds, unless a heartbeat has another limit."""
        environ = os.environ if environ is None else environ
        self._max_silence = max_silence
        self._stacks: IO[str] | None = None
        self._step = 0
        self.sends = 0.0
        """See Beat; the program sets it once it is known."""
        node = environ.get(NODE_DIRECTORY)
        if node is None:
            return
        rank, local_rank = int(environ.get("RANK", "0")), int(environ.get("LOCAL_RANK", "0"))
        self._path = Path(node) / BEATS / f"{local_rank}.json"
        errors = environ.get("TORCHELASTIC_ERROR_FILE")
        stacks = (Path(errors).parent if errors else self._path.parent) / f"stacks-of-rank-{rank}.txt"
        # Fields common to all heartbeats.
        self._own: dict[str, Any] = {"rank": rank, "local_rank": local_rank, "stacks": str(stacks)}
        self._own |= {"pid": os.getpid(), "started": started(os.getpid())}
        with translate_os_errors(str(self._path), needed=_LENGTH):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._stacks = stacks.open("w")
            faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def beat(self, step: int, doing: str, *, max_silence: float | None = None) -> None:
        """Write a heartbeat: this rank has done `step` steps, and what it does next."""
        if self._stacks is None:
            return
        self._step = step
        fields = self._own | {
            "step": step,
            "doing": doing,
            "sends": self.sends,
            "time": time.time(),
            "ticks": time.monotonic(),
            "max_silence": self._max_silence if max_silence is None else max_silence,
        }
        with translate_os_errors(str(self._path), needed=_LENGTH):  # the first time; then it writes over what it has
            os.pwrite(self._file, json.dumps(fields).ljust(_LENGTH).encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Stop the heartbeats. A rank whose GPU failed leaves its last one, which has its step.

        Any other rank removes it: on a full disk, the rank's error file needs its place.
        """
        if self._stacks is None:
            return
        if error is not None and is_gpu_error(str(error)):
            self.beat(self._step, "failing", max_silence=1e9)
        else:
            self._path.unlink(missing_ok=True)
        os.close(self._file)
        # SIGUSR1 ends the process again. A node that has just sent one is about to kill this process all the same.
        faulthandler.unregister(signal.SIGUSR1)
        self._stacks.close()
        self._stacks = None


def read_beats(node: Path, *, living: bool = True) -> list[Beat]:
    """Return the last heartbeat of every rank of the node that is alive; without `living`, of failed ones too."""
    beats = []
    for path in sorted((node / BEATS).glob("*.json")):
        # A file that was just made is empty, and a rank that ends removes its own; the next read sees the change.
        with suppress(FileNotFoundError, DataError):
            beat = parse_json(path.read_bytes(), Beat, where=str(path), fix="the rank's next heartbeat fixes it")
            if not living or status_of(beat) not in {"gone", psutil.STATUS_ZOMBIE}:
                beats.append(beat)
    return beats


def status_of(beat: Beat) -> str:
    """Return the kernel's state of the rank's process: `running`, `sleeping`, `stopped`, `disk-sleep`; or `gone`."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        status = psutil.Process(beat.pid).status()
        if started(beat.pid) == beat.started:
            return str(status)
    return "gone"


def is_stopped(beat: Beat) -> bool:
    """Return True if the rank's process is stopped, or in a read or write that does not end: it waits for no peer."""
    return status_of(beat) in {psutil.STATUS_STOPPED, psutil.STATUS_DISK_SLEEP}


class Watcher:
    """Detects overdue heartbeats; it restarts its timer after the node itself was suspended."""

    def __init__(self) -> None:
        self._since = 0.0

    def overdue(self, beats: Iterable[Beat], *, paused: float, now: float) -> list[Beat]:
        """Return the ranks that are silent for too long; a pause of a second began at `paused` and is just over.

        The likeliest cause is first: a stopped process, then the one with the fewest steps, then the longest silent.
        """
        # If the pause took more than 5 s, the watcher and its ranks were suspended: a paused container, a migrated or
        # overloaded machine.
        if now - paused > 5.0:
            self._since = now
        silent = [beat for beat in beats if now - max(beat.ticks, self._since) > beat.max_silence]
        return sorted(silent, key=lambda beat: (not is_stopped(beat), beat.step, beat.ticks))


def ask_for_stacks(beats: Iterable[Beat], *, within: float = timeouts.STACKS) -> None:
    """Let these ranks write their stacks within `within` seconds; the file of one that does not gets the reason."""
    states = {beat: status_of(beat) for beat in beats}
    for beat in states:
        for number in (signal.SIGUSR1, signal.SIGCONT):  # a stopped process answers when it continues
            with suppress(ProcessLookupError):
                if started(beat.pid) == beat.started:
                    os.kill(beat.pid, number)
    deadline, seen = time.monotonic() + within, dict.fromkeys(states, -1)
    while time.monotonic() < deadline:
        time.sleep(0.2)
        sizes = {beat: Path(beat.stacks).stat().st_size for beat in states}
        if sizes == seen and all(sizes.values()):
            break
        seen = sizes
    for beat, status in states.items():
        stacks = Path(beat.stacks)
        if not stacks.stat().st_size:
            stacks.write_text(f"rank {beat.rank} (process {beat.pid}, {status}) did not answer SIGUSR1\n")


# Frames in which a rank waits for its peers: torch's collectives and wrappers, the gradients' exchange that happens
# below the backward pass, and the waits for a step's sums and votes. Every rank of torchrun's has
# torch/distributed/elastic.
_WAITS = re.compile(
    r"torch/distributed/(?!elastic/)|torch/nn/parallel/distributed|in _engine_run_backward"
    r'|training/step\.py", line \d+ in (collect|result)'
)


def waits_for_peers(beat: Beat) -> bool:
    """Return True if the stacks that a rank has written show that its main thread waits for the other ranks."""
    path = Path(beat.stacks)
    # The main thread handles the signal, so its stack is the "current" one, with the newest frame first.
    text = path.read_text(errors="replace") if path.is_file() else ""
    _, current, rest = text.rpartition("Current thread 0x")
    return bool(current) and _WAITS.search(re.split(r"(?m)^Thread 0x", rest)[0]) is not None


def started(pid: int) -> float:
    """Return the start of a process by a clock that cannot be set: later the same pid may belong to another process.

    On Linux the unit is the kernel's tick since boot, because the time of day derived from it moves when the machine's
    clock is set.
    """
    try:
        if sys.platform == "linux":
            # The name, in parentheses, may hold anything; the start is the 20th word behind it (proc_pid_stat(5)).
            return float(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
        return psutil.Process(pid).create_time()
    except (FileNotFoundError, psutil.NoSuchProcess) as error:
        raise ProcessLookupError(f"there is no process {pid}") from error
