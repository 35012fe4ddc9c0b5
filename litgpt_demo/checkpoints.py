"""Checkpoints: sharded, committed by a manifest written last, resumed from the newest one that verifies."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litgpt_demo.config import Settings
from litgpt_demo.faults import DataError
from litgpt_demo.manifests import FileRecord, bring, read_manifest, write_manifest
from litgpt_demo.storage import Storage

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

FORMAT = 1


class CheckpointManifest(Settings):
    """A checkpoint that is all there."""

    format: int
    run: str
    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens seen."""
    dataset_key: str
    validation_loss: float | None
    """Of this very step, where it was evaluated; nats per token."""
    world_size: int
    versions: dict[str, str]
    files: tuple[FileRecord, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(record.size for record in self.files)


def folder_of(step: int) -> str:
    """Below the run's folder; the zeros keep a listing in order."""
    return f"checkpoints/step-{step:08d}"


def committed(run: Storage, *, tell: Callable[[str], None] = lambda text: None) -> list[CheckpointManifest]:
    """Checkpoints of the run that have a manifest, newest first; a folder without one is a save that never ended.

    A damaged manifest is no manifest; `tell` hears of it.
    """
    found = []
    for name in {path.split("/")[0] for path in run.within("checkpoints").list() if path.endswith("/manifest.json")}:
        try:
            manifest = read_manifest(run.within(f"checkpoints/{name}"), CheckpointManifest)
        except DataError as error:
            tell(f"{name} is passed over: {error}")
        else:
            found += [] if manifest is None else [manifest]
    return sorted(found, key=lambda manifest: -manifest.step)


def open_checkpoint(run: Storage, manifest: CheckpointManifest, scratch: Callable[[], Path]) -> Path:
    """A local folder with the checkpoint's files, every byte verified.

    Raises:
        DataError: names each file that is not what the manifest says.
    """
    return bring(run.within(folder_of(manifest.step)), manifest.files, scratch)


def newest_verified(
    run: Storage, scratch: Callable[[], Path], *, tell: Callable[[str], None]
) -> tuple[CheckpointManifest, Path] | None:
    """The newest checkpoint whose every byte is right. `tell` hears of each that was passed over, and why."""
    for manifest in committed(run, tell=tell):
        try:
            return manifest, open_checkpoint(run, manifest, scratch)
        except DataError as error:
            tell(f"checkpoint of step {manifest.step} is passed over: {error}")
    return None


def retained(checkpoints: Iterable[CheckpointManifest], *, last: int, best: int) -> set[int]:
    """Steps to keep: the newest `last`, and the `best` by validation loss."""
    newest = sorted(checkpoints, key=lambda found: -found.step)
    scored = sorted((found for found in newest if found.validation_loss is not None), key=_score)
    return {found.step for found in newest[:last]} | {found.step for found in scored[:best]}


def _score(manifest: CheckpointManifest) -> tuple[float, int]:
    assert manifest.validation_loss is not None
    return manifest.validation_loss, -manifest.step


def versions() -> dict[str, str]:
    """What wrote it."""
    return {name: importlib.metadata.version(name) for name in ("torch", "lightning", "litgpt", "numpy")}


# --- below here, torch ------------------------------------------------------------------------------------------------


def save_shards(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Write this rank's part of the weights and optimizer state into `folder`; every rank has to call it.

    The folder may be a different one on every rank: nothing but the file names is shared.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    weights, state = get_state_dict(model, optimizer)
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    save({"model": weights, "optimizer": state}, storage_writer=writer, no_dist=_alone())


def load_shards(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Read what `save_shards` wrote into `model` and `optimizer`, on any number of ranks; every rank has to call it."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    weights, state = get_state_dict(model, optimizer)
    load({"model": weights, "optimizer": state}, storage_reader=FileSystemReader(folder), no_dist=_alone())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def load_weights(folder: Path, into: dict[str, Any]) -> None:
    """Read the weights alone, whole, into the tensors of a state dict; one process suffices, whatever wrote them."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load({"model": into}, storage_reader=FileSystemReader(folder), no_dist=True)


def _alone() -> bool:
    import torch.distributed

    return not torch.distributed.is_initialized()


def publish_shards(folder: Path, run: Storage, step: int) -> list[FileRecord]:
    """Move this rank's files to their place in the run; the checkpoint still has no manifest afterwards."""
    place = folder_of(step)
    records = [
        FileRecord.of(run.upload(path, f"{place}/{path.name}", move=True), relative_to=place)
        for path in sorted(folder.iterdir())
    ]
    shutil.rmtree(folder)
    return records


def commit(run: Storage, manifest: CheckpointManifest, *, keep_last: int, keep_best: int) -> None:
    """Write the manifest when every rank's files are there, then remove what retention no longer keeps."""
    write_manifest(run.within(folder_of(manifest.step)), manifest)
    there = committed(run)
    # Newer ones did not verify when this attempt resumed, or it would have gone on from them: they are not kept.
    keep = retained((one for one in there if one.step <= manifest.step), last=keep_last, best=keep_best)
    for old in there:
        if old.step not in keep:
            # The manifest first: a removal that is cut short must not leave something that looks whole.
            run.remove(f"{folder_of(old.step)}/manifest.json")
            run.remove(folder_of(old.step))
