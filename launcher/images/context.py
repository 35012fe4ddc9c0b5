"""The context of `docker build`: the files that .dockerignore leaves, in a tar that is the same everywhere.

The tar is written by us and not by the docker command, so that what is hashed is what is built, byte for byte.
Owners, times and permissions (but for "executable") are left out, as in git: checkouts of one commit differ in them.
"""

from __future__ import annotations

import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from e2b_dockerfile_utils import PatternMatcher

DOCKERFILE = "Dockerfile.train-litgpt"
"""Name of the Dockerfile within the tar: it may come from outside the context."""

# 1980-01-02: zip files, hence wheels built in the image, cannot hold earlier times.
_TIME = 315_619_200


def context_paths(context: Path, ignored: Sequence[str] = ()) -> list[str]:
    """Files and links of the context that are not ignored, sorted; folders are made by what is in them, as in git."""
    return sorted(walk(context, read_ignore_file(context, after=ignored)))


def read_ignore_file(context: Path, *, after: Sequence[str] = ()) -> PatternMatcher:
    """Return the rules of the context's .dockerignore. The file itself is never sent: it acts by its rules alone.

    Args:
        after: patterns that come after the file's own, which therefore cannot take them back (`!pattern`).

    Raises:
        ValueError: the file is not UTF-8, or a line of it is not a pattern.
    """
    file = context / ".dockerignore"
    lines = file.read_text("utf-8-sig").splitlines() if file.exists() else []
    return PatternMatcher([*lines, *after, file.name])


def walk(context: Path, rules: PatternMatcher, folder: str = "") -> Iterator[str]:
    """Yield the files and links below `folder` that the rules leave, in no order."""
    with os.scandir(context / folder) as entries:
        for entry in entries:
            path = posixpath.join(folder, entry.name)
            out = rules.matches(path)
            if entry.is_dir(follow_symlinks=False):
                if not out or rules.may_match_under(path):
                    yield from walk(context, rules, path)
            elif not out and (entry.is_symlink() or entry.is_file()):
                yield path


def write_context(context: Path, dockerfile: str, *, ignored: Sequence[str] = (), to: BinaryIO | None = None) -> str:
    """Write the tar that the engine gets, or only pretend to; returns its sha256, in hex.

    Args:
        ignored: further lines of the .dockerignore.

    Raises:
        OSError: the context or one of its files cannot be read.
        ValueError: its .dockerignore is not UTF-8, or a line of it is not a pattern.
    """
    sink = _Hashing(to)
    with _archive(sink) as tar:
        for path in context_paths(context, ignored):
            _add(tar, context / path, path)
        text = dockerfile.encode()
        tar.addfile(_entry(DOCKERFILE, size=len(text)), io.BytesIO(text))
    return sink.hash.hexdigest()


def write_files(folder: Path, paths: Iterable[str], *, to: BinaryIO) -> str:
    """Write a tar of these files of a folder, what a link leads to in its place; returns its sha256, in hex.

    Raises:
        OSError: one of them cannot be read.
    """
    sink = _Hashing(to)
    with _archive(sink) as tar:
        for path in paths:
            _add_file(tar, folder / path, path)
    return sink.hash.hexdigest()


def _archive(sink: _Hashing) -> tarfile.TarFile:
    return tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT)  # type: ignore[call-overload,no-any-return]


def append_file(tar: BinaryIO, name: str, content: bytes) -> None:
    """Add a file to a tar that `write_context` wrote: one that the build needs and that its result does not hold."""
    with tarfile.open(fileobj=tar, mode="a", format=tarfile.PAX_FORMAT) as opened:
        opened.addfile(_entry(name, size=len(content)), io.BytesIO(content))


def _add(tar: tarfile.TarFile, file: Path, path: str) -> None:
    if file.is_symlink():
        entry = _entry(path, mode=0o777)
        entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(file)  # noqa: PTH115 (the text, not a path)
        tar.addfile(entry)
    else:
        _add_file(tar, file, path)


def _add_file(tar: tarfile.TarFile, file: Path, path: str) -> None:
    with file.open("rb") as content:
        status = os.fstat(content.fileno())
        mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        tar.addfile(_entry(path, size=status.st_size, mode=mode), content)


def _entry(path: str, *, size: int = 0, mode: int = 0o644) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode, entry.mtime = size, mode, _TIME
    return entry


class _Hashing:
    """A file to write to that hashes what goes through it."""

    def __init__(self, to: BinaryIO | None) -> None:
        self.hash = sha256()
        self._to = to

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        if self._to is not None:
            self._to.write(data)
        return len(data)
