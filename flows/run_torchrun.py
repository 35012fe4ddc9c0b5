"""Any script on several nodes, launched and watched as a training is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.hooks import begin, cancel_jobs, flow_runs
from launcher.checks.plan import findings_of
from launcher.config import NAME_PATTERN, PlatformConfig, ScriptConfig, StartSettings, validated
from launcher.events import Note, StepDone, StepStarted
from launcher.images.builders import Image
from launcher.job import Job
from launcher.runs.attempts import claim_of, settle_others
from launcher.runs.index import Index
from launcher.runs.run import script_job, script_name
from tasks.credentials import get_credentials
from tasks.image import build_image
from tasks.preflight import report_findings
from tasks.steps import emit
from tasks.training import run_job


@flow(name="run-torchrun", flow_run_name="{name}", persist_result=False, on_cancellation=[cancel_jobs])
async def run_torchrun(
    script: str,
    name: Annotated[str, Field(pattern=NAME_PATTERN)] = ScriptConfig.model_fields["name"].default,
    root: str = ScriptConfig.model_fields["root"].default,
    args: tuple[str, ...] = ScriptConfig.model_fields["args"].default,
    env: dict[str, str] = {},  # noqa: B006 (Prefect shows the default in its form; nothing writes to it)
    max_restarts: Annotated[int, Field(ge=0)] = ScriptConfig.model_fields["max_restarts"].default,
    platform: PlatformConfig = ScriptConfig.model_fields["platform"].default,
    image: Image = ScriptConfig.model_fields["image"].default,
    start: StartSettings = ScriptConfig.model_fields["start"].default,
) -> str:
    """Run a script or module under torchrun on every node; each call is a new attempt, unless one lives already.

    Args:
        script: A Python file (a path) or a module (`-m package.module`).
        name: What to call the job: lower-case letters, digits and dashes, at most 32.
        root: A folder, or gs://bucket/prefix, that logs are written under.
        args: Its arguments, one item each; no quoting is needed.
        env: Environment variables for every rank. Not for secrets: they would be stored and shown.
        max_restarts: New attempts after a node or network fault.
        platform: Where the nodes are.
        image: What the nodes' software is.
        start: What to do where a job of the same name runs already.
    """
    begin()
    document: dict[str, Any] = {
        "name": name, "root": root, "script": script, "args": args, "env": env, "max_restarts": max_restarts,
        "platform": platform.model_dump(mode="json"), "image": image.model_dump(mode="json"),
        "start": start.model_dump(mode="json"),
    }  # fmt: skip
    return await run_script(validated(ScriptConfig, document, where="the parameters"))


async def run_script(config: ScriptConfig) -> str:
    """Preflight, image, credentials, job; returns where the logs are."""
    name, index = script_name(config), Index.of(config.root)
    await asyncio.to_thread(partial(settle_others, index, config.start, name=config.name, run=name))
    findings = await asyncio.to_thread(findings_of, config)
    await report_findings(findings, artifact=name)
    identity = await build_image(config)
    await get_credentials(config)

    def make_job(attempt: int) -> Job:
        return script_job(config, attempt=attempt, image=identity.image)

    emit(
        StepStarted(
            step="training", what=f"{config.script} on {config.platform.nodes} nodes x {config.platform.processes}"
        )
    )
    claim = replace(claim_of(config), make_job=make_job, flow_runs=flow_runs())
    record = await run_job(claim, max_restarts=config.max_restarts)
    emit(StepDone(step="training", what=f"{config.script} ended well"))
    emit(Note(what=f"logs: {record.directory}"))
    return record.directory
