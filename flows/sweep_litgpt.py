"""Several trainings that differ in some settings, share the dataset, and end in one table."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

from flows.hooks import begin, cancel_jobs
from flows.parameters import config_from, takes
from flows.train_litgpt import PLANNED, train_litgpt
from launcher.checks.plan import findings_of
from launcher.config import SweepConfig
from launcher.curves import summary
from launcher.errors import LauncherError
from launcher.events import Note
from launcher.runs.attempts import CancelWatch, settle_others
from launcher.runs.index import Index
from launcher.runs.run import Outcome, Run, Trial, best_yaml, ranking, runs_of, sweep_name, trials
from litgpt_demo.data.dataset import plan_dataset
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.runs import read_metrics
from litgpt_demo.storage import open_storage
from tasks.dataset import prepare_dataset
from tasks.preflight import report_findings
from tasks.steps import as_it_is, emit


# Trials cancel their own jobs while their orchestrator lives; the sweep's hook is for when it is gone or out of time.
@flow(name="sweep-litgpt", flow_run_name="sweep {name}", persist_result=False, on_cancellation=[cancel_jobs])
@takes(SweepConfig)
async def sweep_litgpt(**parameters: Any) -> list[dict[str, Any]]:
    """Train every combination of a grid; returns the table, best trial first."""
    begin()
    return await run_sweep(config_from(SweepConfig, parameters))


async def run_sweep(config: SweepConfig) -> list[dict[str, Any]]:
    """Run all trials, at most `max_parallel` at a time; one that fails does not end the others."""
    planned, index, sweep = trials(config), Index.of(config.root), sweep_name(config)
    await asyncio.to_thread(settle_others, config, sweep=sweep)
    runs = await asyncio.to_thread(runs_of, planned, plan_dataset)
    works = dict(zip(map(str, planned), runs, strict=True))
    await report_findings(partial(findings_of, config, works), artifact=sweep)
    watch = await asyncio.to_thread(CancelWatch, index, [sweep])
    emit(Note(what=f"{len(planned)} trials, {config.sweep.max_parallel} at a time"))
    for dataset in {run.dataset.key: run.dataset for run in runs}.values():
        await prepare_dataset(as_it_is(dataset), root=config.root, workers=config.workers)
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
