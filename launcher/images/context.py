"""The input of a builder: a build, and its context, which is a tar of the files that .dockerignore does not exclude.

This module writes the tar, not the builder, so that the hashed bytes are the bytes that are built.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from e2b_dockerfile_utils import PatternMatcher

from launcher.errors import ImageProblem
from litgpt_demo.storage import open_storage

DOCKERFILE = "Dockerfile.train-litgpt"
"""Name of the Dockerfile within the tar: it may come from outside the context."""

TIME = 315_619_200
"""1980-01-02, the time of all that is built: zip files, hence wheels built in the image, cannot hold earlier times."""

Log = Callable[[str], None]
Pause = Callable[[float], None]
"""Wait N seconds; raises where the build must stop."""


class Context:
    """The files of a build, as they were when this was made. `ignored` are further lines of .dockerignore. Neither the
    result nor the digest contains `pip_config`, which may hold a password."""

    def __init__(
        self, folder: Path, dockerfile: Path, *, ignored: Sequence[str] = (), pip_config: str | None = None
    ) -> None:
        self.folder, self.dockerfile, self.ignored, self.pip_config = folder, dockerfile, ignored, pip_config
        self.digest = self._write(None)
        """The sha256 of the tar, in hex."""

    def _write(self, to: IO[bytes] | None) -> str:
        try:
            paths = sorted(walk(self.folder, read_ignore_file(self.folder, after=self.ignored)))
            dockerfile = {DOCKERFILE: self.dockerfile.read_text("utf-8").encode()}
            digest = write_files(self.folder, paths, to=to, links=True, more=dockerfile)
            if to is not None and self.pip_config is not None:
                content = Path(self.pip_config).read_bytes()
                to.seek(0)
                with tarfile.open(fileobj=to, mode="a", format=tarfile.PAX_FORMAT) as opened:
                    opened.addfile(_entry("pip.conf", size=len(content)), io.BytesIO(content))
            return digest
        except (OSError, ValueError) as error:
            fix = f"fix the path, permission or pattern, or list the file in {self.folder / '.dockerignore'}"
            raise ImageProblem(f"the build context cannot be read: {error}; {fix}") from error

    @contextmanager
    def tar(self) -> Iterator[IO[bytes]]:
        """Yield the tar as a file; an ImageProblem if the files are others by now."""
        with tempfile.TemporaryFile() as tar:
            if self._write(tar) != self.digest:
                what = f"files in {str(self.folder)!r} change while an image is built from them"
                raise ImageProblem(f"{what}; wait, then build again")
            tar.seek(0)
            yield tar

    def store(self, root: str) -> str:
        """Put the tar, compressed, below a root under the name of its hash, unless it is there; returns its address."""
        storage, path = open_storage(root), f"images/contexts/{self.digest}.tar.gz"
        if not storage.exists(path):
            with self.tar() as tar, tempfile.NamedTemporaryFile() as file:
                # The same bytes from the same tar: no name and no time in the header.
                with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed:
                    shutil.copyfileobj(tar, packed)
                file.flush()
                storage.upload(Path(file.name), path)
        return storage.address(path)


@dataclass(frozen=True, kw_only=True)
class Build:
    """One image to be built: every builder makes the same of it."""

    tag: str
    """`repository:content hash`; the hash covers all inputs of the image."""
    context: Context
    platform: str
    """Operating system and processor: linux/amd64."""
    args: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def content_hash(self) -> str:
        return self.tag.rpartition(":")[2]


def read_ignore_file(context: Path, *, after: Sequence[str] = ()) -> PatternMatcher:
    """Return the rules of the context's .dockerignore, which is never sent itself. Patterns of `after` come last, so
    that the file cannot take them back (`!pattern`)."""
    file = context / ".dockerignore"
    lines = file.read_text("utf-8-sig").splitlines() if file.exists() else []
    return PatternMatcher([*lines, *after, file.name])


def walk(context: Path, rules: PatternMatcher, folder: str = "") -> Iterator[str]:
    """Yield the files and links below `folder` that the rules leave, in no order; no folders, as in git."""
    with os.scandir(context / folder) as entries:
        for entry in entries:
            path = posixpath.join(folder, entry.name)
            out = rules.matches(path)
            if entry.is_dir(follow_symlinks=False):
                if not out or rules.may_match_under(path):
                    yield from walk(context, rules, path)
            elif not out and (entry.is_symlink() or entry.is_file()):
                yield path


def write_files(
    folder: Path, paths: Iterable[str], *, to: IO[bytes] | None, links: bool, more: Mapping[str, bytes]
) -> str:
    """Write a tar of these files of a folder, or only pretend to; returns its sha256, in hex. With `links` a link is
    written as one, and not what it leads to in its place. `more` are files that follow."""
    digest = sha256()

    class Hashing(io.RawIOBase):
        def write(self, data: Any) -> int:
            digest.update(data)
            return len(data) if to is None else to.write(data)

    with tarfile.open(fileobj=Hashing(), mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in paths:
            file = folder / path
            if links and file.is_symlink():
                entry = _entry(path, mode=0o777)
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(file)  # noqa: PTH115 (the text, not a path)
                tar.addfile(entry)
                continue
            with file.open("rb") as content:
                status = os.fstat(content.fileno())
                mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
                tar.addfile(_entry(path, size=status.st_size, mode=mode), content)
        for name, text in more.items():
            tar.addfile(_entry(name, size=len(text)), io.BytesIO(text))
    return digest.hexdigest()


def _entry(path: str, *, size: int = 0, mode: int = 0o644) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode, entry.mtime = size, mode, TIME
    return entry
