"""The search of a sweep: which settings the next trial has, and which trial is not worth its end.

Optuna's samplers and pruners decide, by ask and tell, and nothing of Optuna's is stored: a sweep that goes on has its
study from the runs of its trials. A grid without pruning needs no Optuna (extra `sweeps`), and has no pictures then.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from launcher.config import Choice, Integer, Space, SweepSettings
from launcher.errors import ConfigProblem

if TYPE_CHECKING:
    import optuna

_TRIES = 20  # draws that were there before, one after the other, until a space counts as searched


class Search:
    """The trials of a sweep by their number, which is the order in which they were found."""

    def __init__(self, sweep: SweepSettings) -> None:
        self._sweep, self.objectives = sweep, sweep.objectives
        self.changes: list[Mapping[str, JsonValue]] = []
        """Of each trial, dotted setting to value."""
        self._combinations, self._before = itertools.product(*sweep.grid.values()), list[Mapping[str, JsonValue]]()
        self.study: optuna.Study | None = None
        try:
            import optuna
        except ImportError as error:
            if sweep.sampler == "grid" and sweep.prune is None and len(sweep.objectives) == 1:
                return
            what = f"sweep.sampler={sweep.sampler} with sweep.prune={sweep.prune} needs Optuna, which is not installed"
            raise ConfigProblem(what, fix="pip install 'train-litgpt[sweeps]'") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        pruners = {
            None: optuna.pruners.NopPruner(),
            "median": optuna.pruners.MedianPruner(n_startup_trials=3),
            "asha": optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
        }
        directions = [optuna.study.StudyDirection.MINIMIZE] * len(sweep.objectives)
        self.study = optuna.create_study(directions=directions, pruner=pruners[sweep.prune])
        self._optuna, self._trials = optuna, list[optuna.Trial]()
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

    def add(self, changes: Mapping[str, JsonValue]) -> int:
        """Take up a trial with these settings, as one that was begun before; return its number."""
        self._before.append(changes)
        return self._enter(changes)

    def _enter(self, changes: Mapping[str, JsonValue], trial: optuna.Trial | None = None) -> int:
        if self.study is not None and trial is None:
            coded = {name: json.dumps(value) if name in self._coded else value for name, value in changes.items()}
            self.study.enqueue_trial(coded)
            trial = self.study.ask(self._space)
        if trial is not None:
            self._trials.append(trial)
        self.changes.append(changes)
        return len(self.changes) - 1

    def ask(self) -> int | None:
        """Return the number of a new trial; None where there are as many as asked for, or nothing new is found."""
        if self._sweep.sampler == "grid":
            for values in self._combinations:
                if (changes := dict(zip(self._sweep.grid, values, strict=True))) not in self._before:
                    return self._enter(changes)
            return None
        study, kinds = self.study, self._optuna.samplers
        assert study is not None
        sampler = {"random": kinds.RandomSampler, "tpe": kinds.TPESampler}[self._sweep.sampler]
        for attempt in range(_TRIES if len(self.changes) < (self._sweep.trials or 0) else 0):
            # A draw follows from its number and from what is known by then, and not from who has drawn before.
            seed = self._sweep.seed + 1_000_003 * attempt + len(self.changes)
            study.sampler = sampler(seed=seed)
            trial = study.ask(self._space)
            drawn = trial.params.items()
            changes = {name: json.loads(value) if name in self._coded else value for name, value in drawn}
            if changes not in self.changes:
                return self._enter(changes, trial)
            study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return None

    def is_hopeless(self, number: int, evaluation: int, loss: float) -> bool:
        """Take up the validation loss of a trial at its evaluation of that number; return whether it is to be ended."""
        if self._sweep.prune is None:
            return False
        self._trials[number].report(loss, evaluation)
        return self._trials[number].should_prune()

    def tell(self, number: int, values: Sequence[float] | None, *, pruned: bool = False) -> None:
        """Take up the end of a trial: its objectives, each the better the smaller it is; None where it was ended early
        or has failed."""
        if self.study is not None:
            state = self._optuna.trial.TrialState
            ended = state.COMPLETE if values is not None else state.PRUNED if pruned else state.FAIL
            self.study.tell(self._trials[number], values, state=ended)

    @property
    def front(self) -> set[int]:
        """The numbers of the trials that no other one beats in every objective."""
        if self.study is None:
            return set()
        best = {trial.number for trial in self.study.best_trials}
        return {number for number, trial in enumerate(self._trials) if trial.number in best}
