"""Rank 0's reports of the training: rows of metrics, and all their sinks.

No function waits for the device. metrics.jsonl and metrics.csv are always written, TensorBoard and Weights & Biases if
the settings enable them. A sink that fails costs its own record, never the training.
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
from litgpt_demo.training import checkpoints
from litgpt_demo.training.setup import Training, compiled_part
from litgpt_demo.training.step import StepResult

TABLE, PROFILES = "metrics.csv", "profile"
_MOST_ALLOCATIONS = 200_000  # of a snapshot, with a few hundred bytes of stack each; older ones are dropped


class Reporter:
    """Makes rows of metrics on rank 0, and writes them to all sinks; on other ranks it writes nothing."""

    def __init__(self, training: Training, *, resumed_from: int) -> None:
        self._training, spec = training, training.spec
        self._began, self._file, self._data_wait = monotonic(), None, 0.0
        self._last_step, self._last_time = resumed_from, monotonic()
        self._times = NodeTimer.from_environ()
        self.step_seconds = 0.0
        """The mean of the steps since the last row of one."""
        self._first: dict[str, float] | None = None
        self._losses: list[float] = []
        """For a mixture, the sum of StepResult.by_source since the last row of a step."""
        self._sinks: list[Sink] = []
        self._failed: list[Sink] = []
        """Sinks that get no more rows."""
        if not training.fabric.is_global_zero:
            return
        # In the run's folder if that is local; else in scratch, and uploaded to the bucket with every checkpoint.
        local = training.run.local_path()
        self._folder = local or training.scratch
        self._path = self._folder / METRICS
        if local is None and training.run.exists(METRICS):
            training.run.download(METRICS, self._path)
        self._file = MetricsFile(self._path, resumed_from=resumed_from)
        rows, link = rows_of(self._path.read_bytes()), training.chain.resumed
        self._sinks.append(Table(self._folder / TABLE, rows))
        config, train, fabric = training.model.module.config, spec.train, training.fabric
        settings: dict[type[TensorBoard | Wandb], object] = {TensorBoard: train.tensorboard, Wandb: train.wandb}
        for kind in [kind for kind, setting in settings.items() if setting]:
            try:
                self._sinks.append(kind(spec, self._folder, resumed_from=resumed_from))
            except UserError:  # a setting that no attempt can train with
                raise
            except Exception as error:  # a service does not answer, or does not know the key
                warn(f"{kind.__name__} gets no metrics: {one_line(error)}")
        length, device = spec.model.sequence_length, fabric.device
        self._peak, self._flops = PeakFlops(device, train), estimates.flops_per_token(config, length)
        world, nodes = fabric.world_size, int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        estimate = estimates.memory(config, train, length=length, world_size=world, nodes=nodes, device=device.type)
        self.row(
            kind="start",
            step=resumed_from,
            steps=spec.steps,
            run_tokens=spec.tokens_after(spec.steps),
            tokens_per_step=train.batch_sizes[-1] * length,
            parameters=sum(weight.numel() for weight in training.model.parameters()),
            world_size=fabric.world_size,
            threads=torch.get_num_threads(),
            device=str(device),
            device_name=device_name(device),
            precision=train.precision,
            compile=compiled_part(train, device),
            flops_per_token=self._flops,
            peak_flops=self._peak.flops,
            memory_estimate=estimate.total,
            **(self._times.columns() if self._times else {}),
        )
        if link is not None and not any(row.get("chain_sha256") == link.chain for row in rows):
            # A kill came between the commit of that checkpoint and its row.
            path = checkpoints.folder_of(resumed_from)
            self.row(kind="checkpoint", step=resumed_from, path=path, **link.columns())
        if network := network_test_row(os.environ):
            self.row(**{**network, "step": resumed_from})
        self.publish()  # an attempt that saves nothing has reported its beginning
        self._last_time = monotonic()

    def row(self, **values: Any) -> None:
        if self._file is None:
            return
        self._file.write(values | self.elapsed("elapsed"))
        for sink in [sink for sink in self._sinks if sink not in self._failed]:
            try:
                sink.write(values)
            except Exception as error:  # libraries raise anything, and training must not end by it
                self._failed.append(sink)
                warn(f"{type(sink).__name__} gets no more metrics: {one_line(error)}")

    def elapsed(self, name: str, moment: float | None = None) -> dict[str, float]:
        """Return a column of seconds since the node began, at a moment of the monotonic clock; none without a node."""
        return {} if self._times is None else {name: self._times.elapsed(moment)}

    def step(self, result: StepResult) -> None:
        """Report a finished step. Throughput is of the whole job, over the steps since the last row of a step."""
        spec, train, ended = self._training.spec, self._training.spec.train, result.ended
        self._data_wait += result.local.data_wait
        self._losses = list(map(add, self._losses, result.by_source)) if self._losses else result.by_source
        if self._first is None:  # of this process, which compiles
            self._first = {"first_step_seconds": round(max(0.0, ended - self._last_time), 4)}
        self.step_seconds = max(1e-6, ended - self._last_time) / (result.done - self._last_step)
        if self._file is None or (result.done % train.log_every and result.done != spec.steps):
            return
        tokens = spec.tokens_after(result.done)
        pace = (tokens - spec.tokens_after(self._last_step)) / max(1e-6, ended - self._last_time)
        # Each device computes its part of the model's FLOPs.
        mfu = self._peak.mfu(pace * self._flops / self._training.fabric.world_size)
        self.row(
            kind="step",
            step=result.done,
            loss=result.loss,
            learning_rate=learning_rate_at(train, result.done - 1, steps=spec.steps),
            grad_norm=result.grad_norm,
            batch_sha256=result.batch_sha256,
            tokens=tokens,
            **self._by_source(result.done),
            tokens_per_second=round(pace, 1),
            step_seconds=round(self.step_seconds, 4),
            data_seconds=round(self._data_wait, 4),
            **self._first,
            **memory_columns(self._training.fabric.device),
            **({} if mfu is None else {"mfu": float(f"{mfu:.4g}")}),
        )
        self._last_step, self._last_time = result.done, ended
        self._data_wait, self._first = 0.0, {}
        self._losses = []

    def _by_source(self, done: int) -> dict[str, float]:
        spec, windows = self._training.spec, self._training.data.train
        if not isinstance(windows, MixtureDataset):
            return {}
        seen = (windows.schedule.samples_seen(spec.samples_after(done)) * windows.length).tolist()
        sums, counts = self._losses[: len(seen)], self._losses[len(seen) :]
        losses = zip(windows.names, sums, counts, strict=True)
        means = {f"loss.{name}": loss / count for name, loss, count in losses if count}
        return {f"tokens.{name}": tokens for name, tokens in zip(windows.names, seen, strict=True)} | means

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent training, so that throughput is of training only."""
        if self._file is None:
            return
        began = monotonic()
        self._peak.recalibrate()
        self._last_time += seconds + monotonic() - began

    def publish_rows(self) -> None:
        # An attempt that resumes from a checkpoint repeats no step before it, so its rows must be stored first.
        if self._file is not None and self._training.run.local_path() is None:
            self._training.run.write(METRICS, self._path.read_bytes())

    def publish(self, *, closed: bool = False) -> None:
        # Logs of a tracker's program wait until it has ended: until then a service's answer in them may repeat the key.
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
            warn(f"the metrics were not published, and the next checkpoint publishes them: {error}")

    def close(self, *, step: int, ended_well: bool = True) -> None:
        """Write the last row if the training has ended at `step`, close the sinks, and publish everything."""
        if ended_well:
            self.row(kind="end", step=step, seconds=round(monotonic() - self._began, 2))
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                if sink not in self._failed:  # else a warning was printed already
                    warn(f"{type(sink).__name__} may lack the last metrics: {one_line(error)}")
        self.publish(closed=True)
        if self._file is not None:
            self._file.close()


