"""The verbs of a storage, what is an address and a path, and checksums.

A crc32c is written as 8 lower-case hex digits.
"""

from __future__ import annotations

import errno
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import file_digest
from pathlib import Path
from typing import BinaryIO, TypeAlias

import google_crc32c

from litgpt_demo.errors import TooLarge, UserError

SCHEME = "gs://"

EMPTY = "00000000"
"""The crc32c of no bytes."""

_BLOCK = 1 << 20
_POLYNOMIAL = 0x82F63B78  # RFC 3720 B.4, reflected: bit 31 is the coefficient of x^0

MOST_READ = 1 << 30
"""Bytes of a file that are read into memory. The largest, a dataset's digests, are some 10 MB a shard."""

Names: TypeAlias = list[str]  # inside the classes `list` is a verb

MANIFEST = "manifest.json"
"""The file that says a directory is complete: written last by the process that fills it, removed first here."""


@dataclass(frozen=True)
class ObjectInfo:
    path: str
    """Relative to the storage's root, with `/`."""
    size: int
    crc32c: str


Inventory: TypeAlias = list[ObjectInfo]


@dataclass(frozen=True)
class ReadCursor:
    """A position in a growing file: the number of bytes before it, and their checksum."""

    size: int = 0
    crc32c: str = EMPTY

    def after(self, data: bytes) -> ReadCursor:
        """Return the position behind `data`, which begins at this one."""
        return ReadCursor(self.size + len(data), f"{google_crc32c.extend(int(self.crc32c, 16), data):08x}")


