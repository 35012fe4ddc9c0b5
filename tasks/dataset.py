"""Step 1: text into tokens."""

from __future__ import annotations

import asyncio
import threading

from prefect import task

from launcher.events import StepDone, StepProgress, StepStarted
from launcher.figures import bytes_text, count_text
from litgpt_demo import preparation
from litgpt_demo.dataset import DatasetManifest, PlannedDataset, finished_dataset
from litgpt_demo.preparation import Preparation
from litgpt_demo.storage import open_storage
from tasks.steps import RETRIED, say


@task(name="prepare-dataset", task_run_name="prepare-dataset", **RETRIED)
async def prepare_dataset(planned: PlannedDataset, *, root: str) -> DatasetManifest:
    """Make the dataset under `root`, or find it done by its key."""
    storage = open_storage(root)
    say(StepStarted(step="dataset", what=f"{planned.data.corpus.kind}, {len(planned.sources):,} files"))
    done = await asyncio.to_thread(finished_dataset, storage, planned)
    manifest = done or await _prepare(planned, root)
    say(StepDone(step="dataset", what=_described(manifest, planned.path), reused=done is not None))
    return manifest


async def _prepare(planned: PlannedDataset, root: str) -> DatasetManifest:
    """In a thread, which ends at its next report when this task is cancelled."""
    cancelled = threading.Event()

    def report(progress: Preparation) -> None:
        if cancelled.is_set():
            raise KeyboardInterrupt("the preparation was cancelled")
        rate = progress.text_bytes / max(progress.seconds, 1e-3)
        what = f"{progress.documents:,} documents, {count_text(progress.tokens)} tokens, {bytes_text(rate)}/s"
        say(StepProgress(step="dataset", what=what))

    try:
        return await asyncio.to_thread(preparation.prepare, planned, open_storage(root), report=report)
    finally:
        cancelled.set()


def _described(manifest: DatasetManifest, path: str) -> str:
    return (
        f"{manifest.train.documents + manifest.validation.documents:,} documents, "
        f"{count_text(manifest.train.tokens)} training and {count_text(manifest.validation.tokens)} validation tokens "
        f"in {path}"
    )
