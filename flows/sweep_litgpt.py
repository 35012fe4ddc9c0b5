"""Several trainings that differ in some settings, share the dataset, and end in one table."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact
from prefect.client.orchestration import get_client
from prefect.concurrency.asyncio import concurrency
from prefect.exceptions import ObjectNotFound

from flows.parameters import cancel_jobs, with_config_parameters
from flows.train_litgpt import train_litgpt
from flows.training import ON_ROW, PLANNED
from launcher.checks.plan import findings_of
from launcher.config import SweepConfig
from launcher.errors import JobCancelled, LauncherError, PlatformUnreachable
from launcher.events import TRIAL, Note
from launcher.reports import sweeps
from launcher.reports.goodput import attempt_times
from launcher.reports.sweeps import Outcome, best_yaml, outcome_of
from launcher.runs.attempts import Attempts, CancelWatch, platform_opener, resolve_name_conflicts
from launcher.runs.index import DamagedRecords, Index
from launcher.runs.run import Run
from launcher.runs.search import Search
from launcher.runs.sweeps import Trial, existing_trial_params, runs_of, sweep_name, trial_of, trials
from launcher.runs.waiting import pause
from litgpt_demo import timeouts
from litgpt_demo.config import DataConfig
from litgpt_demo.data.dataset import PlannedDataset, plan_dataset
from litgpt_demo.errors import TrainLitgptError, failure_text
from litgpt_demo.export import finished
from litgpt_demo.export.evaluation import found_scores
from litgpt_demo.metrics import Row
from litgpt_demo.storage import open_storage
from tasks.dataset import prepare_dataset
from tasks.preflight import report_findings
from tasks.steps import emit, opaque

PRUNED = "pruned"
GPUS = "gpus"
"""The name of Prefect's global concurrency limit that all sweeps share, if a user has created it."""


# Trials cancel their own jobs while their orchestrator lives; the sweep's hook is for when it is gone or out of time.
@flow(name="sweep-litgpt", flow_run_name="sweep {name}", persist_result=False, on_cancellation=[cancel_jobs])
@with_config_parameters(SweepConfig)
async def sweep_litgpt(config: SweepConfig) -> list[dict[str, Any]]:
    """Train several variants of a training; returns the table, best first. A failed trial does not end the others."""
    # A resumed sweep reads the runs of its trials: finished trials stay, and it reattaches to live ones.
    index, sweep = Index.of(config.root), sweep_name(config)
    await asyncio.to_thread(resolve_name_conflicts, config, sweep=sweep)
    first = await asyncio.to_thread(trials, config)
    plan = cache(plan_dataset)
    runs = await asyncio.to_thread(runs_of, first, plan)
    works = dict(zip(map(str, first), runs, strict=True))
    await report_findings(partial(findings_of, config, works), artifact=sweep)
    watch = await asyncio.to_thread(CancelWatch, index, [sweep])
    datasets = {run.dataset.content_hash: run.dataset for run in runs}
    for dataset in datasets.values():
        await prepare_dataset(opaque(dataset), root=config.root, workers=config.dataset_workers)
    state = _Sweep(config, sweep, index, watch, plan)
    await asyncio.to_thread(state.resume_trials)
    count = len(first) if config.sweep.sampler == "grid" else config.sweep.trials
    emit(Note(what=f"{count} trials, {config.sweep.max_parallel} at a time; {len(state.outcomes)} are done"))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(config.sweep.max_parallel):
                group.create_task(state.worker_loop())
    except BaseExceptionGroup as group_error:  # the sweep was cancelled, and the other trials have ended with it
        raise group_error.exceptions[0] from None
    outcomes = list(state.outcomes.values())
    table, best = sweeps.table(outcomes), best_yaml(outcomes)
    await acreate_table_artifact(table, key=f"sweep-{sweep}", description="Trials, best first")
    if best is None:
        why = outcomes[0].ended if outcomes else "no trial was started"
        raise LauncherError(f"no trial of {len(outcomes)} has a model; the first: {why}")
    page = await asyncio.to_thread(sweeps.html, sweep, outcomes, state.search)
    await asyncio.to_thread(state.storage.write, "sweep.html", page.encode())
    await asyncio.to_thread(state.storage.write, "best.yaml", best.encode())
    await acreate_markdown_artifact(f"```yaml\n{best}\n```", key=f"best-{sweep}", description="The best trial's config")
    for name in ("best.yaml", "sweep.html"):
        emit(Note(what=f"{name.partition('.')[0]}: {state.storage.address(name)}"))
    return table


