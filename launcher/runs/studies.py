"""Optuna's part of a sweep: it draws trials and judges them while they run, and its study is the sweep's record.

A study outlives the process that asks it. Each of its operations is a small file under the root that is created once
(sweeps/<name>/study/<number>.json), or a row of a database. A trial that was drawn stays drawn: a sweep that is started
again takes up the trials that have no end yet, by their settings and hence by their runs, and draws no other instead.
"""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import JsonValue

from launcher.config import SweepConfig
from launcher.errors import ConfigProblem, NotInstalled
from launcher.runs.outcomes import Outcome, read_outcome, stored
from launcher.runs.trials import Trial, base_of, sweep_folder, sweep_name, trial_of
from launcher.sweep_settings import Dimension, HyperbandPruning, MedianPruning, SweepSettings
from litgpt_demo.settings import key_of
from litgpt_demo.storage import Storage, open_storage

if TYPE_CHECKING:
    from optuna import Study as OptunaStudy
    from optuna import Trial as OptunaTrial

STARTUP = 10
"""Trials that TPE draws at random before it looks at any result: Optuna's own default."""
_OUTCOME = "outcome"

Value: TypeAlias = bool | int | float | str | None


def require_optuna(settings: SweepSettings) -> None:
    """See that Optuna is installed where a sweep needs it.

    Raises:
        NotInstalled: it is not.
    """
    if settings.has_study and importlib.util.find_spec("optuna") is None:
        why = f"sweep.sampler={settings.drawn_by}" if settings.drawn_by != "grid" else "sweep.pruning"
        raise NotInstalled(
            f'{why} needs Optuna, which is not installed here: pip install "train-litgpt[sweep]", or take a '
            "sweep.grid without pruning"
        )


@contextmanager
def quiet() -> Iterator[Any]:
    """Import Optuna without its own lines of log, and use it without its notes for people who write code."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield optuna


# --- settings to Optuna and back --------------------------------------------------------------------------------------


def distributions(dimensions: Mapping[str, Dimension]) -> dict[str, Any]:
    """Return Optuna's distribution of each setting."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def one(dimension: Dimension) -> Any:
        if dimension.integer is not None:
            first, last = dimension.integer
            step = dimension.step or 1
            return IntDistribution(first, last - (last - first) % step, step=step)
        if dimension.choice is not None:
            return CategoricalDistribution([_label(value) for value in dimension.choice])
        low, high = dimension.uniform or dimension.log_uniform or (0.0, 0.0)
        return FloatDistribution(low, high, log=dimension.log_uniform is not None)

    return {name: one(dimension) for name, dimension in dimensions.items()}


def _label(value: JsonValue) -> Value:
    """Return a value as Optuna takes it: a whole section as its text."""
    return value if isinstance(value, Value) else json.dumps(value, sort_keys=True)


