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
from typing import TypeAlias

from litgpt_demo.data.corpus.files import CHUNK, Source
from litgpt_demo.data.corpus.hub import fetch_from_hub
from litgpt_demo.errors import DataError
from litgpt_demo.storage import bucket_path, crc32c_of, open_storage, sha256_of
from litgpt_demo.storage.local import explaining

_SETTLED = 2_000_000_000
"""Nanoseconds after which a file's time of change tells its next change apart: file systems keep some only by the
second or two, and then two writes in a row look like one."""

_Signature: TypeAlias = tuple[int, int, int, int]
"""Tells two states of a local file apart without reading it: size, nanoseconds of its change, inode, device."""


@contextmanager
def local_copy(source: Source, scratch: Path) -> Iterator[Path]:
    """The file on this machine, verified before it is read and, by its time of change, again afterwards.

    A remote file is fetched into `scratch` and stays there for the next reading. One that another process of this
    machine is fetching already is waited for. One that is gone, is not what was listed or changes meanwhile is a
    DataError.
    """
    if (path := source.file) is None:
        yield _fetched(source, scratch)
        return
    before = _verified(path, source)
    changed = DataError(
        f"{source.address} was written anew while it was read, so that what was read may be neither the old nor "
        "the new text: it changed meanwhile; run again to list it anew"
    )
    try:
        yield path
    except (DataError, OSError) as error:
        if _verified(path, source) != before:
            raise changed from error
        raise
    if _verified(path, source) != before:
        raise changed


def _fetched(source: Source, scratch: Path) -> Path:
    folder = _folder_of(source, scratch)  # where a download that was killed finds what it had
    content = folder / "content"
    with explaining(str(scratch), needed=source.size), _alone(folder):
        if not content.exists():
            folder.mkdir(exist_ok=True)
            fetch = fetch_from_hub if bucket_path(source.address) is None else _fetch_from_bucket
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


def _fetch_from_bucket(source: Source, folder: Path) -> Path:
    parent, _, last = source.address.rpartition("/")
    try:
        open_storage(parent).download(last, folder / "download")
    except FileNotFoundError as error:
        raise _gone(source) from error
    return folder / "download"


def _verified(path: Path, source: Source) -> _Signature:
    """The signature of the file if it holds what `source` says.

    The Hub's client checks sizes only: here the bytes are checked, once per process for a file that stays as it is.
    """
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise _gone(source) from error
    if not stat.S_ISREG(found.st_mode):
        raise _gone(source)
    signature = found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev
    algorithm, _, listed = source.version.partition(":")
    settled = time.time_ns() - found.st_mtime_ns > _SETTLED
    checksum = _known_checksum(path, algorithm, signature) if settled else _CHECKSUMS[algorithm](path)
    if checksum != listed:
        raise DataError(
            f"{source.address} has {algorithm} {checksum} ({found.st_size} bytes), listed was {listed} "
            f"({source.size} bytes): it changed meanwhile or came damaged; run again to list it anew"
        )
    return signature


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
