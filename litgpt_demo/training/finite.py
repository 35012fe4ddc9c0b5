"""Losses and gradients that are not finite: whose samples they came of, and the steps whose batch is left out since."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from litgpt_demo.config import TrainConfig
from litgpt_demo.data.batches import numbers_of, share_of
from litgpt_demo.errors import UserError
from litgpt_demo.runs import LeftOut, Skipped, read_skipped, write_skipped
from litgpt_demo.training.setup import Training

# A batch or two may be bad; a training that breaks down at every other step has another trouble.
MOST = 10

# Numbers of samples that a message lists; all of them are a command away.
_LISTED = 64


class NotFiniteError(Exception):
    """A step's loss or gradient is not finite. All ranks raise it after the same step, and know the same of it."""

    def __init__(self, training: Training, *, done: int, name: str, value: float, own_loss: Tensor) -> None:
        ranks, spec = training.ranks, training.spec
        self.left_out = LeftOut(
            step=done,
            why=f"the {name} of step {done} is {value}",
            windows=ranks.together(
                lambda: math.isfinite(float(own_loss)), lambda finite: _suspects(training, done - 1, finite)
            ),
        )
        self.advice = (
            f"look at them with `python -m litgpt_demo windows --run {training.run.root} --step {done}`. A lower "
            f"train.learning_rate={spec.train.learning_rate}, more train.warmup_steps={spec.train.warmup_steps} or "
            "train.precision=32-true usually fix it"
        )
        super().__init__(self.left_out.why)

    def __str__(self) -> str:
        windows = self.left_out.windows
        listed = ", ".join(map(str, windows[:_LISTED])) + (
            f" and {len(windows) - _LISTED} more" if windows[_LISTED:] else ""
        )
        return f"{self.left_out.why}; its samples are the windows {listed} of the training split; {self.advice}"


def _suspects(training: Training, step: int, finite: list[bool]) -> tuple[int, ...]:
    """The samples of the ranks whose own loss is not finite; of all ranks, where it is the gradient alone."""
    numbers = numbers_of(training.spec, training.data.train, step)
    world = len(finite)
    shares = [share_of(numbers, rank=rank, world_size=world) for rank in range(world) if not finite[rank]]
    return tuple(int(number) for share in shares or [numbers] for number in share)


def require_finite(loss: float, name: str, done: int, train: TrainConfig) -> float:
    """A validation loss is of weights, not of a batch: no batch could be left out for it.

    Raises:
        UserError: it is not finite.
    """
    if not math.isfinite(loss):
        raise UserError(
            f"the {name} of step {done} is {loss}; a lower train.learning_rate={train.learning_rate}, more "
            f"train.warmup_steps={train.warmup_steps} or train.precision=32-true usually fix it"
        )
    return loss


class Skips:
    """The steps of a run that make no update, kept in its folder. Every rank has them, and calls this alike."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._steps = {found.step: found for found in training.ranks.first(lambda: read_skipped(training.run).steps)}

    def at(self, done: int) -> LeftOut | None:
        """Return why step `done`, as the metrics count, is left out; None if it is not."""
        return self._steps.get(done)

    def add(self, found: NotFiniteError) -> None:
        """Leave that step's batch out from now on, in this and every later attempt.

        Raises:
            UserError: the run is to stop, or has left out too many.
        """
        if self._training.spec.train.on_not_finite == "stop":
            raise UserError(f"{found}, and train.on_not_finite=skip leaves such a batch out") from found
        if len(self._steps) >= MOST:
            raise UserError(
                f"{found}. The batches of {MOST} steps were left out already, so it is not the data"
            ) from found
        self._steps[found.left_out.step] = found.left_out
        self._training.ranks.first(lambda: _write(self._training, self._steps.values()))


def _write(training: Training, steps: Iterable[LeftOut]) -> None:
    content = Skipped(steps=tuple(sorted(steps, key=lambda left_out: left_out.step)))
    write_skipped(training.run, content)
