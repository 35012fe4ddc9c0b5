"""JSON that lies on a disk or in a bucket: written with a checksum of its own, and read in one way.

Whatever is read may have been cut short, changed by a failing disk, edited, or written by another version; `parse_json`
says so in words that name the place.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

from pydantic import TypeAdapter, ValidationError

from litgpt_demo.config import Settings
from litgpt_demo.errors import DataError, NodeError
from litgpt_demo.storage import MANIFEST, ObjectInfo, Storage, crc32c_of
from litgpt_demo.storage.base import copy_with_crc, is_remote

T = TypeVar("T")
Manifest = TypeVar("Manifest", bound=Settings)
_adapter = cache(TypeAdapter)

MOST_BYTES = 64 << 20
"""Bytes of the largest document that is parsed. The manifest of 100,000 files takes 20 MB."""


@dataclass
class Unreadable:
    """A count of the things that a node wrote and nobody can read, and the first of them: to be said once."""

    what: str
    """The things, in the plural: `lines of metrics`."""
    count: int = 0
    first: str = ""

    def add(self, why: str) -> None:
        """Count one more."""
        self.count += 1
        self.first = self.first or why

    def __str__(self) -> str:
        """Return the sentence; empty where there is nothing to say."""
        return f"{self.count:,} {self.what} could not be read; the first: {self.first}" if self.count else ""


def parse_json(content: bytes, kind: type[T], *, where: str, fix: str) -> T:
    """The value that stored bytes hold, with their seal taken off if they have one; `kind` is a pydantic model, a
    dataclass, or a type such as `dict[str, Any]`. Else a DataError with the address `where` and the advice `fix`.
    """
    if len(content) > MOST_BYTES:
        raise DataError(f"{where} has {len(content):,} bytes, and no document of ours has {MOST_BYTES:,}; {fix}")
    try:
        text = _without_checksum(content)
        value: T = _adapter(cast(Any, kind)).validate_json(text)
        if re.search(rb"\d{20}", text):
            json.loads(text, parse_int=_whole)
    except ValidationError as error:
        name = "JSON object" if kind.__module__ == "builtins" else kind.__name__
        problems = f"{error.error_count()} problems, first: {first_problem(error)}"
        raise DataError(f"{where} is not a valid {name} of this version ({problems}); {fix}") from error
    except ValueError as error:
        raise DataError(f"{where} is not as it was written: {error}; {fix}") from error
    return value


def first_problem(error: ValidationError) -> str:
    """Return what is wrong first, and where. The names of unknown fields are theirs who wrote them: they are cut."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"])).encode(errors="backslashreplace").decode()
    return f"{first['msg'][:500]}{f' at {place[:100]}' if place else ''}"


def _whole(digits: str) -> int:
    """A number that Python also prints, divides and makes a float, which it refuses to do with one of many digits."""
    if len(digits) > 20:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    return int(digits)


ChecksummedKind: TypeAlias = Literal["manifest", "config", "record"]

# The last line of a document is the checksum of what is before it, because nothing else vouches for it.
_NAMES = "|".join(get_args(ChecksummedKind))
_SEAL = re.compile(rf'(?P<text>.*),\n "(?:{_NAMES})_crc32c": "(?P<crc32c>[0-9a-f]{{8}})"\n\}}'.encode(), re.DOTALL)


def with_checksum(text: bytes, name: ChecksummedKind) -> bytes:
    """Return a JSON object, written with an indent of 1, with `<name>_crc32c` as its last member."""
    inside = text.removesuffix(b"\n}")
    return b'%s,\n "%s_crc32c": "%s"\n}' % (inside, name.encode(), _crc32c(inside))


def _without_checksum(content: bytes) -> bytes:
    """The document without its last line. One of an older version has none, and one that lost it is no JSON."""
    if (seal := _SEAL.fullmatch(content)) is None:
        return content
    if (found := _crc32c(seal["text"])) != seal["crc32c"]:
        raise ValueError(f"it says that its crc32c is {seal['crc32c'].decode()}, and it is {found.decode()}")
    return seal["text"] + b"\n}"


def _crc32c(text: bytes) -> bytes:
    return copy_with_crc(io.BytesIO(text))[1].encode()


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
_ANEW = "remove that folder: a dataset is prepared anew, a training goes on from the checkpoint before"


def read_manifest(storage: Storage, kind: type[Manifest]) -> Manifest | None:
    """The manifest of the folder that `storage` stands on, or None: then whatever lies there is not done."""
    try:
        content = storage.read(MANIFEST)
    except FileNotFoundError:
        return None
    return parse_json(content, kind, where=storage.address(MANIFEST), fix=f"remove {storage.address()} and run again")


def write_manifest(storage: Storage, manifest: Settings) -> ObjectInfo:
    """Commit the folder: every file the manifest names must be there already."""
    return storage.write(MANIFEST, with_checksum(manifest.model_dump_json(indent=1).encode(), "manifest"))


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


def fetch_verified(
    storage: Storage, records: Iterable[FileRecord], scratch: Callable[[], Path], fix: str = _ANEW
) -> Path:
    """A local folder with all `records` of the folder that `storage` stands on, every byte verified.

    A local folder is verified where it is; of a bucket's files those are fetched into `scratch()` that are not there.
    A DataError where a second reading, by another way, finds files damaged too; a NodeError where it finds none.
    """
    records, failed = list(records), list[str]()
    if (folder := storage.local_path()) is None:
        folder = scratch()

        def fetch(record: FileRecord) -> None:
            try:
                if _difference(folder, record) is not None:
                    storage.download(record.path, folder / record.path)
            except FileNotFoundError as error:
                raise DataError(f"{storage.address(record.path)} is missing, but its manifest lists it") from error
            except DataError as error:  # other bytes than the bucket has, again and again
                failed.append(str(error))

        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            list(pool.map(fetch, records))
    if wrong := differences(folder, records):
        doubted = [record for record in records if any(line.startswith(f"{folder / record.path} ") for line in wrong)]
        if all(at_rest(storage, record.path) == (record.size, record.crc32c) for record in doubted):
            raise misread(storage.address(), "; ".join(failed or wrong))
        raise DataError(f"{storage.address()} is not what its manifest says: {'; '.join(wrong)}", fix=fix)
    return folder


def at_rest(storage: Storage, path: str) -> tuple[int, str] | None:
    """Size and crc32c of a stored file, by another way than to fetch it; None if it is missing.

    A bucket says them itself. A folder's file is read again, from its disk where this machine can forget its content.
    """
    local = storage.local_path(path)
    try:
        if local is not None and hasattr(os, "posix_fadvise"):
            with local.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        stored = storage.stat(path)
    except FileNotFoundError:
        return None
    return stored.size, stored.crc32c


def misread(address: str, what: str) -> NodeError:
    """Return the error of a machine that reads other bytes than are stored."""
    proof = "the bucket itself says that they are as" if is_remote(address) else "read once more, they are as"
    problem = f"this machine reads files of {address} wrongly: {what}; {proof} the manifest has them"
    return NodeError(problem, fix="run elsewhere, and have this machine's disk, memory and network looked at")
