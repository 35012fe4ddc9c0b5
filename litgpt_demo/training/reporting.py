"""The reports of rank 0 about the training: rows of metrics, and all the places that they go to.

None waits for the device. metrics.jsonl and a table are always written, TensorBoard and Weights & Biases if asked for.
A logger has a folder and two verbs. One that fails costs its own record, never the training.
"""

from __future__ import annotations

import csv
import os
import platform
import resource
from base64 import b64encode
from collections.abc import Iterable
from contextlib import ExitStack
from operator import add
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, TypeAlias

import torch
from torch.profiler import ProfilerAction, profile

from litgpt_demo import timeouts
from litgpt_demo.config import TrainConfig, TrainingSpec
from litgpt_demo.data.batches import MixtureDataset
from litgpt_demo.errors import TrainLitgptError, UserError, one_line
from litgpt_demo.metrics import CSV_COLUMNS, MetricsFile, Row, rows_of
from litgpt_demo.models import estimates
from litgpt_demo.models.devices import device_named, matmul_dtype
from litgpt_demo.node.environment import NodeTimer
from litgpt_demo.node.network_test import network_test_row
from litgpt_demo.runs import METRICS
from litgpt_demo.schedules import learning_rate_at
from litgpt_demo.secrets import without
from litgpt_demo.training.setup import Training
from litgpt_demo.training.step import StepResult

TABLE, PROFILES = "metrics.csv", "profile"
_MOST_ALLOCATIONS = 200_000  # of a snapshot, with a few hundred bytes of stack each; older ones go


