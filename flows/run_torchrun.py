"""Any script on several nodes, launched and watched as a training is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from prefect import flow

from flows.hooks import begin, cancel_jobs
from flows.parameters import config_from, takes
from launcher.checks.plan import findings_of_script
from launcher.config import ScriptConfig
from launcher.events import Note, Step, StepDone, StepStarted
from launcher.job import Job
from launcher.runs.attempts import claim_script, known_image, opening_beside, script_of_flow_run, settle_others
from launcher.runs.index import Index
from launcher.runs.run import Script, plan_script, script_job
from tasks.credentials import get_credentials
from tasks.image import build_image, ship_code
from tasks.preflight import report_findings
from tasks.steps import as_it_is, emit
from tasks.training import ask, flow_runs, run_job


@flow(name="run-torchrun", flow_run_name="{name}", persist_result=False, on_cancellation=[cancel_jobs])
@takes(ScriptConfig)
async def run_torchrun(**parameters: Any) -> str:
    """Run a script or module under torchrun on every node; each call is a new attempt, unless one lives already."""
    begin()
    return await run_script(config_from(ScriptConfig, parameters))


def _planned(config: ScriptConfig, flow_run: str | None) -> Script:
    """Read the code once for all steps; a resumed flow run keeps to that of the job that it has started."""
    return script_of_flow_run(config, flow_run) or plan_script(config)


async def run_script(config: ScriptConfig) -> str:
    """Preflight, image, credentials, code, job; returns where the logs are. A job that lives is followed at once."""
    script = await asyncio.to_thread(_planned, config, flow_runs()[0])
    claim = claim_script(script)
    lives = await ask(claim, claim.attempts.live) is not None
    if not lives:
        beside, name = opening_beside(config.platform), script.name
        await asyncio.to_thread(
            partial(settle_others, Index.of(config.root), config.start, name=config.name, run=name, open=beside)
        )
        await report_findings(partial(findings_of_script, script), artifact=name)
    image = known_image(config.image) if lives else None
    if image is None:  # a live job's too, where this step names the image: a new attempt would need it
        image = (await build_image(config)).image
    if not lives:
        await get_credentials(config)
        if script.code is not None:
            await ship_code(as_it_is(script.code), config.root)

    def make_job(attempt: int) -> Job:
        return script_job(script, attempt=attempt, image=image)

    emit(
        StepStarted(
            step=Step.TRAINING, what=f"{config.script} on {config.platform.nodes} nodes x {config.platform.processes}"
        )
    )
    claim = replace(claim, make_job=make_job)
    record = await run_job(claim, max_restarts=config.max_restarts, restarts=config.restarts)
    emit(StepDone(step=Step.TRAINING, what=f"{config.script} ended well"))
    emit(Note(what=f"logs: {record.directory}"))
    return record.directory
