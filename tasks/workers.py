"""The steps of a preparation as Prefect tasks, on the task runner that `workers` chooses."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from prefect import Task, task
from prefect.context import SyncClientContext
from prefect.futures import PrefectFuture
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from launcher.config import ProcessWorkers, ThreadWorkers, Workers
from launcher.errors import JobCancelled, LauncherError
from litgpt_demo.errors import Fault
from tasks.steps import RETRIED, own_tries

T = TypeVar("T")
R = TypeVar("R")

# Tasks that a phase starts, however many shards there are: with thousands Prefect's page of the run is of no use.
MOST_TASKS = 128
# The same for each process of this machine, where Prefect spends 0.2 s of a core on every task.
_PER_PROCESS = 8
# Tasks of one more call, where a phase has used them up: max_bytes makes many waves of one survey.
_MORE_TASKS = 16

# Seen by tasks in threads of this process. Other processes have none: they can be killed.
_stopped: ContextVar[threading.Event | None] = ContextVar("stopped", default=None)


@task(name="shards", task_run_name="{what}", **RETRIED)
def carry_out(what: str, share: Callable[[], list[Any]]) -> list[Any]:
    """One task's share of a phase; a callable, because Prefect would search a list of shards for futures."""
    return share()


def _results(step: Callable[[T], R], items: Sequence[T]) -> list[R]:
    results, stopped = [], _stopped.get()
    for item in items:
        if stopped is not None and stopped.is_set():
            raise _stop()
        results.append(step(item))
    return results


def _stop() -> JobCancelled:
    return JobCancelled("the preparation was stopped; the same command goes on with what is left")


class _Call:
    """A phase that is being carried out."""

    def __init__(self) -> None:
        self.ended: SimpleQueue[PrefectFuture[list[Any]] | None] = SimpleQueue()
        self.stopped = threading.Event()

    def stop(self) -> None:
        self.stopped.set()
        self.ended.put(None)


class Fanout:
    """While entered: carries out steps (`litgpt_demo.data.preparation.MapFn`) as mapped tasks of the flow run it is in.

    The task runner is its own, not the flow's: so a flow chooses its workers by a parameter, needs no subflow for it,
    and one that finds its dataset done starts none.
    """

    def __init__(self, workers: Workers) -> None:
        self._kind, self._runner = workers.kind, task_runner(workers)
        self._most = MOST_TASKS
        if isinstance(workers, ProcessWorkers):
            self._most = min(MOST_TASKS, _PER_PROCESS * (workers.count or _cores()))
        self._call = _Call()
        self._over = threading.Event()
        self._items = Counter[str]()
        self._tasks = Counter[str]()

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            # One client for the tasks of all threads; else each makes one, which takes longer than a small shard.
            entered.enter_context(SyncClientContext.get_or_create())
            if self._kind == "processes":
                entered.enter_context(_safe_path())
            entered.enter_context(self._runner)  # its end cancels what has not begun, and waits for the rest
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)

    def __call__(self, step: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
        names, shares = self._shares(step, items)
        mapped: Task[..., Any] = carry_out
        self._call = call = _Call()
        _stopped.set(call.stopped)
        if self._over.is_set():  # asked after the call stands: `stop` finds this one, or this finds it stopped
            call.stop()
        futures: Sequence[PrefectFuture[list[Any]]] = []
        try:
            futures = self._runner.map(mapped, {"what": names, "share": shares}) if items else []
            for future in futures:
                future.add_done_callback(call.ended.put)
            for _ in futures:
                yield from self._next(call)
        except GeneratorExit:
            # Called off, to be done otherwise: nothing of it may still be writing then.
            call.stopped.set()
            for future in futures:
                future.wait()
            raise
        except BaseException:
            call.stopped.set()
            raise

    def stop(self) -> None:
        """End it, from another thread: the tasks that have begun end after the shard in hand."""
        self._over.set()
        self._call.stop()

    def _next(self, call: _Call) -> list[Any]:
        """The results of the next task that ends."""
        future = call.ended.get()
        if future is None or call.stopped.is_set():
            raise _stop()
        losses = _losses(self._kind)
        try:
            with own_tries():
                return future.result()
        except tuple(losses) as error:
            raise LauncherError(
                f"workers.kind={self._kind}: a worker was lost, or the way to it ({type(error).__name__}: {error}); "
                "run again, what is done is kept; if it comes back, memory is short: take fewer workers",
                fault=next(fault for kind, fault in losses.items() if isinstance(error, kind)),
                given_up=True,
            ) from error

    def _shares(self, step: Callable[[T], R], items: Sequence[T]) -> tuple[list[str], list[Callable[[], list[R]]]]:
        """Neighbouring items together, so that there are not too many; each task is named after its items."""
        verb = str(getattr(step, "func", step).__name__)  # preparation's steps are partials
        room = max(self._most - self._tasks[verb], _MORE_TASKS)
        size, before = math.ceil(len(items) / room) or 1, self._items[verb]
        groups = [items[start : start + size] for start in range(0, len(items), size)]
        self._items[verb] += len(items)
        self._tasks[verb] += len(groups)
        names = []
        for first, group in zip(count(before + 1, size), groups, strict=False):
            numbers = f"{first}" if len(group) == 1 else f"{first}-{first + len(group) - 1}"
            names.append(f"{verb} {numbers} of {self._items[verb]}")
        return names, [partial(_results, step, group) for group in groups]


@contextmanager
def _safe_path() -> Iterator[None]:
    """Keep the current folder, which may be somebody else's, off the path of the Pythons that are started meanwhile."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def task_runner(workers: Workers) -> TaskRunner[Any]:
    """The task runner that `workers` means; not started."""
    if isinstance(workers, ThreadWorkers):
        return ThreadPoolTaskRunner(max_workers=workers.count or _cores())
    if isinstance(workers, ProcessWorkers):
        return ProcessPoolTaskRunner(max_workers=workers.count or _cores())
    from prefect_dask.task_runners import DaskTaskRunner

    return DaskTaskRunner(address=workers.scheduler, client_kwargs={"timeout": "10s"})


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _losses(kind: str) -> dict[type[BaseException], Fault]:
    """The exceptions that a task runner raises when a worker died, or nothing leads to it any more; their classes."""
    if kind != "dask":
        return {BrokenExecutor: Fault.NODE}
    from distributed import CancelledError, KilledWorker

    return {KilledWorker: Fault.NODE, CancelledError: Fault.NETWORK}
