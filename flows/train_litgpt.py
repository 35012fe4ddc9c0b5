"""The main job: raw text in, a verified checkpoint out."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from flows.hooks import begin, cancel_jobs, flow_runs
from flows.sections import Section, tell_of_defaults
from launcher.checks.plan import findings_at
from launcher.config import NAME_PATTERN, PlatformConfig, RunConfig, StartSettings, Workers, overridden, validated
from launcher.events import Note, StepDone, StepStarted
from launcher.images.builders import Image, SoftwareIdentity
from launcher.job import Job
from launcher.runs.attempts import claim_at, settle_others
from launcher.runs.index import Index
from launcher.runs.run import Run, plan_run, training_job, training_spec, write_config
from litgpt_demo.config import DataConfig, ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.export import FinalManifest, exported
from litgpt_demo.training import checkpoints
from tasks.checkpoints import collect_checkpoints
from tasks.credentials import get_credentials
from tasks.dataset import prepare_dataset
from tasks.image import build_image
from tasks.preflight import report_findings
from tasks.report import publish_report
from tasks.steps import emit
from tasks.training import run_job


@flow(name="train-litgpt", flow_run_name="{name}", persist_result=False, on_cancellation=[cancel_jobs])
async def train_litgpt(
    name: Annotated[str, Field(pattern=NAME_PATTERN)] = RunConfig.model_fields["name"].default,
    root: str = RunConfig.model_fields["root"].default,
    data: Section[DataConfig] = RunConfig.model_fields["data"].default,
    workers: Section[Workers] = RunConfig.model_fields["workers"].default,
    model: Section[ModelConfig] = RunConfig.model_fields["model"].default,
    train: Section[TrainConfig] = RunConfig.model_fields["train"].default,
    platform: Section[PlatformConfig] = RunConfig.model_fields["platform"].default,
    image: Section[Image] = RunConfig.model_fields["image"].default,
    start: Section[StartSettings] = RunConfig.model_fields["start"].default,
    overrides: dict[str, Any] = {},  # noqa: B006 (Prefect shows the default in its form; nothing writes to it)
) -> FinalManifest:
    """Prepare the data, pin the software, prove access, train, collect.

    Args:
        name: What to call the run: lower-case letters, digits and dashes, at most 32.
        root: A folder, or gs://bucket/prefix, that everything is written under.
        data: Which text, cut into which tokens.
        workers: Who prepares the dataset. Changes nothing in it.
        model: Which model.
        train: How it is trained. All of it: what is left out is a default, not the deployment's.
        platform: Where the nodes are.
        image: What the nodes' software is.
        start: What to do where a job of the same name runs already.
        overrides: Single settings by their dotted names: {"train.learning_rate": 0.0003}. They win over the sections;
            a section given with -p replaces the deployment's whole section.
    """
    begin()
    groups = {
        "data": data, "workers": workers, "model": model, "train": train, "platform": platform, "image": image,
        "start": start,
    }  # fmt: skip
    tell_of_defaults(groups)
    document = {"name": name, "root": root} | {group: value.model_dump(mode="json") for group, value in groups.items()}
    config = validated(RunConfig, overridden(document, overrides), where="the parameters")
    return await run_pipeline(config)


async def run_pipeline(config: RunConfig) -> FinalManifest:
    """The five steps; each finds itself done by its key, so that running again is free."""
    run = await asyncio.to_thread(plan_run, config)
    if await asyncio.to_thread(exported, run.storage) is None:
        await asyncio.to_thread(partial(settle_others, Index(run.root), config.start, name=config.name, run=run.name))
    await report_findings(await asyncio.to_thread(findings_at, run), artifact=run.name)
    dataset = await prepare_dataset(run.dataset, root=config.root, workers=config.workers)
    identity = await build_image(config)
    await get_credentials(config)
    await train_to_the_end(run, dataset, identity)
    final = await collect_checkpoints(run)
    address = await publish_report(run, dataset=dataset, identity=identity, final=final)
    emit(Note(what=f"report: {address}"))
    return final


async def train_to_the_end(run: Run, dataset: DatasetManifest, identity: SoftwareIdentity) -> None:
    """Train until the run's last checkpoint is committed, or find that it is."""
    spec = training_spec(run, dataset)
    emit(StepStarted(step="training", what=_described(run, spec)))
    done = await asyncio.to_thread(is_trained, run, spec)
    if not done:
        await asyncio.to_thread(write_config, run, spec, asdict(identity))
        labels = {"litgpt-demo.dev/flow-run-id": str(flow_run.id or "none")}

        def make_job(attempt: int) -> Job:
            return training_job(run, attempt=attempt, image=identity.image, labels=labels)

        claim = replace(claim_at(run), make_job=make_job, flow_runs=flow_runs())
        await run_job(claim, max_restarts=run.config.train.max_restarts)
    emit(StepDone(step="training", what=f"{spec.steps} steps", reused=done))


def is_trained(run: Run, spec: TrainingSpec) -> bool:
    """Return True if the run's last checkpoint is committed. (Collection reads every byte of it.)"""
    there = checkpoints.committed(run.storage)
    return bool(there) and checkpoints.reached_end(there[0], spec)


def _described(run: Run, spec: TrainingSpec) -> str:
    platform = run.config.platform
    return (
        f"{run.name}: {spec.steps} steps on {platform.nodes} nodes x {platform.processes} processes ({platform.kind})"
    )
