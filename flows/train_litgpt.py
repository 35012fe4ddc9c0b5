"""The main job: raw text in, a verified checkpoint out; its first step on its own, and sweeps of several such jobs."""

from __future__ import annotations

import asyncio
from contextlib import closing
from contextvars import ContextVar
from functools import partial
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

from flows.parameters import DATASET_FIELDS, cancel_jobs, takes
from launcher.checks.plan import findings_of
from launcher.config import RunConfig, SweepConfig
from launcher.curves import summary
from launcher.errors import LauncherError
from launcher.events import Note
from launcher.runs.attempts import CancelWatch, claim_at, run_of_flow_run, settle_others
from launcher.runs.index import Index
from launcher.runs.run import (
    Outcome,
    Run,
    Trial,
    best_yaml,
    plan_run,
    ranking,
    recorded_software,
    runs_of,
    sweep_name,
    trials,
)
from litgpt_demo.data.dataset import DatasetManifest, plan_dataset, warnings_of
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.export import FinalManifest, exported
from litgpt_demo.runs import read_metrics
from litgpt_demo.storage import open_storage
from tasks import dataset
from tasks.checkpoints import Collector, collect_checkpoints
from tasks.preflight import build_image, get_credentials, is_under_way, report_findings
from tasks.report import publish_report
from tasks.steps import as_it_is, emit
from tasks.training import flow_runs, train

PLANNED: ContextVar[Run | None] = ContextVar("planned", default=None)
"""The run of a sweep's trial: the sweep has read the corpus for all of them."""


def _planned(config: RunConfig, flow_run: str | None) -> Run:
    """Return the run that a resumed flow run has started already, else the one that the config means."""
    return run_of_flow_run(config, flow_run) or PLANNED.get() or plan_run(config)


@flow(name="train-litgpt", flow_run_name="{name}", persist_result=False, on_cancellation=[cancel_jobs])
@takes(RunConfig)
async def train_litgpt(config: RunConfig) -> FinalManifest:
    """Prepare the data, pin the software, prove access, train, collect."""
    # Each step finds itself done by its key, so that running again is free. A job that lives is followed: what only a
    # submission needs (machines, image, access) is not looked at again.
    run = await asyncio.to_thread(_planned, config, flow_runs()[0])
    find, done = partial(findings_of, config, {"": run}), partial(exported, run.storage)
    lives = await is_under_way(claim_at(run), find, done=done)
    prepared = await dataset.prepare_dataset(as_it_is(run.dataset), root=config.root, workers=config.workers)
    identity = await asyncio.to_thread(recorded_software, run) if lives else None
    if identity is None:
        identity = await build_image(config)
    if not lives:
        await get_credentials(config)
    with closing(Collector(run)) as collector:
        await train(as_it_is(run), as_it_is(prepared), identity, on_row=collector.follow)
        final = await collect_checkpoints(as_it_is(run), collector, image=identity.image)
    address = await publish_report(as_it_is(run), dataset=as_it_is(prepared), identity=identity, final=as_it_is(final))
    emit(Note(what=f"report: {address}"))
    return final


@flow(name="prepare-dataset", flow_run_name="prepare {data.corpus.kind}", persist_result=False)
@takes(RunConfig, only=DATASET_FIELDS)
async def prepare_dataset(config: RunConfig) -> DatasetManifest:
    """Turn a corpus into train.bin and val.bin with a manifest, or find it done."""
    planned = await asyncio.to_thread(plan_dataset, config.data)
    for finding in await asyncio.to_thread(lambda: list(warnings_of(planned))):
        emit(Note(what=str(finding), severity=finding.severity))
    return await dataset.prepare_dataset(as_it_is(planned), root=config.root, workers=config.workers)


# Trials cancel their own jobs while their orchestrator lives; the sweep's hook is for when it is gone or out of time.
@flow(name="sweep-litgpt", flow_run_name="sweep {name}", persist_result=False, on_cancellation=[cancel_jobs])
@takes(SweepConfig)
async def sweep_litgpt(config: SweepConfig) -> list[dict[str, Any]]:
    """Train every combination of a grid; returns the table, best first. One that fails does not end the others."""
    planned, index, sweep = trials(config), Index.of(config.root), sweep_name(config)
    await asyncio.to_thread(settle_others, config, sweep=sweep)
    runs = await asyncio.to_thread(runs_of, planned, plan_dataset)
    works = dict(zip(map(str, planned), runs, strict=True))
    await report_findings(partial(findings_of, config, works), artifact=sweep)
    watch = await asyncio.to_thread(CancelWatch, index, [sweep])
    emit(Note(what=f"{len(planned)} trials, {config.sweep.max_parallel} at a time"))
    for planned_dataset in {run.dataset.key: run.dataset for run in runs}.values():
        await dataset.prepare_dataset(as_it_is(planned_dataset), root=config.root, workers=config.workers)
    slots = asyncio.Semaphore(config.sweep.max_parallel)

    async def carried_out(trial: Trial, run: Run) -> Outcome:
        """One trial as a run of its own, shown below this one in the UI."""
        changes = ", ".join(f"{name.rsplit('.', 1)[-1]}={value}" for name, value in trial.changes.items())
        name = f"{trial.config.name} {changes}".replace("{", "(").replace("}", ")")
        async with slots:
            await asyncio.to_thread(watch.check)
            PLANNED.set(run)
            try:
                final = await train_litgpt.with_options(flow_run_name=name)(**dict(trial.config))
            except TrainLitgptError as error:
                why, nothing = str(error), {"validation_loss": None, "tokens_per_second": None}
                emit(Note(what=f"trial {changes}: {why.splitlines()[0]}", severity="warning"))
                return Outcome(trial=trial, run=run.name, **nothing, error=why)
            speed = summary(await asyncio.to_thread(read_metrics, run.storage)).tokens_per_second
        emit(Note(what=f"trial {changes}: validation loss {final.validation_loss:.4f}"))
        return Outcome(trial=trial, run=run.name, validation_loss=final.validation_loss, tokens_per_second=speed)

    try:
        async with asyncio.TaskGroup() as group:
            begun = [group.create_task(carried_out(*pair)) for pair in zip(planned, runs, strict=True)]
    except BaseExceptionGroup as several:  # no failure of a trial, and nobody would watch the others: they have ended
        raise several.exceptions[0] from None
    outcomes = [one.result() for one in begun]
    storage = open_storage(config.root).within(f"sweeps/{sweep}")
    table = ranking(outcomes)
    await acreate_table_artifact(table, key=f"sweep-{sweep}", description="Trials, best first")
    best = best_yaml(outcomes)
    if best is None:
        raise LauncherError(f"none of {len(outcomes)} trials succeeded; the first: {outcomes[0].error}")
    await asyncio.to_thread(storage.write, "best.yaml", best.encode())
    await acreate_markdown_artifact(f"```yaml\n{best}\n```", key=f"best-{sweep}", description="The best trial's config")
    emit(Note(what=f"best: {storage.address('best.yaml')}"))
    return table
