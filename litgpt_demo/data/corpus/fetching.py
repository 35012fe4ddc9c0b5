"""A corpus's files on this machine, with the very content that was listed."""

from __future__ import annotations

import fcntl
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha1, sha256
from pathlib import Path
from typing import NamedTuple

from litgpt_demo.data.corpus.compression import CHUNK
from litgpt_demo.data.corpus.hub import fetch_from_hub
from litgpt_demo.data.corpus.source import Source
from litgpt_demo.errors import DataError
from litgpt_demo.storage import bucket_path, crc32c_of, open_storage, sha256_of
from litgpt_demo.storage.local import explaining

_SETTLED = 2_000_000_000
"""Nanoseconds after which a file's time of change tells its next change apart: file systems keep some only by the
second or two, and then two writes in a row look like one."""


@contextmanager
def local_copy(source: Source, scratch: Path) -> Iterator[Path]:
    """The file on this machine, verified before it is read and, by its time of change, again afterwards.

    A remote file is fetched into `scratch` and stays there for the next reading. One that another process of this
    machine is fetching already is waited for.

    Raises:
        DataError: it is gone, is not what was listed, or changed while it was read.
        UserError: the Hub or the bucket refuses.
        NetworkError: the Hub or the bucket went away.
        DiskFull: there is no room for it.
    """
    if (path := source.file) is None:
        yield _fetched(source, scratch)
        return
    before = _verified(path, source)
    try:
        yield path
    except (DataError, OSError) as error:
        _require_unchanged(path, source, before, error)
        raise
    _require_unchanged(path, source, before)


# --- fetching ---------------------------------------------------------------------------------------------------------


def _fetched(source: Source, scratch: Path) -> Path:
    """The folder for fetched files, where a download that was killed finds what it had."""
    folder = _folder_of(source, scratch)
    content = folder / "content"
    with explaining(str(scratch), needed=source.size), _alone(folder):
        if not content.exists():
            folder.mkdir(exist_ok=True)
            fetch = fetch_from_hub if bucket_path(source.address) is None else _from_bucket
            fetch(source, folder).rename(content)
        try:
            _verified(content, source)
        except DataError:
            content.unlink()  # so that the next try fetches it anew
            raise
    return content


def forget(sources: Iterable[Source], scratch: Path) -> None:
    """Remove what was fetched of these files; who wants one later fetches it anew."""
    for source in sources:
        folder = _folder_of(source, scratch)
        if source.is_remote and folder.exists():
            with _alone(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _folder_of(source: Source, scratch: Path) -> Path:
    return scratch / "sources" / sha256(f"{source.version} {source.address}".encode()).hexdigest()[:24]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One thread of one process of this machine at a time; a process that dies lets go of the lock."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _from_bucket(source: Source, folder: Path) -> Path:
    parent, _, last = source.address.rpartition("/")
    target = folder / "download"
    try:
        open_storage(parent).download(last, target)
    except FileNotFoundError as error:
        raise _gone(source) from error
    return target


# --- verifying --------------------------------------------------------------------------------------------------------


class _Signature(NamedTuple):
    """The values that tell two states of a local file apart without reading it."""

    size: int
    changed: int
    """Nanoseconds since the epoch."""
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path, source: Source) -> _Signature:
        try:
            found = path.stat()
        except FileNotFoundError as error:
            raise _gone(source) from error
        if not stat.S_ISREG(found.st_mode):
            raise _gone(source)
        return cls(found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev)


def _verified(path: Path, source: Source) -> _Signature:
    """The signature of the file if it holds what `source` says.

    The Hub's client checks sizes only: here the bytes are checked, once per process for a file that stays as it is.
    """
    signature = _Signature.of(path, source)
    algorithm, _, listed = source.version.partition(":")
    settled = time.time_ns() - signature.changed > _SETTLED
    found = _known_checksum(path, algorithm, signature) if settled else _CHECKSUMS[algorithm](path)
    if found != listed:
        raise DataError(
            f"{source.address} has {algorithm} {found} ({signature.size} bytes), listed was {listed} "
            f"({source.size} bytes): it changed meanwhile or came damaged; run again to list it anew"
        )
    return signature


def _require_unchanged(path: Path, source: Source, before: _Signature, cause: Exception | None = None) -> None:
    if _verified(path, source) != before:
        raise DataError(
            f"{source.address} was written anew while it was read, so that what was read may be neither the old nor "
            "the new text: it changed meanwhile; run again to list it anew"
        ) from cause


def _gone(source: Source) -> DataError:
    return DataError(f"{source.address} was there when the corpus was listed and is gone; run again to list it anew")


@cache
def _known_checksum(path: Path, algorithm: str, signature: _Signature) -> str:
    return _CHECKSUMS[algorithm](path)


def _git_blob_of(path: Path) -> str:
    """The id that git gives a file: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects, "Object Storage"."""
    blob = sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)  # git's own choice
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            blob.update(chunk)
    return blob.hexdigest()


_CHECKSUMS: dict[str, Callable[[Path], str]] = {"crc32c": crc32c_of, "sha256": sha256_of, "git": _git_blob_of}
