"""Several trainings that differ in some settings, share the dataset, and end in one table."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact

from flows.deployed_trials import cancel_sweep, require_deployment
from flows.hooks import begin
from flows.parameters import config_from, named, takes
from flows.trials import Trials, TrialSource, require_slots
from launcher.checks.plan import findings_of
from launcher.config import SweepConfig
from launcher.errors import LauncherError, PlatformRefused
from launcher.events import Note
from launcher.job import Submission
from launcher.platforms.base import TakesArrays
from launcher.runs.attempts import CancelWatch, opening_beside, settle_others
from launcher.runs.index import Index
from launcher.runs.outcomes import Outcome, ranking
from launcher.runs.studies import Listed, Study, storage_of
from launcher.runs.sweep_progress import SWEEP_PAGE, progress_of_trials, write_progress
from launcher.runs.sweeps import MOST_TOGETHER, TOGETHER, Together, runs_of, trials
from launcher.runs.trials import Trial, sweep_name
from launcher.runs.waiting import asked
from litgpt_demo.data.dataset import plan_dataset
from litgpt_demo.settings import key_of
from tasks.preflight import report_findings
from tasks.steps import emit
from tasks.sweep import LiveSweep
from tasks.training import at_work, flow_runs, is_resumed, orchestrator, tell_of_silence


# Trials cancel their own jobs while their orchestrator lives; the sweep's hook is for when it is gone or out of time.
@flow(name="sweep-litgpt", flow_run_name=named("sweep {name}"), persist_result=False, on_cancellation=[cancel_sweep])
@takes(SweepConfig)
async def sweep_litgpt(**parameters: Any) -> list[dict[str, Any]]:
    """Train every combination of a grid, or trials drawn from a space; returns the table, best trial first."""
    begin()
    return await run_sweep(config_from(SweepConfig, parameters))


async def run_sweep(config: SweepConfig) -> list[dict[str, Any]]:
    """Run all trials, at most `max_parallel` at a time; one that fails does not end the others.

    Raises:
        ConfigProblem: the sweep, or a trial of its grid, would be refused; none has begun.
    """
    known, index, sweep = await asyncio.to_thread(trials, config), Index.of(config.root), sweep_name(config)
    await require_slots(config, known)
    await require_deployment(config)
    if not (resumed := await is_resumed(index, sweep)):
        start, beside = config.start.model_copy(update={"sweep": sweep}), opening_beside(config.platform)
        await asyncio.to_thread(partial(settle_others, index, start, name=config.name, open=beside))
    await report_findings(await asyncio.to_thread(findings_of, config, trusted=True), artifact=sweep)
    async with at_work(index, sweep):
        return await _from_trials_to_table(config, known, resumed=resumed)


async def _from_trials_to_table(config: SweepConfig, known: Sequence[Trial], *, resumed: bool) -> list[dict[str, Any]]:
    index, sweep = Index.of(config.root), sweep_name(config)
    watching = partial(CancelWatch, index, [sweep], orchestrator=orchestrator())
    watch = await asyncio.to_thread(watching)
    source = await asyncio.to_thread(_source, config, known)
    count = config.sweep.trials or len(known)
    emit(Note(what=f"{count} trials, {config.sweep.max_parallel} at a time"))
    async with LiveSweep(config) as live:
        running = Trials(config, source, watch, partial(_keep, live, count), flow_runs()[0] if resumed else None)
        for data in {key_of(trial.config.data): trial.config.data for trial in known}.values():
            await running.prepare(data)
        together = await asyncio.to_thread(_together, config, known)
        TOGETHER.set(together)
        parallel = config.sweep.max_parallel if together is None else len(known)
        outcomes = await running.carry_out(parallel=parallel)
        live.have(outcomes)
    return await publish(config, outcomes, live)


def _source(config: SweepConfig, known: Sequence[Trial]) -> TrialSource:
    """Return what says which trial comes next."""
    if not config.sweep.has_study:
        return Listed(known)
    return Study(config, listed=known if config.sweep.drawn_by == "grid" else ())


def _together(config: SweepConfig, planned: Sequence[Trial]) -> Together | None:
    """Return what submits the trials' first jobs as one; None where their platform has no such thing for them."""
    if config.sweep.drawn_by == "tpe" or config.sweep.deployment is not None:
        return None  # not all are known, or each is another process's
    platform, sweep = config.platform.open(), sweep_name(config)
    alike = all(trial.config.platform == config.platform for trial in planned)
    if not isinstance(platform, TakesArrays) or not alike or not 1 < len(planned) <= MOST_TOGETHER:
        return None
    as_one = platform.submit_together

    async def submit(jobs: Sequence[Submission]) -> None:
        question = partial(as_one, jobs, name=sweep, parallel=config.sweep.max_parallel)
        try:
            await asked(question, platform=config.platform.kind, about=sweep, on_silence=tell_of_silence)
        except PlatformRefused as error:
            emit(Note(what=f"trials become single jobs, not one array: {error}", severity="warning"))
            raise

    names = [run.name for run in runs_of(planned, plan_dataset)]
    return Together(submit, runs=names, parallel=config.sweep.max_parallel)


async def _keep(live: LiveSweep, count: int, running: Trials) -> None:
    """Write down how far the trials are, for who asks for the sweep's status, and show it where trials have ended."""
    progress = progress_of_trials(
        running.config, running.ended, trials=count, gpu_hours=running.gpu_hours, dollars=running.dollars
    )
    await asyncio.to_thread(write_progress, storage_of(running.config), progress)
    if running.ended:
        live.have(running.ended)


async def publish(config: SweepConfig, outcomes: list[Outcome], live: LiveSweep) -> list[dict[str, Any]]:
    """Leave the page and best.yaml under the root, the latter as an artifact, too; return the table.

    Raises:
        LauncherError: no trial succeeded.
    """
    name, storage = sweep_name(config), storage_of(config)
    made = await live.write_page()
    emit(Note(what=f"report: {storage.address(SWEEP_PAGE)}"))
    if made.best is None:
        why = next((one.error for one in outcomes), "the budget was used up before any began")
        raise LauncherError(f"none of {len(outcomes)} trials succeeded; the first: {why}")
    await asyncio.to_thread(storage.write, "best.yaml", made.best.encode())
    best = f"```yaml\n{made.best}\n```"
    await acreate_markdown_artifact(best, key=f"best-{name}", description="The best trial's config")
    emit(Note(what=f"best: {storage.address('best.yaml')}"))
    return ranking(outcomes, config.sweep.aims, numbered=config.sweep.has_study)
