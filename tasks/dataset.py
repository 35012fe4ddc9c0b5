"""Step 1: text into tokens."""

from __future__ import annotations

import asyncio
import time

from prefect import get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

from launcher.checks.preflight import check_workers
from launcher.config import ThreadWorkers, Workers
from launcher.errors import require
from launcher.events import Step, StepDone, StepProgress, StepStarted
from launcher.formatting import count_text
from launcher.reports import datasets
from litgpt_demo.data import preparation
from litgpt_demo.data.dataset import DatasetManifest, PlannedDataset, finished_dataset
from litgpt_demo.data.preparation import Preparation
from litgpt_demo.storage import open_storage
from tasks.live import Live
from tasks.steps import RETRIED, as_it_is, emit, own_tries
from tasks.workers import Fanout


@task(name=Step.DATASET.task, task_run_name=Step.DATASET.task, **RETRIED)
async def prepare_dataset(planned: PlannedDataset, *, root: str, workers: Workers) -> DatasetManifest:
    """Make the dataset under `root`, by the `workers`, or find it done by its key."""
    emit(StepStarted(step=Step.DATASET, what=f"{planned.data.corpus.kind}, {len(planned.sources):,} files"))
    done = await asyncio.to_thread(finished_dataset, open_storage(root), planned)
    manifest = done or await _prepare(planned, root, workers)
    what = (
        f"{manifest.documents:,} documents, {count_text(manifest.train.tokens)} training and "
        f"{count_text(manifest.validation.tokens)} validation tokens in {planned.path}"
    )
    emit(StepDone(step=Step.DATASET, what=what, reused=done is not None))
    return manifest


async def _prepare(planned: PlannedDataset, root: str, workers: Workers) -> DatasetManifest:
    require(await asyncio.to_thread(check_workers, workers))
    if isinstance(workers, ThreadWorkers) and workers.count is None:
        workers = workers.model_copy(update={"count": preparation.threads_for(root)})
    start, fanout = time.monotonic(), Fanout(workers)
    async with LivePreparation(planned) as live:

        def prepare() -> DatasetManifest:
            with fanout:
                return preparation.prepare(planned, open_storage(root), each=fanout, report=live.report)

        making = asyncio.create_task(asyncio.to_thread(prepare))
        try:
            manifest = await asyncio.shield(making)
        finally:  # the thread is stopped and waited for when this is cancelled
            fanout.stop()
            await asyncio.gather(making, return_exceptions=True)
        live.report(None)
    with own_tries():
        await publish_dataset(as_it_is(planned), as_it_is(manifest), seconds=time.monotonic() - start)
    return manifest


class LivePreparation(Live):
    """While a dataset is made: a progress artifact; at times a log line."""

    def __init__(self, planned: PlannedDataset) -> None:
        super().__init__()
        self._name = f"{planned.name}-{planned.key}"
        self._now: Preparation | None = Preparation(phase="survey")

    def report(self, progress: Preparation | None) -> None:
        """Report progress from the thread that prepares; None: it is done."""
        self._now = progress
        self.news += 1
        if progress is not None:
            what, fraction = datasets.progress_text(progress), datasets.fraction(progress)
            emit(StepProgress(step=Step.DATASET, what=what, fraction=fraction))

    async def show(self) -> None:
        progress, text, percent = self._now, "done", 100.0
        if progress is not None:
            text, percent = datasets.progress_text(progress), min(99.0, 100 * (datasets.fraction(progress) or 0.0))
            if self.line_is_due():
                get_run_logger().info(text)
        told = f"Preparation of {self._name}: {text}"
        await self.show_progress(percent, key=f"dataset-{self._name}", description=told)


@task(name="publish-dataset", task_run_name="publish-dataset", **RETRIED)
async def publish_dataset(planned: PlannedDataset, manifest: DatasetManifest, *, seconds: float) -> None:
    """Show in Prefect the totals of a preparation of `seconds`."""
    name, table = f"{planned.name}-{planned.key}", datasets.table(manifest, seconds=seconds)
    await acreate_table_artifact(table, key=f"dataset-figures-{name}", description="The dataset in figures")
    if lengths := datasets.lengths_markdown(manifest):
        await acreate_markdown_artifact(lengths, key=f"dataset-lengths-{name}", description="Lengths of its documents")
