"""The trials of a sweep while they run: each is drawn, trained as a flow run of its own, judged, and written down."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.concurrency.asyncio import concurrency
from prefect.exceptions import ObjectNotFound

from flows.deployed_trials import BLAMELESS, run_deployed
from flows.train_litgpt import train_litgpt
from launcher.checks.cost import listed_price
from launcher.config import SweepConfig
from launcher.errors import ConfigProblem, JobCancelled
from launcher.events import Note
from launcher.formatting import loss_text
from launcher.reports.curves import summary
from launcher.reports.goodput import ledger
from launcher.runs.attempts import Attempts, CancelWatch, cancel_each, opening_beside
from launcher.runs.index import Index, damaged_records
from launcher.runs.outcomes import Outcome, objective_of
from launcher.runs.run import Run, plan_run
from launcher.runs.studies import Listed, Study
from launcher.runs.sweeps import ON_ROW, TOGETHER
from launcher.runs.trials import Trial, sweep_name
from litgpt_demo.data.dataset import plan_dataset
from litgpt_demo.data.settings import DataConfig
from litgpt_demo.errors import Fault, TrainLitgptError
from litgpt_demo.evaluation import evaluated
from litgpt_demo.export import exported
from litgpt_demo.metrics import Row
from litgpt_demo.runs import read_metrics
from litgpt_demo.settings import key_of
from tasks.dataset import prepare_dataset
from tasks.report import attempt_times
from tasks.steps import as_it_is, emit

TrialSource: TypeAlias = Study | Listed

_TELL = 30.0  # seconds between two words on what the trials have taken
_COUNT = 5.0  # seconds between two looks at what running trials have taken


@dataclass
class Trials:
    """The trials of one sweep."""

    config: SweepConfig
    source: TrialSource
    watch: CancelWatch
    on_news: Callable[[Trials], Awaitable[None]]
    """Called with these trials at their start, whenever one has ended, and from time to time."""
    resumed: str | None = None
    """This sweep's flow run, if an orchestrator of it has died: what it began may have outlived it, or ended since."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    _same: dict[str, asyncio.Future[Outcome]] = field(default_factory=dict)
    _prepared: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    _live: dict[str, Run] = field(default_factory=dict)
    gpu_hours: float = 0.0
    """GPU hours that all trials have taken, as of the last count."""
    dollars: float | None = None
    """The same at list price; None where no price is known."""
    _used_up: str = ""

    @property
    def ended(self) -> list[Outcome]:
        """Return the outcomes so far, by the numbers of their trials."""
        return [self.outcomes[number] for number in sorted(self.outcomes)]

    @property
    def name(self) -> str:
        """Return the sweep's name."""
        return sweep_name(self.config)

    async def carry_out(self, *, parallel: int) -> list[Outcome]:
        """Run trials until there are enough or the budget is used up, `parallel` at a time.

        Raises:
            JobCancelled: somebody asked for the sweep to end.
        """
        if self.resumed is not None:
            await asyncio.to_thread(self._end_if_cancelled)
        await self._take_up_earlier()
        lanes = [asyncio.create_task(self._lane()) for _ in range(parallel)]
        guards = [asyncio.create_task(self._guard()), asyncio.create_task(self._tell())]
        try:
            done, _ = await asyncio.wait(lanes, return_when=asyncio.FIRST_EXCEPTION)
            problems = [problem for lane in done if (problem := lane.exception())]
            if all(isinstance(problem, JobCancelled) for problem in problems):
                await asyncio.gather(*lanes, return_exceptions=True)  # each ends its own trial
            for problem in problems:
                raise problem
        finally:
            for task in (*guards, *lanes):
                task.cancel()
            await asyncio.gather(*guards, *lanes, return_exceptions=True)
        return self.ended

    def _end_if_cancelled(self) -> None:
        """End the jobs that a cancellation of meanwhile did not reach.

        Raises:
            JobCancelled: there was one.
        """
        try:
            self.watch.check()
        except JobCancelled:
            started = Index.of(self.config.root).newest(damaged_records())
            _stop([self._attempts(record.run) for record in started if record.sweep == self.name])
            raise

    async def _take_up_earlier(self) -> None:
        """Take over what ended before this process began; a trial that was pruned then may still have its job."""
        earlier = await asyncio.to_thread(self.source.earlier)
        pruned = [self._attempts(one.run) for one in earlier if one.state == "pruned" and one.run]
        await asyncio.to_thread(_stop, pruned)
        for outcome in earlier:
            if outcome.state == "pruned" and outcome.run:
                outcome = await asyncio.to_thread(remeasured, self.config, outcome)
            self._same.setdefault(outcome.trial.decisive, _settled(outcome))
            self.outcomes[outcome.trial.number] = outcome
        if earlier:
            emit(Note(what=f"{len(earlier)} trials have ended before, and are not run again"))
        await self._count()

    async def _lane(self) -> None:
        while not self._used_up:
            await asyncio.to_thread(self.watch.check)
            trial = await asyncio.to_thread(self.source.next)
            if trial is None:
                return
            outcome = await self._outcome(trial)
            await asyncio.to_thread(self.source.tell, outcome)
            self.outcomes[trial.number] = outcome
            await self._count()
            told = outcome.error.splitlines()[0] if outcome.error else f"validation loss {_loss(outcome)}"
            severity = "info" if outcome.state in {"done", "pruned"} else "warning"
            emit(Note(what=f"trial {trial.title}: {told}", severity=severity))
            await self.on_news(self)

    async def _tell(self) -> None:
        """Tell from time to time what the trials have taken so far."""
        while True:
            try:
                await self._count()
                await self.on_news(self)
            except (TrainLitgptError, OSError) as error:  # the root is away: the next time is soon
                emit(Note(what=f"the sweep's progress could not be written: {error}", severity="warning"))
            await asyncio.sleep(_TELL)

    async def _outcome(self, trial: Trial) -> Outcome:
        """Train a trial; one that is the same training as another takes over what became of that."""
        if trial.problem:
            return _failed(trial, trial.problem)
        if (other := self._same.get(trial.decisive)) is not None:
            known = await asyncio.shield(other)
            if known.state != "stopped":
                return replace(known, trial=trial)
        mine = self._same[trial.decisive] = asyncio.get_running_loop().create_future()
        try:
            outcome = await self._trained(trial)
        except BaseException as error:
            mine.cancel()
            raise error
        mine.set_result(outcome)
        return outcome

    async def _trained(self, trial: Trial) -> Outcome:
        try:
            run = await asyncio.to_thread(plan_run, trial.config)
            await self.prepare(trial.config.data)
        except JobCancelled:
            raise
        except TrainLitgptError as problem:
            return _failed(trial, str(problem))
        judge = Judge(self.source, trial, run, self._attempts(run.name))
        try:
            async with _slots(self.config, run), judge:
                self._live[run.name] = run
                flow_run, error = await self._run(trial, run, judge)
                if error is not None and not judge.why and not self._used_up and error.fault is Fault.CANCELLED:
                    await asyncio.to_thread(self.watch.check)
        finally:
            self._live.pop(run.name, None)
            if (together := TOGETHER.get()) is not None:
                together.leave(run.name)
        if judge.why:
            await _show_pruned(flow_run, judge.why)
        why = judge.why or (self._used_up if error is not None else "")
        measured = partial(outcome_of, self.config, trial, run, flow_run=flow_run, error=error, pruned=judge.why)
        outcome = await asyncio.to_thread(measured)
        return replace(outcome, error=why, ended="stopped") if why and not judge.why else outcome

    async def _run(self, trial: Trial, run: Run, judge: Judge) -> tuple[str, TrainLitgptError | None]:
        """Run the trial's flow; return the id of its flow run, and the error that it ended with."""
        numbered = f"{trial.number}: " if self.config.sweep.has_study else ""
        name = f"{self.config.name} {numbered}{trial.title}".replace("{", "(").replace("}", ")")
        if self.config.sweep.deployment is not None:
            return await run_deployed(
                self.config.sweep.deployment, run, sweep=self.name, number=trial.number, name=name,
                on_row=judge.take, stop=self._ends, resumed=self.resumed,
            )  # fmt: skip
        ON_ROW.set(judge.take)
        named: Any = train_litgpt.with_options(flow_run_name=name)  # Prefect's types know no `return_state` here
        state: State[Any] = await named(**dict(trial.config), return_state=True)
        result = await state.aresult(raise_on_failure=False)
        if isinstance(result, BaseException) and not isinstance(result, TrainLitgptError):
            raise result
        return str(state.state_details.flow_run_id), result if isinstance(result, TrainLitgptError) else None

    async def prepare(self, data: DataConfig) -> None:
        """Prepare a dataset, once for all trials that read it."""

        async def once() -> None:
            planned = await asyncio.to_thread(plan_dataset, data)
            await prepare_dataset(as_it_is(planned), root=self.config.root, workers=self.config.workers)

        key = key_of(data)
        if key not in self._prepared:
            self._prepared[key] = asyncio.create_task(once())
        await asyncio.shield(self._prepared[key])

    def _attempts(self, run: str) -> Attempts:
        return Attempts(index=Index.of(self.config.root), run=run, open=opening_beside(self.config.platform))

    def _ends(self) -> bool:
        """Return whether the whole sweep is to end."""
        try:
            self.watch.check()
        except JobCancelled:
            return True
        return bool(self._used_up)

    # --- the budget ---

    async def _guard(self) -> None:
        """Stop everything that runs when the budget is used up."""
        budget = self.config.sweep.budget
        while not self._used_up and (budget.gpu_hours is not None or budget.dollars is not None):
            await asyncio.sleep(_COUNT)
            await self._count()
            if self._used_up:
                emit(Note(what=f"{self._used_up}; the trials that run are stopped", severity="warning"))
                await asyncio.to_thread(_stop, [self._attempts(run) for run in list(self._live)])

    async def _count(self) -> None:
        budget = self.config.sweep.budget
        ended = {one.run: (one.gpu_hours or 0.0, one.dollars or 0.0) for one in self.outcomes.values() if one.run}
        live = [await asyncio.to_thread(spent, run, self.name) for run in list(self._live.values())]
        hours = sum(one for one, _ in ended.values()) + sum(one.gpu_hours for one in live)
        dollars = sum(one for _, one in ended.values()) + sum(one.dollars or 0.0 for one in live)
        self.gpu_hours, self.dollars = hours, None if listed_price(self.config.platform) is None else dollars
        if budget.gpu_hours is not None and hours >= budget.gpu_hours:
            self._used_up = f"stopped: the trials took {hours:.3g} of sweep.budget.gpu_hours={budget.gpu_hours:g}"
        if budget.dollars is not None and dollars >= budget.dollars:
            self._used_up = f"stopped: the trials took ${dollars:,.2f} of sweep.budget.dollars={budget.dollars:g}"