def warn(text: str) -> None:
    print(f"warning: {text}", flush=True)


_PLOTTED = ("step", "evaluation", "checkpoint")


class Table:
    """metrics.csv: the rows of steps, evaluations and checkpoints, one column per metric, empty where it has none."""

    def __init__(self, path: Path, kept: Iterable[Row]) -> None:
        partial_file = path.with_name(f".{path.name}.partial")
        self._file = partial_file.open("w", buffering=1, newline="")
        self._writer = csv.DictWriter(self._file, CSV_COLUMNS, extrasaction="ignore")
        self._writer.writeheader()
        for row in kept:
            self.write(row)
        partial_file.replace(path)

    def write(self, row: Row) -> None:
        if row.get("kind") in _PLOTTED:
            self._writer.writerow(row)

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    def __init__(self, spec: TrainingSpec, folder: Path, *, resumed_from: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps of older attempts that will be repeated must not be drawn twice.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_from + 1, flush_secs=10)

    def write(self, row: Row) -> None:
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, int(row["step"]))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases with the run's name, continued by later attempts; it makes `wandb/`.

    Its program logs the service's answer to a refused request, and some answers repeat the key. So the key is removed
    from its files after the program has ended. Files of a killed attempt are scrubbed when the next one begins.
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
            ends.callback(wandb.teardown)  # waits until the program has written its last line
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                id=spec.run,
                name=spec.run,
                resume="allow",
                dir=str(folder),
                config=spec.model_dump(mode="json"),
                mode="online" if key else "offline",
                # The job has its own log, and code and git are in the run's folder.
                settings=wandb.Settings(api_key=key, console="off", silent=True, disable_git=True, disable_code=True),
            )
            # W&B's own step cannot go back, but an attempt may repeat steps.
            self._run.define_metric("*", step_metric="step")
            ends.callback(self._run.finish)
            self._ends = ends.pop_all()

    def write(self, row: Row) -> None:
        values = _scalars(row)
        if values:
            self._run.log({"step": int(row["step"]), **values})

    def close(self) -> None:
        self._ends.close()


