"""The search of a sweep: the settings of the next trial, and the trials that are pruned.

Optuna's samplers and pruners decide, but its study is not stored: a resumed sweep makes the study again from the
runs of its trials. A grid without pruning needs no Optuna (extra `sweeps`), but has no pictures
without it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from launcher.config import Choice, Draw, Integer, Space, SweepSettings
from launcher.errors import ConfigProblem, install_extra

if TYPE_CHECKING:
    import optuna

_TRIES = 50  # consecutive draws without a new trial after which a space counts as searched


class Search:
    """The draws of a sweep by their number, which is the order in which they are made. A draw that makes no trial has a
    number too, so that a resumed search makes the same draws."""

    def __init__(self, sweep: SweepSettings) -> None:
        self._sweep, self.objectives = sweep, sweep.objectives
        self.changes: dict[int, Mapping[str, JsonValue]] = {}
        """Dotted setting to value, of each draw that is a trial."""
        self._next = 0
        self._evaluated = set[tuple[int, int]]()
        combinations = itertools.product(*sweep.grid.values()) if sweep.sampler == "grid" else ()
        self._grid: list[dict[str, JsonValue]] = [dict(zip(sweep.grid, values, strict=True)) for values in combinations]
        self._numbers = {json.dumps(changes, sort_keys=True): number for number, changes in enumerate(self._grid)}
        self.study: optuna.Study | None = None
        try:
            import optuna
        except ImportError as error:
            if sweep.sampler == "grid" and sweep.prune is None and len(sweep.objectives) == 1:
                return
            what = f"sweep.sampler={sweep.sampler} with sweep.prune={sweep.prune} needs Optuna, which is not installed"
            raise ConfigProblem(what, fix=install_extra("sweeps")) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        pruners = {
            None: optuna.pruners.NopPruner(),
            "median": optuna.pruners.MedianPruner(n_startup_trials=3),
            "asha": optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
        }
        directions = [optuna.study.StudyDirection.MINIMIZE] * len(sweep.objectives)
        self.study = optuna.create_study(directions=directions, pruner=pruners[sweep.prune])
        self._optuna, self._trials = optuna, dict[int, optuna.Trial]()
        spaces = {name: Choice(kind="choice", values=values) for name, values in sweep.grid.items()} | sweep.space
        # Optuna's categories are plain values, and a setting may be a list: a choice goes by its JSON.
        self._coded = {name for name, space in spaces.items() if isinstance(space, Choice)}
        self._space = {name: self._distribution(space) for name, space in spaces.items()}

    def _distribution(self, space: Space) -> Any:
        kinds = self._optuna.distributions
        if isinstance(space, Choice):
            return kinds.CategoricalDistribution([json.dumps(value) for value in space.values])
        if isinstance(space, Integer):
            return kinds.IntDistribution(space.low, space.high, log=space.log)
        return kinds.FloatDistribution(space.low, space.high, log=space.kind == "log-uniform")

    def enqueue_existing(self, draw: Draw) -> int:
        """Add a trial that was begun before; return its number."""
        # The settings of a grid may have another order now.
        number = self._numbers.get(json.dumps(draw.changes, sort_keys=True), draw.number)
        # `tpe` draws by the trials that have ended by then: a number that it has passed would be another draw now.
        if self._sweep.sampler == "tpe":
            self._next = max(self._next, number + 1)
        self._enqueue(number, draw.changes)
        return number

    def _enqueue(self, number: int, changes: Mapping[str, JsonValue]) -> None:
        if self.study is not None:
            coded = {name: json.dumps(value) if name in self._coded else value for name, value in changes.items()}
            self.study.enqueue_trial(coded)
            self._trials[number] = self.study.ask(self._space)
        self.changes[number] = changes

    def ask(self) -> int | None:
        """Return the number of a new draw, None if nothing new is found. It depends on its number and on the trials
        that are known."""
        if self._sweep.sampler == "grid":
            return self._next_of_grid()
        study, kinds = self.study, self._optuna.samplers
        assert study is not None
        sampler = {"random": kinds.RandomSampler, "tpe": kinds.TPESampler}[self._sweep.sampler]
        while len(self.changes) < (self._sweep.trials or 0):
            number = self._next
            earlier = {before: changes for before, changes in self.changes.items() if before < number}
            if number - max(earlier, default=-1) > _TRIES:
                return None
            self._next += 1
            if number in self.changes:
                continue
            study.sampler = sampler(seed=self._sweep.seed + number)
            trial = study.ask(self._space)
            drawn = trial.params.items()
            changes = {name: json.loads(value) if name in self._coded else value for name, value in drawn}
            self._trials[number], self.changes[number] = trial, changes
            if changes not in earlier.values():
                return number
            self.reject(number)
        return None

    def _next_of_grid(self) -> int | None:
        while self._next < len(self._grid):
            number = self._next
            self._next += 1
            if number not in self.changes:
                self._enqueue(number, self._grid[number])
                return number
        return None

    def reject(self, number: int) -> None:
        """Drop a draw that makes no trial: its settings cannot be used together, or they were drawn before."""
        self.tell(number, None)
        del self.changes[number]

    def report(self, number: int, evaluation: int, loss: float) -> bool:
        """Report the validation loss of a trial at its evaluation of that number; return whether to prune the trial."""
        if self._sweep.prune is None:
            return False
        # The evaluations of a live trial are read again: Optuna would ignore them with a warning.
        if (number, evaluation) not in self._evaluated:
            self._evaluated.add((number, evaluation))
            self._trials[number].report(loss, evaluation)
        return self._trials[number].should_prune()

    def tell(self, number: int, values: Sequence[float] | None, *, pruned: bool = False) -> None:
        """Report the end of a trial: its objectives, the smaller the better, or None if it was pruned or failed."""
        if self.study is None:
            return
        states = self._optuna.trial.TrialState
        state = states.COMPLETE
        if values is None:
            state = states.PRUNED if pruned else states.FAIL
        self.study.tell(self._trials[number], values, state=state)

    @property
    def pareto_front(self) -> set[int]:
        """Return the numbers of the trials that no other trial beats in every objective."""
        if self.study is None:
            return set()
        best = {trial.number for trial in self.study.best_trials}
        return {number for number, trial in self._trials.items() if trial.number in best}
