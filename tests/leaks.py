"""What a test must leave as it found it: threads, child processes, environment, folder, signal handlers and limits.

What one test leaves behind makes another one red, on another day. So the test that leaves it fails, by name.
"""

import os
import resource
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# Seconds. What was told to end needs a moment of a busy machine; what was not told waits in vain.
PATIENCE = 60.0

# Threads that libraries keep for the whole process, by what their names begin with.
KEPT = (
    "GlobalEventLoopThread", "RunSyncEventLoopThread", "RunnerThread-", "WatcherThread-",  # Prefect's loops
    "EventsWorker", "APILogWorkerThread", "QueueServiceThread", "EventsPipeline", "ConcurrencySlot",  # Prefect
    "AnyIO worker thread", "asyncio_", "ThreadPoolExecutor-",  # executors keep idle threads
    "Dummy-",  # a thread of C code that once called Python, as gRPC's do
    "tqdm_monitor", "IO loop", "Profile", "TornadoThread", "Dask-", "execnet",
)  # fmt: skip
# The same, by the function that a thread without a name of its own runs: gRPC's.
KEPT_FUNCTIONS = ("(_poll_wrapper)", "(channel_spin)", "(_serve)")
# Threads and processes of fixtures that outlive a test.
SHARED: set[threading.Thread | int] = set()
# Processes that Python keeps, by a word of their command line.
KEPT_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

# Of the environment, what pytest itself changes, and torch and Lightning when they are imported first.
OF_PYTEST = frozenset({"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"})


@dataclass(frozen=True)
class Snapshot:
    """The state of this process that tests share."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    rest: dict[str, object]


def snapshot(home: Path) -> Snapshot:
    """Return the state now; all processes that tests start have this folder in their environment."""
    # SIGALRM is pytest-timeout's.
    handlers = {f"handler of {sig}": signal.getsignal(sig) for sig in signal.valid_signals() - {signal.SIGALRM}}
    limits = {f"limit {key}": resource.getrlimit(key) for key in range(resource.RLIMIT_CORE, resource.RLIMIT_OFILE + 1)}
    environment = {f"${name}": value for name, value in os.environ.items() if name not in OF_PYTEST}
    return Snapshot(
        threads=frozenset(threading.enumerate()),
        children=descendants(home),
        rest={"folder": str(Path.cwd()), **environment, **handlers, **limits},
    )


# Processes that were looked at already, and whether tests of this process started them. To look at all takes 20 ms.
_SEEN: dict[int, bool] = {}


def descendants(home: Path) -> frozenset[int]:
    """Return the processes that tests of this process started, also those that no longer are its children."""
    current = {*psutil.pids()} - {os.getpid()}
    for number in _SEEN.keys() - current:
        del _SEEN[number]
    for number in current - _SEEN.keys():
        with suppress(OSError):  # it has ended, or is another user's
            _SEEN[number] = str(home).encode() in Path(f"/proc/{number}/environ").read_bytes()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return frozenset(number for number, is_child in _SEEN.items() if is_child) | frozenset(map(int, children))


def left_behind(before: Snapshot, home: Path) -> list[str]:
    """Return what is not as it was before the test, after what is about to end has had time to; `home` as above."""
    begun = time.monotonic()
    while True:
        now = snapshot(home)
        threads = [thread.name for thread in now.threads - before.threads - SHARED if not _is_kept(thread.name)]
        commands = {number: _command(number) for number in now.children - before.children - SHARED}
        findings = [f"the thread {name!r}" for name in threads]
        findings += [f"the process {number}: {command}" for number, command in commands.items() if command]
        if not findings or time.monotonic() - begun > PATIENCE:
            break
        time.sleep(0.05)
    old, new = before.rest, now.rest
    changed = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
    return findings + [f"{name}: {new.get(name)!r}, was {old.get(name)!r}" for name in changed]


def _is_kept(thread: str) -> bool:
    return thread.startswith(KEPT) or thread.endswith(KEPT_FUNCTIONS)


def _command(number: int) -> str:
    """Return its command line; nothing if it has ended, or is one that Python keeps."""
    try:
        command = " ".join(psutil.Process(number).cmdline())
    except psutil.Error:
        return ""
    return "" if any(word in command for word in KEPT_PROCESSES) else command
