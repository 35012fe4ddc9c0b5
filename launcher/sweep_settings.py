"""The `sweep` section of a config: what is varied, how trials are drawn, judged and stopped, and what they may cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from litgpt_demo.settings import Count, PositiveCount, Settings

VALIDATION_LOSS = "validation_loss"
TOKENS_PER_SECOND = "tokens_per_second"
COST = "cost"
GPU_HOURS = "gpu_hours"
MEASURED = (VALIDATION_LOSS, TOKENS_PER_SECOND, COST, GPU_HOURS)
"""The objectives that every training has; any other is a score of its evaluation, `task/metric`."""

_CONDITIONS = {"when", "if", "only_if", "condition", "conditions", "depends_on", "parent"}
_NO_CONDITIONS = (
    "conditional spaces are not supported: each setting is drawn by itself, whatever the others are; give each branch "
    "a sweep of its own, or list whole sections as `choice`, as in "
    "data.tokenizer: {choice: [{kind: train, vocab_size: 4096}, {kind: hub, name: gpt2}]}"
)


def _unconditional(given: object) -> object:
    if isinstance(given, Mapping) and (_CONDITIONS & given.keys() or isinstance(given.get("choice"), Mapping)):
        raise ValueError(_NO_CONDITIONS)
    return given


class Dimension(Settings):
    """The values that one setting may take: one of `choice`, `uniform`, `log_uniform` and `integer`."""

    choice: tuple[JsonValue, ...] | None = Field(None, min_length=1)
    """The values themselves, which may be whole sections: {choice: [2, 4, 8]}."""
    uniform: tuple[float, float] | None = None
    """Any number between two: {uniform: [0, 0.1]}."""
    log_uniform: tuple[float, float] | None = None
    """Any number between two above 0, each factor as likely as another: {log_uniform: [1e-4, 1e-2]}."""
    integer: tuple[Count, Count] | None = None
    """Any whole number from the first to the second: {integer: [2, 12]}."""
    step: PositiveCount | None = None
    """The distance between two numbers of `integer`; empty is 1."""

    @property
    def ends(self) -> tuple[JsonValue, ...]:
        """Return the outermost values; all of a choice."""
        bounds = self.uniform or self.log_uniform or self.integer
        return self.choice or tuple(dict.fromkeys(bounds or ()))

    @property
    def values(self) -> tuple[JsonValue, ...] | None:
        """Return every value, None where they cannot be counted."""
        if self.integer is not None:
            return tuple(range(self.integer[0], self.integer[1] + 1, self.step or 1))
        return self.choice

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        kinds = ("choice", "uniform", "log_uniform", "integer")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given) or 'nothing'} given; give one of {', '.join(kinds)}")
        if self.step is not None and self.integer is None:
            raise ValueError(f"step belongs to integer, and {given[0]} is given; leave it out")
        bounds = self.uniform or self.log_uniform or self.integer
        if bounds is not None and not (all(map(math.isfinite, bounds)) and bounds[0] < bounds[1]):
            raise ValueError(f"{given[0]}: {list(bounds)} is no range; give a number, then a larger one")
        if self.log_uniform is not None and self.log_uniform[0] <= 0:
            raise ValueError(f"log_uniform: {list(self.log_uniform)} begins at 0 or below; give numbers above 0")
        if self.choice is not None and any(one in self.choice[:place] for place, one in enumerate(self.choice)):
            raise ValueError(f"choice: {list(self.choice)} has a value twice; list each once")
        return self


class AshaPruning(Settings):
    """Asynchronous successive halving: at each rung only the best of those that got there go on."""

    model_config = ConfigDict(title="ASHA")

    kind: Literal["asha"] = "asha"
    min_steps: PositiveCount | None = None
    """The step of the first rung; empty is the first evaluation."""
    factor: Count = Field(3, ge=2)
    """One of so many goes on at each rung, and the next rung is at so many times the steps."""


class HyperbandPruning(Settings):
    """Several successive halvings side by side, which begin at different steps."""

    model_config = ConfigDict(title="Hyperband")

    kind: Literal["hyperband"] = "hyperband"
    min_steps: PositiveCount | None = None
    """The step of the earliest rung; empty is the first evaluation."""
    factor: Count = Field(3, ge=2)
    """One of so many goes on at each rung."""


class MedianPruning(Settings):
    """A trial ends whose best loss so far is worse than the median of the finished ones at the same step."""

    model_config = ConfigDict(title="Median")

    kind: Literal["median"] = "median"
    min_steps: PositiveCount | None = None
    """No trial ends before this step; empty is the first evaluation."""
    startup_trials: Count = Field(4, ge=1)
    """So many trials have to finish before any is compared with them."""


Pruning = Annotated[AshaPruning | HyperbandPruning | MedianPruning, Field(discriminator="kind")]


class SweepBudget(Settings):
    """The most that all trials together may take. What runs when it is used up is stopped, and goes on with a larger
    one."""

    model_config = ConfigDict(title="Budget")

    gpu_hours: float | None = Field(None, gt=0)
    """Hours of GPUs that are held, of processes where there are none."""
    dollars: float | None = Field(None, gt=0)
    """US dollars at the machines' list price."""


def _known_objective(name: str) -> str:
    if name not in MEASURED and not all(name.rpartition("/")[::2]):
        raise ValueError(
            f"there is no such objective; there are {', '.join(MEASURED)}, and scores of `evaluation`, as "
            "validation/bits_per_byte or hellaswag/acc_norm"
        )
    return name