Sink: TypeAlias = Table | TensorBoard | Wandb
"""`write` takes a row without waiting for disk or network; `close` waits until all rows are stored."""


def _scalars(row: Row) -> dict[str, float]:
    if row["kind"] not in _PLOTTED:
        return {}
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
    return {f"{row['kind']}/{name}": float(value) for name, value in numbers.items()}


def scrub_api_key(folder: Path, key: str | None) -> None:
    """Remove a key from the text files below a folder, which no process may write to; other bytes stay."""
    if key is None:
        return
    header = b64encode(f"api:{key}".encode()).decode()  # of `Authorization: Basic`, the program's login
    for path in [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]:
        if path.suffix == ".wandb":  # records with checksums: metrics and config, no answers
            continue
        text = path.read_bytes().decode(errors="surrogateescape")
        scrubbed = without(text, key, header)
        if scrubbed != text:
            path.write_bytes(scrubbed.encode(errors="surrogateescape"))


class Profiler:
    """Records the steps and ranks of `train.profiler`: torch's profiler writes a trace of them and, on a GPU, a
    snapshot of its memory. A recording that fails never costs the training."""

    def __init__(self, training: Training, *, resumed_from: int) -> None:
        self._training = training
        self._profile: profile | None = None
        self.next = -1
        """The step, from 0, before which to call `turn`; -1 if there is none."""
        settings, steps = training.spec.train.profiler, training.spec.steps
        if settings is None or training.fabric.global_rank not in settings.ranks:
            return
        self._first, self._last = max(settings.numbers[0] - 1, resumed_from), min(settings.numbers[-1], steps)
        if self._first < self._last:
            self.next = self._first
        else:
            problem = f"train.profiler.steps={settings.steps} records nothing"
            warn(f"{problem}: this attempt begins after step {resumed_from}")

    def turn(self, step: int) -> None:
        """Begin to record, mark the next step, or end and write. The time that this takes counts as the steps'."""
        self.next = step + 1
        if step == self._last:
            self.end(step)
        elif self._profile is not None:
            self._profile.step()
        else:
            # Every step is recorded; with a schedule torch also marks the beginning of each with its number.
            self._profile = profile(schedule=lambda _: ProfilerAction.RECORD, record_shapes=True, profile_memory=True)
            self._profile.step_num = step + 1
            try:
                self._profile.start()
                if self._training.fabric.device.type == "cuda":
                    torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS, stacks="python")
            except RuntimeError as error:  # such as another profiler on the device
                self._profile, self.next = None, -1
                warn(f"no profile is recorded: {one_line(error)}")

    def end(self, done: int, *, keep: bool = True) -> None:
        """End a recording, if there is one, after `done` steps; with `keep`, store it in the run's folder."""
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
    """Peak matmul FLOP/s of this process' device in the training's dtype.

    A GPU's is in a table. A CPU's is measured with the threads of this process, because it depends on its clock and
    other load, which can only make it too small. After a step that is faster, MFU is None until it is measured again.
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

    def mfu(self, flops: float) -> float | None:
        """Return `flops` a second as a share of the peak; None if the peak is not known, or was exceeded."""
        if self.flops is None:
            return None
        self._beaten = self._beaten or flops > self.flops
        return None if self._beaten else flops / self.flops

    def recalibrate(self) -> None:
        """Measure a CPU again if its peak was exceeded. It takes a moment: call it while the training waits."""
        if self._beaten and self._dtype is not None and self.flops is not None:
            self.flops = max(self.flops, measured_flops(self._dtype))
        self._beaten = False


def measured_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of many square matrix products of several sizes."""
    pairs = [(torch.ones(side, side, dtype=dtype), torch.empty(side, side, dtype=dtype)) for side in _SIDES]
    best, began = 0.0, perf_counter()
    while perf_counter() - began < _LONG_ENOUGH:
        for matrix, product in pairs:
            start = perf_counter()
            torch.mm(matrix, matrix, out=product)
            best = max(best, 2.0 * len(matrix) ** 3 / (perf_counter() - start))
    return best


def device_name(device: torch.device) -> str:
    """Return the driver's name of a GPU, or a CPU's model."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return _read_proc_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def memory_columns(device: torch.device) -> dict[str, int]:
    """Return the columns of a step about memory, those of a GPU's allocator too."""
    columns = {"memory": peak_memory_bytes(device)}
    if device.type == "cuda":
        retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
        columns |= {"memory_reserved": torch.cuda.max_memory_reserved(device), "allocation_retries": retries}
    return columns


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak so far: of tensors on a GPU, as its allocator counts them; of this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # getrusage begins with the peak of the process that started this one.
    peak = _read_proc_field("/proc/self/status", "VmHWM:")
    if peak:
        return int(peak.split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes, on a Mac


def _read_proc_field(path: str, name: str) -> str:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
