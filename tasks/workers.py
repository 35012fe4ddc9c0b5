"""The steps of a preparation as Prefect tasks, on the task runner that `workers` chooses."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack
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

_Ended = SimpleQueue[PrefectFuture[list[Any]] | None]
_STOPPED = "the preparation was stopped; the same command goes on with what is left"
_SAFE_PATH = "PYTHONSAFEPATH"

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
            raise JobCancelled(_STOPPED)
        results.append(step(item))
    return results


class Fanout:
    """While entered: carries out steps (`litgpt_demo.data.preparation.MapFn`) as mapped tasks of the flow run it is in.

    The task runner is its own, not the flow's: so a flow chooses its workers by a parameter, needs no subflow for it,
    and one that finds its dataset done starts none.
    """

    def __init__(self, workers: Workers) -> None:
        self._kind, self._runner, self._most = workers.kind, _task_runner(workers), MOST_TASKS
        if isinstance(workers, ProcessWorkers):
            self._most = min(MOST_TASKS, _PER_PROCESS * (workers.count or _cores()))
        self._over = False
        self._phase_stopped, self._ended = threading.Event(), _Ended()
        self._items, self._tasks = Counter[str](), Counter[str]()

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            # One client for the tasks of all threads; else each makes one, which takes longer than a small shard.
            entered.enter_context(SyncClientContext.get_or_create())
            if self._kind == "processes":
                # The current folder, which may be somebody else's, is not on the path of the Pythons that are started.
                before = {name: value for name, value in os.environ.items() if name == _SAFE_PATH}
                entered.callback(os.environ.update, before)
                entered.callback(os.environ.pop, _SAFE_PATH)
                os.environ[_SAFE_PATH] = "1"
            entered.enter_context(self._runner)  # its end cancels what has not begun, and waits for the rest
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)

    def __call__(self, step: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
        names, shares = self._shares(step, items)
        mapped: Task[..., Any] = carry_out
        stopped, ended = self._phase_stopped, self._ended = threading.Event(), _Ended()
        _stopped.set(stopped)
        if self._over:  # asked after the phase stands: `stop` finds this one, or this finds it stopped
            self.stop()
        futures: Sequence[PrefectFuture[list[Any]]] = []
        try:
            futures = self._runner.map(mapped, {"what": names, "share": shares}) if items else []
            for future in futures:
                future.add_done_callback(ended.put)
            for _ in futures:
                if (next_one := ended.get()) is None or stopped.is_set():
                    raise JobCancelled(_STOPPED)
                yield from self._result(next_one)
        except BaseException as error:
            stopped.set()
            if isinstance(error, GeneratorExit):  # to be done otherwise: nothing of it may still be writing then
                for future in futures:
                    future.wait()
            raise

    def stop(self) -> None:
        """End it, from another thread: the tasks that have begun end after the shard in hand."""
        self._over = True
        self._phase_stopped.set()
        self._ended.put(None)

    def _result(self, future: PrefectFuture[list[Any]]) -> list[Any]:
        # What a task runner raises when a worker died, or nothing leads to it any more.
        losses: dict[type[BaseException], Fault] = {BrokenExecutor: Fault.NODE}
        if self._kind == "dask":
            from distributed import CancelledError, KilledWorker

            losses = {KilledWorker: Fault.NODE, CancelledError: Fault.NETWORK}
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


def _task_runner(workers: Workers) -> TaskRunner[Any]:
    if isinstance(workers, ThreadWorkers):
        return ThreadPoolTaskRunner(max_workers=workers.count or _cores())
    if isinstance(workers, ProcessWorkers):
        return ProcessPoolTaskRunner(max_workers=workers.count or _cores())
    from prefect_dask.task_runners import DaskTaskRunner

    return DaskTaskRunner(address=workers.scheduler, client_kwargs={"timeout": "10s"})


def _cores() -> int:
    return len(os.sched_getaffinity(0))