def _settled(outcome: Outcome) -> asyncio.Future[Outcome]:
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    future.set_result(outcome)
    return future


def _loss(outcome: Outcome) -> str:
    return loss_text(outcome.validation_loss)


def _failed(trial: Trial, why: str) -> Outcome:
    return Outcome(trial=trial, run="", validation_loss=None, tokens_per_second=None, error=why)


def _stop(those: list[Attempts]) -> None:
    """Cancel the jobs of these runs, as `train-litgpt cancel` does."""
    _, problems = cancel_each(those, tell=lambda what: emit(Note(what=what, severity="warning")))
    for problem in problems:
        emit(Note(what=f"a trial is not known to be stopped: {problem}", severity="warning"))


# --- judging ----------------------------------------------------------------------------------------------------------


class Judge:
    """Hands a trial's evaluations to the study as they come, and ends its job where the study says so."""

    def __init__(self, source: TrialSource, trial: Trial, run: Run, attempts: Attempts) -> None:
        self.why = ""
        """The reason why the trial was pruned; empty while it was not."""
        self._source, self._trial, self._run, self._attempts = source, trial, run, attempts
        self._loop, self._rows = asyncio.get_running_loop(), asyncio.Queue[Row]()
        self._steps: int | None = None

    def take(self, row: Row) -> None:
        """Take a row of metrics; from any thread."""
        if row.get("kind") in {"start", "evaluation"}:
            self._loop.call_soon_threadsafe(self._rows.put_nowait, row)

    async def __aenter__(self) -> Judge:
        self._task = asyncio.create_task(self._judge())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if not self.why:  # else its job is being cancelled
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _judge(self) -> None:
        while True:
            row = await self._rows.get()
            self._steps = row.get("steps") or self._steps
            if row["kind"] != "evaluation" or "validation_loss" not in row:
                continue
            step, loss = int(row["step"]), float(row["validation_loss"])
            if self._steps is not None and step >= self._steps:
                continue  # it has come to its end
            why = await asyncio.to_thread(self._source.report, self._trial.number, step, loss)
            if why:
                self.why = why
                await asyncio.to_thread(self._prune, step, loss, why)
                return

    def _prune(self, step: int, loss: float, why: str) -> None:
        """Write the decision down, then carry it out: a sweep that is killed in between does the rest later."""
        outcome = Outcome(
            trial=self._trial, run=self._run.name, validation_loss=loss, tokens_per_second=None,
            error=why, ended="pruned", step=step,
        )  # fmt: skip
        self._source.tell(outcome)
        _stop([self._attempts])