class SweepSettings(Settings):
    """The settings of the run that are varied, and how."""

    model_config = ConfigDict(title="Sweep")

    grid: dict[str, list[JsonValue]] = Field({}, json_schema_extra={"default": {}})
    """Dotted setting to the values it takes: {"train.learning_rate": [1e-3, 3e-4]}. Trials are all combinations."""
    max_parallel: Count = Field(1, gt=0)
    """Trials that run at the same time."""
    objective: str | None = Field(None, pattern=r"^.+/[^/]+$")
    """The score of `evaluation` that ranks the trials: validation/bits_per_byte, hellaswag/acc_norm; empty is the
    validation loss."""
    space: dict[str, Annotated[Dimension, BeforeValidator(_unconditional)]] = Field(
        {}, json_schema_extra={"default": {}}
    )
    """Dotted setting to the range it is drawn from: {"train.learning_rate": {"log_uniform": [1e-4, 1e-2]}}."""
    sampler: Literal["grid", "random", "tpe"] | None = None
    """The way trials are drawn: all combinations, at random, or near the best ones so far (TPE). Empty is tpe for a
    space, and grid for a grid. All but a grid need the extra `sweep`."""
    trials: PositiveCount | None = None
    """The number of trials that are drawn; more of them go on with the same sweep."""
    seed: Count = Field(0, ge=0, lt=2**32)
    """Seed of the drawing. Trial n is drawn from it, n and, by TPE, what is known of earlier trials then."""
    objectives: tuple[Annotated[str, AfterValidator(_known_objective)], ...] = ()
    """The figures that are made best: validation_loss, tokens_per_second, cost, gpu_hours, or scores of `evaluation`.
    Several make a Pareto front; the first ranks the table. Empty is `objective`."""
    pruning: Pruning | None = None
    """The rule that stops trials early by their validation loss: {kind: asha}, {kind: hyperband}, {kind: median}."""
    budget: SweepBudget = SweepBudget()
    """The most that all trials together may take."""
    gpu_limit: str | None = Field(None, min_length=1)
    """The name of a global concurrency limit of Prefect's: a trial holds as many of its slots as it has GPUs (its
    processes), so that sweeps share what there is."""
    deployment: str | None = Field(None, pattern=r"^train-litgpt/[^/]+$")
    """The deployment whose flow runs the trials, each in its work pool: train-litgpt/local. Empty runs them in the
    process of the sweep."""
    database: str | None = Field(None, pattern=r"^[A-Z][A-Z0-9_]*$")
    """The name of an environment variable with the address of a database that keeps the study
    (postgresql+psycopg://…); empty keeps it under the root."""

    @property
    def dimensions(self) -> dict[str, Dimension]:
        """Return the range of each setting that is varied."""
        listed = {name: Dimension.model_construct(choice=tuple(values)) for name, values in self.grid.items()}
        return dict(self.space) or listed

    @property
    def drawn_by(self) -> Literal["grid", "random", "tpe"]:
        """Return the sampler."""
        return self.sampler or ("tpe" if self.space else "grid")

    @property
    def has_study(self) -> bool:
        """Return whether Optuna draws the trials or judges them while they run."""
        return self.drawn_by != "grid" or self.pruning is not None

    @property
    def aims(self) -> tuple[str, ...]:
        """Return the objectives, the one that ranks first."""
        return self.objectives or (self.objective or VALIDATION_LOSS,)

    @model_validator(mode="after")
    def _has_trials(self) -> Self:
        empty = [name for name, values in self.grid.items() if not values]
        if empty:
            raise ValueError(
                f"sweep.grid has no values for {', '.join(empty)}; give each setting a list of at least one"
            )
        if self.grid and self.space:
            raise ValueError(
                "sweep.grid and sweep.space are both given; list the grid's values in the space, as {choice: […]}"
            )
        for name in self.space:
            if inside := [other for other in self.space if other.startswith(f"{name}.")]:
                raise ValueError(f"sweep.space has {name} and a part of it, {inside[0]}; {_NO_CONDITIONS}")
        return self

    @model_validator(mode="after")
    def _is_drawn(self) -> Self:
        if self.drawn_by == "grid":
            endless = [name for name, one in self.dimensions.items() if one.values is None]
            if endless:
                raise ValueError(
                    f"sweep.sampler=grid tries every value, and {', '.join(endless)} has no end of them; "
                    "list them as {choice: […]}, or take random or tpe"
                )
            if self.trials is not None:
                raise ValueError(
                    f"sweep.trials={self.trials} is for random and tpe: a grid has as many trials as combinations"
                )
        elif self.trials is None:
            raise ValueError(f"sweep.trials is not given, and {self.drawn_by} draws for ever; give a number, as 20")
        elif not self.dimensions:
            raise ValueError(f"sweep.sampler={self.drawn_by} has nothing to draw; give a sweep.space")
        return self

    @model_validator(mode="after")
    def _is_judged(self) -> Self:
        if self.objective is not None and self.objectives:
            raise ValueError("sweep.objective and sweep.objectives are both given; list all in sweep.objectives")
        if len(set(self.objectives)) < len(self.objectives):
            raise ValueError(f"sweep.objectives={', '.join(self.objectives)}: one is listed twice")
        if self.pruning is None:
            return self
        if len(self.aims) > 1:
            raise ValueError(
                f"sweep.pruning compares one figure, and there are {len(self.aims)} objectives; leave one of both out"
            )
        if self.aims[0] in {TOKENS_PER_SECOND, COST, GPU_HOURS}:
            raise ValueError(
                f"sweep.pruning compares validation losses, which say nothing of {self.aims[0]}; leave pruning out"
            )
        return self
