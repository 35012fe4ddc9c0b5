"""Sweeps: the trials of a config, checked before one begins, and their first jobs as one array."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import cache

from launcher.checks.cost import listed_price
from launcher.config import SweepConfig
from launcher.errors import ConfigProblem, PlatformRefused
from launcher.job import Submission
from launcher.runs.run import Run, look_at_start, run_of
from launcher.runs.studies import first_trials, require_optuna
from launcher.runs.trials import Trial, base_of, combinations, trial_of
from launcher.sweep_settings import COST
from litgpt_demo.data.dataset import PlannedDataset
from litgpt_demo.data.settings import DataConfig
from litgpt_demo.metrics import Row
from litgpt_demo.settings import key_of


def trials(sweep: SweepConfig) -> list[Trial]:
    """Return the trials that are known beforehand: all but those that TPE draws by what it has seen of the first.

    Raises:
        ConfigProblem: a trial of a grid cannot be used, a space has an end that cannot, two trials of a grid would be
            the same training, or money is counted and no price is known.
        NotInstalled: Optuna is missing.
    """
    require_optuna(sweep.sweep)
    require_prices(sweep)
    if sweep.sweep.drawn_by == "grid":
        return combinations(sweep)
    check_space(sweep)
    return [trial for trial in first_trials(sweep) if not trial.problem]


_PROBES = 16
"""Combinations in which each end of a setting's range is tried before a sweep begins."""


def check_space(sweep: SweepConfig) -> None:
    """See that each end of each range makes a training with some values of the other settings, and another one.

    Raises:
        ConfigProblem: one does not.
        NotInstalled: Optuna is missing.
    """
    base = base_of(sweep)
    around = [{}, *(trial.changes for trial in first_trials(sweep, _PROBES))]
    problems = []
    for name, dimension in sweep.sweep.dimensions.items():
        models = set()
        for end in dimension.ends:
            tried = (trial_of(base, 0, {**others, name: end}) for others in around)
            first = next(tried)
            good = first if not first.problem else next((trial for trial in tried if not trial.problem), None)
            if good is None:
                problems.append(first.problem)
            else:
                models.add(good.decisive)
        if len(models) == 1 and len(dimension.ends) > 1 and not problems:
            problems.append(
                f"sweep.space.{name} does not change the model, so that its trials would be the same training; "
                "leave it out"
            )
    if problems:
        raise ConfigProblem("\n".join(problems))


def require_prices(sweep: SweepConfig) -> None:
    """See that the price of the machines is known where the sweep counts money.

    Raises:
        ConfigProblem: it is not.
    """
    counted = [
        what
        for what, asked in {
            f"sweep.budget.dollars={sweep.sweep.budget.dollars}": sweep.sweep.budget.dollars is not None,
            f"sweep.objectives={COST}": COST in sweep.sweep.objectives,
        }.items()
        if asked
    ]
    if counted and listed_price(sweep.platform) is None:
        raise ConfigProblem(
            f"{' and '.join(counted)}: no list price is known of the machines of platform.kind={sweep.platform.kind}, "
            "so that nothing says what a trial costs; count gpu_hours instead"
        )


def runs_of(every: Sequence[Trial], plan: Callable[[DataConfig], PlannedDataset]) -> list[Run]:
    """Return the runs of these trials; `plan` looks at a corpus once, however many trials read it.

    Raises:
        UserError: a corpus or a tokenizer is not there.
    """
    planned: dict[str, PlannedDataset] = {}
    for trial in every:
        if (key := key_of(trial.config.data)) not in planned:
            planned[key] = plan(trial.config.data)
    look = cache(look_at_start)
    return [run_of(trial.config, planned[key_of(trial.config.data)], look) for trial in every]


# --- several jobs as one ----------------------------------------------------------------------------------------------

MOST_TOGETHER = 100
"""Trials whose jobs are submitted as one: all of them are followed from then on, however few run at a time."""
_GATHERING = 30.0
"""Seconds without a new one after which those that have come are submitted: a trial may wait for something else."""


class Together:
    """The first jobs of a sweep's trials, which wait for each other and are submitted as one.

    Where the platform does not take them as one, they are submitted one by one, so many at a time.

    Args:
        submit: submits several jobs as one.
        runs: the names of the trials' runs.
        parallel: the number of jobs at a time.
        gathering: seconds without a new job after which those that have come are submitted.
    """

    def __init__(
        self, submit: Callable[[Sequence[Submission]], Awaitable[None]], *,
        runs: Iterable[str], parallel: int, gathering: float = _GATHERING,
    ) -> None:  # fmt: skip
        self._submit, self._gathering = submit, gathering
        self._awaited = set(runs)
        self._come: list[Submission] = []
        self._news = asyncio.Event()
        self._round: asyncio.Task[bool] | None = None
        self._slots, self._held = asyncio.Semaphore(parallel), set[str]()

    def awaits(self, run: str) -> bool:
        """Return whether a trial's first job is still to come."""
        return run in self._awaited

    async def submit(self, run: str, job: Submission) -> bool:
        """Return whether the job was submitted with the others; where it was not, it may be submitted by itself now.

        Raises:
            PlatformUnreachable: nobody knows.
        """
        self._come.append(job)
        self.leave(run)
        self._round = self._round or asyncio.create_task(self._gather())
        if await asyncio.shield(self._round):
            return True
        await self._slots.acquire()
        self._held.add(run)
        return False

    def leave(self, run: str) -> None:
        """Wait for a trial no longer: its first job is there, or none will come. One that has ended frees its place."""
        self._awaited.discard(run)
        self._news.set()
        if run in self._held:
            self._held.remove(run)
            self._slots.release()

    async def _gather(self) -> bool:
        try:
            while self._awaited:
                self._news.clear()
                await asyncio.wait_for(self._news.wait(), self._gathering)
        except TimeoutError:
            pass
        come, self._come, self._round = self._come, [], None
        try:
            await self._submit(come)
        except PlatformRefused:  # one of them alone says why, if it is not for their number
            return False
        return True


TOGETHER: ContextVar[Together | None] = ContextVar("together", default=None)
"""The sweep that a trial belongs to, where the jobs of its trials are submitted as one."""

ON_ROW: ContextVar[Callable[[Row], None] | None] = ContextVar("on_row", default=None)
"""The listener of a trial's metrics, where a sweep judges the trial while it runs."""