async def _show_pruned(flow_run: str, why: str) -> None:
    """Call a pruned trial's flow run so in Prefect, where it would pass for one that failed."""
    async with get_client() as client:
        pruned = State[Any](type=StateType.CANCELLED, name="Pruned", message=why)
        await client.set_flow_run_state(UUID(flow_run), pruned, force=True)


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The time and cost of a run's attempts."""

    seconds: float
    gpu_hours: float
    dollars: float | None


def spent(run: Run, sweep: str) -> Spent:
    """Return what a run has taken as a trial of this sweep: what it took before for itself counts for nothing."""
    times = [one for one in attempt_times(Index(run.root), run.name) if one.record.sweep == sweep]
    price = listed_price(run.config.platform)
    booked = ledger(times, read_metrics(run.storage), price)
    hours = sum(booked.held.values()) / 3600
    dollars = None if price is None else hours * price.usd
    return Spent(seconds=booked.wall, gpu_hours=hours * run.config.platform.processes, dollars=dollars)


def outcome_of(
    sweep: SweepConfig, trial: Trial, run: Run, *, flow_run: str, error: TrainLitgptError | None, pruned: str
) -> Outcome:
    """Return what became of a trial that has ended, read from its run's folder."""
    rows, taken = read_metrics(run.storage), spent(run, sweep_name(sweep))
    seen = summary(rows)
    final = exported(run.storage) if error is None and not pruned else None
    verdict = "" if error is None else str(error)
    scores = []
    if final is not None and trial.config.evaluation is not None:
        made = evaluated(run.storage, trial.config.evaluation)
        try:
            named = [name for name in sweep.sweep.aims if "/" in name]
            scores = [score for name in named if (score := objective_of(made.scores if made else (), name))]
        except ConfigProblem as problem:
            verdict = str(problem)
    blameless = error is not None and error.fault in BLAMELESS
    return Outcome(
        trial=trial,
        run=run.name,
        validation_loss=final.validation_loss if final is not None else seen.validation_loss if pruned else None,
        tokens_per_second=seen.tokens_per_second if final is not None or pruned else None,
        score=scores[0] if scores and "/" in sweep.sweep.aims[0] else None,
        scores=tuple(scores),
        error=pruned or verdict,
        ended="pruned" if pruned else "stopped" if blameless else None,
        step=seen.step,
        mfu=seen.mfu,
        dollars=taken.dollars,
        gpu_hours=taken.gpu_hours,
        seconds=taken.seconds,
        flow_run=flow_run,
    )


