"""The schedules of the learning rate. A new one is an entry of SCHEDULES, a row in docs/howto/schedule.md, and tests.

No schedule imports torch: a config is checked without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from litgpt_demo.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Position:
    """A step after the warm-up, and its place in the run."""

    step: int
    """Counted from 0. The first one after the warm-up is `warmup`."""
    warmup: int
    """The number of steps of the warm-up."""
    steps: int
    """The number of steps of the run."""
    done: float
    """The share of the decay that is done, 0 to 1. The decay takes the last `train.decay_steps`, or all steps after the
    warm-up if the schedule does not read those."""
    shape: str
    """The name of an entry of DECAY_SHAPES: `train.decay_shape`."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The course of the learning rate after the warm-up."""

    help: str
    """Its part of the help text of `train.schedule`."""
    settings: frozenset[str]
    """The fields of `train` that this schedule reads and another one does not. The others refuse them."""
    decay: Callable[[Position, float, float], float]
    """The learning rate, from the position, the highest and the lowest rate."""


def _cosine(position: Position, high: float, low: float) -> float:
    return low + (high - low) * (1 + math.cos(math.pi * position.done)) / 2


def _line(position: Position, high: float, low: float) -> float:
    return (1 - position.done) * high + position.done * low


def _square_root(position: Position, high: float, low: float) -> float:
    # Hägele et al. 2024 (https://arxiv.org/abs/2405.18392, section 4) reach a lower loss by it than by a line.
    return low + (high - low) * (1 - math.sqrt(position.done))


def _constant(position: Position, high: float, low: float) -> float:
    return high


DECAY_SHAPES = {"linear": _line, "sqrt": _square_root, "cosine": _cosine}
"""The shapes of a decay in the last steps, from the highest rate to the lowest."""


def _shaped(position: Position, high: float, low: float) -> float:
    return DECAY_SHAPES[position.shape](position, high, low)


SCHEDULES = {
    "cosine": Schedule(
        help="falls along half a cosine to the last step",
        settings=frozenset({"min_learning_rate"}),
        decay=_cosine,
    ),
    "linear": Schedule(
        help="falls in a straight line to the last step",
        settings=frozenset({"min_learning_rate"}),
        decay=_line,
    ),
    "wsd": Schedule(
        help="stays, then falls in the last `decay_steps`, by `decay_shape`",
        settings=frozenset({"min_learning_rate", "decay_steps", "decay_shape"}),
        decay=_shaped,
    ),
    "constant": Schedule(help="stays", settings=frozenset(), decay=_constant),
}


def warmup_and_decay_steps(train: TrainConfig, steps: int) -> tuple[int, int]:
    """Return the number of steps of the warm-up, and of a decay at the end: 0 if the schedule has no such phase."""
    warmup = in_steps(train.warmup_steps, steps)
    if "decay_steps" not in SCHEDULES[train.schedule].settings:
        return warmup, 0
    return warmup, max(1, in_steps(train.decay_steps, steps))


def in_steps(length: float, steps: int) -> int:
    """Return a number of steps as it is, and a share of the run, which is below 1, in steps."""
    return round(length * steps) if length < 1 else int(length)


def schedule_problem(train: TrainConfig, steps: int, steps_text: str) -> tuple[str, str] | None:
    """Return an error and its fix if no step has the highest learning rate; `steps_text` names the run's steps."""
    warmup, decay = warmup_and_decay_steps(train, steps)
    if warmup + decay < steps:
        return None
    phases, fix = f"train.warmup_steps={train.warmup_steps}", "a tenth of the steps is a usual warm-up"
    if decay:
        phases += f" with train.decay_steps={train.decay_steps}"
        fix += ", a fifth a usual decay"
    return f"{phases} leaves no step of {steps_text}", fix


def learning_rate_at(train: TrainConfig, step: int, *, steps: int) -> float:
    """Return the learning rate of step `step`, counted from 0, in a run of `steps`."""
    high, low = train.learning_rate, train.min_learning_rate
    if low is None:
        low = high / 10
    warmup, decay = warmup_and_decay_steps(train, steps)
    if step < warmup:
        return high * (step + 1) / warmup
    last = steps - 1
    start = last - decay if decay else warmup
    done = min(1.0, max(0, step - start) / max(1, last - start))
    position = Position(step=step, warmup=warmup, steps=steps, done=done, shape=train.decay_shape)
    return SCHEDULES[train.schedule].decay(position, high, low)
