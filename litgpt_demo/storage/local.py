"""A storage in a local folder, and how a file is replaced in one step."""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from litgpt_demo.errors import DiskFull, NodeError, UserError
from litgpt_demo.storage import base
from litgpt_demo.storage.base import Inventory, Names, ObjectInfo, ReadCursor, Storage

_READERS = 4  # files read at once; more only make one disk seek
# FAT and most FUSE mounts.
_CANNOT_LINK = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK}
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The errors of a full disk, a used-up quota, and a file larger than the file system or the user's limit takes."""
_REFUSED = {
    errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip


@dataclass(frozen=True)
class LocalStorage(Storage):
    """A folder of this machine, or one that is mounted."""

    def local_path(self, path: str = "") -> Path:
        return Path(self.address(path))

    def list(self, prefix: str = "") -> Names:
        root, found = Path(self.root), []

        def unless_gone(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise error

        with translate_os_errors(self.address(prefix)):
            # Symbolic links to folders are followed, because `exists` and `read` follow them too.
            for folder, _, names in os.walk(root / base.clean_path(prefix), followlinks=True, onerror=unless_gone):
                files = (Path(folder, name) for name in names if not base.is_partial(name))
                found += [file.relative_to(root).as_posix() for file in files if file.is_file()]
        return sorted(found)

    def inventory(self, prefix: str = "", *, odd: bool = False) -> Inventory:
        def stat_unless_gone(path: str) -> ObjectInfo | None:
            with suppress(FileNotFoundError):
                return self.stat(path)
            return None

        with ThreadPoolExecutor(_READERS) as pool:
            return [stored for stored in pool.map(stat_unless_gone, self.list(prefix)) if stored]

    def exists(self, path: str) -> bool:
        with translate_os_errors(self.address(path)):
            return self._file(path).is_file()

    def read(self, path: str, *, most: int = base.MOST_READ) -> bytes:
        with translate_os_errors(self.address(path)), self._present(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            base.require_size(size, most, self.address(path))
            return file.read(size)

    def read_from(self, path: str, position: ReadCursor, *, most: int = base.MOST_READ) -> tuple[ReadCursor, bytes]:
        with translate_os_errors(self.address(path)):
            file = self._present(path)
            size = file.stat().st_size
            if size < position.size:
                position = ReadCursor()
            if size == position.size:
                return position, b""
            with file.open("rb") as content:
                content.seek(position.size)
                return position, content.read(min(most, size - position.size))

    def write(self, path: str, data: bytes) -> ObjectInfo:
        final = self._file(path)
        with (
            translate_os_errors(self.address(path), needed=len(data)),
            atomic_write(final, durable=self.durable) as partial,
        ):
            size, crc32c = base.copy_with_crc(io.BytesIO(data), partial)
        return ObjectInfo(base.clean_path(path), size, crc32c)

    def create(self, path: str, data: bytes) -> bool:
        final = self._file(path)
        with translate_os_errors(self.address(path), needed=len(data)):
            try:
                with atomic_write(final, durable=self.durable, take=link) as partial:
                    partial.write(data)
            except FileExistsError:
                if not final.is_file():  # it is a folder, or what should be its folder is a file
                    raise
                return final.read_bytes() == data
        return True

    def stat(self, path: str) -> ObjectInfo:
        with translate_os_errors(self.address(path)), self._present(path).open("rb") as file:
            return ObjectInfo(base.clean_path(path), *base.copy_with_crc(file))

    def upload(self, source: Path, path: str, *, move: bool = False, is_new: bool = False) -> ObjectInfo:
        final = self._file(path)
        with translate_os_errors(str(source)):
            needed = source.stat().st_size
        with translate_os_errors(self.address(path), needed=needed), source.open("rb") as file:
            if move and not source.is_symlink():
                final.parent.mkdir(parents=True, exist_ok=True)
                content = base.copy_with_crc(file)
                if self.durable:
                    os.fsync(file.fileno())
                try:
                    rename(source, final, durable=self.durable)
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
                    file.seek(0)  # across file systems only a copy will do
                else:
                    return ObjectInfo(base.clean_path(path), *content)
            with atomic_write(final, durable=self.durable) as partial:
                content = base.copy_with_crc(file, partial)
            if move:
                source.unlink()
        return ObjectInfo(base.clean_path(path), *content)

    def download(self, path: str, target: Path) -> ObjectInfo:
        with translate_os_errors(self.address(path)):
            source = self._present(path)
            needed = source.stat().st_size
        with (
            translate_os_errors(str(target), needed=needed),
            source.open("rb") as file,
            atomic_write(target) as partial,
        ):
            return ObjectInfo(base.clean_path(path), *base.copy_with_crc(file, partial))

    def join(self, parts: Sequence[str], path: str) -> ObjectInfo:
        final = self._file(path)
        with translate_os_errors(self.address(path)):
            files = [self._present(part) for part in parts]
            needed = sum(file.stat().st_size for file in files)
            if final.is_file() and final.stat().st_size == needed:
                existing = self.stat(path)
                if existing == base.combine_crc32c(existing.path, map(self.stat, parts)):
                    return existing
        with (
            translate_os_errors(self.address(path), needed=needed),
            atomic_write(final, durable=self.durable) as joined,
        ):
            copied = list[ObjectInfo]()
            for file in files:
                with file.open("rb") as part:
                    copied.append(ObjectInfo(file.name, *base.copy_with_crc(part, joined)))
        return base.combine_crc32c(base.clean_path(path), copied)

    def move(self, folder: str, target: str) -> None:
        final = self._file(target)
        with translate_os_errors(str(final)):
            final.parent.mkdir(parents=True, exist_ok=True)
            rename(self._file(folder), final, durable=self.durable)

    def remove(self, path: str) -> None:
        folder = Path(self.address(base.checked_remove_path(path)))
        with translate_os_errors(str(folder)):
            if not folder.is_dir() or folder.is_symlink():
                with suppress(FileNotFoundError, NotADirectoryError):
                    folder.unlink()
                return
            for inner, _, _ in os.walk(folder):  # does not follow links, and neither does rmtree
                Path(inner, base.MANIFEST).unlink(missing_ok=True)
            while folder.exists():
                try:
                    shutil.rmtree(folder)
                except OSError as error:  # someone else removes it too, or writes there
                    if error.errno not in {errno.ENOENT, errno.ENOTEMPTY}:
                        raise

    def remove_unfinished(self) -> None:
        with translate_os_errors(self.root):
            for folder, _, names in os.walk(self.root):
                for name in filter(base.is_partial, names):
                    Path(folder, name).unlink(missing_ok=True)

    def _file(self, path: str) -> Path:
        return Path(self.root, base.clean_file(path))

    def _present(self, path: str) -> Path:
        file = self._file(path)
        if not file.is_file():
            raise base.absent(str(file))
        return file


def rename(source: Path, final: Path, *, durable: bool = True) -> None:
    """Give `source` the name `final`; durable, for good: the name itself is on disk only when its folder is."""
    source.replace(final)
    if durable:
        _flush_folder(final.parent)


def link(source: Path, final: Path) -> None:
    """Give the content of `source` the name `final` too, unless that is taken (FileExistsError)."""
    try:
        os.link(source, final)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        # A mount without hard links: still only one caller takes the name, though a reader that comes in the
        # same moment may see the file short, and reads JSON that ends too early.
        with final.open("xb") as file:
            file.write(source.read_bytes())
            file.flush()
            os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextmanager
def atomic_write(
    final: Path, *, durable: bool = True, take: Callable[[Path, Path], object] = Path.replace
) -> Iterator[BinaryIO]:
    """A new file next to `final` that takes its name when the block ends well, and is gone when it does not."""
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with partial.open("x+b") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        take(partial, final)
        if durable:
            _flush_folder(final.parent)
    finally:
        partial.unlink(missing_ok=True)


def _room(path: Path) -> tuple[int, int]:
    """Return the bytes and the files that the file system of a path still takes; -1 files where it does not count."""
    seen = os.statvfs(next(folder for folder in (path, *path.parents) if folder.exists()))
    return seen.f_bavail * seen.f_frsize, seen.f_favail if seen.f_files else -1


@contextmanager
def translate_os_errors(address: str, *, needed: int = 0) -> Iterator[None]:
    """Say of the operating system's errors which fault they are and what to do; `needed` bytes are to be written."""
    path, free = Path(address).absolute(), 0
    if needed:  # checked before, because a write that fails half way leaves less
        with suppress(OSError):
            free, _ = _room(path)
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError) as raised:
        error: BaseException | None = raised
        if not isinstance(raised, OSError):
            # torch's zip writer says "unexpected pos 64 vs 0" when Python's file has refused its bytes: of such errors
            # a full disk beneath is the fault.
            while error is not None and not (isinstance(error, OSError) and error.errno in NO_ROOM):
                error = error.__context__
        if (
            not isinstance(error, OSError) or error.errno is None
        ):  # requests derives errors of its own, without a number
            raise
        where = f"{address}: {error.strerror}" + (f" ({error.filename})" if error.filename else "")
        if error.errno in NO_ROOM:
            with suppress(OSError):
                if error.errno == errno.ENOSPC and _room(path)[1] == 0:
                    what = f"{where}: its file system holds no more files, whatever their size (its inodes are used up)"
                    raise DiskFull(what, fix="remove files, or choose another place") from raised
            raise DiskFull(f"{where}: {needed} bytes are needed, but {free} are free; make room") from raised
        if error.errno in _REFUSED:
            raise UserError(f"{where}; check its owner and mode, or choose another place") from raised
        raise NodeError(f"{where}; this machine's disk or mount does not work, use another machine") from raised


# Bytes: a node's report with the last 40 lines of a traceback of each of 8 ranks takes about 30 KiB, its traces 40 KiB
# at the most (litgpt_demo.node.evidence).
_ROOM = 96 * 1024


def preallocate(path: Path) -> None:
    """Take the room that `atomic_write_json` will need for `path`, so that nothing else can take it first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _aside(path).write_bytes(b" " * _ROOM)


def atomic_write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file so that a reader sees all of it or none, into the room that was reserved if any was."""
    aside = _aside(path)
    data = json.dumps(content, indent=1).encode()
    # Not truncated before it is written: most file systems give blocks back then, and would have to find them again.
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
        file.write(data)
        file.truncate()
    aside.replace(path)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")
