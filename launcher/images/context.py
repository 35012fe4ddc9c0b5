"""The context of a build: the files that .dockerignore leaves, in a tar that is the same everywhere.

The tar is written by us and not by the builder, so that what is hashed is what is built, byte for byte.
Owners, times and permissions (but for "executable") are left out, as in git: checkouts of one commit differ in them.
"""

from __future__ import annotations

import gzip
import io
import os
import posixpath
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Self, cast

from e2b_dockerfile_utils import PatternMatcher

from launcher.errors import ImageProblem
from litgpt_demo.storage import open_storage

DOCKERFILE = "Dockerfile.train-litgpt"
"""Name of the Dockerfile within the tar: it may come from outside the context."""

TIME = 315_619_200
"""1980-01-02, the time of all that is built: zip files, hence wheels built in the image, cannot hold earlier times."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """The files of a build, as they were when they were hashed."""

    folder: Path
    dockerfile: Path
    digest: str
    """The sha256 of the tar, in hex."""
    ignored: tuple[str, ...] = ()
    """Lines after those of the folder's .dockerignore."""
    pip_config: Path | None = None
    """A pip.conf that the build needs, and neither its result holds nor the digest counts: it may hold a password."""

    @classmethod
    def of(
        cls, folder: Path, dockerfile: Path, *, ignored: tuple[str, ...] = (), pip_config: Path | None = None
    ) -> Self:
        """Hash the context.

        Raises:
            ImageProblem: folder or Dockerfile cannot be read.
        """
        digest = _written(folder, dockerfile, ignored, to=None)
        return cls(folder=folder, dockerfile=dockerfile, digest=digest, ignored=ignored, pip_config=pip_config)

    @contextmanager
    def tar(self) -> Iterator[BinaryIO]:
        """Yield the tar as a file.

        Raises:
            ImageProblem: the files are others by now.
        """
        with tempfile.TemporaryFile() as file:
            tar = cast("BinaryIO", file)
            if _written(self.folder, self.dockerfile, self.ignored, to=tar) != self.digest:
                raise ImageProblem(
                    f"files in {str(self.folder)!r} change while an image is built from them; wait, then build again"
                )
            if self.pip_config is not None:
                _append_file(tar, "pip.conf", _read_pip_config(self.pip_config))
            tar.seek(0)
            yield tar

    def store(self, root: str) -> str:
        """Put the tar, compressed, below a root under the name of its hash, unless it is there; returns its address.

        Raises:
            ImageProblem: the files are others by now, or one of them is not to be stored.
            TrainLitgptError: the root cannot be written.
        """
        if self.pip_config is not None:
            raise ImageProblem(
                f"image.pip_config={str(self.pip_config)!r} may hold a password, and would be stored in {root} for the "
                "builder; build with image.kind=docker, or leave it out"
            )
        storage, path = open_storage(root), f"images/contexts/{self.digest}.tar.gz"
        if not storage.exists(path):
            with self.tar() as tar, tempfile.NamedTemporaryFile() as file:
                # The same bytes from the same tar: no name and no time in the header.
                with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed:
                    shutil.copyfileobj(tar, packed)
                file.flush()
                storage.upload(Path(file.name), path)
        return storage.address(path)


def _read_pip_config(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ImageProblem(f"image.pip_config={str(path)!r} cannot be read: {error.strerror}; fix the path") from error


def _written(folder: Path, dockerfile: Path, ignored: Sequence[str], *, to: BinaryIO | None) -> str:
    try:
        return write_context(folder, dockerfile.read_text("utf-8"), ignored=ignored, to=to)
    except (OSError, ValueError) as error:
        raise ImageProblem(
            f"the build context cannot be read: {error}; fix the path, the permission or the pattern, "
            f"or name the file in {folder / '.dockerignore'}"
        ) from error


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


def _append_file(tar: BinaryIO, name: str, content: bytes) -> None:
    """Add a file to a tar that `write_context` wrote: one that the build needs and that its result does not hold."""
    tar.seek(0)
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
    entry.size, entry.mode, entry.mtime = size, mode, TIME
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