@dataclass(frozen=True)
class Storage(ABC):
    """A root and the files below it. Paths are relative to the root and use `/`.

    Every verb raises UserError for a path that leaves the root, and where the disk or the bucket refuses; DiskFull,
    NodeError for a broken disk, and NetworkError. A missing file is a FileNotFoundError with its full address. Bytes
    that stay wrong on their way, or change while they are read, are a DataError; the target keeps its old content.
    """

    root: str
    """An absolute local path, or gs://bucket/prefix without a trailing slash."""
    durable: bool = True
    """True if finished writes outlast a loss of power. False is faster, for files whose checksums are compared before
    anything is built on them; a bucket has no such choice."""
    patience: float = 600.0
    """Seconds without a good answer after which a bucket's request fails; real outages outlast the client's 120 s."""

    def address(self, path: str = "") -> str:
        """Return the root joined with `path`, as `open_storage` takes it."""
        below = clean_path(path)
        return f"{self.root.rstrip('/')}/{below}" if below else self.root

    def within(self, path: str) -> Storage:
        """Return the storage whose root is `address(path)`."""
        return replace(self, root=self.address(path))

    @abstractmethod
    def local_path(self, path: str = "") -> Path | None:
        """Return the path of `address(path)` on this machine; None for a bucket."""

    @abstractmethod
    def list(self, prefix: str = "") -> Names:
        """Return every file below the folder `prefix`, relative to the root and sorted; no unfinished ones."""

    @abstractmethod
    def inventory(self, prefix: str = "", *, odd: bool = False) -> Inventory:
        """Return the files of `list` with sizes and checksums: one request to a bucket; local files are read.

        With `odd`, include objects of a bucket that no path spells (`a//b`, a line break); no verb takes those names.
        """

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether there is a file at `path`; a folder is not one."""

    @abstractmethod
    def read(self, path: str, *, most: int = MOST_READ) -> bytes:
        """Return the content; a file of more than `most` bytes is not read (TooLarge)."""

    @abstractmethod
    def read_from(self, path: str, position: ReadCursor, *, most: int = MOST_READ) -> tuple[ReadCursor, bytes]:
        """Return at most `most` bytes behind `position`, and where they begin: there, or at 0 if the file was replaced.

        Nothing is read twice, or if the file has not changed. A bucket's checksum shows a replaced file, when the last
        bytes are read; a local file is known to be replaced only if it is shorter.
        """

    @abstractmethod
    def write(self, path: str, data: bytes) -> ObjectInfo:
        """Put `data` at `path`, replacing any file. Folders need not be made first."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Put `data` at `path` if no file exists; return whether it was put.

        Of several callers at once exactly one puts its data, provided that theirs differ. A caller that repeats the
        request because the answer was lost gets True.
        """

    @abstractmethod
    def stat(self, path: str) -> ObjectInfo:
        """Return size and checksum; a local file is read for it."""

    @abstractmethod
    def upload(self, source: Path, path: str, *, move: bool = False, is_new: bool = False) -> ObjectInfo:
        """Put the content of a local file at `path`; with `move`, `source` is gone, on one file system by a rename.

        `is_new` states that the path is the caller's own and still free: a bucket is sent the content at once.
        """

    @abstractmethod
    def download(self, path: str, target: Path) -> ObjectInfo:
        """Put the file at `path` into the local file `target`, which only the complete, verified content replaces."""

    @abstractmethod
    def join(self, parts: Sequence[str], path: str) -> ObjectInfo:
        """Put the files `parts` behind one another at `path`; the parts stay. No parts make an empty file."""

    @abstractmethod
    def move(self, folder: str, target: str) -> None:
        """Move an existing folder to `target`, which is empty: in one step, or file by file in a bucket."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove the file at `path`, or everything below the folder; absent is success.

        Manifests go first, so that an interrupted removal never leaves a directory that looks complete.
        """

    @abstractmethod
    def remove_unfinished(self) -> None:
        """Remove the partial files of killed writers. A live writer gets a FileNotFoundError and must begin again."""


def is_remote(address: str) -> bool:
    """Return whether the address has a scheme, supported or not, and so is not a path of this machine."""
    return "://" in address


def bucket_path(address: str) -> str | None:
    """Return `bucket/prefix` of an address in a bucket; None for every other address."""
    return address.removeprefix(SCHEME) if address.startswith(SCHEME) else None


def clean_path(path: str) -> str:
    """Return `path` without empty and `.` components; "" is the root."""
    parts = [part for part in path.split("/") if part not in {"", "."}]
    if path.startswith("/") or ".." in parts:
        raise UserError(f"path {path!r} leaves the storage's root; give one relative to the root, without '..'")
    if re.search(r"[\0\r\n]", path):
        raise UserError(f"path {path!r} has a line break or a NUL, which buckets refuse; rename it")
    if parts and is_partial(parts[-1]):
        raise UserError(f"path {path!r} is named like an unfinished write (.*.partial); choose another name")
    return "/".join(parts)


def clean_file(path: str) -> str:
    """Return `clean_path(path)`; a UserError for the root."""
    file = clean_path(path)
    if not file:
        raise UserError(f"path {path!r} is the storage's root itself; name a file below it")
    return file


def checked_remove_path(path: str) -> str:
    # An empty name, or one that ends with a slash, is refused: it would remove the folder above.
    if clean_path(path) != path or not path:
        raise UserError(f"{path!r} is not a path below the root, so it is not removed; give a file or folder below it")
    return path


def is_partial(name: str) -> bool:
    """Return whether a file of this name is still being written: no verb shows or takes it."""
    return name.startswith(".") and name.endswith(".partial")


def require_size(size: int, most: int, address: str) -> None:
    if size > most:
        raise TooLarge(f"{address} has {size:,} bytes, but at most {most:,} are read; check its writer, or remove it")


def absent(address: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "no such file", address)


def content_of(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return copy_with_crc(file)


def crc32c_of(path: Path) -> str:
    return content_of(path)[1]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def copy_with_crc(source: BinaryIO, sink: BinaryIO | None = None) -> tuple[int, str]:
    """Copy `source` to its end into `sink`, if there is one; return the number of bytes and their crc32c."""
    size, crc32c = 0, 0
    while block := source.read(_BLOCK):
        if sink is not None:
            sink.write(block)
        crc32c = google_crc32c.extend(crc32c, block)
        size += len(block)
    return size, f"{crc32c:08x}"


def combine_crc32c(path: str, parts: Iterable[ObjectInfo]) -> ObjectInfo:
    """Return size and checksum of `parts` behind one another, from those of the parts.

    A crc is a remainder of polynomials over GF(2): to put `size` bytes behind a text is to multiply its remainder by
    x^(8 size), and that of the bytes is added, which is xor.
    """
    size, crc32c = 0, 0
    for part in parts:
        square, exponent = 1 << 23, part.size  # x^8
        while exponent:
            if exponent & 1:
                crc32c = _product(square, crc32c)
            square = _product(square, square)
            exponent >>= 1
        size, crc32c = size + part.size, crc32c ^ int(part.crc32c, 16)
    return ObjectInfo(path, size, f"{crc32c:08x}")


def _product(factor: int, shifted: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if factor >> bit & 1:
            product ^= shifted
        shifted = shifted >> 1 ^ _POLYNOMIAL * (shifted & 1)  # times x
    return product
