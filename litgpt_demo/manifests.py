"""Manifests: JSON written last into an output folder, listing every file. No manifest, not done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from litgpt_demo.config import Settings
from litgpt_demo.documents import parse_json, sealed
from litgpt_demo.errors import DataError
from litgpt_demo.storage import MANIFEST, ObjectInfo, Storage, crc32c_of


class FileRecord(Settings):
    """One file of an output: where it lies, relative to the manifest, and what its bytes must be."""

    path: str
    size: int
    """Bytes."""
    crc32c: str
    """Eight lower-case hexadecimal digits."""
    sha256: str | None = None
    """Given where the file is meant to be compared between machines."""

    @classmethod
    def of(cls, stored: ObjectInfo, *, relative_to: str = "", sha256: str | None = None) -> FileRecord:
        path = stored.path.removeprefix(relative_to).lstrip("/")
        return cls(path=path, size=stored.size, crc32c=stored.crc32c, sha256=sha256)


_FILES_AT_ONCE = 4  # a bucket's large file comes in parallel ranges by itself

Manifest = TypeVar("Manifest", bound=Settings)


def read_manifest(storage: Storage, kind: type[Manifest]) -> Manifest | None:
    """The manifest of the folder that `storage` stands on, or None: then whatever lies there is not done."""
    try:
        content = storage.read(MANIFEST)
    except FileNotFoundError:
        return None
    fix = f"remove {storage.address()} and run again"
    return parse_json(content, kind, where=storage.address(MANIFEST), fix=fix)


def write_manifest(storage: Storage, manifest: Settings) -> ObjectInfo:
    """Commit the folder: every file the manifest names must be there already."""
    return storage.write(MANIFEST, sealed(manifest.model_dump_json(indent=1).encode(), "manifest"))


def differences(folder: Path, records: Iterable[FileRecord]) -> list[str]:
    """Return how the files in `folder` differ from their records, a sentence each; reads every byte, in parallel."""
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        return list(filter(None, pool.map(lambda record: _difference(folder, record), records)))


def _difference(folder: Path, record: FileRecord) -> str | None:
    path = folder / record.path
    if not path.is_file():
        return f"{path} is missing"
    if (size := path.stat().st_size) != record.size:
        return f"{path} has {size} bytes, its manifest says {record.size}"
    if (crc32c := crc32c_of(path)) != record.crc32c:
        return f"{path} has crc32c {crc32c}, its manifest says {record.crc32c}"
    return None


def bring(storage: Storage, records: Iterable[FileRecord], scratch: Callable[[], Path]) -> Path:
    """A local folder with all `records` of the folder that `storage` stands on, every byte verified.

    A local folder is verified where it is; a bucket's files are fetched into `scratch()`, several at a time, skipping
    those that are there already and right.
    """
    records = list(records)
    if (folder := storage.local_path()) is None:
        folder = scratch()

        def fetch(record: FileRecord) -> None:
            try:
                if _difference(folder, record) is not None:
                    storage.download(record.path, folder / record.path)
            except FileNotFoundError as error:
                raise DataError(f"{storage.address(record.path)} is missing, but its manifest lists it") from error

        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            list(pool.map(fetch, records))
    if wrong := differences(folder, records):
        raise DataError(
            f"{storage.address()} is not what its manifest says: {'; '.join(wrong)}. A dataset is prepared anew "
            "when that folder is removed, a training goes on from the checkpoint before"
        )
    return folder
