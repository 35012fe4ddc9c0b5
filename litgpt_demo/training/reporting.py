"""The reports of rank 0 about the training."""

from __future__ import annotations

import os
from contextlib import suppress
from time import monotonic
from typing import Any

from litgpt_demo.errors import TrainLitgptError, words_of
from litgpt_demo.metrics import MetricsFile, rows_of
from litgpt_demo.models import estimates
from litgpt_demo.node.collectives import measured_row
from litgpt_demo.node.times import NodeTimes
from litgpt_demo.runs import METRICS
from litgpt_demo.training.loggers import Logger, Table, asked_for
from litgpt_demo.training.setup import Training
from litgpt_demo.training.utilisation import Peak, device_name, held_bytes

TABLE = "metrics.csv"


class Reporter:
    """Turns what rank 0 sees into metrics rows; other ranks keep silent."""

    def __init__(self, training: Training, *, resumed_from: int) -> None:
        self._training, spec = training, training.spec
        self._begun, self._file = monotonic(), None
        self._last_step, self._last_time = resumed_from, monotonic()
        self._times = NodeTimes.told()
        self._first: dict[str, float] | None = None
        self._loggers: list[Logger] = []
        self._failed: list[Logger] = []
        if not training.fabric.is_global_zero:
            return
        # Beside the run when that is a local folder; else in scratch, and carried to the bucket with every checkpoint.
        local = training.run.local_path()
        self._folder = local or training.scratch
        self._path = self._folder / METRICS
        if local is None and training.run.exists(METRICS):
            training.run.download(METRICS, self._path)
        self._file = MetricsFile(self._path, resumed_from=resumed_from)
        self._open_loggers(resumed_from)
        config, train = training.model.module.config, spec.train
        length, world_size = spec.model.sequence_length, training.fabric.world_size
        device = training.fabric.device
        self._peak, self._flops = Peak(device, train), estimates.flops_per_token(config, length)
        estimate = estimates.memory(config, train, length=length, world_size=world_size, device=device.type)
        self.row(
            kind="start",
            step=resumed_from,
            steps=spec.steps,
            tokens_per_step=train.global_batch * length,
            parameters=sum(weight.numel() for weight in training.model.parameters()),
            world_size=world_size,
            device=str(device),
            device_name=device_name(device),
            precision=train.precision,
            flops_per_token=self._flops,
            peak_flops=self._peak.flops,
            memory_estimate=estimate.total,
            **(self._times.columns() if self._times else {}),
        )
        if network := measured_row(os.environ):
            self.row(**{**network, "step": resumed_from})
        try:
            self.publish()  # an attempt that saves nothing has told when it began
        except TrainLitgptError as error:
            warn(f"the metrics were not published, the next checkpoint's will be: {error}")
        self._last_time = monotonic()

    def _open_loggers(self, resumed_from: int) -> None:
        self._loggers = [Table(self._folder / TABLE, rows_of(self._path.read_bytes()))]
        for name, opened in asked_for(self._training.spec, self._folder, resumed_from=resumed_from).items():
            try:
                self._loggers.append(opened())
            except Exception as error:  # a service that does not answer, a key that it does not know
                warn(f"{name} is told no metrics: {words_of(error)}")

    def row(self, **values: Any) -> None:
        if self._file is None:
            return
        self._file.write(values | self.elapsed("elapsed"))
        for logger in list(self._loggers):
            try:
                logger.write(values)
            except Exception as error:  # theirs can be anything, and none of it is worth a training
                self._loggers.remove(logger)
                self._failed.append(logger)
                warn(f"{type(logger).__name__} is told no more metrics: {words_of(error)}")

    def elapsed(self, name: str, moment: float | None = None) -> dict[str, float]:
        """Return a column of seconds since the node began, at a moment of the monotonic clock; none without a node."""
        return {} if self._times is None else {name: self._times.elapsed(moment)}

    def first_step(self, ended: float) -> None:
        """Take the end of the first step of this process, which compiles; later calls change nothing."""
        if self._first is None:
            self._first = {"first_step_seconds": round(max(0.0, ended - self._last_time), 4)}

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
        first, self._first = self._first or {}, {}
        pace = steps * tokens_per_step / seconds
        self.row(
            kind="step",
            step=done,
            loss=loss,
            learning_rate=rate,
            grad_norm=grad_norm,
            tokens=done * tokens_per_step,
            tokens_per_second=round(pace, 1),
            step_seconds=round(seconds / steps, 4),
            data_seconds=round(reading, 4),
            **first,
            **self._use(pace),
        )

    def _use(self, tokens_per_second: float) -> dict[str, float | int]:
        """Memory, and the share of the devices' peak, of which each has its part."""
        if self._file is None:
            return {}
        device, world_size = self._training.fabric.device, self._training.fabric.world_size
        used: dict[str, float | int] = {"memory": held_bytes(device)}
        share = self._peak.share(tokens_per_second * self._flops / world_size)
        return used if share is None else {**used, "mfu": float(f"{share:.4g}")}

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent training, so that throughput tells of training alone."""
        if self._file is None:
            return
        began = monotonic()
        self._peak.measure_again()
        self._last_time += seconds + monotonic() - began

    def publish(self, *, closed: bool = False) -> None:
        """Carry what is written so far to the run's folder, if that is in a bucket.

        Logs of a tracker's program wait until it has ended: until then they may hold what a service repeated of a key.
        """
        run = self._training.run
        if self._file is None or run.local_path() is not None:
            return
        written = [path for name in ("tensorboard", "wandb") for path in (self._folder / name).rglob("*")]
        for path in [self._path, self._folder / TABLE, *written]:
            if path.is_file() and not path.is_symlink() and (closed or path.suffix != ".log"):
                run.upload(path, path.relative_to(self._folder).as_posix())

    def close(self, *, step: int, ended_well: bool = True) -> None:
        """The last row, if this attempt brought the training to its end at `step`; and all rows to the run's folder."""
        if ended_well:
            self.row(kind="end", step=step, seconds=round(monotonic() - self._begun, 2))
        for logger in self._loggers:
            try:
                logger.close()
            except Exception as error:
                warn(f"{type(logger).__name__} may lack the last metrics: {words_of(error)}")
        for logger in self._failed:
            with suppress(Exception):  # it was told that they lack metrics
                logger.close()
        self.publish(closed=True)
        if self._file is not None:
            self._file.close()


def warn(text: str) -> None:
    """Say what a person should know, in the log of this rank."""
    print(f"warning: {text}", flush=True)