class Reporter:
    """Turns what rank 0 sees into metrics rows; other ranks keep silent."""

    def __init__(self, training: Training, *, resumed_from: int) -> None:
        self._training, spec = training, training.spec
        self._begun, self._file, self._waited = monotonic(), None, 0.0
        self._last_step, self._last_time = resumed_from, monotonic()
        self._times = NodeTimer.from_environ()
        self.step_seconds = 0.0
        """The mean of the steps since the last row of one."""
        self._first: dict[str, float] | None = None
        self._losses: list[float] = []
        """Of a mixture, what StepResult.by_source came to since the last row of a step."""
        self._loggers: dict[Logger, bool] = {}
        """All that were opened, and whether each still takes rows."""
        if not training.fabric.is_global_zero:
            return
        # Beside the run when that is a local folder; else in scratch, and carried to the bucket with every checkpoint.
        local = training.run.local_path()
        self._folder = local or training.scratch
        self._path = self._folder / METRICS
        if local is None and training.run.exists(METRICS):
            training.run.download(METRICS, self._path)
        self._file = MetricsFile(self._path, resumed_from=resumed_from)
        self._loggers[Table(self._folder / TABLE, rows_of(self._path.read_bytes()))] = True
        config, train, fabric = training.model.module.config, spec.train, training.fabric
        asked: dict[type[TensorBoard | Wandb], object] = {TensorBoard: train.tensorboard, Wandb: train.wandb}
        for kind in [kind for kind, wanted in asked.items() if wanted]:
            try:
                self._loggers[kind(spec, self._folder, resumed_from=resumed_from)] = True
            except UserError:  # a setting that no attempt can train with
                raise
            except Exception as error:  # a service that does not answer, a key that it does not know
                warn(f"{kind.__name__} is told no metrics: {one_line(error)}")
        length, device = spec.model.sequence_length, fabric.device
        self._peak, self._flops = PeakFlops(device, train), estimates.flops_per_token(config, length)
        world, nodes = fabric.world_size, int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        estimate = estimates.memory(config, train, length=length, world_size=world, nodes=nodes, device=device.type)
        self.row(
            kind="start",
            step=resumed_from,
            steps=spec.steps,
            tokens_per_step=train.global_batch * length,
            parameters=sum(weight.numel() for weight in training.model.parameters()),
            world_size=fabric.world_size,
            device=str(device),
            device_name=device_name(device),
            precision=train.precision,
            flops_per_token=self._flops,
            peak_flops=self._peak.flops,
            memory_estimate=estimate.total,
            **(self._times.columns() if self._times else {}),
        )
        if network := network_test_row(os.environ):
            self.row(**{**network, "step": resumed_from})
        self.publish()  # an attempt that saves nothing has told when it began
        self._last_time = monotonic()

    def row(self, **values: Any) -> None:
        if self._file is None:
            return
        self._file.write(values | self.elapsed("elapsed"))
        for logger in [one for one, takes in self._loggers.items() if takes]:
            try:
                logger.write(values)
            except Exception as error:  # theirs can be anything, and none of it is worth a training
                self._loggers[logger] = False
                warn(f"{type(logger).__name__} is told no more metrics: {one_line(error)}")

    def elapsed(self, name: str, moment: float | None = None) -> dict[str, float]:
        """A column of seconds since the node began, at a moment of the monotonic clock; none without a node."""
        return {} if self._times is None else {name: self._times.elapsed(moment)}

    def step(self, result: StepResult) -> None:
        """A step is finished; throughput is over those since the last row of one, of the whole job."""
        spec, train, ended = self._training.spec, self._training.spec.train, result.ended
        self._waited += result.local.data_wait
        self._losses = list(map(add, self._losses, result.by_source)) if self._losses else result.by_source
        if self._first is None:  # of this process, which compiles
            self._first = {"first_step_seconds": round(max(0.0, ended - self._last_time), 4)}
        self.step_seconds = max(1e-6, ended - self._last_time) / (result.done - self._last_step)
        if self._file is None or (result.done % train.log_every and result.done != spec.steps):
            return
        tokens_per_step = train.global_batch * spec.model.sequence_length
        pace = tokens_per_step / self.step_seconds
        # The model's arithmetic as a share of the devices' peak, of which each has its part.
        share = self._peak.share(pace * self._flops / self._training.fabric.world_size)
        self.row(
            kind="step",
            step=result.done,
            loss=result.loss,
            learning_rate=learning_rate_at(train, result.done - 1, steps=spec.steps),
            grad_norm=result.grad_norm,
            tokens=result.done * tokens_per_step,
            **self._by_source(result.done),
            tokens_per_second=round(pace, 1),
            step_seconds=round(self.step_seconds, 4),
            data_seconds=round(self._waited, 4),
            **self._first,
            memory=peak_memory_bytes(self._training.fabric.device),
            **({} if share is None else {"mfu": float(f"{share:.4g}")}),
        )
        self._last_step, self._last_time, self._waited, self._first = result.done, ended, 0.0, {}
        self._losses = []

    def _by_source(self, done: int) -> dict[str, float]:
        """Of each source of a mixture the tokens of all steps so far, and its mean loss since the last row, if it has
        any; nothing of one source alone."""
        spec, windows = self._training.spec, self._training.data.train
        if not isinstance(windows, MixtureDataset):
            return {}
        seen = (windows.schedule.samples_seen(done * spec.train.global_batch) * windows.length).tolist()
        sums, counts = self._losses[: len(seen)], self._losses[len(seen) :]
        losses = zip(windows.names, sums, counts, strict=True)
        means = {f"loss.{name}": one / count for name, one, count in losses if count}
        return {f"tokens.{name}": tokens for name, tokens in zip(windows.names, seen, strict=True)} | means

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent training, so that throughput tells of training alone."""
        if self._file is None:
            return
        began = monotonic()
        self._peak.measure_again()
        self._last_time += seconds + monotonic() - began

    def publish_rows(self) -> None:
        """Carry the rows so far to the run's folder, if that is in a bucket; the training may add more meanwhile.

        An attempt that resumes from a checkpoint repeats no step before it, so its rows must be there first.
        """
        if self._file is not None and self._training.run.local_path() is None:
            self._training.run.write(METRICS, self._path.read_bytes())

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
        for logger, takes in self._loggers.items():
            try:
                logger.close()
            except Exception as error:
                if takes:  # else it was told that it lacks metrics
                    warn(f"{type(logger).__name__} may lack the last metrics: {one_line(error)}")
        self.publish(closed=True)
        if self._file is not None:
            self._file.close()


def warn(text: str) -> None:
    """Say what a person should know, in the log of this rank."""
    print(f"warning: {text}", flush=True)


_PLOTTED = ("step", "evaluation", "checkpoint")


class Table:
    """metrics.csv: the rows of steps, evaluations and checkpoints, one column per metric, empty where it has none."""

    def __init__(self, path: Path, kept: Iterable[Row]) -> None:
        """Begins with the rows of older attempts that still count."""
        aside = path.with_name(f".{path.name}.partial")
        self._file = aside.open("w", buffering=1, newline="")
        self._writer = csv.DictWriter(self._file, CSV_COLUMNS, extrasaction="ignore")
        self._writer.writeheader()
        for row in kept:
            self.write(row)
        aside.replace(path)

    def write(self, row: Row) -> None:
        if row.get("kind") in _PLOTTED:
            self._writer.writerow(row)

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files; `tensorboard --logdir` on the folder shows them."""

    def __init__(self, spec: TrainingSpec, folder: Path, *, resumed_from: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps of older attempts that will be repeated are not to be drawn twice.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_from + 1, flush_secs=10)

    def write(self, row: Row) -> None:
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, int(row["step"]))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases with the run's name, taken up again by later attempts; it makes `wandb/`.

    Their program keeps what its service answers to a refused request in a log, and some answers repeat the key that
    they were sent. So the key is taken out of their files when their program has ended, and what an attempt that was
    killed left is dealt with when the next one begins.
    """

    def __init__(self, spec: TrainingSpec, folder: Path, *, resumed_from: int) -> None:
        settings = spec.train.wandb
        assert settings is not None
        files, key = folder / "wandb", settings.secret and os.environ.get(settings.secret)
        if settings.secret and not key:
            what = f"train.wandb.secret={settings.secret} names a variable that is not in this node's environment"
            raise UserError(what, fix="set it where the run is submitted, or leave the secret empty to stay offline")
        scrub_api_key(files, key)
        import wandb

        with ExitStack() as ends:
            ends.callback(scrub_api_key, files, key)
            ends.callback(wandb.teardown)  # which waits until their program has written its last line
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                id=spec.run,
                name=spec.run,
                resume="allow",
                dir=str(folder),
                config=spec.model_dump(mode="json"),
                mode="online" if key else "offline",
                # What the job prints is its own log already, and code and git are in the run's folder.
                settings=wandb.Settings(api_key=key, console="off", silent=True, disable_git=True, disable_code=True),
            )
            # Their own step cannot go back, ours does when an attempt repeats steps.
            self._run.define_metric("*", step_metric="step")
            ends.callback(self._run.finish)
            self._ends = ends.pop_all()

    def write(self, row: Row) -> None:
        if values := _scalars(row):
            self._run.log({"step": int(row["step"]), **values})

    def close(self) -> None:
        self._ends.close()


Logger: TypeAlias = Table | TensorBoard | Wandb
"""It takes rows without waiting for disk or network; `close` waits until all are where they should be."""


def _scalars(row: Row) -> dict[str, float]:
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
    return {f"{row['kind']}/{name}": float(value) for name, value in numbers.items() if row["kind"] in _PLOTTED}


def scrub_api_key(folder: Path, key: str | None) -> None:
    """Take a key out of the text files below a folder, which nobody may be writing to; other bytes stay as they are."""
    if key is None:
        return
    sent = b64encode(f"api:{key}".encode()).decode()  # `Authorization: Basic`, as their program logs in
    for path in [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]:
        if path.suffix == ".wandb":  # their records, with checksums: metrics and config, no answers
            continue
        text = path.read_bytes().decode(errors="surrogateescape")
        if (kept := without(text, key, sent)) != text:
            path.write_bytes(kept.encode(errors="surrogateescape"))


class Profiler:
    """Records the steps that `train.profile` asks for, on the ranks that it names: torch's profiler writes a trace of
    them and, on a GPU, a snapshot of its memory. A recording that fails costs itself, never the training."""

    def __init__(self, training: Training, *, resumed_from: int) -> None:
        self._training = training
        self._profile: profile | None = None
        self.next = -1
        """The step, from 0, before which to call `turn`; -1 where there is none."""
        asked, steps = training.spec.train.profile, training.spec.steps
        if asked is None or training.fabric.global_rank not in asked.ranks:
            return
        self._first, self._last = max(asked.numbers[0] - 1, resumed_from), min(asked.numbers[-1], steps)
        if self._first < self._last:
            self.next = self._first
        else:
            warn(f"train.profile.steps={asked.steps} records nothing: this attempt has the steps after {resumed_from}")

    def turn(self, step: int) -> None:
        """Begin to record, mark the next step, or end and write; what this takes counts as time of the steps."""
        self.next = step + 1
        if step == self._last:
            self.end(step)
        elif self._profile is not None:
            self._profile.step()
        else:
            # Every step is recorded; with a schedule torch also marks where each begins, by its number.
            self._profile = profile(schedule=lambda _: ProfilerAction.RECORD, record_shapes=True, profile_memory=True)
            self._profile.step_num = step + 1
            try:
                self._profile.start()
                if self._training.fabric.device.type == "cuda":
                    torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS, stacks="python")
            except RuntimeError as error:  # as where another profiler holds the device
                self._profile, self.next = None, -1
                warn(f"no profile is recorded: {one_line(error)}")

    def end(self, done: int, *, keep: bool = True) -> None:
        """End a recording, if there is one, after `done` steps, and leave it in the run's folder if it is kept."""
        recorded, self._profile, self.next = self._profile, None, -1
        if recorded is None:
            return
        run, scratch, fabric = self._training.run, self._training.scratch, self._training.fabric
        self._training.heart.beat(done, "writing the profile", max_silence=timeouts.FIRST_PASS)
        name = f"steps-{self._first + 1}-{done}-rank-{fabric.global_rank}"
        try:
            recorded.stop()
            if not keep:
                return
            files = [scratch / f"{name}.json.gz"]
            recorded.export_chrome_trace(str(files[0]))
            if fabric.device.type == "cuda":
                files.append(scratch / f"{name}.memory.pickle")
                torch.cuda.memory._dump_snapshot(str(files[1]))  # type: ignore[no-untyped-call]
            for file in files:
                run.upload(file, f"{PROFILES}/{file.name}", move=True)
        except (TrainLitgptError, OSError, RuntimeError) as error:
            warn(f"the profile of the steps up to {done} is lost: {one_line(error)}")
        finally:
            if fabric.device.type == "cuda":
                torch.cuda.memory._record_memory_history(enabled=None)


