"""The reports of rank 0 about the training, with the utilisation of its device. None waits for the device."""

from __future__ import annotations

import os
import platform
import resource
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch

from litgpt_demo.config import TrainConfig
from litgpt_demo.errors import TrainLitgptError, words_of
from litgpt_demo.metrics import MetricsFile, rows_of
from litgpt_demo.models import estimates
from litgpt_demo.models.devices import device_named, multiplied_in
from litgpt_demo.node.environment import NodeTimes
from litgpt_demo.node.gate import measured_row
from litgpt_demo.runs import METRICS
from litgpt_demo.training.loggers import Logger, Table, asked_for
from litgpt_demo.training.setup import Training
from litgpt_demo.training.step import StepResult, learning_rate

TABLE = "metrics.csv"


_SIDES = (256, 384, 512, 768, 1024)
"""Sizes of the matrices. Which is fastest depends on caches and threads; a short product may escape other load."""
_LONG_ENOUGH = 0.3  # seconds of products


class Reporter:
    """Turns what rank 0 sees into metrics rows; other ranks keep silent."""

    def __init__(self, training: Training, *, resumed_from: int) -> None:
        self._training, spec = training, training.spec
        self._begun, self._file, self._waited = monotonic(), None, 0.0
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
        self._loggers = [Table(self._folder / TABLE, rows_of(self._path.read_bytes()))]
        for name, opened in asked_for(spec, self._folder, resumed_from=resumed_from).items():
            try:
                self._loggers.append(opened())
            except Exception as error:  # a service that does not answer, a key that it does not know
                warn(f"{name} is told no metrics: {words_of(error)}")
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
        self.publish()  # an attempt that saves nothing has told when it began
        self._last_time = monotonic()

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

    def step(self, result: StepResult) -> None:
        """A step is finished; throughput is over those since the last row of one, of the whole job."""
        spec, train, ended = self._training.spec, self._training.spec.train, result.ended
        self._waited += result.own.waited
        if self._first is None:  # of this process, which compiles
            self._first = {"first_step_seconds": round(max(0.0, ended - self._last_time), 4)}
        if self._file is None or (result.done % train.log_every and result.done != spec.steps):
            return
        tokens_per_step = train.global_batch * spec.model.sequence_length
        steps, seconds = result.done - self._last_step, max(1e-6, ended - self._last_time)
        pace, device = steps * tokens_per_step / seconds, self._training.fabric.device
        # The model's arithmetic as a share of the devices' peak, of which each has its part.
        share = self._peak.share(pace * self._flops / self._training.fabric.world_size)
        self.row(
            kind="step",
            step=result.done,
            loss=result.loss,
            learning_rate=learning_rate(train, step=result.done - 1, steps=spec.steps),
            grad_norm=result.grad_norm,
            tokens=result.done * tokens_per_step,
            tokens_per_second=round(pace, 1),
            step_seconds=round(seconds / steps, 4),
            data_seconds=round(self._waited, 4),
            **self._first,
            memory=held_bytes(device),
            **({} if share is None else {"mfu": float(f"{share:.4g}")}),
        )
        self._last_step, self._last_time, self._waited, self._first = result.done, ended, 0.0, {}

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
        try:
            for path in [self._path, self._folder / TABLE, *written]:
                if path.is_file() and not path.is_symlink() and (closed or path.suffix != ".log"):
                    run.upload(path, path.relative_to(self._folder).as_posix())
        except TrainLitgptError as error:
            if closed:
                raise
            warn(f"the metrics were not published, the next checkpoint's will be: {error}")

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


def device_name(device: torch.device) -> str:
    """Return the driver's name of a GPU; a CPU's model."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return _said("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _said(path: str, name: str) -> str:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


class Peak:
    """The most FLOP/s that this process could do in the products of this training.

    A GPU's is in our table. A CPU's is measured, in the threads that this process has, for its clock and its neighbours
    decide. Other load can only make the measurement too small. A training that beats it proves it wrong: no share is
    told until it is measured again.
    """

    def __init__(self, device: torch.device, train: TrainConfig) -> None:
        self._dtype: torch.dtype | None = None
        self._beaten = False
        if device.type == "cuda":
            known = device_named(device_name(device))
            self.flops = None if known is None else known.peak(multiplied_in(train.precision, float8=train.float8))
            return
        self._dtype = torch.bfloat16 if multiplied_in(train.precision) == "bfloat16" else torch.float32
        self.flops = measured_flops(self._dtype)

    def share(self, flops: float) -> float | None:
        """Return what share of the peak `flops` a second are; None where the peak is not known or proved wrong."""
        if self.flops is None:
            return None
        self._beaten = self._beaten or flops > self.flops
        return None if self._beaten else flops / self.flops

    def measure_again(self) -> None:
        """Measure a CPU again if its peak was beaten. It takes a moment: call it where the training stands still."""
        if self._beaten and self._dtype is not None and self.flops is not None:
            self.flops = max(self.flops, measured_flops(self._dtype))
        self._beaten = False


def measured_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of many square matrix products of several sizes."""
    pairs = [(torch.ones(side, side, dtype=dtype), torch.empty(side, side, dtype=dtype)) for side in _SIDES]
    best, began = 0.0, perf_counter()
    while perf_counter() - began < _LONG_ENOUGH:
        for one, out in pairs:
            start = perf_counter()
            torch.mm(one, one, out=out)
            best = max(best, 2.0 * len(one) ** 3 / (perf_counter() - start))
    return best


def held_bytes(device: torch.device) -> int:
    """The most that was held at once so far: tensors on a GPU, as its allocator counts them; this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # getrusage begins with the peak of the process that started this one.
    if peak := _said("/proc/self/status", "VmHWM:"):
        return int(peak.split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
