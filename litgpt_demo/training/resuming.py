"""Going on from the newest checkpoint that verifies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from litgpt_demo.errors import DataError
from litgpt_demo.manifests import FileRecord, bring
from litgpt_demo.training import checkpoints
from litgpt_demo.training.checkpoints import INDEX, CheckpointManifest
from litgpt_demo.training.reading import files_of_shards, load_shards
from litgpt_demo.training.setup import Training

Tell = Callable[[str], object]


def resume(training: Training, *, tell: Tell) -> int:
    """Load the newest checkpoint that verifies, on all ranks; returns the steps done, 0 without one.

    Those that do not verify are set aside, and `tell` hears on rank 0 where and why.
    """
    ranks, run = training.ranks, training.run
    model, optimizer = training.model.module, training.optimizer.optimizer
    precision = training.fabric.strategy.precision

    def candidates() -> list[CheckpointManifest]:
        found = checkpoints.committed(run, damaged=lambda folder, error: _set_aside(training, folder, error, tell))
        for manifest in found:
            checkpoints.require_same(run, manifest, training.spec)
        return found

    for manifest in ranks.first(candidates):
        if (folder := _verified(training, manifest, tell)) is None:
            optimizer.state.clear()  # which is made to see what is read: a training begins without
            continue
        address = run.address(checkpoints.folder_of(manifest.step))
        if saved := load_shards(model, optimizer, folder, precision=precision.state_dict(), address=address):
            precision.load_state_dict(saved)
        ranks.first(lambda: None)  # until then some rank may still read
        if run.local_path() is None and training.fabric.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        training.clock.go_on_from(manifest.seconds)
        return manifest.step
    training.clock.go_on_from(0.0)
    return 0


def _verified(training: Training, manifest: CheckpointManifest, tell: Tell) -> Path | None:
    """A folder with the files that the ranks of this node read; None if one is not what it should be.

    The ranks read and compare a share of the files each: of all for a local folder, which they see all, and of what
    their node reads for a bucket. Nodes share no folder, though they may share a machine.
    """
    ranks, path = training.ranks, checkpoints.folder_of(manifest.step)
    place, node = training.run.within(path), ranks.number - training.fabric.local_rank
    local = place.local_path()
    folder = local or training.scratch.parent / f"resume-{node}"

    def right(records: Sequence[FileRecord]) -> bool:
        try:
            ranks.together(lambda: bring(place, records, lambda: folder), lambda _: None)
        except DataError as error:
            reason = error
            ranks.first(lambda: _set_aside(training, path, reason, tell))
            return False
        return True

    if local is not None:
        return local if right(manifest.files[ranks.number :: ranks.world]) else None
    first_of_node = training.fabric.local_rank == 0
    if not right([file for file in manifest.files if file.path == INDEX and first_of_node]):
        return None

    def read_here() -> tuple[int, set[str]]:
        model, optimizer = training.model.module, training.optimizer.optimizer
        precision = training.fabric.strategy.precision.state_dict()
        return node, files_of_shards(model, optimizer, folder, precision=precision, address=place.address())

    needs = ranks.together(read_here, lambda found: found)
    here = {name for where, names in needs for name in names if where == node}
    records = [file for file in manifest.files if file.path in here]
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return folder if right(records[training.fabric.local_rank :: count]) else None


def _set_aside(training: Training, folder: str, error: DataError, tell: Tell) -> None:
    where = checkpoints.set_aside(training.run, folder, str(error))
    tell(f"{folder} does not verify and was moved to {where}: {error}")