_SIDES = (256, 384, 512, 768, 1024)
"""Sizes of the matrices. Which is fastest depends on caches and threads; a short product may escape other load."""
_LONG_ENOUGH = 0.3  # seconds of products


class PeakFlops:
    """The most FLOP/s that this process could do in the products of this training.

    A GPU's is in our table. A CPU's is measured, in the threads that this process has, for its clock and its neighbours
    decide. Other load can only make the measurement too small. A training that beats it proves it wrong: no share is
    told until it is measured again.
    """

    def __init__(self, device: torch.device, train: TrainConfig) -> None:
        self._dtype, self._beaten = None, False
        self.flops: float | None
        if device.type == "cuda":
            known = device_named(device_name(device))
            self.flops = None if known is None else known.peak(matmul_dtype(train.precision, float8=train.float8))
            return
        self._dtype = torch.bfloat16 if matmul_dtype(train.precision) == "bfloat16" else torch.float32
        self.flops = measured_flops(self._dtype)

    def share(self, flops: float) -> float | None:
        """The share of the peak that `flops` a second are; None where the peak is not known or proved wrong."""
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
    """The FLOP/s of the fastest of many square matrix products of several sizes."""
    pairs = [(torch.ones(side, side, dtype=dtype), torch.empty(side, side, dtype=dtype)) for side in _SIDES]
    best, began = 0.0, perf_counter()
    while perf_counter() - began < _LONG_ENOUGH:
        for one, out in pairs:
            start = perf_counter()
            torch.mm(one, one, out=out)
            best = max(best, 2.0 * len(one) ** 3 / (perf_counter() - start))
    return best


def device_name(device: torch.device) -> str:
    """The driver's name of a GPU; a CPU's model."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return _said("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was held at once so far: tensors on a GPU, as its allocator counts them; this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # getrusage begins with the peak of the process that started this one.
    if peak := _said("/proc/self/status", "VmHWM:"):
        return int(peak.split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes, on a Mac


def _said(path: str, name: str) -> str:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
