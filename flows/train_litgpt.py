"""The main job: raw text in, a verified checkpoint out."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.hooks import begin, cancel_jobs, flow_runs
from flows.parameters import config_from, takes
from launcher.checks.plan import findings_at
from launcher.config import RunConfig
from launcher.events import Note, StepDone, StepStarted
from launcher.images.builders import SoftwareIdentity
from launcher.job import Job
from launcher.runs.attempts import claim_at, settle_others
from launcher.runs.index import Index
from launcher.runs.run import Run, plan_run, training_job, training_spec, write_config
from litgpt_demo.config import TrainingSpec
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.export import FinalManifest, collected
from litgpt_demo.training import checkpoints
from tasks.checkpoints import collect_checkpoints
from tasks.credentials import get_credentials
from tasks.dataset import prepare_dataset
from tasks.image import build_image
from tasks.preflight import report_findings
from tasks.report import publish_report
from tasks.steps import say
from tasks.training import run_job


@flow(name="train-litgpt", flow_run_name="{name}", persist_result=False, on_cancellation=[cancel_jobs])
@takes(RunConfig)
async def train_litgpt(**parameters: Any) -> FinalManifest:
    """Prepare the data, pin the software, prove access, train, collect."""
    begin()
    return await run_pipeline(config_from(RunConfig, parameters))


async def run_pipeline(config: RunConfig) -> FinalManifest:
    """The five steps; each finds itself done by its key, so that running again is free."""
    run = await asyncio.to_thread(plan_run, config)
    if await asyncio.to_thread(collected, run.storage) is None:
        await asyncio.to_thread(partial(settle_others, Index(run.root), config.start, name=config.name, run=run.name))
    await report_findings(await asyncio.to_thread(findings_at, run), artifact=run.name)
    dataset = await prepare_dataset(run.dataset, root=config.root, workers=config.workers)
    identity = await build_image(config)
    await get_credentials(config)
    await train_to_the_end(run, dataset, identity)
    final = await collect_checkpoints(run)
    address = await publish_report(run, dataset=dataset, identity=identity, final=final)
    say(Note(what=f"report: {address}"))
    return final


async def train_to_the_end(run: Run, dataset: DatasetManifest, identity: SoftwareIdentity) -> None:
    """Train until the run's last checkpoint is committed, or find that it is."""
    spec = training_spec(run, dataset)
    say(StepStarted(step="training", what=_described(run, spec)))
    done = await asyncio.to_thread(is_trained, run, spec)
    if not done:
        await asyncio.to_thread(write_config, run, spec, asdict(identity))
        labels = {"litgpt-demo.dev/flow-run-id": str(flow_run.id or "none")}

        def make_job(attempt: int) -> Job:
            return training_job(run, attempt=attempt, image=identity.image, labels=labels)

        claim = replace(claim_at(run), make_job=make_job, flow_runs=flow_runs())
        await run_job(claim, max_restarts=run.config.train.max_restarts)
    say(StepDone(step="training", what=f"{spec.steps} steps", reused=done))


def is_trained(run: Run, spec: TrainingSpec) -> bool:
    """Is the run's last checkpoint committed? (Collection reads every byte of it.)"""
    there = checkpoints.committed(run.storage)
    return bool(there) and checkpoints.reached_end(there[0], spec)


def _described(run: Run, spec: TrainingSpec) -> str:
    platform = run.config.platform
    return (
        f"{run.name}: {spec.steps} steps on {platform.nodes} nodes x {platform.processes} processes ({platform.kind})"
    )
