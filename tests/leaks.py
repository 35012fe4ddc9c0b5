"""What a test must leave as it found it: threads, child processes, environment, folder, signal handlers and limits.

What one test leaves behind makes another one red, on another day. So the test that leaves it fails, by name.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

# Seconds. What was told to end needs a moment of a busy machine; what was not told waits in vain.
PATIENCE = 60.0

# Threads that libraries keep for the whole process, by what their names begin with.
KEPT = (
    "GlobalEventLoopThread", "RunSyncEventLoopThread", "RunnerThread-", "WatcherThread-",  # Prefect's loops
    "EventsWorker", "APILogWorkerThread", "QueueServiceThread", "EventsPipeline",  # Prefect's senders
    "AnyIO worker thread", "asyncio_", "ThreadPoolExecutor-",  # executors keep idle threads
    "Dummy-",  # a thread of C code that once called Python, as gRPC's do
    "tqdm_monitor", "IO loop", "Profile", "TornadoThread", "Dask-", "execnet",
)  # fmt: skip
# The same, by the function that a thread without a name of its own runs: gRPC's.
KEPT_FUNCTIONS = ("(_poll_wrapper)", "(channel_spin)", "(_serve)")
# Processes that Python keeps, by a word of their command line.
KEPT_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

# Of the environment, what pytest itself changes, and torch and Lightning when they are imported first.
OF_PYTEST = frozenset({"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"})


@dataclass(frozen=True)
class Snapshot:
    """The state of this process that tests share."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    environment: dict[str, str]
    folder: str
    handlers: dict[int, object]
    limits: dict[int, tuple[int, int]]


def snapshot(home: Path) -> Snapshot:
    """Return the state now.

    Args:
        home: the folder that all processes which tests start have in their environment.
    """
    return Snapshot(
        threads=frozenset(threading.enumerate()),
        children=descendants(home),
        environment={name: value for name, value in os.environ.items() if name not in OF_PYTEST},
        folder=str(Path.cwd()),
        # SIGALRM is pytest-timeout's.
        handlers={number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGALRM}},
        limits={kind: resource.getrlimit(kind) for kind in range(resource.RLIMIT_CORE, resource.RLIMIT_OFILE + 1)},
    )


# Processes that were looked at already, and whether tests of this process started them. To look at all takes 20 ms.
_SEEN: dict[int, bool] = {}


def descendants(home: Path) -> frozenset[int]:
    """Return the processes that tests of this process started, also those that no longer are its children."""
    there = {int(name) for name in os.listdir("/proc") if name.isdecimal()} - {os.getpid()}  # noqa: PTH208
    for number in _SEEN.keys() - there:
        del _SEEN[number]
    for number in there - _SEEN.keys():
        try:
            _SEEN[number] = str(home).encode() in Path(f"/proc/{number}/environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
    children = (Path(f"/proc/self/task/{os.getpid()}/children").read_text()).split()
    return frozenset(number for number, ours in _SEEN.items() if ours) | frozenset(map(int, children))


def left_behind(before: Snapshot, home: Path, *, shared: frozenset[threading.Thread | int]) -> list[str]:
    """Return what is not as it was, after what is about to end has had time to.

    Args:
        before: the state before the test.
        home: see `snapshot`.
        shared: threads and processes of fixtures that later tests use too.
    """
    begun = time.monotonic()
    while time.monotonic() - begun < PATIENCE:
        now = snapshot(home)
        threads = {thread for thread in now.threads - before.threads - shared if not _is_kept(thread.name)}
        children = {
            number
            for number in now.children - before.children - shared
            if not _is_zombie(number) and not any(word in _command(number) for word in KEPT_PROCESSES)
        }
        if not threads and not children:
            break
        time.sleep(0.05)
    told = [f"the thread {thread.name!r}" for thread in threads]
    told += [f"the process {number}: {_command(number)}" for number in children]
    for what in ("environment", "folder", "handlers", "limits"):
        old, new = getattr(before, what), getattr(now, what)
        if isinstance(old, dict):
            told += [f"{what}: {key} is {new.get(key)!r}, was {old.get(key)!r}"
                     for key in old.keys() | new.keys() if old.get(key) != new.get(key)]  # fmt: skip
        elif old != new:
            told.append(f"{what}: {new!r}, was {old!r}")
    return told


def _is_kept(thread: str) -> bool:
    return thread.startswith(KEPT) or thread.endswith(KEPT_FUNCTIONS)


def _is_zombie(number: int) -> bool:
    """Return whether it has ended, and nobody has asked how."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _command(number: int) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:300]
    except OSError:
        return "it has ended meanwhile"
