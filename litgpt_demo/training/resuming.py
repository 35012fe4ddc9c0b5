"""Going on from the newest checkpoint that verifies, or from the weights that the training starts from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from litgpt_demo.errors import DataError
from litgpt_demo.manifests import FileRecord, bring
from litgpt_demo.models.model import base_weights
from litgpt_demo.pretrained import finished_weights
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training import checkpoints
from litgpt_demo.training.checkpoints import CheckpointManifest
from litgpt_demo.training.ranks import Ranks
from litgpt_demo.training.reading import load_shards, load_weights
from litgpt_demo.training.setup import Training, begin_again
from litgpt_demo.training.tensor import in_litgpts_order

Tell = Callable[[str], object]


def resume(training: Training, *, tell: Tell) -> int:
    """Load the newest checkpoint that verifies, on all ranks; returns the steps done, 0 without one.

    Those that do not verify are set aside, and `tell` hears on rank 0 where and why. Without one the training starts
    from the weights that it was given, if it was.

    Raises:
        DataError: the newest is of another model or another dataset, or the weights are damaged.
    """
    if (step := _resumed(training, tell)) == 0:
        _start(training)
    return step


def go_back(training: Training, *, tell: Tell) -> int:
    """The same for a training that has begun: without a checkpoint it begins again."""
    if (step := _resumed(training, tell)) == 0:
        begin_again(training)
        _start(training)
    return step


def _resumed(training: Training, tell: Tell) -> int:
    ranks = training.ranks
    for manifest in ranks.first(lambda: _candidates(training, tell)):
        if (folder := _verified(training, ranks, manifest, tell)) is not None:
            _load(training, folder, training.run.address(checkpoints.folder_of(manifest.step)))
            _forget(training, training.run, folder)
            training.clock.go_on_from(manifest.seconds)
            return manifest.step
    training.clock.go_on_from(0.0)
    return 0


def _start(training: Training) -> None:
    """Put the weights to start from over the random ones, on all ranks.

    Raises:
        DataError: they are not there, or not what their manifest says.
    """
    if (address := training.spec.weights) is None:
        return
    place = open_storage(address)
    if (manifest := finished_weights(place)) is None:
        raise DataError(f"{address} has no staged weights; run it again, the pipeline stages them anew")
    folder = _brought(training, place, manifest.files)
    model = training.model.module
    load_weights(folder, in_litgpts_order(base_weights(model), model), address=address)
    _forget(training, place, folder)


def _candidates(training: Training, tell: Tell) -> list[CheckpointManifest]:
    """The checkpoints of the run, newest first, as far as their manifests can be read."""
    run = training.run
    found = checkpoints.committed(run, damaged=lambda folder, error: _set_aside(training, folder, error, tell))
    for manifest in found:
        checkpoints.require_same(run, manifest, training.spec)
    return found


def _verified(training: Training, ranks: Ranks, manifest: CheckpointManifest, tell: Tell) -> Path | None:
    """A folder with all files of the checkpoint; None if they are not what they should be, and so set aside."""
    path = checkpoints.folder_of(manifest.step)
    try:
        return _brought(training, training.run.within(path), manifest.files)
    except DataError as error:
        reason = error
        ranks.first(lambda: _set_aside(training, path, reason, tell))
        return None


def _brought(training: Training, place: Storage, files: Sequence[FileRecord]) -> Path:
    """A folder with these files of `place`.

    The ranks read and compare a share of them each: of all for a local folder, which they see all, and of what their
    node needs for a bucket.

    Raises:
        DataError: on all ranks, where one of them found a file that is not what it should be.
    """
    ranks, fetched = training.ranks, training.scratch.parent / "resume"
    index, count = ranks.number, ranks.world
    if (local := place.local_path()) is None:
        index, count = training.fabric.local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ranks.together(lambda: bring(place, files[index::count], lambda: fetched), lambda _: None)
    return local or fetched


def _forget(training: Training, place: Storage, folder: Path) -> None:
    """Remove what was fetched, when all ranks have read it."""
    if place.local_path() is None:
        training.ranks.together(lambda: shutil.rmtree(folder, ignore_errors=True), lambda _: None)


def _set_aside(training: Training, folder: str, error: DataError, tell: Tell) -> None:
    where = checkpoints.set_aside(training.run, folder, str(error))
    tell(f"{folder} does not verify and was moved to {where}: {error}")


def _load(training: Training, folder: Path, address: str) -> None:
    precision = training.fabric.strategy.precision
    model, optimizer = training.model.module, training.optimizer.optimizer
    saved = load_shards(model, optimizer, folder, precision=precision.state_dict(), address=address)
    if saved:
        precision.load_state_dict(saved)
