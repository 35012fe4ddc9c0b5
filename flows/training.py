"""The pipeline of a training, from raw text to a verified model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from contextvars import ContextVar

from prefect import flow, get_run_logger

from flows.parameters import cancel_jobs, name_flow_run, with_config_parameters
from launcher.config import RunConfig
from launcher.runs.attempts import CancelWatch, job_handle, run_of_flow_run
from launcher.runs.run import Run, plan_run
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.export import FinalManifest
from litgpt_demo.metrics import Row
from tasks import dataset
from tasks.checkpoints import Collector, collect_checkpoints
from tasks.evaluation import CheckpointScores, evaluate
from tasks.preflight import prepare_job
from tasks.report import LiveReport, publish_report
from tasks.steps import emit_milestone, opaque
from tasks.training import flow_runs, train

PLANNED: ContextVar[Run | None] = ContextVar("planned", default=None)
"""The planned run of a trial, because a sweep reads the corpus once for all of its trials."""
ON_ROW: ContextVar[Callable[[Row], None]] = ContextVar("on_row", default=lambda row: None)
"""Called with each row of a trial's metrics."""


async def run_pipeline(config: RunConfig) -> FinalManifest:
    """Run the stages of a training, and return the manifest of its model."""
    flow_run = flow_runs()[0]
    run = await asyncio.to_thread(lambda: run_of_flow_run(config, flow_run) or PLANNED.get() or plan_run(config))
    await name_flow_run(run.name)
    async with LiveReport(run) as page:
        return await _run_steps(config, run, page)


async def _run_steps(config: RunConfig, run: Run, page: LiveReport) -> FinalManifest:
    handle = job_handle(run)  # starts attempts of this run, or reattaches to them
    watch = await asyncio.to_thread(CancelWatch, handle.attempts.index, handle.names)

    async def inputs(_reattaches: bool) -> DatasetManifest:
        planned = opaque(run.dataset)
        prepared: DatasetManifest = await dataset.prepare_dataset(
            planned, root=config.root, workers=config.dataset_workers
        )
        return prepared

    prepared, identity = await prepare_job(handle, run, inputs)
    page.dataset, page.identity = prepared, identity
    async with CheckpointScores(run) as scores:
        with closing(Collector(run)) as collector:

            def on_row(row: Row) -> None:
                collector.follow(row)
                scores.follow(row)
                page.follow(row)
                ON_ROW.get()(row)

            await train(opaque(run), opaque(prepared), identity, on_row=on_row, watch=watch)
            final = await collect_checkpoints(opaque(run), collector, image=identity.image)
    if config.evaluation is not None:
        final = await evaluate(run.storage.address(), config.evaluation)
    address = await publish_report(opaque(run), dataset=opaque(prepared), identity=identity, final=opaque(final))
    get_run_logger().info("report: %s", address)  # a command prints the address at its end
    if await asyncio.to_thread(handle.attempts.index.announce, run.name, f"finished-{final.step}"):
        emit_milestone(
            "run.finished", run.name, run.root.address(), step=final.step, loss=final.validation_loss, report=address
        )
    return final


@flow(name="train-litgpt", persist_result=False, on_cancellation=[cancel_jobs])
@with_config_parameters(RunConfig, has_form=False)
async def _train_here(config: RunConfig) -> FinalManifest:
    return await run_pipeline(config)


async def train_planned(run: Run) -> FinalManifest:
    """Run the flow of a command, which has checked the config: the form of flows.train_litgpt takes half a second."""
    PLANNED.set(run)
    final: FinalManifest = await _train_here(**dict(run.config))
    return final
