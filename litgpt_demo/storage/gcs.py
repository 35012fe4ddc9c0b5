"""A storage in a bucket."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from litgpt_demo.errors import UserError
from litgpt_demo.storage.base import (
    MANIFEST,
    MOST_READ,
    SCHEME,
    Inventory,
    Names,
    ObjectInfo,
    Position,
    Storage,
    absent,
    bucket_path,
    clean_file,
    clean_path,
    is_partial,
    removable,
    require_size,
)
from litgpt_demo.storage.checksums import copy_with_crc
from litgpt_demo.storage.local import content_of, explaining, replacing
from litgpt_demo.storage.objects import USER, VIEWER, Objects, metadata
from litgpt_demo.storage.transfer import download_in_ranges, join, upload_in_parts

Blobs: TypeAlias = list[Any]  # inside the class `list` is a verb


@dataclass(frozen=True)
class BucketStorage(Storage):
    """A bucket of Google Cloud Storage, or of whatever STORAGE_EMULATOR_HOST points at. Safe to pickle and to fork."""

    parallel: int = 8
    """Requests at a time that one verb makes."""
    part_size: int = 32 << 20
    """Bytes. What is larger than two parts goes up and down in parts, and on from there after an interruption."""

    def local_path(self, path: str = "") -> None:
        return None

    def browse_url(self, path: str) -> str:
        return f"https://storage.cloud.google.com/{bucket_path(self.address(path))}"

    def list(self, prefix: str = "") -> Names:
        return sorted(self._path(blob.name) for blob in self._below(prefix))

    def inventory(self, prefix: str = "", *, odd: bool = False) -> Inventory:
        return sorted(map(self._stored, self._below(prefix, odd=odd)), key=lambda stored: stored.path)

    def exists(self, path: str) -> bool:
        name = self._file(path)
        return self._objects.retry_transient(name, VIEWER, lambda: self._objects.look(name) is not None)

    def read(self, path: str, *, most: int = MOST_READ) -> bytes:
        name = self._file(path)

        def attempt() -> bytes:
            content, blob = io.BytesIO(), self._objects.found(name)
            require_size(metadata(blob).size, most, self.address(path))
            self._objects.fetch(blob, content)
            return content.getvalue()

        return self._objects.retry_transient(name, VIEWER, attempt)

    def read_on(self, path: str, position: Position, *, most: int = MOST_READ) -> tuple[Position, bytes]:
        name = self._file(path)

        def attempt() -> tuple[Position, bytes]:
            blob = self._objects.found(name)
            whole = metadata(blob)
            end = Position(whole.size, whole.crc32c)
            if end == position:
                return position, b""
            if end.size > position.size > 0:
                fresh = self._range(blob, position.size, min(end.size, position.size + most))
                if position.size + len(fresh) < end.size or position.after(fresh) == end:
                    return position, fresh
            if end.size > most:  # too large to be compared as a whole now: it is when its last bytes are read
                return Position(), self._range(blob, 0, most)
            content = io.BytesIO()
            self._objects.fetch(blob, content)
            # The range may have come damaged: then it is the same file all the same.
            begin = position if Position().after(content.getvalue()[: position.size]) == position else Position()
            return begin, content.getvalue()[begin.size :]

        return self._objects.retry_transient(name, VIEWER, attempt)

    def _range(self, blob: Any, start: int, end: int) -> bytes:
        content = io.BytesIO()
        self._objects.fetch_range(blob, start, end, content)
        return content.getvalue()

    def write(self, path: str, data: bytes) -> ObjectInfo:
        wanted = ObjectInfo(self._file(path), *copy_with_crc(io.BytesIO(data)))
        self._objects.put(wanted, lambda: io.BytesIO(data))
        return replace(wanted, path=clean_path(path))

    def create(self, path: str, data: bytes) -> bool:
        wanted = ObjectInfo(self._file(path), *copy_with_crc(io.BytesIO(data)))
        objects, looks = self._objects, iter([False])

        def attempt() -> bool:
            # Sent before anything is asked: one request instead of two. Where there is one, 412 makes another attempt.
            there = objects.look(wanted.path) if next(looks, True) else None
            if there is None:
                objects.send(wanted, lambda: io.BytesIO(data), there)
            return there is None or metadata(there) == wanted

        return objects.retry_transient(wanted.path, USER, attempt)

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
        return replace(wanted, path=clean_path(path))

    def download(self, path: str, target: Path) -> ObjectInfo:
        name = self._file(path)

        def attempt() -> ObjectInfo:
            blob = self._objects.found(name)
            stored = self._stored(blob)
            with explaining(str(target), needed=stored.size):
                there = target.is_file() and target.stat().st_size == stored.size
                if there and content_of(target) == (stored.size, stored.crc32c):
                    return stored
                if stored.size > 2 * self.part_size:
                    download_in_ranges(self._objects, blob, target, self.part_size)
                else:
                    with replacing(target) as partial:
                        self._objects.fetch(blob, partial)
            return stored

        return self._objects.retry_transient(name, VIEWER, attempt)

    def join(self, parts: Sequence[str], path: str) -> ObjectInfo:
        objects, name, names = self._objects, self._file(path), [self._file(part) for part in parts]
        folders = sorted({part.rpartition("/")[0] for part in names})

        def attempt() -> ObjectInfo:
            lists = objects.each(lambda folder: objects.listed(f"{folder}/" if folder else "", direct=True), folders)
            there = {blob.name: blob for blobs in lists for blob in blobs}
            if missing := next((part for part in names if part not in there), None):
                raise absent(objects.address(missing))
            return join(objects, [there[part] for part in names], name)

        if not names:
            return self.write(path, b"")
        return replace(objects.retry_transient(name, USER, attempt), path=clean_path(path))

    def move(self, folder: str, target: str) -> None:
        for path in self.within(folder).list():
            self.join([f"{folder}/{path}"], f"{target}/{path}")  # the bucket copies by itself
        self.remove(folder)

    def remove(self, path: str) -> None:
        objects, name = self._objects, self._name(removable(path))

        def attempt() -> None:
            blobs = objects.listed(f"{name}/") + [there for there in [objects.look(name)] if there]
            manifests = [blob for blob in blobs if blob.name.rpartition("/")[2] == MANIFEST]
            objects.each(objects.delete, manifests)
            objects.each(objects.delete, [blob for blob in blobs if blob not in manifests])

        objects.retry_transient(name, USER, attempt)

    def remove_unfinished(self) -> None:
        objects, name = self._objects, self._name("")

        def attempt() -> None:
            blobs = objects.listed(f"{name}/" if name else "")
            objects.each(objects.delete, [blob for blob in blobs if is_partial(blob.name.rpartition("/")[2])])

        objects.retry_transient(name, USER, attempt)

    def _below(self, prefix: str, *, odd: bool = False) -> Blobs:
        name = self._name(prefix)
        blobs = self._objects.retry_transient(name, VIEWER, lambda: self._objects.listed(f"{name}/" if name else ""))
        # Whatever is not spelt as we spell paths is left out: folder markers (`a/`; the folder's own has the empty path
        # here) and names like `a//b`.
        names = [(self._path(blob.name), blob) for blob in blobs]
        return [blob for name, blob in names if _is_ours(name) or (odd and name and not name.endswith("/"))]

    def _stored(self, blob: Any) -> ObjectInfo:
        return replace(metadata(blob), path=self._path(blob.name))

    def _file(self, path: str) -> str:
        return self._name(clean_file(path))

    def _name(self, path: str) -> str:
        return self.address(path).removeprefix(SCHEME).partition("/")[2]

    def _path(self, name: str) -> str:
        """The path that `_name` makes this name of."""
        return name.removeprefix(self._name("")).removeprefix("/") if self._name("") else name

    @property
    def _objects(self) -> Objects:
        bucket = self.root.removeprefix(SCHEME).partition("/")[0]
        return Objects(bucket, patience=self.patience, parallel=self.parallel)


def _is_ours(name: str) -> bool:
    try:
        return bool(name) and clean_path(name) == name
    except UserError:
        return False
