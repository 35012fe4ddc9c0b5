"""JSON documents on a disk or in a bucket: written with a checksum, and read in one way.

A document may have been truncated, changed by a failing disk, edited, or written by another version. The errors of
`parse_json` name its address.
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
    """A count of items that could not be read, and the reason for the first one, for one message."""

    what: str
    """The items, in the plural: `lines of metrics`."""
    count: int = 0
    first: str = ""

    def add(self, why: str) -> None:
        """Count one more."""
        self.count += 1
        self.first = self.first or why

    def __str__(self) -> str:
        """Return the message; empty if all items could be read."""
        if not self.count:
            return ""
        return f"{self.count:,} {self.what} could not be read; the first: {self.first}"


def parse_json(content: bytes, kind: type[T], *, where: str, fix: str) -> T:
    """Return the value of a stored document, after a check of its checksum if it has one.

    `kind` is a pydantic model, a dataclass, or a type such as `dict[str, Any]`. A DataError, with the address `where`
    and the advice `fix`, if the document is damaged or of another kind.
    """
    if len(content) > MOST_BYTES:
        raise DataError(f"{where} has {len(content):,} bytes, but a document may have at most {MOST_BYTES:,}; {fix}")
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
    """Return the first problem and its place. Names of unknown fields may be of any length, so they are cut."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    message = first["msg"][:500]
    place = ".".join(map(str, first["loc"])).encode(errors="backslashreplace").decode()
    if place:
        message += f" at {place[:100]}"
    return message


def _whole(digits: str) -> int:
    """Return an integer that Python can also print and divide, which it refuses for one of many digits."""
    if len(digits) > 20:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    return int(digits)


ChecksummedKind: TypeAlias = Literal["manifest", "config", "record"]

# The last line of a document is the checksum of the text before it, because nothing else lists that checksum.
_NAMES = "|".join(get_args(ChecksummedKind))
_CHECKSUM_LINE = re.compile(
    rf'(?P<text>.*),\n "(?:{_NAMES})_crc32c": "(?P<crc32c>[0-9a-f]{{8}})"\n\}}'.encode(), re.DOTALL
)


def with_checksum(text: bytes, name: ChecksummedKind) -> bytes:
    """Return a JSON object, written with an indent of 1, with `<name>_crc32c` as its last member."""
    inside = text.removesuffix(b"\n}")
    return b'%s,\n "%s_crc32c": "%s"\n}' % (inside, name.encode(), _crc32c(inside))


def _without_checksum(content: bytes) -> bytes:
    """Return the document without its checksum, after a check. One that lost its last line is not JSON."""
    match = _CHECKSUM_LINE.fullmatch(content)
    if match is None:
        return content
    crc32c = _crc32c(match["text"])
    if crc32c != match["crc32c"]:
        raise ValueError(f"its crc32c should be {match['crc32c'].decode()}, but it is {crc32c.decode()}")
    return match["text"] + b"\n}"


def _crc32c(text: bytes) -> bytes:
    return copy_with_crc(io.BytesIO(text))[1].encode()


class FileRecord(Settings):
    """One file of an output: its path relative to the manifest, and its size and checksums."""

    path: str
    size: int
    """Bytes."""
    crc32c: str
    """Eight lower-case hexadecimal digits."""
    sha256: str | None = None
    """Recorded for files that are compared between machines."""

    @classmethod
    def of(cls, stored: ObjectInfo, *, relative_to: str = "", sha256: str | None = None) -> FileRecord:
        path = stored.path.removeprefix(relative_to).lstrip("/")
        return cls(path=path, size=stored.size, crc32c=stored.crc32c, sha256=sha256)


_FILES_AT_ONCE = 4  # a bucket's large file comes in parallel ranges by itself
_REMOVE = "remove that folder: a dataset is prepared again, a training continues from the checkpoint before"


def read_manifest(storage: Storage, kind: type[Manifest]) -> Manifest | None:
    """Return the manifest of the folder of `storage`; None if the folder is not complete."""
    try:
        content = storage.read(MANIFEST)
    except FileNotFoundError:
        return None
    return parse_json(content, kind, where=storage.address(MANIFEST), fix=f"remove {storage.address()} and run again")


def write_manifest(storage: Storage, manifest: Settings) -> ObjectInfo:
    """Commit the folder. Every file that the manifest lists must exist already."""
    return storage.write(MANIFEST, with_checksum(manifest.model_dump_json(indent=1).encode(), "manifest"))


def differences(folder: Path, records: Iterable[FileRecord]) -> list[str]:
    """Return how the files in `folder` differ from their records, a sentence each; reads every byte, in parallel."""
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        return list(filter(None, pool.map(lambda record: _difference(folder, record), records)))


def _difference(folder: Path, record: FileRecord) -> str | None:
    path = folder / record.path
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != record.size:
        return f"{path} has {size} bytes, but its manifest says {record.size}"
    crc32c = crc32c_of(path)
    if crc32c != record.crc32c:
        return f"{path} has crc32c {crc32c}, but its manifest says {record.crc32c}"
    return None


def fetch_verified(
    storage: Storage, records: Iterable[FileRecord], scratch: Callable[[], Path], fix: str = _REMOVE
) -> Path:
    """Return a local folder with all `records` of the folder of `storage`, every byte verified.

    A local folder is verified in place. Files of a bucket are fetched into `scratch()`, unless they are there already.
    Damaged files are read a second time by another way: a DataError if it finds them damaged too, else a NodeError.
    """
    records, failed = list(records), list[str]()
    folder = storage.local_path()
    if folder is None:
        folder = scratch()

        def fetch(record: FileRecord) -> None:
            try:
                if _difference(folder, record) is not None:
                    storage.download(record.path, folder / record.path)
            except FileNotFoundError as error:
                raise DataError(f"{storage.address(record.path)} is missing, but its manifest lists it") from error
            except DataError as error:  # repeatedly other bytes than those in the bucket
                failed.append(str(error))

        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            list(pool.map(fetch, records))
    wrong = differences(folder, records)
    if not wrong:
        return folder
    suspects = [record for record in records if any(line.startswith(f"{folder / record.path} ") for line in wrong)]
    if all(at_rest(storage, record.path) == (record.size, record.crc32c) for record in suspects):
        raise misread(storage.address(), "; ".join(failed or wrong))
    raise DataError(f"{storage.address()} is not what its manifest says: {'; '.join(wrong)}", fix=fix)


def at_rest(storage: Storage, path: str) -> tuple[int, str] | None:
    """Return size and crc32c of a stored file, by another way than fetching it; None if it is missing.

    A bucket lists them. A file in a folder is read again, from its disk if this machine can drop its cached content.
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
    proof = "the bucket lists them as" if is_remote(address) else "read again, they are as"
    problem = f"this machine reads files of {address} wrongly: {what}; {proof} the manifest has them"
    return NodeError(problem, fix="run elsewhere, and check this machine's disk, memory and network")
