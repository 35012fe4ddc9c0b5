"""The training loop: LitGPT's model on Lightning Fabric, one process per device, started by torchrun.

Everything that decides the outcome is a function of the spec and the step: the batch, the learning rate, the random
state. Resuming needs the weights, the optimizer's state and one integer.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from litgpt.model import GPT, Block
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from litgpt_demo import checkpoints
from litgpt_demo.batches import Numbers, Windows, batch_numbers, open_windows, share_of
from litgpt_demo.checkpoints import CheckpointManifest
from litgpt_demo.config import TrainConfig, TrainingSpec
from litgpt_demo.dataset import DatasetManifest, Split, open_dataset, stage
from litgpt_demo.faults import DataError, UserError
from litgpt_demo.metrics import MetricsFile
from litgpt_demo.model import decay_groups, initialise, litgpt_config
from litgpt_demo.runs import METRICS, read_spec
from litgpt_demo.storage import Storage, open_storage


@dataclass(frozen=True, kw_only=True)
class Data:
    """What the model reads."""

    manifest: DatasetManifest
    train: Windows
    validation: Windows


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything one rank holds."""

    spec: TrainingSpec
    data: Data
    fabric: Fabric
    model: Any
    """Fabric's wrapper of the (possibly DDP or FSDP) model: what is called."""
    optimizer: Any
    run: Storage
    scratch: Path


def learning_rate(train: TrainConfig, *, step: int, steps: int) -> float:
    """The rate of step `step` (from 0): up in a straight line, then down a cosine to the minimum at the last step."""
    low = train.learning_rate / 10 if train.min_learning_rate is None else train.min_learning_rate
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, steps - 1 - train.warmup_steps)
    return low + (train.learning_rate - low) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def step_seed(*, seed: int, step: int, rank: int) -> int:
    """Seeds torch's generators at every step, so that dropout is a function of the step and resumes exactly."""
    return int.from_bytes(blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=7).digest(), "little")


def open_data(spec: TrainingSpec, folder: Path) -> Data:
    """The two splits, memory-mapped.

    Raises:
        DataError: it is not the dataset of the spec.
        UserError: a split is shorter than one sample.
    """
    manifest = open_dataset(str(folder))
    if manifest.key != spec.dataset_key:
        raise DataError(
            f"{folder} is the dataset {manifest.key}, this run was made for {spec.dataset_key}; stage that one"
        )

    def windows(split: Split) -> Windows:
        paths = [folder / record.path for record in split.files]
        return open_windows(paths, dtype=manifest.dtype, length=spec.model.sequence_length)

    return Data(manifest=manifest, train=windows(manifest.train), validation=windows(manifest.validation))


def open_fabric(train: TrainConfig) -> Fabric:
    """Fabric over the ranks that torchrun started, this process being one of them."""
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # else every rank greets in every log
    processes, nodes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    alone = processes * nodes == 1
    strategy: str | DDPStrategy | ModelParallelStrategy = "auto"
    if train.strategy == "fsdp" and not alone:
        strategy = ModelParallelStrategy(_sharded, data_parallel_size=processes * nodes, tensor_parallel_size=1)
    elif not alone:
        strategy = DDPStrategy(gradient_as_bucket_view=True, forward_sync_buffers=False)
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = Fabric(
        accelerator=accelerator, devices=processes, num_nodes=nodes, strategy=strategy, precision=train.precision
    )
    fabric.launch()
    return fabric


def _sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2: each block's weights come together when it runs. Unlike FSDP1 it runs on CPUs, and weights keep their
    shapes, by which decay_groups tells matrices from vectors."""
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def set_up(spec: TrainingSpec, data: Data, fabric: Fabric, run: Storage, scratch: Path) -> Training:
    """Model and optimizer with their initial values, distributed as the strategy says."""
    config = litgpt_config(spec.model, vocab_size=data.manifest.vocab_size)
    with fabric.init_module(empty_init=False):
        model = GPT(config)
    model.max_seq_length = spec.model.sequence_length
    initialise(model, seed=spec.train.seed)
    if spec.train.activation_checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    if spec.train.compile:
        model.compile()
    wrapped = fabric.setup_module(model)
    fused = fabric.device.type in {"cuda", "cpu"}
    adamw = torch.optim.AdamW(
        decay_groups(wrapped, spec.train.weight_decay), lr=spec.train.learning_rate, betas=spec.train.betas, fused=fused
    )
    optimizer = fabric.setup_optimizers(adamw)
    return Training(spec=spec, data=data, fabric=fabric, model=wrapped, optimizer=optimizer, run=run, scratch=scratch)


def loss_of(model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood of the targets, in nats per token."""
    logits = model(inputs)
    return cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


def read_batch(training: Training, windows: Windows, numbers: Numbers) -> tuple[Tensor, Tensor]:
    inputs, targets = windows.read(numbers)
    device = training.fabric.device
    return torch.from_numpy(inputs).to(device), torch.from_numpy(targets.copy()).to(device)


