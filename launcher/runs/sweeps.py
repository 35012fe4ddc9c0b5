"""The trials of a sweep: their settings, their runs, and the trials that exist already."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pydantic import JsonValue

from launcher.config import Draw, LaunchSettings, Objective, RunConfig, SweepConfig, overridden, validated
from launcher.errors import ConfigProblem
from launcher.formatting import setting_text
from launcher.runs.index import DamagedRecords, Index
from launcher.runs.run import Run, run_of
from launcher.runs.search import Search
from litgpt_demo.config import DataConfig, content_hash
from litgpt_demo.data.dataset import PlannedDataset, plan_dataset
from litgpt_demo.training.origins import find_initial_weights

MOST_TRIALS = 10_000
"""More are a mistake in the grid, and would take minutes only to be listed."""
_PREVIEWED = 20  # draws of a sweep that are checked before it begins


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a sweep."""

    changes: Mapping[str, JsonValue]
    """Dotted setting to its value."""
    config: RunConfig
    objectives: Sequence[Objective] = ("validation_loss",)

    def __str__(self) -> str:
        """Its changes as they would be written on a command line."""
        return " ".join(f"{name}={value}" for name, value in self.changes.items())


def sweep_name(sweep: SweepConfig) -> str:
    """Return the sweep's own name, `<name>-<id>`. The id has what is searched and what decides a trial's model, so that
    a sweep can continue with more trials, or elsewhere."""
    search = sweep.sweep.model_dump(mode="json", include={"grid", "space", "sampler", "seed", "objectives", "prune"})
    return f"{sweep.name}-{content_hash(search, sweep.data, sweep.model, sweep.train.run_id_settings())}"


def trial_of(sweep: SweepConfig, changes: Mapping[str, JsonValue], number: int = 0) -> Trial:
    """Return the trial of this draw, with these settings; a ConfigProblem where they cannot be used together."""
    short = ", ".join(f"{name.rpartition('.')[2]}={setting_text(value)}" for name, value in changes.items())
    draw = Draw(number=number, changes=dict(changes))
    launch = {**sweep.launch.model_dump(), "sweep": sweep_name(sweep), "trial": short, "draw": draw}
    base = sweep.model_dump(mode="json", exclude={"sweep", "launch"}) | {"launch": launch}
    where = "trial " + ", ".join(f"{name}={value}" for name, value in changes.items())
    config = validated(RunConfig, overridden(base, dict(changes)), where=where)
    return Trial(changes=changes, config=config, objectives=sweep.sweep.objectives)


def trials(sweep: SweepConfig) -> list[Trial]:
    """Return every trial of a grid, in the order of the config; for a sweep that draws, its first draws."""
    is_drawn = sweep.sweep.sampler != "grid"
    count = math.prod(map(len, sweep.sweep.grid.values()))
    if count > MOST_TRIALS and not is_drawn:
        what = f"sweep.grid has {count:,} trials, more than {MOST_TRIALS:,}"
        raise ConfigProblem(what, fix="vary fewer settings at a time, or take sweep.sampler=tpe with sweep.trials")
    search, made, problems = Search(sweep.sweep), list[Trial](), list[str]()
    while True:
        number = search.ask()
        if number is None or (is_drawn and number >= _PREVIEWED):
            break
        try:
            made.append(trial_of(sweep, search.changes[number], number))
        except ConfigProblem as problem:
            problems.append(str(problem))
            search.reject(number)
    if problems and not (is_drawn and made):
        raise ConfigProblem("\n".join(problems[:_PREVIEWED]))
    # Two trials with the same settings of the trained model would share one run's folder.
    configs = [trial.config for trial in made]
    hashes = {content_hash(config.data, config.model, config.train.run_id_settings()) for config in configs}
    if len(hashes) < len(made):
        raise ConfigProblem(
            "sweep: two of its trials are the same training, which a root keeps once: a value is listed twice, or a "
            "setting is varied that does not change the model (micro_batch, strategy, compile, platform, name, …)",
            fix="to compare speeds or costs, run the config once for each value with a name of its own: "
            "train-litgpt run CONFIG name=gpt-8 train.micro_batch=8",
        )
    return made


def runs_of(every: Sequence[Trial], plan: Callable[[DataConfig], PlannedDataset] = plan_dataset) -> list[Run]:
    """Return the runs of these trials; `plan` reads each corpus once, however many trials share it."""
    planned, weights = cache(plan), cache(find_initial_weights)
    configs = [trial.config for trial in every]
    return [
        run_of(
            config,
            planned(config.data),
            weights(config.model.init_from, config.model.load_optimizer_state, config.root),
        )
        for config in configs
    ]


def existing_trial_params(sweep: SweepConfig, index: Index, bad: DamagedRecords) -> list[Draw]:
    """Return the draws of the trials that the sweep has begun, in their order; `bad` gets what cannot be read."""
    name = sweep_name(sweep)
    draws: dict[int, Draw] = {}
    for record in index.of_name(sweep.name, bad):
        draw = LaunchSettings.model_validate(record.config["launch"]).draw if record.sweep == name else None
        if draw is not None:
            draws[draw.number] = draw
    return [draws[number] for number in sorted(draws)]
