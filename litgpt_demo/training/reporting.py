"""What rank 0 tells of the training."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic
from typing import Any

from litgpt_demo.collectives import measured_row
from litgpt_demo.metrics import MetricsFile
from litgpt_demo.runs import METRICS
from litgpt_demo.training.setup import Training


class Reporter:
    """Turns what rank 0 sees into metrics rows; other ranks keep silent."""

    def __init__(self, training: Training, *, resumed_from: int) -> None:
        self._training, spec = training, training.spec
        self._begun, self._file = monotonic(), None
        self._last_step, self._last_time = resumed_from, monotonic()
        if not training.fabric.is_global_zero:
            return
        # Beside the run when that is a local folder; else in scratch, and carried to the bucket with every checkpoint.
        local = not training.run.root.startswith("gs://")
        self._path = Path(training.run.root) / METRICS if local else training.scratch / METRICS
        if not local and training.run.exists(METRICS):
            training.run.download(METRICS, self._path)
        self._file = MetricsFile(self._path, resumed_from=resumed_from)
        tokens_per_step = spec.train.global_batch * spec.model.sequence_length
        parameters = sum(weight.numel() for weight in training.model.parameters())
        self.row(
            kind="start",
            step=resumed_from,
            steps=spec.steps,
            tokens_per_step=tokens_per_step,
            parameters=parameters,
            world_size=training.fabric.world_size,
            device=str(training.fabric.device),
            precision=spec.train.precision,
        )
        if network := measured_row(os.environ):
            self.row(**{**network, "step": resumed_from})

    def row(self, **values: Any) -> None:
        if self._file is not None:
            self._file.write(values)

    def step(
        self, done: int, *, loss: float, grad_norm: float, rate: float, reading: float, ended: float | None = None
    ) -> None:
        """`done` steps are finished; throughput is over the steps since the last such row, of the whole job.

        Args:
            ended: when the last of them was, on the monotonic clock; now, if it is not said.
        """
        ended = monotonic() if ended is None else ended
        tokens_per_step = self._training.spec.train.global_batch * self._training.spec.model.sequence_length
        steps, seconds = done - self._last_step, max(1e-6, ended - self._last_time)
        self._last_step, self._last_time = done, ended
        self.row(
            kind="step",
            step=done,
            loss=loss,
            learning_rate=rate,
            grad_norm=grad_norm,
            tokens=done * tokens_per_step,
            tokens_per_second=round(steps * tokens_per_step / seconds, 1),
            step_seconds=round(seconds / steps, 4),
            data_seconds=round(reading, 4),
        )

    def back(self, step: int) -> None:
        """Training has gone back to where `step` steps were done; the rows since then are told again."""
        self._last_step, self._last_time = step, monotonic()

    def pause(self, seconds: float) -> None:
        """Time that was not spent training, so that throughput tells of training alone."""
        self._last_time += seconds

    def publish(self) -> None:
        if self._file is not None and self._training.run.root.startswith("gs://"):
            self._training.run.upload(self._path, METRICS)

    def close(self, *, step: int, ended_well: bool = True) -> None:
        """The last row, if this attempt brought the training to its end at `step`; and all rows to the run's folder."""
        if ended_well:
            self.row(kind="end", step=step, seconds=round(monotonic() - self._begun, 2))
        self.publish()
        if self._file is not None:
            self._file.close()