def train_step(training: Training, step: int) -> tuple[Tensor, Tensor, float]:
    """One optimizer step.

    Returns:
        This rank's mean loss and the gradient's norm, both on the device, and the seconds spent reading samples.
    """
    spec, fabric, train = training.spec, training.fabric, training.spec.train
    torch.manual_seed(step_seed(seed=train.seed, step=step, rank=fabric.global_rank))
    for group in training.optimizer.param_groups:
        group["lr"] = learning_rate(train, step=step, steps=spec.steps)
    numbers = batch_numbers(
        step=step,
        global_batch=train.global_batch,
        windows=len(training.data.train),
        dataset_key=spec.dataset_key,
        seed=train.seed,
    )
    mine = share_of(numbers, rank=fabric.global_rank, world_size=fabric.world_size)
    passes = train.accumulation(fabric.world_size)
    total, reading = torch.zeros((), device=fabric.device), 0.0
    for index in range(passes):
        began = monotonic()
        inputs, targets = read_batch(
            training, training.data.train, mine[index * train.micro_batch : (index + 1) * train.micro_batch]
        )
        reading += monotonic() - began
        with fabric.no_backward_sync(training.model, enabled=index < passes - 1):
            loss = loss_of(training.model, inputs, targets) / passes
            fabric.backward(loss)
        total += loss.detach()
    limit = math.inf if train.clip_norm is None else train.clip_norm
    norm = fabric.clip_gradients(training.model, training.optimizer, max_norm=limit, error_if_nonfinite=False)
    training.optimizer.step()
    training.optimizer.zero_grad()
    assert norm is not None
    return total, norm.full_tensor() if isinstance(norm, DTensor) else norm, reading


@torch.no_grad()
def evaluate(training: Training) -> float:
    """Mean loss over the first `evaluation_windows` validation samples, the same ones on any number of ranks."""
    fabric, train = training.fabric, training.spec.train
    windows = training.data.validation
    count = min(train.evaluation_windows, len(windows))
    numbers = np.arange(count, dtype=np.uint64)[fabric.global_rank :: fabric.world_size]
    numbers_of_one = np.zeros(1, dtype=np.uint64)
    sums = torch.zeros(2, dtype=torch.float64, device=fabric.device)
    training.model.eval()
    # Every rank makes the same number of forward passes, with an empty share as zero weight: FSDP's are collective.
    each = math.ceil(math.ceil(count / fabric.world_size) / train.micro_batch)
    for index in range(each):
        part = numbers[index * train.micro_batch : (index + 1) * train.micro_batch]
        weight = len(part)
        inputs, targets = read_batch(training, windows, part if weight else numbers_of_one)
        loss = loss_of(training.model, inputs, targets)
        sums += torch.tensor([float(loss) * weight, weight], dtype=torch.float64, device=fabric.device)
    training.model.train()
    if fabric.world_size > 1:
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def save(training: Training, *, step: int, validation_loss: float | None) -> float:
    """Commit a checkpoint of `step` finished steps; returns the seconds that training stood still."""
    spec, fabric, run = training.spec, training.fabric, training.run
    began = monotonic()
    if fabric.is_global_zero:
        run.remove(checkpoints.folder_of(step))  # what a save that was cut short may have left
    fabric.barrier()
    shards = training.scratch / f"step-{step}"
    checkpoints.save_shards(training.model.module, training.optimizer.optimizer, shards)
    mine = checkpoints.publish_shards(shards, run, step)
    every: list[Any] = [mine]
    if fabric.world_size > 1:
        every = [None] * fabric.world_size
        dist.all_gather_object(every, mine)
    if fabric.is_global_zero:
        manifest = CheckpointManifest(
            format=checkpoints.FORMAT,
            run=spec.run,
            step=step,
            tokens=step * spec.train.global_batch * spec.model.sequence_length,
            dataset_key=spec.dataset_key,
            validation_loss=validation_loss,
            world_size=fabric.world_size,
            versions=checkpoints.versions(),
            files=tuple(found for files in every for found in files),
        )
        checkpoints.commit(run, manifest, keep_last=spec.train.keep_last, keep_best=spec.train.keep_best)
    fabric.barrier()
    return monotonic() - began


