"""Going on from the newest checkpoint that verifies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from litgpt_demo.errors import DataError
from litgpt_demo.manifests import bring
from litgpt_demo.training import checkpoints
from litgpt_demo.training.checkpoints import CheckpointManifest
from litgpt_demo.training.ranks import Ranks
from litgpt_demo.training.reading import load_shards
from litgpt_demo.training.setup import Training

Tell = Callable[[str], object]


def resume(training: Training, *, tell: Tell) -> int:
    """Load the newest checkpoint that verifies, on all ranks; returns the steps done, 0 without one.

    Those that do not verify are set aside, and `tell` hears on rank 0 where and why.

    Raises:
        DataError: the newest is of another model or another dataset.
    """
    ranks = training.ranks
    for manifest in ranks.first(lambda: _candidates(training, tell)):
        if (folder := _verified(training, ranks, manifest, tell)) is not None:
            address = training.run.address(checkpoints.folder_of(manifest.step))
            model, optimizer = training.model.module, training.optimizer.optimizer
            precision = training.fabric.strategy.precision
            if saved := load_shards(model, optimizer, folder, precision=precision.state_dict(), address=address):
                precision.load_state_dict(saved)
            ranks.first(lambda: None)  # until then some rank may still read
            if training.run.local_path() is None and training.fabric.local_rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            training.clock.go_on_from(manifest.seconds)
            return manifest.step
    training.clock.go_on_from(0.0)
    return 0


def _candidates(training: Training, tell: Tell) -> list[CheckpointManifest]:
    """The checkpoints of the run, newest first, as far as their manifests can be read."""
    run = training.run
    found = checkpoints.committed(run, damaged=lambda folder, error: _set_aside(training, folder, error, tell))
    for manifest in found:
        checkpoints.require_same(run, manifest, training.spec)
    return found


def _verified(training: Training, ranks: Ranks, manifest: CheckpointManifest, tell: Tell) -> Path | None:
    """A folder with all files of the checkpoint; None if they are not what they should be, and so set aside.

    The ranks read and compare a share of the files each: of all for a local folder, which they see all, and of what
    their node needs for a bucket. Nodes share no folder, though they may share a machine.
    """
    path = checkpoints.folder_of(manifest.step)
    place = training.run.within(path)
    first_of_node = ranks.number - training.fabric.local_rank
    fetched = training.scratch.parent / f"resume-{first_of_node}"
    index, count = ranks.number, ranks.world
    if (local := place.local_path()) is None:
        index, count = training.fabric.local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        ranks.together(lambda: bring(place, manifest.files[index::count], lambda: fetched), lambda _: None)
    except DataError as error:
        reason = error
        ranks.first(lambda: _set_aside(training, path, reason, tell))
        return None
    return local or fetched


def _set_aside(training: Training, folder: str, error: DataError, tell: Tell) -> None:
    where = checkpoints.set_aside(training.run, folder, str(error))
    tell(f"{folder} does not verify and was moved to {where}: {error}")