def changes_of(dimensions: Mapping[str, Dimension], drawn: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Return the settings that Optuna's values mean. Numbers have four digits, which a person can copy."""

    def one(dimension: Dimension, value: Any) -> JsonValue:
        if dimension.choice is not None:
            return next(choice for choice in dimension.choice if _label(choice) == value)
        if dimension.integer is not None:
            return int(value)
        low, high = dimension.uniform or dimension.log_uniform or (value, value)
        return min(max(float(f"{value:.4g}"), low), high)

    return {name: one(dimension, drawn[name]) for name, dimension in dimensions.items()}


def _sampler(settings: SweepSettings, *what: JsonValue) -> Any:
    """Return the sampler of one draw. Each has a seed of its own, so that nothing is lost with a process."""
    from optuna.samplers import RandomSampler, TPESampler

    seed = int(key_of(settings.seed, *what)[:8], 16)
    if settings.drawn_by == "tpe":
        return TPESampler(seed=seed, n_startup_trials=STARTUP)
    return RandomSampler(seed=seed)


def _draw(study: OptunaStudy, settings: SweepSettings, asked: OptunaTrial, spread: Mapping[str, Any]) -> None:
    """Draw what a new trial has not yet: all of it, or what a killed process has left out."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    study.sampler = _sampler(settings, asked.number)
    asked.relative_params  # noqa: B018  it draws all settings that TPE draws together
    for name, one in spread.items():
        study.sampler = _sampler(settings, asked.number, name)
        if isinstance(one, CategoricalDistribution):
            asked.suggest_categorical(name, list(one.choices))
        elif isinstance(one, IntDistribution):
            asked.suggest_int(name, one.low, one.high, step=one.step)
        else:
            asked.suggest_float(name, one.low, one.high, log=one.log)


def _pruner(sweep: SweepConfig) -> Any:
    from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner

    pruning = sweep.sweep.pruning
    if pruning is None:
        return NopPruner()
    first = pruning.min_steps or sweep.train.evaluate_every
    if isinstance(pruning, MedianPruning):
        return MedianPruner(n_startup_trials=pruning.startup_trials, n_warmup_steps=first)
    if isinstance(pruning, HyperbandPruning):
        longest = sweep.train.max_steps or "auto"
        return HyperbandPruner(min_resource=first, max_resource=longest, reduction_factor=pruning.factor)
    return SuccessiveHalvingPruner(min_resource=first, reduction_factor=pruning.factor)


def why_pruned(settings: SweepSettings, step: int, loss: float) -> str:
    """Return the reason why a trial ends early, in a sentence."""
    pruning = settings.pruning
    if isinstance(pruning, MedianPruning):
        behind = "worse than the median of the finished trials there"
    else:
        factor = 3 if pruning is None else pruning.factor
        behind = f"not among the best 1/{factor} of the trials that came so far"
    return f"pruned at step {step:,}: its validation loss {loss:.4f} is {behind}"


def first_trials(sweep: SweepConfig, count: int | None = None) -> list[Trial]:
    """Return the trials that are drawn at random, as the sweep itself will draw them: they depend on no result.

    Args:
        count: draw so many, however many trials the sweep has.

    Raises:
        NotInstalled: Optuna is missing.
    """
    settings = sweep.sweep
    require_optuna(settings)
    if count is None:
        count = min(settings.trials or 0, STARTUP) if settings.drawn_by == "tpe" else settings.trials or 0
    found, base = [], base_of(sweep)
    with quiet() as optuna:
        study, spread = optuna.create_study(), distributions(settings.dimensions)
        for number in range(count):
            _draw(study, settings, asked := study.ask(), spread)
            found.append(trial_of(base, number, changes_of(settings.dimensions, asked.params)))
    return found


class Listed:
    """The trials of a grid that nobody judges: runs are found done by their keys, so that nothing else is kept."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._left = list(reversed(trials))

    def earlier(self) -> list[Outcome]:
        """Return no outcome: each trial is asked for again."""
        return []

    def next(self) -> Trial | None:
        """Return the next trial; None after the last."""
        return self._left.pop() if self._left else None

    def report(self, number: int, step: int, loss: float) -> str:
        """Let every trial go on."""
        return ""

    def tell(self, outcome: Outcome) -> None:
        """Keep nothing."""


# --- the study --------------------------------------------------------------------------------------------------------


def _open_storage(sweep: SweepConfig) -> Any:
    """Return where the study is kept.

    Raises:
        ConfigProblem: it is to be a database, and no address of one is there.
    """
    import optuna

    from launcher.runs.study_journal import Journal

    if (name := sweep.sweep.database) is None:
        folder = storage_of(sweep).within("study")
        return optuna.storages.JournalStorage(Journal(folder))
    if not (address := os.environ.get(name)):
        raise ConfigProblem(
            f"sweep.database={name} names an environment variable that is not set here; set it to the database's "
            "address, as postgresql+psycopg://user:password@host/name"
        )
    try:
        return optuna.storages.RDBStorage(address)
    except Exception as error:  # SQLAlchemy's and the driver's, of any kind; none may show the password
        raise ConfigProblem(
            f"the database of sweep.database={name} cannot be opened ({type(error).__name__}); look at its address and "
            "at its driver"
        ) from None


class Study:
    """The study of a sweep: what has been drawn, and what became of it. Its methods may be called from any thread."""

    def __init__(self, sweep: SweepConfig, listed: Sequence[Trial] = ()) -> None:
        """Open the study, or create it.

        Args:
            listed: the trials of a grid, which are not drawn.

        Raises:
            ConfigProblem: its database cannot be opened.
            NotInstalled: Optuna is missing.
        """
        require_optuna(sweep.sweep)
        self._base, self._settings, self._listed = base_of(sweep), sweep.sweep, list(listed)
        self._count = len(listed) if listed else sweep.sweep.trials or 0
        self._lock = Lock()
        with quiet() as optuna:
            self._study: OptunaStudy = optuna.create_study(
                storage=_open_storage(sweep),
                study_name=sweep_name(sweep),
                directions=["minimize"] * len(self._settings.aims),
                pruner=_pruner(sweep),
                load_if_exists=True,
            )
            self._spread = distributions(self._settings.dimensions)
            self._asked: dict[int, OptunaTrial] = {}
            self._open = [one.number for one in self._trials() if not one.state.is_finished()]

    def _trials(self) -> list[Any]:
        """Return Optuna's trials that have been drawn, oldest first."""
        from optuna.trial import TrialState

        return [one for one in self._study.get_trials(deepcopy=False) if one.state != TrialState.WAITING]

    def earlier(self) -> list[Outcome]:
        """Return the outcomes of trials that have ended, in the life of whichever process."""
        with self._lock, quiet():
            found = []
            for one in self._trials():
                if one.state.is_finished() and _OUTCOME in one.user_attrs:
                    trial = self._trial(one.number, one.params)
                    content = str(one.user_attrs[_OUTCOME]).encode()
                    found.append(read_outcome(trial, content, where=f"trial {one.number} of {self._study.study_name}"))
            return found

    def next(self) -> Trial | None:
        """Return a trial that has no end yet and nobody here runs, else a new one; None where there are enough."""
        with self._lock, quiet() as optuna:
            if self._open:
                number = self._open.pop(0)
                (there,) = [one for one in self._trials() if one.number == number]
                asked = optuna.Trial(self._study, there._trial_id)
            else:
                if (number := len(self._trials())) >= self._count:
                    return None
                if self._listed:
                    changes = {name: _label(value) for name, value in self._listed[number].changes.items()}
                    self._study.enqueue_trial(changes, skip_if_exists=True)
                asked = self._study.ask()
            _draw(self._study, self._settings, asked, self._spread)
            self._asked[asked.number] = asked
            return self._trial(asked.number, asked.params)

    def _trial(self, number: int, drawn: Mapping[str, Any]) -> Trial:
        return trial_of(self._base, number, changes_of(self._settings.dimensions, drawn))

    def report(self, number: int, step: int, loss: float) -> str:
        """Take a validation loss of a trial that runs; return why it is to end now, '' where it goes on.

        A step that was reported before, as by a process that was killed, says nothing again.
        """
        with self._lock, quiet():
            asked = self._asked[number]
            known = self._study._storage.get_trial(asked._trial_id).intermediate_values
            if step not in known:
                asked.report(loss, step)
            elif step < max(known):
                return ""
            return why_pruned(self._settings, step, loss) if asked.should_prune() else ""

    def tell(self, outcome: Outcome) -> None:
        """Write down how a trial ended; one that was stopped has not, and goes on when the sweep does."""
        from optuna.trial import TrialState

        if outcome.state == "stopped":
            return
        number = outcome.trial.number
        with self._lock, quiet():
            there = self._study.get_trials(deepcopy=False)[number]
            if there.state.is_finished():
                return
            self._study._storage.set_trial_user_attr(there._trial_id, _OUTCOME, json.dumps(stored(outcome)))
            worths = [outcome.worth(name) for name in self._settings.aims]
            values = [worth for worth in worths if worth is not None]
            if outcome.state == "done" and len(values) == len(worths):
                self._study.tell(number, values, skip_if_finished=True)
            else:
                ended = TrialState.PRUNED if outcome.state == "pruned" else TrialState.FAIL
                self._study.tell(number, state=ended, skip_if_finished=True)


ENOUGH_FOR_IMPORTANCE = 4
"""Trials with different results that have to come to their end before anybody says which settings mattered."""


def importance(outcomes: Iterable[Outcome], dimensions: Mapping[str, Dimension], objective: str) -> dict[str, float]:
    """Return the share that each setting has in how far the trials differ, the largest first (PED-ANOVA).

    It is empty where Optuna is missing, and where too few trials with different results came to their end.
    """
    done = [(one, worth) for one in outcomes if one.state == "done" and (worth := one.worth(objective)) is not None]
    if len({worth for _, worth in done}) < ENOUGH_FOR_IMPORTANCE or importlib.util.find_spec("optuna") is None:
        return {}
    with quiet() as optuna:
        spread, study = distributions(dimensions), optuna.create_study()
        for outcome, worth in done:
            params = {name: _label(value) for name, value in outcome.trial.changes.items()}
            study.add_trial(optuna.create_trial(params=params, distributions=spread, value=worth))
        found: dict[str, float] = optuna.importance.get_param_importances(study)
    return found


def storage_of(sweep: SweepConfig) -> Storage:
    """Return the folder of a sweep's results."""
    return sweep_folder(open_storage(sweep.root), sweep_name(sweep))