def resume(training: Training) -> int:
    """Load the newest checkpoint that verifies, the same one on all ranks; returns the steps done, 0 without one."""
    fabric = training.fabric

    def scratch() -> Path:
        return training.scratch / "resume"

    found = None
    if fabric.is_global_zero:
        found = checkpoints.newest_verified(
            training.run, scratch, tell=lambda text: print(f"warning: {text}", flush=True)
        )
    manifest = fabric.broadcast(found[0] if found else None)
    if manifest is None:
        return 0
    folder = found[1] if found else checkpoints.open_checkpoint(training.run, manifest, scratch)
    if manifest.dataset_key != training.spec.dataset_key:
        raise DataError(
            f"{training.run.address(checkpoints.folder_of(manifest.step))} was trained on dataset "
            f"{manifest.dataset_key}, this run is on {training.spec.dataset_key}; give the run another name or root"
        )
    checkpoints.load_shards(training.model.module, training.optimizer.optimizer, folder)
    return int(manifest.step)


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

    def row(self, **values: Any) -> None:
        if self._file is not None:
            self._file.write(values)

    def step(self, done: int, *, loss: float, grad_norm: float, rate: float, reading: float) -> None:
        """`done` steps are finished; throughput is over the steps since the last such row, of the whole job."""
        now, tokens_per_step = (
            monotonic(),
            self._training.spec.train.global_batch * self._training.spec.model.sequence_length,
        )
        steps, seconds = done - self._last_step, now - self._last_time
        self._last_step, self._last_time = done, now
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

    def pause(self, seconds: float) -> None:
        """Time that was not spent training, so that throughput tells of training alone."""
        self._last_time += seconds

    def publish(self) -> None:
        if self._file is not None and self._training.run.root.startswith("gs://"):
            self._training.run.upload(self._path, METRICS)

    def close(self) -> None:
        self.row(kind="end", step=self._training.spec.steps, seconds=round(monotonic() - self._begun, 2))
        self.publish()
        if self._file is not None:
            self._file.close()


def fit(training: Training) -> None:
    """Train from the newest checkpoint to the last step."""
    spec, fabric, train = training.spec, training.fabric, training.spec.train
    first = resume(training)
    report = Reporter(training, resumed_from=first)
    training.model.train()
    reading = 0.0
    for step in range(first, spec.steps):
        loss, norm, seconds = train_step(training, step)
        done, last = step + 1, step + 1 == spec.steps
        logs, saves = done % train.log_every == 0 or last, done % train.checkpoint_every == 0 or last
        reading += seconds
        if logs or saves:  # what is saved is checked too: weights that are not numbers would be resumed from for ever
            mean = _finite(_mean(loss, fabric), "loss", done, train)
        if logs:
            rate = learning_rate(train, step=step, steps=spec.steps)
            report.step(done, loss=mean, grad_norm=float(norm), rate=rate, reading=reading)
            reading = 0.0
        validation_loss = None
        if done % train.evaluate_every == 0 or last:
            began = monotonic()
            validation_loss = _finite(evaluate(training), "validation loss", done, train)
            seconds = monotonic() - began
            report.pause(seconds)
            report.row(
                kind="evaluation",
                step=done,
                validation_loss=validation_loss,
                perplexity=math.exp(min(validation_loss, 700.0)),
                seconds=round(seconds, 2),
            )
        if saves:
            seconds = save(training, step=done, validation_loss=validation_loss)
            report.pause(seconds)
            report.row(kind="checkpoint", step=done, seconds=round(seconds, 2), path=checkpoints.folder_of(done))
            report.publish()
    report.close()


def _finite(loss: float, name: str, done: int, train: TrainConfig) -> float:
    if not math.isfinite(loss):
        raise UserError(
            f"the {name} of step {done} is {loss}; a lower train.learning_rate={train.learning_rate}, more "
            f"train.warmup_steps={train.warmup_steps} or train.precision=32-true usually mend it"
        )
    return loss


def _mean(loss: Tensor, fabric: Fabric) -> float:
    """The mean over all ranks; each saw an equal share of the batch."""
    if fabric.world_size > 1:
        loss = loss.clone()
        dist.all_reduce(loss)
        loss /= fabric.world_size
    return float(loss)


@record
def main(argv: Sequence[str] | None = None) -> int:
    """`-m litgpt_demo train --run ADDRESS`, in every rank."""
    parser = argparse.ArgumentParser(prog="litgpt_demo train", description=__doc__)
    parser.add_argument("--run", required=True, help="address of the run's folder, with its config.json")
    args = parser.parse_args(argv)
    run = open_storage(args.run)
    spec = read_spec(run)
    fabric = open_fabric(spec.train)
    if fabric.world_size != spec.world_size:
        raise UserError(
            f"this rank is one of {fabric.world_size}, the run was submitted for {spec.world_size}; submit it again"
        )
    scratch = scratch_of(run, fabric.global_rank)
    staged = os.environ.get("LITGPT_DATASET")
    folder = Path(staged) if staged else stage(spec.dataset, scratch)
    fit(set_up(spec, open_data(spec, folder), fabric, run, scratch))
    shutil.rmtree(scratch)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def scratch_of(run: Storage, rank: int) -> Path:
    """An empty folder for this rank's unfinished files, freed of what a killed attempt left in it.

    On the run's own file system where it has one, so that finished shards move instead of being copied.
    """
    parent = Path(tempfile.gettempdir()) / run.root.rsplit("/", 1)[-1]
    if not run.root.startswith("gs://"):
        parent = Path(run.root) / ".scratch"
    folder = parent / f"rank-{rank}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
