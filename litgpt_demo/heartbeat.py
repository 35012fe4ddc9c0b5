"""Signs of life: a rank says after every step that it lives, and its node finds the one that has fallen silent.

Any script under `python -m litgpt_demo node` may do so (docs/failures.md); one that never does is never found silent.
A sign of life is a small file in the node's folder. A rank that has begun also answers SIGUSR1 with the stacks of all
its threads, even if it hangs in native code, for the answer comes from a signal handler and not from Python.
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
_LENGTH = 1024  # bytes: each sign of life is written over the last one, in one write and blanks to this length


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A sign of life."""

    rank: int
    """The rank within the whole job."""
    local_rank: int
    pid: int
    started: float
    """When that process began (`started`)."""
    step: int
    doing: str
    time: float
    """Seconds since the epoch, for people."""
    ticks: float
    """Seconds on the machine's monotonic clock, which nobody sets: by it silence is measured."""
    max_silence: float
    """Seconds of silence that mean nothing yet."""
    sends: float = 0.0
    """Bytes that its node must send to the others in a step, as its program says; 0 where that is not known."""
    stacks: str
    """The file that SIGUSR1 has the stacks written to."""


class Heartbeat:
    """A rank's side; without a node above it, it does nothing."""

    def __init__(self, *, max_silence: float, environ: Mapping[str, str] | None = None) -> None:
        """Silence of `max_silence` seconds means nothing yet, where a heartbeat says nothing else."""
        environ = os.environ if environ is None else environ
        self._max_silence = max_silence
        self._stacks: IO[str] | None = None
        self._step = 0
        self.sends = 0.0
        """See Beat; the program sets it once it is known."""
        if (node := environ.get(NODE_DIRECTORY)) is None:
            return
        rank, local_rank = int(environ.get("RANK", "0")), int(environ.get("LOCAL_RANK", "0"))
        self._path = Path(node) / BEATS / f"{local_rank}.json"
        errors = environ.get("TORCHELASTIC_ERROR_FILE")
        stacks = (Path(errors).parent if errors else self._path.parent) / f"stacks-of-rank-{rank}.txt"
        # What each sign of life has of the fields of Beat, whatever is done.
        self._own: dict[str, Any] = {"rank": rank, "local_rank": local_rank, "stacks": str(stacks)}
        self._own |= {"pid": os.getpid(), "started": started(os.getpid())}
        with translate_os_errors(str(self._path), needed=_LENGTH):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._stacks = stacks.open("w")
            faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def beat(self, step: int, doing: str, *, max_silence: float | None = None) -> None:
        """Say that this rank lives, has done `step` steps, and what it does next."""
        if self._stacks is None:
            return
        self._step = step
        told = self._own | {
            "step": step,
            "doing": doing,
            "sends": self.sends,
            "time": time.time(),
            "ticks": time.monotonic(),
        }
        told["max_silence"] = self._max_silence if max_silence is None else max_silence
        with translate_os_errors(str(self._path), needed=_LENGTH):  # the first time; then it writes over what it has
            os.pwrite(self._file, json.dumps(told).ljust(_LENGTH).encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Silence means nothing from here on. A rank whose GPU stopped leaves its last sign of life, for its step.

        Any other rank removes it: where a disk is full, the rank's error file needs its place.
        """
        if self._stacks is None:
            return
        if error is not None and is_gpu_error(str(error)):
            self.beat(self._step, "failing", max_silence=1e9)
        else:
            self._path.unlink(missing_ok=True)
        os.close(self._file)
        # What it did before it does again. A node that asked a moment ago is about to kill this process all the same.
        faulthandler.unregister(signal.SIGUSR1)
        self._stacks.close()
        self._stacks = None


def read_beats(node: Path, *, living: bool = True) -> list[Beat]:
    """The last sign of life of every rank of the node that lives and gives any; or of those that failed too."""
    found = []
    for path in sorted((node / BEATS).glob("*.json")):
        # A file that was just made is empty, and a rank that ends removes its own; another look will do.
        with suppress(FileNotFoundError, DataError):
            beat = parse_json(path.read_bytes(), Beat, where=str(path), fix="the rank's next sign of life fixes it")
            if not living or status_of(beat) not in {"gone", psutil.STATUS_ZOMBIE}:
                found.append(beat)
    return found


def status_of(beat: Beat) -> str:
    """The kernel's word for what the rank's process does: `running`, `sleeping`, `stopped`, `disk-sleep`; or `gone`."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        status = psutil.Process(beat.pid).status()
        if started(beat.pid) == beat.started:
            return str(status)
    return "gone"


def is_stopped(beat: Beat) -> bool:
    """Whether the rank's process is stopped, or in a read or write that does not end: it waits for no peer."""
    return status_of(beat) in {psutil.STATUS_STOPPED, psutil.STATUS_DISK_SLEEP}


class Watcher:
    """The node's look at silence, which counts anew when the node has stood still itself."""

    def __init__(self) -> None:
        self._since = 0.0

    def overdue(self, beats: Iterable[Beat], *, paused: float, now: float) -> list[Beat]:
        """Those that have been silent for longer than they may; a pause of a second began at `paused` and is just over.

        First the likeliest to hold up the others: a process that does not even wait for them, then the one that came
        least far, then the longest silent.
        """
        # What takes longer than 5 s has held up the watcher, and its ranks with it: a container that was paused, a
        # machine that was moved or had no time for them.
        if now - paused > 5.0:
            self._since = now
        silent = [beat for beat in beats if now - max(beat.ticks, self._since) > beat.max_silence]
        return sorted(silent, key=lambda beat: (not is_stopped(beat), beat.step, beat.ticks))


def ask_for_stacks(beats: Iterable[Beat], *, within: float = timeouts.STACKS) -> None:
    """Let these ranks write their stacks within so many seconds; in the file of one that does not, stands why."""
    asked = {beat: status_of(beat) for beat in beats}
    for beat in asked:
        for number in (signal.SIGUSR1, signal.SIGCONT):  # a stopped process answers when it goes on
            with suppress(ProcessLookupError):
                if started(beat.pid) == beat.started:
                    os.kill(beat.pid, number)
    deadline, seen = time.monotonic() + within, dict.fromkeys(asked, -1)
    while time.monotonic() < deadline:
        time.sleep(0.2)
        sizes = {beat: Path(beat.stacks).stat().st_size for beat in asked}
        if sizes == seen and all(sizes.values()):
            break
        seen = sizes
    for beat, status in asked.items():
        if not (stacks := Path(beat.stacks)).stat().st_size:
            stacks.write_text(f"rank {beat.rank} (process {beat.pid}, {status}) did not answer SIGUSR1\n")


# Frames in which a rank waits for its peers: torch's collectives and wrappers, the gradients' exchange that happens
# below the backward pass, and the wait for a step's sums. Every rank of torchrun's has torch/distributed/elastic.
_WAITS = re.compile(
    r"torch/distributed/(?!elastic/)|torch/nn/parallel/distributed|in _engine_run_backward"
    r'|training/step\.py", line \d+ in collect'
)


def waits_for_peers(beat: Beat) -> bool:
    """Whether the stacks that a rank has written show that its main thread waits for the other ranks."""
    path = Path(beat.stacks)
    # The main thread answers the signal, so that its stack is the one called so, the newest frame first.
    text = path.read_text(errors="replace") if path.is_file() else ""
    _, current, rest = text.rpartition("Current thread 0x")
    return bool(current) and _WAITS.search(re.split(r"(?m)^Thread 0x", rest)[0]) is not None


def started(pid: int) -> float:
    """Return when a process began, by a clock that nobody sets: a pid alone may be another's by the time it is used.

    On Linux the unit is the kernel's tick after the start of the machine, because the time of day that is made of it
    moves when the machine's clock is set.
    """
    try:
        if sys.platform == "linux":
            # The name, in parentheses, may hold anything; the start is the 20th word behind it (proc_pid_stat(5)).
            return float(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
        return psutil.Process(pid).create_time()
    except (FileNotFoundError, psutil.NoSuchProcess) as error:
        raise ProcessLookupError(f"there is no process {pid}") from error
