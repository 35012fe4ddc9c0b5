"""Dataset preparation on its own."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow

from flows.hooks import begin
from flows.parameters import DATASET_FIELDS, config_from, takes
from launcher.config import RunConfig
from launcher.events import Note
from litgpt_demo.data.dataset import DatasetManifest, plan_dataset, warnings_of
from tasks import dataset
from tasks.steps import as_it_is, emit


@flow(name="prepare-dataset", flow_run_name="prepare {data.corpus.kind}", persist_result=False)
@takes(RunConfig, only=DATASET_FIELDS)
async def prepare_dataset(**parameters: Any) -> DatasetManifest:
    """Turn a corpus into train.bin and val.bin with a manifest, or find it done."""
    begin()
    config = config_from(RunConfig, parameters)
    planned = await asyncio.to_thread(plan_dataset, config.data)
    for finding in await asyncio.to_thread(lambda: list(warnings_of(planned))):
        emit(Note(what=str(finding), severity=finding.severity))
    return await dataset.prepare_dataset(as_it_is(planned), root=config.root, workers=config.workers)