@asynccontextmanager
async def gpus(count: int, *, lease: float = 300.0) -> AsyncIterator[None]:
    """Hold `count` slots of the limit that all sweeps share, if it exists. The server takes back those of a killed
    process."""
    async with get_client() as client:
        try:
            limit = await client.read_global_concurrency_limit_by_name(GPUS)
        except ObjectNotFound:
            limit = None
    if limit is None or not limit.active:
        yield
        return
    if count > limit.limit:  # Prefect would wait for them forever
        what = f"the trial needs {count} slots (nodes x processes), but Prefect's limit {GPUS} has {limit.limit}"
        raise LauncherError(what, fix=f"raise it: prefect gcl update {GPUS} --limit {count}")
    if limit.active_slots + count > limit.limit:
        taken = f"{limit.active_slots} of {limit.limit} are taken"
        emit(Note(what=f"waiting for {count} slots of Prefect's limit {GPUS}: {taken}"))
    # A training continues if the lease is lost while Prefect's server restarts.
    async with concurrency(GPUS, count, lease_duration=lease, raise_on_lease_renewal_failure=False):
        yield


class _Sweep:
    def __init__(
        self, config: SweepConfig, name: str, index: Index, watch: CancelWatch,
        plan: Callable[[DataConfig], PlannedDataset],
    ) -> None:  # fmt: skip
        self.config, self.index, self._plan = config, index, plan
        self.storage = open_storage(config.root).within(f"sweeps/{name}")
        self.search, self.outcomes = Search(config.sweep), dict[int, Outcome]()
        self._watch, self._ask_lock = watch, asyncio.Lock()
        self._pending = deque[tuple[int, Trial, Run]]()
        self._runs, self._prune_tasks = set[str](), dict[str, asyncio.Task[None]]()
        self._running = dict[int, tuple[Trial, Run]]()
        self._steps = dict[int, int]()  # of each trial, as its nodes say
        self._newest = dict[int, tuple[int, float, bool]]()  # evaluations that are about to be judged

    def resume_trials(self) -> None:
        pruned, bad = set(self.storage.list()), DamagedRecords()
        draws = existing_trial_params(self.config, self.index, bad)
        if bad:
            emit(Note(what=str(bad), severity="warning"))
        for draw in draws:
            number = self.search.enqueue_existing(draw)
            trial = trial_of(self.config, draw.changes, number)
            [run] = runs_of([trial], self._plan)
            self._runs.add(run.name)
            final, ended = finished(run.storage), ""
            if final is not None:
                wanted = trial.config.evaluation
                has_ended = wanted is None or found_scores(run.storage, final, wanted) is not None
            else:
                has_ended = f"pruned/{run.name}" in pruned
            if not has_ended:
                self._pending.append((number, trial, run))
                continue
            if final is None:
                ended = self.storage.read(f"pruned/{run.name}").decode()
                self._cancel_pruned(run)
            outcome = outcome_of(trial, run, attempt_times(self.index, run.name), final=final, ended=ended)
            for step, loss in outcome.losses.items():
                self.search.report(number, step // trial.config.train.evaluate_every, loss)
            self._record_outcome(number, outcome)

    def _record_outcome(self, number: int, outcome: Outcome) -> None:
        values = outcome.values(self.config.sweep.objectives)
        self.search.tell(number, values, pruned=outcome.ended.startswith(PRUNED))
        self.outcomes[number] = outcome
        self._running.pop(number, None)

    def _next(self) -> tuple[int, Trial, Run] | None:
        if self._pending:
            return self._pending.popleft()
        if self._is_budget_spent():
            return None
        while True:
            number = self.search.ask()
            if number is None:
                return None
            try:
                trial = trial_of(self.config, self.search.changes[number], number)
                [run] = runs_of([trial], self._plan)
            except TrainLitgptError as problem:  # two settings that do not fit each other
                emit(Note(what=str(problem), severity="warning"))
                self.search.reject(number)
                continue
            if run.name not in self._runs:
                self._runs.add(run.name)
                return number, trial, run
            self.search.reject(number)

    def _is_budget_spent(self) -> bool:
        settings, outcomes = self.config.sweep, list(self.outcomes.values())
        if settings.max_gpu_hours or settings.max_usd:  # running trials have spent something too
            for trial, run in self._running.values():
                outcomes.append(outcome_of(trial, run, attempt_times(self.index, run.name)))
        hours = sum(outcome.hours for outcome in outcomes)
        usd = sum(outcome.usd or 0.0 for outcome in outcomes)
        is_spent = hours >= (settings.max_gpu_hours or math.inf) or usd >= (settings.max_usd or math.inf)
        if is_spent:
            emit(Note(what=f"no further trial starts: {hours:,.2f} GPU hours and ${usd:,.2f} are spent"))
        return is_spent

    async def worker_loop(self) -> None:
        while True:
            TRIAL.set("")
            async with self._ask_lock:  # in a thread, and one at a time: the search counts its trials
                drawn = await asyncio.to_thread(self._next)
                if drawn is None:
                    return
                number, trial, run = drawn
                self._running[number] = trial, run
            label = trial.config.launch.trial or ""
            TRIAL.set(label)
            PLANNED.set(run)
            ON_ROW.set(partial(self._on_metrics_row, number, run))
            name = f"{trial.config.name} {label}".replace("{", "(").replace("}", ")")
            final, ended = None, ""
            try:
                async with self._slots(trial.config.world_size):
                    await asyncio.to_thread(self._watch.check)
                    final = await train_litgpt.with_options(flow_run_name=name)(**dict(trial.config))
                emit(Note(what=f"validation loss {final.validation_loss:.4f}", ends=True))
            except Exception as error:
                await asyncio.to_thread(self._watch.check)
                ended = failure_text(error)
                if run.name in self._prune_tasks:
                    await self._prune_tasks[run.name]
                    ended = (await asyncio.to_thread(self.storage.read, f"pruned/{run.name}")).decode()
                emit(Note(what=ended.splitlines()[0], severity="warning", ends=True))
            times = await asyncio.to_thread(attempt_times, self.index, run.name)
            outcome = await asyncio.to_thread(outcome_of, trial, run, times, final=final, ended=ended)
            if final is not None and outcome.ended:
                emit(Note(what=outcome.ended, severity="warning"))
            self._record_outcome(number, outcome)

    @asynccontextmanager
    async def _slots(self, count: int) -> AsyncIterator[None]:
        """Hold the slots of a trial. A cancellation of the sweep ends the wait for them, as JobCancelled."""
        worker = asyncio.current_task()
        assert worker is not None

        async def watch() -> None:
            try:
                await pause(math.inf, look=self._watch.check)
            except JobCancelled:
                worker.cancel()
                raise

        watching = asyncio.create_task(watch())
        try:
            async with gpus(count):
                watching.cancel()
                yield
        except asyncio.CancelledError:
            if watching.done() and not watching.cancelled():
                error = watching.exception()
                if error is not None:
                    worker.uncancel()
                    raise error from None
            raise
        finally:
            watching.cancel()

    def _on_metrics_row(self, number: int, run: Run, row: Row) -> None:
        match row:
            case {"kind": "start", "steps": int(steps)}:
                self._steps[number] = steps
            case {"kind": "evaluation", "step": int(step), "validation_loss": int() | float() as loss}:
                evaluation = step // run.config.train.evaluate_every
                last = self._steps.get(number, run.config.train.max_steps)
                is_hopeless = self.search.report(number, evaluation, loss) and step != last
                # A resumed sweep reads the evaluations of hours at once: only the newest of them decides.
                if number not in self._newest:
                    asyncio.get_running_loop().call_soon(self._judge, number, run)
                self._newest[number] = step, loss, is_hopeless

    def _judge(self, number: int, run: Run) -> None:
        step, loss, is_hopeless = self._newest.pop(number)
        if is_hopeless and number in self._running and run.name not in self._prune_tasks:
            why = f"{PRUNED} at step {step}, with validation loss {loss:.4f}"
            self._prune_tasks[run.name] = asyncio.create_task(asyncio.to_thread(self._prune, run, why))

    def _prune(self, run: Run, why: str) -> None:
        self.storage.write(f"pruned/{run.name}", why.encode())
        self._attempts(run).cancel(patience=timeouts.CANCELLATION)

    def _cancel_pruned(self, run: Run) -> None:
        """Cancel the job of a pruned trial if it still runs: the sweep that marked the trial may have been killed."""
        attempts = self._attempts(run)
        try:
            if attempts.live() is not None:
                attempts.cancel(patience=timeouts.CANCELLATION)
        except PlatformUnreachable as error:  # the other trials continue
            what = f"{run.name} is pruned, but its job may still be running: {error}; cancel it: train-litgpt cancel "
            emit(Note(what=f"{what}{run.name} --root {run.root.address()}", severity="warning"))

    def _attempts(self, run: Run) -> Attempts:
        return Attempts(index=self.index, run=run.name, open_platform=platform_opener(self.config.platform))
