"""A storage in a bucket."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from litgpt_demo.errors import UserError
from litgpt_demo.storage.base import MANIFEST, Inventory, Names, ObjectInfo, Storage, clean, clean_file, is_partial
from litgpt_demo.storage.checksums import copy_with_crc
from litgpt_demo.storage.compose import join, members
from litgpt_demo.storage.local import content_of, explaining, replacing
from litgpt_demo.storage.objects import ADMIN, VIEWER, Objects, metadata
from litgpt_demo.storage.transfer import download_in_ranges, upload_in_parts

Blobs: TypeAlias = list[Any]  # inside the class `list` is a verb


@dataclass(frozen=True)
class BucketStorage(Storage):
    """A bucket of Google Cloud Storage, or of whatever STORAGE_EMULATOR_HOST points at. Safe to pickle and to fork."""

    patience: float = 600.0
    """Seconds without a good answer after which a request is given up; real outages outlast the client's own 120 s."""
    parallel: int = 8
    """Requests at a time that one verb makes."""
    part_size: int = 32 << 20
    """Bytes. What is larger than two parts goes up and down in parts, and on from there after an interruption."""

    def list(self, prefix: str = "") -> Names:
        return sorted(self._path(blob.name) for blob in self._below(prefix))

    def inventory(self, prefix: str = "") -> Inventory:
        return sorted(map(self._stored, self._below(prefix)), key=lambda stored: stored.path)

    def exists(self, path: str) -> bool:
        name = self._file(path)
        return self._objects.retry_transient(name, VIEWER, lambda: self._objects.look(name) is not None)

    def read(self, path: str) -> bytes:
        name = self._file(path)

        def attempt() -> bytes:
            content = io.BytesIO()
            self._objects.fetch(self._objects.found(name), content)
            return content.getvalue()

        return self._objects.retry_transient(name, VIEWER, attempt)

    def write(self, path: str, data: bytes) -> ObjectInfo:
        wanted = ObjectInfo(self._file(path), *copy_with_crc(io.BytesIO(data)))
        self._objects.put(wanted, lambda: io.BytesIO(data))
        return replace(wanted, path=clean(path))

    def create(self, path: str, data: bytes) -> bool:
        wanted = ObjectInfo(self._file(path), *copy_with_crc(io.BytesIO(data)))
        return self._objects.create(wanted, lambda: io.BytesIO(data))

    def stat(self, path: str) -> ObjectInfo:
        name = self._file(path)
        return self._objects.retry_transient(name, VIEWER, lambda: self._stored(self._objects.found(name)))

    def upload(self, source: Path, path: str, *, move: bool = False) -> ObjectInfo:
        name = self._file(path)
        with explaining(str(source)):
            if source.stat().st_size > 2 * self.part_size:
                wanted = upload_in_parts(self._objects, source, name, self.part_size)
            else:
                wanted = ObjectInfo(name, *content_of(source))
                self._objects.put(wanted, lambda: source.open("rb"))
            if move:
                source.unlink()
        return replace(wanted, path=clean(path))

    def download(self, path: str, target: Path) -> ObjectInfo:
        name = self._file(path)

        def attempt() -> ObjectInfo:
            blob = self._objects.found(name)
            stored = self._stored(blob)
            with explaining(str(target), needed=stored.size):
                if _holds(target, stored):
                    return stored
                if stored.size > 2 * self.part_size:
                    download_in_ranges(self._objects, blob, target, self.part_size)
                else:
                    with replacing(target) as partial:
                        self._objects.fetch(blob, partial)
            return stored

        return self._objects.retry_transient(name, VIEWER, attempt)

    def join(self, parts: Sequence[str], path: str) -> ObjectInfo:
        name, names = self._file(path), [self._file(part) for part in parts]

        def attempt() -> ObjectInfo:
            return join(self._objects, members(self._objects, names), name)

        if not names:
            return self.write(path, b"")
        return replace(self._objects.retry_transient(name, ADMIN, attempt), path=clean(path))

    def remove(self, path: str) -> None:
        objects, name = self._objects, self._name(path)
        if not name:
            raise UserError(f"will not remove everything in {self.root}; name what is to go")

        def attempt() -> None:
            blobs = objects.listed(f"{name}/") + [there for there in [objects.look(name)] if there]
            manifests = [blob for blob in blobs if blob.name.rpartition("/")[2] == MANIFEST]
            objects.each(objects.delete, manifests)
            objects.each(objects.delete, [blob for blob in blobs if blob not in manifests])

        objects.retry_transient(name, ADMIN, attempt)

    def remove_unfinished(self) -> None:
        objects, name = self._objects, self._name("")

        def attempt() -> None:
            blobs = objects.listed(f"{name}/" if name else "")
            objects.each(objects.delete, [blob for blob in blobs if is_partial(blob.name.rpartition("/")[2])])

        objects.retry_transient(name, ADMIN, attempt)

    def _below(self, prefix: str) -> Blobs:
        name = self._name(prefix)
        blobs = self._objects.retry_transient(name, VIEWER, lambda: self._objects.listed(f"{name}/" if name else ""))
        # Whatever is not spelt as we spell paths is left out: folder markers (`a/`) and names like `a//b`.
        return [blob for blob in blobs if _is_ours(self._path(blob.name))]

    def _stored(self, blob: Any) -> ObjectInfo:
        return replace(metadata(blob), path=self._path(blob.name))

    def _file(self, path: str) -> str:
        """The name of the object that is this file."""
        return self._name(clean_file(path))

    def _name(self, path: str) -> str:
        return self.address(path).removeprefix("gs://").partition("/")[2]

    def _path(self, name: str) -> str:
        """The path that `_name` makes this name of."""
        return name.removeprefix(self._name("")).removeprefix("/") if self._name("") else name

    @property
    def _objects(self) -> Objects:
        bucket = self.root.removeprefix("gs://").partition("/")[0]
        return Objects(bucket, patience=self.patience, parallel=self.parallel)


def _holds(target: Path, stored: ObjectInfo) -> bool:
    """Return True if there is nothing to fetch."""
    if not target.is_file() or target.stat().st_size != stored.size:
        return False
    return content_of(target) == (stored.size, stored.crc32c)


def _is_ours(name: str) -> bool:
    try:
        return clean(name) == name
    except UserError:
        return False
