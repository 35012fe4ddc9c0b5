"""Step 1: text into tokens, by what `workers` chooses: threads, processes or a Dask cluster."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any, Self, TypeVar

from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

from launcher.checks.preflight import check_workers
from launcher.config import ProcessWorkers, ThreadWorkers, Workers
from launcher.errors import JobCancelled, LauncherError, raise_on_errors
from launcher.events import Step, StepDone, StepProgress, StepStarted
from launcher.formatting import count_text
from launcher.reports import report
from litgpt_demo.data import preparation
from litgpt_demo.data.dataset import DatasetManifest, PlannedDataset, finished_dataset
from litgpt_demo.data.preparation import Preparation
from litgpt_demo.errors import FailureClass
from litgpt_demo.storage import open_storage
from tasks.report import Live
from tasks.steps import DELAYS, emit, is_transient, no_outer_retry, opaque, step_task

T = TypeVar("T")
R = TypeVar("R")

# Shares of a phase that go to other processes and machines, however many shards there are: each carries the whole step.
_MOST_SHARES = 512
_SAFE_PATH = "PYTHONSAFEPATH"


@step_task(Step.DATASET.task)
async def prepare_dataset(planned: PlannedDataset, *, root: str, workers: Workers) -> DatasetManifest:
    """Make the dataset under `root`, by the `workers`, or find it done by its key."""
    emit(StepStarted(step=Step.DATASET, what=f"{planned.name}, {len(planned.sources):,} files"))
    done = await asyncio.to_thread(finished_dataset, open_storage(root), planned)
    manifest = done or await _prepare(planned, root, workers)
    what = (
        f"{manifest.documents:,} documents, {count_text(manifest.train.tokens)} training and "
        f"{count_text(manifest.validation.tokens)} validation tokens in {planned.path}"
    )
    emit(StepDone(step=Step.DATASET, what=what, reused=done is not None))
    return manifest


async def _prepare(planned: PlannedDataset, root: str, workers: Workers) -> DatasetManifest:
    raise_on_errors(await asyncio.to_thread(check_workers, workers))
    if isinstance(workers, ThreadWorkers) and workers.count is None:
        workers = workers.model_copy(update={"count": preparation.threads_for(root)})
    start, fanout = time.monotonic(), Fanout(workers)
    async with LivePreparation(planned) as live:

        def prepare() -> DatasetManifest:
            with fanout:
                return preparation.prepare(planned, open_storage(root), map_steps=fanout, report=live.report)

        making = asyncio.create_task(asyncio.to_thread(prepare))
        try:
            manifest = await asyncio.shield(making)
        finally:  # the thread is stopped and waited for when this is cancelled
            fanout.stop()
            await asyncio.gather(making, return_exceptions=True)
        live.report(None)
    with no_outer_retry():
        await publish_dataset(opaque(planned), opaque(manifest), seconds=time.monotonic() - start)
    return manifest


class LivePreparation(Live):
    """While a dataset is made: a progress artifact; at times a log line."""

    def __init__(self, planned: PlannedDataset) -> None:
        name = f"{planned.name}-{planned.key}"
        super().__init__(f"dataset-{name}", f"Preparation of {name}")
        self._now: Preparation | None = Preparation(phase="survey")

    def report(self, progress: Preparation | None) -> None:
        """Report progress from the thread that prepares; None: it is done."""
        self._now = progress
        self.news += 1
        if progress is not None:
            what, fraction = report.progress_text(progress), report.fraction(progress)
            emit(StepProgress(step=Step.DATASET, what=what, fraction=fraction))

    def look(self) -> tuple[float, str]:
        if (progress := self._now) is None:
            return 100.0, "done"
        return min(99.0, 100 * (report.fraction(progress) or 0.0)), report.progress_text(progress)


@step_task("publish-dataset")
async def publish_dataset(planned: PlannedDataset, manifest: DatasetManifest, *, seconds: float) -> None:
    """Show in Prefect the totals of a preparation of `seconds`."""
    name, table = f"{planned.name}-{planned.key}", report.dataset_table(manifest, seconds=seconds)
    await acreate_table_artifact(table, key=f"dataset-figures-{name}", description="The dataset in figures")
    if lengths := report.lengths_markdown(manifest):
        await acreate_markdown_artifact(lengths, key=f"dataset-lengths-{name}", description="Lengths of its documents")


class Fanout(ExitStack):
    """A way to carry out steps (`litgpt_demo.data.preparation.MapSteps`) by workers of the chosen kind."""

    def __init__(self, workers: Workers) -> None:
        super().__init__()
        self._workers = workers
        self._executor: futures.Executor
        self._over = threading.Event()
        self._futures: list[futures.Future[list[Any]]] = []

    def __enter__(self) -> Self:
        """Get the executor; the end of this one ends it, and waits for what it is at."""
        workers = self._workers
        count = getattr(workers, "count", None) or len(os.sched_getaffinity(0))
        if isinstance(workers, ThreadWorkers):
            self._executor = self.enter_context(futures.ThreadPoolExecutor(count))
        elif isinstance(workers, ProcessWorkers):
            # The current folder, which may be somebody else's, is not on the path of the Pythons that are started.
            before = {name: value for name, value in os.environ.items() if name == _SAFE_PATH}
            self.callback(os.environ.update, before)
            self.callback(os.environ.pop, _SAFE_PATH)
            os.environ[_SAFE_PATH] = "1"
            self._executor = self.enter_context(futures.ProcessPoolExecutor(count, mp_context=get_context("spawn")))
        else:
            from distributed import Client

            client = self.enter_context(Client(workers.scheduler, timeout=10, set_as_default=False))
            self._executor = client.get_executor()
        return self

    def __call__(self, step: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
        size = 1 if isinstance(self._workers, ThreadWorkers) else math.ceil(len(items) / _MOST_SHARES) or 1
        shares = [items[start : start + size] for start in range(0, len(items), size)]
        self._futures = begun = [self._executor.submit(_results, step, share) for share in shares]
        ended, told = set[futures.Future[list[Any]]](), 0
        try:
            for future in futures.as_completed(begun):
                if self._over.is_set():
                    raise JobCancelled("the preparation was stopped; the same command goes on with what is left")
                self._result(future)  # one that failed ends it now, and not when its turn comes
                ended.add(future)
                while told < len(begun) and begun[told] in ended:
                    yield from begun[told].result()
                    told += 1
        except BaseException as error:
            otherwise = isinstance(error, GeneratorExit)  # to be done so: nothing of it may still be writing then
            if not otherwise or self._workers.kind != "dask":  # which calls cancelled what its workers are at
                self._call_off()
            if otherwise:
                futures.wait(begun)
            raise

    def stop(self) -> None:
        """End it, from another thread: what has begun ends with the share in hand."""
        self._over.set()
        self._call_off()

    def _call_off(self) -> None:
        for future in self._futures:
            future.cancel()

    def _result(self, future: futures.Future[list[Any]]) -> list[Any]:
        # What an executor raises when a worker died, or nothing leads to it any more.
        losses: dict[type[BaseException], FailureClass] = {futures.BrokenExecutor: FailureClass.NODE}
        if self._workers.kind == "dask":
            from distributed import KilledWorker

            losses = {KilledWorker: FailureClass.NODE, futures.CancelledError: FailureClass.NETWORK}
        try:
            return future.result()
        except tuple(losses) as error:
            raise LauncherError(
                f"workers.kind={self._workers.kind}: a worker was lost, or the way to it ({type(error).__name__}: "
                f"{error}); run again, what is done is kept; if it comes back, memory is short: take fewer workers",
                fault=next(fault for kind, fault in losses.items() if isinstance(error, kind)),
                no_retry=True,
            ) from error


def _results(step: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Carry out one share. It is tried again by itself: what passes of one share must not use up the whole step's."""
    return [_tried(step, item) for item in items]


def _tried(step: Callable[[T], R], item: T) -> R:
    for seconds in DELAYS:
        try:
            return step(item)
        except Exception as error:
            if not is_transient(error):
                raise
            time.sleep(seconds)
    with no_outer_retry():
        return step(item)