def remeasured(sweep: SweepConfig, outcome: Outcome) -> Outcome:
    """Return the outcome of a pruned trial with what its run's folder tells.

    The decision is written down before the job has ended, so that nobody could say then what it took; its budget counts
    all the same when the sweep is started again.
    """
    try:
        run = plan_run(outcome.trial.config)
        flow_run = Index(run.root).records(run.name)[-1].flow_run or ""
    except (TrainLitgptError, IndexError):  # its weights are gone from the Hub, or somebody removed its records
        return outcome
    return outcome_of(sweep, outcome.trial, run, flow_run=flow_run, error=None, pruned=outcome.error)


# --- sharing GPUs -----------------------------------------------------------------------------------------------------


def _slots(config: SweepConfig, run: Run) -> AbstractAsyncContextManager[None]:
    """Return what holds as many slots of the sweep's limit as the run has GPUs."""
    if config.sweep.gpu_limit is None:
        return nullcontext()
    gpus = run.config.world_size
    # A lease that is not renewed, as when the server is away, must not end a training.
    return concurrency(config.sweep.gpu_limit, occupy=gpus, strict=True, raise_on_lease_renewal_failure=False)


async def require_slots(config: SweepConfig, trials: list[Trial]) -> None:
    """See that the sweep's limit is there, and large enough for each of these trials.

    Raises:
        ConfigProblem: it is not.
    """
    if (name := config.sweep.gpu_limit) is None:
        return
    async with get_client() as client:
        try:
            limit = (await client.read_global_concurrency_limit_by_name(name)).limit
        except ObjectNotFound as error:
            raise ConfigProblem(
                f"sweep.gpu_limit={name}: Prefect's server has no global concurrency limit of that name; "
                f"`prefect gcl create {name} --limit 8` makes one of 8 GPUs"
            ) from error
    if (most := max(trial.config.world_size for trial in trials)) > limit:
        raise ConfigProblem(
            f"sweep.gpu_limit={name} has {limit} slots, and a trial has {most} GPUs, so that it would wait for ever; "
            f"`prefect gcl update {name} --limit {most}`, or take fewer"
        )
