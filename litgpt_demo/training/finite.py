"""Losses and gradients that are not finite: the samples they came of, and the steps whose update is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from litgpt_demo.config import TrainConfig
from litgpt_demo.data.batches import numbers_of, share_of
from litgpt_demo.errors import UserError
from litgpt_demo.training.exchange import StepResult
from litgpt_demo.training.setup import Training

# A batch or two may be bad; a training that makes no update in so many steps has another trouble.
MOST_IN_A_ROW = 10

# Numbers of samples that a message lists; all of them are a command away.
_LISTED = 64


class FiniteWatch:
    """Looks at the numbers of every step, alike on every rank."""

    def __init__(self, training: Training) -> None:
        self._training, self._in_a_row = training, 0

    def look(self, result: StepResult) -> tuple[str, Sequence[int]] | None:
        """Return why a step made no update, and its samples; None where it made one.

        Raises:
            UserError: the run is to stop at the first such step, or this is the last of too many.
        """
        training, spec = self._training, self._training.spec
        values = {"loss": result.loss}
        if training.scaler is None:  # it leaves out an update whose gradients overflowed
            values["gradient norm"] = result.grad_norm
        found = next((name for name, value in values.items() if not math.isfinite(value)), None)
        if found is None:
            self._in_a_row = 0
            return None
        self._in_a_row += 1

        def suspects(finite: list[bool]) -> list[int]:
            """The samples of the ranks whose own loss is not finite; of all ranks, where it is the gradient alone."""
            numbers, world = numbers_of(spec, training.data.train, result.done - 1), len(finite)
            shares = [share_of(numbers, rank=rank, world_size=world) for rank in range(world) if not finite[rank]]
            return [int(number) for share in shares or [numbers] for number in share]

        windows = training.ranks.together(lambda: math.isfinite(float(result.own.loss)), suspects)
        why = f"the {found} of step {result.done} is {values[found]}"
        more = f" and {len(windows) - _LISTED} more" if len(windows) > _LISTED else ""
        told = (
            f"{why}; its samples are the windows {', '.join(map(str, windows[:_LISTED]))}{more} of the training split; "
            f"look at them with `python -m litgpt_demo windows --run {training.run.root} --step {result.done}`. "
            f"{advice(spec.train)}"
        )
        if spec.train.on_not_finite == "stop":
            raise UserError(f"{told}, and train.on_not_finite=skip leaves out the update of such a step")
        if self._in_a_row == MOST_IN_A_ROW:
            raise UserError(f"{told}. It is step {MOST_IN_A_ROW} in a row without an update, so it is not the data")
        return why, windows


def advice(train: TrainConfig) -> str:
    """What to change where losses are not finite."""
    return (
        f"A lower train.learning_rate={train.learning_rate}, more train.warmup_steps={train.warmup_steps} or "
        "train.precision=32-true usually fix it"
    )
