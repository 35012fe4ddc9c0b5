"""The trials of a sweep: what each changes, and the training that this makes of the sweep's config."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from launcher.config import RunConfig, SweepConfig, overridden, validated
from launcher.errors import ConfigProblem
from launcher.formatting import cut_text
from litgpt_demo.settings import key_of
from litgpt_demo.storage import Storage

MOST_TRIALS = 10_000
"""More are a mistake in the grid, and would take minutes only to be listed."""

# How many trials there are, and how many at a time, is no part of a search: with more of them the same one goes on.
_NOT_IN_KEY = {"trials", "max_parallel", "budget", "gpu_limit", "deployment", "database"}
_OF_A_GRID = {"grid", "max_parallel", "objective"}  # grids keep the names that they had before there was anything else

_LONGEST = 60  # characters of a value in a title


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a sweep."""

    number: int = 0
    """Its place among the sweep's trials, from 0."""
    changes: Mapping[str, JsonValue]
    """Dotted setting to its value."""
    config: RunConfig
    """The training; the sweep's own where there is a problem."""
    problem: str = ""
    """The reason why these changes make no training."""

    def __str__(self) -> str:
        """Return its changes as they would be written on a command line."""
        return " ".join(f"{name}={value}" for name, value in self.changes.items())

    @property
    def title(self) -> str:
        """Return its changes in short, without the sections that they are in; a whole section as value is cut."""
        return ", ".join(
            f"{name.rsplit('.', 1)[-1]}={cut_text(str(value), _LONGEST)}" for name, value in self.changes.items()
        )

    @property
    def decisive(self) -> str:
        """Return what decides the trained model: two trials that agree in it would share one run's folder."""
        return key_of(self.config.data, self.config.model, self.config.train.outcome())


def sweep_name(sweep: SweepConfig) -> str:
    """Return the sweep's own name, `<name>-<key>`: where its table lies, and what its trials are found by."""
    document = sweep.model_dump(mode="json", exclude={"start"})
    settings = document["sweep"]
    searching = sweep.sweep.has_study or sweep.sweep.space or sweep.sweep.objectives
    kept = settings.keys() - _NOT_IN_KEY if searching else _OF_A_GRID
    return f"{sweep.name}-{key_of(document | {'sweep': {name: settings[name] for name in kept}})}"


def sweep_folder(root: Storage, sweep: str) -> Storage:
    """Return the folder of the results of the sweep with this name."""
    return root.within(f"sweeps/{sweep}")


def base_of(sweep: SweepConfig) -> dict[str, JsonValue]:
    """Return the document of a sweep's training, which its trials change."""
    return sweep.model_dump(mode="json", exclude={"sweep", "start"}) | {
        "start": {"others": sweep.start.others, "sweep": sweep_name(sweep)}
    }


def trial_of(base: Mapping[str, JsonValue], number: int, changes: Mapping[str, JsonValue]) -> Trial:
    """Return the trial that these changes make, with the problem where they make none.

    Args:
        base: what `base_of` gives.
    """
    where = "trial " + ", ".join(f"{name}={value}" for name, value in changes.items())
    try:
        config = validated(RunConfig, overridden(base, changes), where=where)
    except ConfigProblem as problem:
        own = validated(RunConfig, base, where="the sweep")
        return Trial(number=number, changes=changes, config=own, problem=str(problem))
    return Trial(number=number, changes=changes, config=config)


def combinations(sweep: SweepConfig) -> list[Trial]:
    """Return every combination of the values, in the order they are written; each can be used.

    Raises:
        ConfigProblem: a trial's settings cannot be used, or two trials would be the same training.
    """
    values = {name: one.values or () for name, one in sweep.sweep.dimensions.items()}
    if (count := math.prod(map(len, values.values()))) > MOST_TRIALS:
        raise ConfigProblem(
            f"sweep.grid has {count:,} trials, more than {MOST_TRIALS:,}; vary fewer settings at a time"
        )
    base = base_of(sweep)
    made = [
        trial_of(base, number, dict(zip(values, those, strict=True)))
        for number, those in enumerate(itertools.product(*values.values()))
    ]
    if problems := [trial.problem for trial in made if trial.problem]:
        raise ConfigProblem("\n".join(problems))
    if len({trial.decisive for trial in made}) < len(made):
        raise ConfigProblem(
            "sweep.grid: two of its trials are the same training; is a value listed twice, or a setting varied that "
            "does not change the model (name, root, image, platform, checkpoint_every, …)?"
        )
    return made
