"""A rank's part in saving and resuming."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any

import torch.distributed as dist

from litgpt_demo import checkpoints
from litgpt_demo.checkpoints import CheckpointManifest
from litgpt_demo.faults import DataError
from litgpt_demo.training.setup import Training


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
