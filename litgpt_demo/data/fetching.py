"""The files of a corpus on this machine: fetched where they are remote, and compared with their listed checksums."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import file_digest, sha1, sha256
from pathlib import Path

from litgpt_demo.data.hub import download_from_hub
from litgpt_demo.data.readers import MOST_POINTER, Source, refuse_lfs_pointer
from litgpt_demo.errors import DataError
from litgpt_demo.storage import crc32c_of, open_storage, sha256_of
from litgpt_demo.storage.local import translate_os_errors

# Nanoseconds after which the next change gives a file another time of change: file systems keep some only by the second
# or two, and then two writes in a row look like one.
_SETTLED = 2_000_000_000


@contextmanager
def local_copy(source: Source, scratch: Path) -> Iterator[Path]:
    """Yield the file's path on this machine, verified before it is read and, by its time of change, again afterwards.

    A remote file is fetched into `scratch` and stays there for the next reading. If another process of this machine is
    fetching it already, this one waits. A DataError for a file that is gone, is not what was listed, or changes
    meanwhile.
    """
    if source.file is None:
        yield _fetched(source, scratch)
        return
    signature = verify_checksum(source.file, source)
    try:
        yield source.file
    except (DataError, OSError):
        verify_checksum(source.file, source, signature)  # a change of the file explains the error better
        raise
    verify_checksum(source.file, source, signature)


def _fetched(source: Source, scratch: Path) -> Path:
    folder = _folder_of(source, scratch)  # a download that was killed left its part there
    content = folder / "content"
    fetch = _FETCHERS[source.address.partition("://")[0]]
    with translate_os_errors(str(scratch), needed=source.size), _file_lock(folder):
        if not content.exists():
            folder.mkdir(exist_ok=True)
            fetch(source, content)
        try:
            verify_checksum(content, source)
            with content.open("rb") as file:
                refuse_lfs_pointer(file.read(MOST_POINTER), source.address)
        except DataError:
            content.unlink(missing_ok=True)  # so that the next try fetches it again
            raise
    return content


def _fetch_from_bucket(source: Source, content: Path) -> None:
    folder, _, name = source.address.rpartition("/")
    with suppress(FileNotFoundError):  # the verification says that it is gone
        open_storage(folder).download(name, content)


def _fetch_from_hub(source: Source, content: Path) -> None:
    download_from_hub(source, content.parent).rename(content)


_FETCHERS: dict[str, Callable[[Source, Path], None]] = {"gs": _fetch_from_bucket, "hf": _fetch_from_hub}


def forget(sources: Iterable[Source], scratch: Path) -> None:
    for source in sources:
        folder = _folder_of(source, scratch)
        if source.file is None and folder.exists():
            with _file_lock(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _folder_of(source: Source, scratch: Path) -> Path:
    return scratch / "sources" / sha256(f"{source.version} {source.address}".encode()).hexdigest()[:24]


@contextmanager
def _file_lock(folder: Path) -> Iterator[None]:
    """Admit one thread of one process of this machine at a time. A process that dies releases the lock."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


Signature = tuple[int, int, int, int]
"""The size, time of change, inode and device of a file: they change when the file does, and take no reading."""


def verify_checksum(path: Path, source: Source, expected: Signature | None = None) -> Signature:
    """Return the file's signature if it and the content are as expected; an unchanged file is read once a process."""
    if not path.is_file():
        raise DataError(f"{source.address} was removed after the corpus was listed; run again")
    status = path.stat()
    signature = status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev
    algorithm, _, listed = source.version.partition(":")
    if time.time_ns() - status.st_mtime_ns > _SETTLED:
        checksum = _known_checksum(path, algorithm, signature)
    else:
        checksum = CHECKSUMS[algorithm](path)
    if checksum != listed:
        raise DataError(
            f"{source.address} has {algorithm} {checksum} ({status.st_size} bytes), but {listed} ({source.size} bytes) "
            "was listed: it has changed, or was damaged on its way here; run again"
        )
    if expected not in {None, signature}:  # what was read may be neither the old nor the new text
        raise DataError(f"{source.address} was rewritten while it was read; run again")
    return signature


@cache
def _known_checksum(path: Path, algorithm: str, signature: Signature) -> str:
    return CHECKSUMS[algorithm](path)


def _git_blob_of(path: Path) -> str:
    """Return git's id of a file: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects, "Object Storage"."""
    blob = sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)  # git's own choice
    with path.open("rb") as file:
        return file_digest(file, lambda: blob).hexdigest()


CHECKSUMS: dict[str, Callable[[Path], str]] = {"crc32c": crc32c_of, "sha256": sha256_of, "git": _git_blob_of}
"""The checksums that buckets and the Hub list, computed of a local file."""
