"""Step 1: text into tokens, by what `dataset_workers` chooses: threads, processes or a Dask cluster."""

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
from tasks.report import ProgressReporter
from tasks.steps import DELAYS, emit, is_transient, no_outer_retry, opaque, step_task

T = TypeVar("T")
R = TypeVar("R")

# The chunks of a phase for other processes and machines, however many shards there are: each carries the whole step.
_MOST_CHUNKS = 512
_SAFE_PATH = "PYTHONSAFEPATH"


@step_task(Step.DATASET.task)
async def prepare_dataset(planned: PlannedDataset, *, root: str, workers: Workers) -> DatasetManifest:
    """Make the dataset under `root` by the `workers`, unless it exists with the same content hash."""
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
    start, executor = time.monotonic(), MapExecutor(workers)
    async with PreparationProgress(planned) as live:

        def prepare() -> DatasetManifest:
            with executor:
                return preparation.prepare(planned, open_storage(root), map_steps=executor, report=live.report)

        making = asyncio.create_task(asyncio.to_thread(prepare))
        try:
            manifest = await asyncio.shield(making)
        finally:  # the thread is stopped and waited for when this is cancelled
            executor.stop()
            await asyncio.gather(making, return_exceptions=True)
        live.report(None)
    with no_outer_retry():
        await publish_dataset(opaque(planned), opaque(manifest), seconds=time.monotonic() - start)
    return manifest


class PreparationProgress(ProgressReporter):
    def __init__(self, planned: PlannedDataset) -> None:
        name = f"{planned.name}-{planned.content_hash}"
        super().__init__(f"dataset-{name}", f"Preparation of {name}")
        self._now: Preparation | None = Preparation(phase="survey")

    def report(self, progress: Preparation | None) -> None:
        self._now = progress
        self.revision += 1
        if progress is not None:
            what, fraction = report.progress_text(progress), report.fraction(progress)
            emit(StepProgress(step=Step.DATASET, what=what, fraction=fraction))

    def progress(self) -> tuple[float, str]:
        if self._now is None:
            return 100.0, "done"
        return min(99.0, 100 * (report.fraction(self._now) or 0.0)), report.progress_text(self._now)


@step_task("publish-dataset")
async def publish_dataset(planned: PlannedDataset, manifest: DatasetManifest, *, seconds: float) -> None:
    name, table = f"{planned.name}-{planned.content_hash}", report.dataset_table(manifest, seconds=seconds)
    lengths = report.lengths_markdown(manifest)
    await acreate_table_artifact(table, key=f"dataset-figures-{name}", description="The dataset in figures")
    if lengths:
        await acreate_markdown_artifact(lengths, key=f"dataset-lengths-{name}", description="Lengths of its documents")


class MapExecutor(ExitStack):
    """A way to carry out steps (`litgpt_demo.data.preparation.MapSteps`) by workers of the chosen kind."""

    def __init__(self, workers: Workers) -> None:
        super().__init__()
        self._workers = workers
        self._executor: futures.Executor
        self._over = threading.Event()
        self._futures: list[futures.Future[list[Any]]] = []

    def __enter__(self) -> Self:
        """Start the executor; leaving this one ends it, and waits for its running tasks."""
        workers = self._workers
        count = getattr(workers, "count", None) or len(os.sched_getaffinity(0))
        if isinstance(workers, ThreadWorkers):
            self._executor = self.enter_context(futures.ThreadPoolExecutor(count))
        elif isinstance(workers, ProcessWorkers):
            # The started Pythons do not import from the current folder, which may be another user's.
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
        size = 1
        if not isinstance(self._workers, ThreadWorkers):
            size = max(1, math.ceil(len(items) / _MOST_CHUNKS))
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        pending = [self._executor.submit(_results, step, chunk) for chunk in chunks]
        self._futures = pending
        ended, yielded = set[futures.Future[list[Any]]](), 0
        try:
            for future in futures.as_completed(pending):
                if self._over.is_set():
                    raise JobCancelled("the preparation was stopped; run the same command again to continue")
                self._result(future)  # a failed one ends the step now, and not when its turn comes
                ended.add(future)
                while yielded < len(pending) and pending[yielded] in ended:
                    yield from pending[yielded].result()
                    yielded += 1
        except GeneratorExit:
            if self._workers.kind != "dask":  # which reports running tasks as cancelled
                self._cancel_pending()
            futures.wait(pending)  # the step is done in another way, and no worker may still be writing then
            raise
        except BaseException:
            self._cancel_pending()
            raise

    def stop(self) -> None:
        """Stop it, from another thread: workers finish only the chunk at hand."""
        self._over.set()
        self._cancel_pending()

    def _cancel_pending(self) -> None:
        for future in self._futures:
            future.cancel()

    def _result(self, future: futures.Future[list[Any]]) -> list[Any]:
        # The errors of an executor when a worker died, or cannot be reached any more.
        losses: dict[type[BaseException], FailureClass] = {futures.BrokenExecutor: FailureClass.NODE}
        if self._workers.kind == "dask":
            from distributed import KilledWorker

            losses = {KilledWorker: FailureClass.NODE, futures.CancelledError: FailureClass.NETWORK}
        try:
            return future.result()
        except tuple(losses) as error:
            raise LauncherError(
                f"dataset_workers.kind={self._workers.kind}: a worker was lost, or the connection to it: "
                f"{type(error).__name__}: {error}",
                fix="run again: finished work is kept. If it fails again, memory is short: take fewer workers",
                fault=next(fault for kind, fault in losses.items() if isinstance(error, kind)),
                no_retry=True,
            ) from error


def _results(step: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Carry out one chunk. Each item has retries of its own: transient errors must not use up the step's."""
    return [_with_retry(step, item) for item in items]


def _with_retry(step: Callable[[T], R], item: T) -> R:
    for seconds in DELAYS:
        try:
            return step(item)
        except Exception as error:
            if not is_transient(error):
                raise
            time.sleep(seconds)
    with no_outer_retry():
        return step(item)
