"""The flows of deployments that train: the pipeline from raw text to a verified model, and only its first stage."""

from __future__ import annotations

import asyncio

from prefect import flow

from flows.parameters import DATASET_FIELDS, cancel_jobs, name_flow_run, with_config_parameters
from flows.training import run_pipeline
from launcher.config import RunConfig
from launcher.events import Note
from litgpt_demo.data.dataset import DatasetManifest, plan_dataset, warnings_of
from litgpt_demo.export import FinalManifest
from tasks import dataset
from tasks.steps import emit, opaque


@flow(name="train-litgpt", persist_result=False, on_cancellation=[cancel_jobs])
@with_config_parameters(RunConfig)
async def train_litgpt(config: RunConfig) -> FinalManifest:
    """Prepare the data, pin the software, check access, train, collect.

    A step that is already done costs nothing when it is repeated. If the job is live, `prepare_job` skips the checks
    that only a submission needs: machines, image and access.
    """
    return await run_pipeline(config)


@flow(name="prepare-dataset", persist_result=False)
@with_config_parameters(RunConfig, only=DATASET_FIELDS)
async def prepare_dataset(config: RunConfig) -> DatasetManifest:
    """Convert a corpus to train.bin and val.bin with a manifest, unless they exist."""
    planned = await asyncio.to_thread(plan_dataset, config.data)
    await name_flow_run(f"prepare-{planned.name}-{planned.content_hash}")
    for finding in await asyncio.to_thread(lambda: list(warnings_of(planned))):
        emit(Note(what=str(finding), severity=finding.severity))
    return await dataset.prepare_dataset(opaque(planned), root=config.root, workers=config.dataset_workers)
