"""Dataset preparation on its own."""

from __future__ import annotations

import asyncio

from prefect import flow

from flows.hooks import begin
from launcher.config import RunConfig, Workers
from litgpt_demo.config import DataConfig
from litgpt_demo.data.dataset import DatasetManifest, plan_dataset
from tasks import dataset


@flow(name="prepare-dataset", flow_run_name="prepare {data.corpus.kind}", persist_result=False)
async def prepare_dataset(
    root: str = RunConfig.model_fields["root"].default,
    data: DataConfig = RunConfig.model_fields["data"].default,
    workers: Workers = RunConfig.model_fields["workers"].default,
) -> DatasetManifest:
    """Turn a corpus into train.bin and val.bin with a manifest, or find it done.

    Args:
        root: A folder, or gs://bucket/prefix, that the dataset is written under.
        data: Which text, cut into which tokens.
        workers: Who prepares it. Changes nothing in it.
    """
    begin()
    planned = await asyncio.to_thread(plan_dataset, data)
    return await dataset.prepare_dataset(planned, root=root, workers=workers)
