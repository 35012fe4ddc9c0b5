"""Sweeps: a grid over dotted settings becomes trials, and finished trials a ranking."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import JsonValue

from launcher.config import RunConfig, SweepConfig, overridden, validated
from launcher.errors import ConfigProblem
from launcher.runs.run import Run, as_started, run_of
from litgpt_demo.config import DataConfig, key_of
from litgpt_demo.data.dataset import PlannedDataset

MOST_TRIALS = 10_000
"""More are a mistake in the grid, and would take minutes only to be listed."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a sweep."""

    changes: Mapping[str, JsonValue]
    """Dotted setting to its value."""
    config: RunConfig

    def __str__(self) -> str:
        """Return its changes as they would be written on a command line."""
        return " ".join(f"{name}={value}" for name, value in self.changes.items())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a trial."""

    trial: Trial
    run: str
    """`<name>-<key>`, or '' where the trial did not get that far."""
    validation_loss: float | None
    tokens_per_second: float | None
    error: str = ""

    @property
    def rank(self) -> tuple[bool, float]:
        """Return the sort key of a trial: first those with a loss, an infinite one too, the smaller the better."""
        loss = self.validation_loss
        return (True, math.inf) if loss is None or math.isnan(loss) else (False, loss)


def sweep_name(sweep: SweepConfig) -> str:
    """Return the sweep's own name, `<name>-<key>`: where its table lies, and what its trials are found by."""
    return f"{sweep.name}-{key_of(sweep.model_dump(mode='json', exclude={'start'}))}"


def trials(sweep: SweepConfig) -> list[Trial]:
    """Every combination of the grid, in the order it is written; all are validated before any of them runs.

    A ConfigProblem where a trial's settings cannot be used, or two trials would be the same training.
    """
    base = sweep.model_dump(mode="json", exclude={"sweep", "start"}) | {
        "start": {"others": sweep.start.others, "sweep": sweep_name(sweep)}
    }
    grid = sweep.sweep.grid
    if (count := math.prod(map(len, grid.values()))) > MOST_TRIALS:
        raise ConfigProblem(
            f"sweep.grid has {count:,} trials, more than {MOST_TRIALS:,}; vary fewer settings at a time"
        )
    made, problems = [], []
    for values in itertools.product(*grid.values()):
        changes = dict(zip(grid, values, strict=True))
        where = "trial " + ", ".join(f"{name}={value}" for name, value in changes.items())
        try:
            made.append(Trial(changes=changes, config=validated(RunConfig, overridden(base, changes), where=where)))
        except ConfigProblem as problem:
            problems.append(str(problem))
    if problems:
        raise ConfigProblem("\n".join(problems))
    # What decides the trained model: two trials that agree in it would share one run's folder.
    if len({key_of(one.config.data, one.config.model, one.config.train.outcome()) for one in made}) < len(made):
        raise ConfigProblem(
            "sweep.grid: two of its trials are the same training; is a value listed twice, or a setting varied that "
            "does not change the model (name, root, image, platform, checkpoint_every, …)?"
        )
    return made


def runs_of(every: Sequence[Trial], plan: Callable[[DataConfig], PlannedDataset]) -> list[Run]:
    """Return the runs of these trials; `plan` looks at a corpus once, however many trials read it."""
    planned = {
        key: plan(data) for key, data in {key_of(trial.config.data): trial.config.data for trial in every}.items()
    }
    return [as_started(run_of(trial.config, planned[key_of(trial.config.data)])) for trial in every]


def ranking(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """The sweep's table, best trial first."""
    return [
        {
            **{name: str(value) for name, value in outcome.trial.changes.items()},
            "validation loss": "" if outcome.validation_loss is None else f"{outcome.validation_loss:.4f}",
            "tokens/s": "" if outcome.tokens_per_second is None else f"{outcome.tokens_per_second:,.0f}",
            "run": outcome.run,
            "error": outcome.error.splitlines()[0] if outcome.error else "",
        }
        for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)
    ]


def best_yaml(outcomes: Iterable[Outcome]) -> str | None:
    """The best trial's whole config, ready for `train-litgpt run`; None where none succeeded."""
    done = [outcome for outcome in outcomes if outcome.rank < (False, math.inf)]
    if not done:
        return None
    best = min(done, key=lambda outcome: outcome.rank)
    heading = f"# validation loss {best.validation_loss:.4f}, run {best.run}\n"
    settings = best.trial.config.model_dump(mode="json", exclude={"start"})
    return heading + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
