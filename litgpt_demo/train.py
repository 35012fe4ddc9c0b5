"""The training loop: LitGPT's model on Lightning Fabric, one process per device, started by torchrun.

Everything that decides the outcome is a function of the spec and the step: the batch, the learning rate, the random
state. Resuming needs the weights, the optimizer's state and one integer.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from litgpt_demo import checkpoints
from litgpt_demo.config import TrainConfig
from litgpt_demo.dataset import stage
from litgpt_demo.faults import LitgptDemoError, UserError
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.data import open_data
from litgpt_demo.training.parallel import open_fabric
from litgpt_demo.training.reporting import Reporter
from litgpt_demo.training.resuming import resume
from litgpt_demo.training.saving import Saved, Saver
from litgpt_demo.training.schedule import learning_rate
from litgpt_demo.training.setup import Training, set_up
from litgpt_demo.training.step import evaluate, train_step


def fit(training: Training) -> None:
    """Train from the newest checkpoint to the last step."""
    first = resume(training, tell=_warn)
    report = Reporter(training, resumed_from=first)
    with Saver(training, tell=lambda saved: _tell(report, saved)) as saver:
        _run(training, report, saver, first=first)
    report.close(step=training.spec.steps)


def _run(training: Training, report: Reporter, saver: Saver, *, first: int) -> None:
    spec, fabric, train = training.spec, training.fabric, training.spec.train
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
            report.pause(saver.save(done, validation_loss))


def _tell(report: Reporter, saved: Saved) -> None:
    if saved.warning is not None:
        _warn(saved.warning)
    if saved.failed is None:
        path = checkpoints.folder_of(saved.step)
        report.row(kind="checkpoint", step=saved.step, seconds=round(saved.stall, 4), path=path)
        try:
            report.publish()
        except LitgptDemoError as error:
            _warn(f"the metrics were not published, the next checkpoint's will be: {error}")


def _warn(text: str) -> None:
    print(f"warning: {text}", flush=True)


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
