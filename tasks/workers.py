"""The steps of a preparation, carried out by what `workers` chooses: threads, processes or a Dask cluster."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any, Self, TypeVar

from launcher.config import ProcessWorkers, ThreadWorkers, Workers
from launcher.errors import JobCancelled, LauncherError
from litgpt_demo.errors import Fault
from tasks.steps import DELAYS, may_pass, own_tries

T = TypeVar("T")
R = TypeVar("R")

# Shares of a phase that go to other processes and machines, however many shards there are: each carries the whole step.
_MOST_SHARES = 512
_SAFE_PATH = "PYTHONSAFEPATH"


class Fanout:
    """While entered: a way to carry out steps (`litgpt_demo.data.preparation.MapFn`) by workers of the chosen kind."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._over = threading.Event()
        self._futures: list[Future[list[Any]]] = []

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            self._executor = _executor(self._workers, entered)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)

    def __call__(self, step: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
        size = 1 if isinstance(self._workers, ThreadWorkers) else math.ceil(len(items) / _MOST_SHARES) or 1
        shares = [items[start : start + size] for start in range(0, len(items), size)]
        self._futures = futures = [self._executor.submit(_results, step, share) for share in shares]
        try:
            for future in as_completed(futures):
                if self._over.is_set():
                    raise JobCancelled("the preparation was stopped; the same command goes on with what is left")
                yield from self._result(future)
        except GeneratorExit:  # to be done otherwise: nothing of it may still be writing then
            if self._workers.kind != "dask":  # which calls cancelled what its workers are at
                self._call_off()
            wait(futures)
            raise
        except BaseException:
            self._call_off()
            raise

    def stop(self) -> None:
        """End it, from another thread: what has begun ends with the share in hand."""
        self._over.set()
        self._call_off()

    def _call_off(self) -> None:
        for future in self._futures:
            future.cancel()

    def _result(self, future: Future[list[Any]]) -> list[Any]:
        # What an executor raises when a worker died, or nothing leads to it any more.
        losses: dict[type[BaseException], Fault] = {BrokenExecutor: Fault.NODE}
        if self._workers.kind == "dask":
            from distributed import KilledWorker

            losses = {KilledWorker: Fault.NODE, CancelledError: Fault.NETWORK}
        try:
            return future.result()
        except tuple(losses) as error:
            raise LauncherError(
                f"workers.kind={self._workers.kind}: a worker was lost, or the way to it ({type(error).__name__}: "
                f"{error}); run again, what is done is kept; if it comes back, memory is short: take fewer workers",
                fault=next(fault for kind, fault in losses.items() if isinstance(error, kind)),
                given_up=True,
            ) from error


def _results(step: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Carry out one share. It is tried again by itself: what passes of one share must not use up the whole step's."""
    return [_tried(step, item) for item in items]


def _tried(step: Callable[[T], R], item: T) -> R:
    for seconds in DELAYS:
        try:
            return step(item)
        except Exception as error:
            if not may_pass(error):
                raise
            time.sleep(seconds)
    with own_tries():
        return step(item)


def _executor(workers: Workers, entered: ExitStack) -> Executor:
    """Return the executor; the end of `entered` ends it, and waits for what it is at."""
    count = getattr(workers, "count", None) or len(os.sched_getaffinity(0))
    if isinstance(workers, ThreadWorkers):
        return entered.enter_context(ThreadPoolExecutor(count))
    if isinstance(workers, ProcessWorkers):
        # The current folder, which may be somebody else's, is not on the path of the Pythons that are started.
        before = {name: value for name, value in os.environ.items() if name == _SAFE_PATH}
        entered.callback(os.environ.update, before)
        entered.callback(os.environ.pop, _SAFE_PATH)
        os.environ[_SAFE_PATH] = "1"
        return entered.enter_context(ProcessPoolExecutor(count, mp_context=get_context("spawn")))
    from distributed import Client

    client = entered.enter_context(Client(workers.scheduler, timeout=10, set_as_default=False))
    executor: Executor = client.get_executor()
    return executor
