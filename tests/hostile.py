"""Checkpoints that somebody else wrote: right by their manifest, and programs to a reader that unpickles them."""

import os
import pickle
from io import BytesIO
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from litgpt_demo.documents import FileRecord, read_manifest, write_manifest
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import CheckpointManifest


class Marking:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def flip_a_bit(path: Path, at: int = -1) -> None:
    """As a bad disk does."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def pickled_by_torch(marker: Path) -> bytes:
    """What `torch.save` writes of it."""
    content = BytesIO()
    torch.save(Marking(marker), content)
    return content.getvalue()


def spoil_index(folder: Path, marker: Path) -> None:
    """Hide it in a part of the index that nothing reads."""
    index = _index(folder)
    index.planner_data = Marking(marker)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def spoil_bytes(folder: Path, marker: Path) -> None:
    """Put it in the place of every tensor, as what is none."""
    _spoil_entries(folder, marker)
    index = _index(folder)
    for entry, place in list(index.storage_data.items()):
        index.state_dict_metadata[entry.fqn] = BytesStorageMetadata()
        index.storage_data[MetadataIndex(entry.fqn)] = place
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def spoil_tensors(folder: Path, marker: Path) -> None:
    """Put it in the place of every tensor."""
    _spoil_entries(folder, marker)


def _spoil_entries(folder: Path, marker: Path) -> None:
    content, index = pickled_by_torch(marker), _index(folder)
    (folder / "__9_0.distcp").write_bytes(content)
    for place in index.storage_data.values():
        place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(content)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def _index(folder: Path) -> Metadata:
    index: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return index


def seal(folder: Path) -> None:
    """Have the manifest of a checkpoint's folder agree with what lies there."""
    storage = open_storage(str(folder))
    manifest = read_manifest(storage, CheckpointManifest)
    paths = [path for path in storage.list() if path != "manifest.json"]
    write_manifest(storage, manifest.model_copy(update={"files": tuple(map(FileRecord.of, map(storage.stat, paths)))}))
