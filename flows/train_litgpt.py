"""The main job: raw text in, a verified checkpoint out."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from prefect import flow

from flows.hooks import begin, cancel_jobs
from flows.parameters import config_from, takes
from launcher.checks.plan import findings_at
from launcher.config import RunConfig
from launcher.events import Note
from launcher.runs.attempts import opening_beside, settle_others
from launcher.runs.index import Index
from launcher.runs.run import plan_run
from litgpt_demo.export import FinalManifest, exported
from tasks.checkpoints import Collector, collect_checkpoints
from tasks.credentials import get_credentials
from tasks.dataset import prepare_dataset
from tasks.image import build_image
from tasks.preflight import report_findings
from tasks.report import publish_report
from tasks.steps import as_it_is, emit
from tasks.training import train


@flow(name="train-litgpt", flow_run_name="{name}", persist_result=False, on_cancellation=[cancel_jobs])
@takes(RunConfig)
async def train_litgpt(**parameters: Any) -> FinalManifest:
    """Prepare the data, pin the software, prove access, train, collect."""
    begin()
    return await run_pipeline(config_from(RunConfig, parameters))


async def run_pipeline(config: RunConfig) -> FinalManifest:
    """The five steps; each finds itself done by its key, so that running again is free."""
    run = await asyncio.to_thread(plan_run, config)
    if await asyncio.to_thread(exported, run.storage) is None:
        beside = opening_beside(config.platform)
        await asyncio.to_thread(
            partial(settle_others, Index(run.root), config.start, name=config.name, run=run.name, open=beside)
        )
    await report_findings(await asyncio.to_thread(findings_at, run, trusted=True), artifact=run.name)
    dataset = await prepare_dataset(as_it_is(run.dataset), root=config.root, workers=config.workers)
    identity = await build_image(config)
    await get_credentials(config)
    with Collector(run) as collector:
        await train(as_it_is(run), as_it_is(dataset), identity, on_row=collector.follow)
        final = await collect_checkpoints(as_it_is(run), collector)
    address = await publish_report(as_it_is(run), dataset=as_it_is(dataset), identity=identity, final=as_it_is(final))
    emit(Note(what=f"report: {address}"))
    return final
