"""Files under one root, a local folder or gs://bucket/prefix, behind the same few verbs.

A name shows its old or its new whole content, never a part of one; and what came over a network was compared by crc32c.
The bucket's side is built around what google-cloud-storage does not survive by itself: answers that are lost or cut
short, resumed downloads that it does not check, corruption that it does not retry.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from hashlib import file_digest
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

import google_crc32c

from litgpt_demo.faults import DataError, NetworkError, NodeError, UserError

T = TypeVar("T")
Names: TypeAlias = list[str]  # inside the classes `list` is a verb

MANIFEST = "manifest.json"
"""The file that says a directory is complete: written last by whoever fills it, removed first here."""

_BLOCK = 1 << 20
_CHUNK = 16 << 20  # bytes per upload request; the client holds about twice that, and its default of 100 MB is too much
_TRIES = 5
_SLOWEST = 10e6  # bytes/s that a download may fall to and still be resumed


@dataclass(frozen=True)
class Stored:
    """What lies at a path."""

    path: str
    """Relative to the storage's root, with `/`."""
    size: int
    """Bytes."""
    crc32c: str
    """8 lower-case hex digits."""


@dataclass(frozen=True)
class Storage(ABC):
    """A root and the files below it. Paths are relative to the root and use `/`.

    Every verb refuses (UserError) a path that leaves the root, and says what to do where the disk or the bucket refuses
    (UserError), is full or broken (NodeError), or does not answer (NetworkError).
    """

    root: str
    """An absolute local path, or gs://bucket/prefix without a trailing slash."""

    def address(self, path: str = "") -> str:
        """The root joined with `path`, as `open_storage` takes it."""
        clean = _clean(path)
        return f"{self.root.rstrip('/')}/{clean}" if clean else self.root

    def within(self, path: str) -> Storage:
        """The storage whose root is `address(path)`."""
        return replace(self, root=self.address(path))

    @abstractmethod
    def list(self, prefix: str = "") -> Names:
        """Every file below the folder `prefix`, however deep, relative to the root and sorted; [] where there is none.

        A file that is still being written is never listed.
        """

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file at `path`; a folder is not one."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The whole content.

        Raises:
            FileNotFoundError: names the full address.
            DataError: the bytes that arrive stay wrong.
        """

    @abstractmethod
    def write(self, path: str, data: bytes) -> Stored:
        """Put `data` at `path`, replacing what is there. Folders need not be made first."""

    @abstractmethod
    def stat(self, path: str) -> Stored:
        """Size and checksum; a local file is read for it.

        Raises:
            FileNotFoundError: names the full address.
        """

    @abstractmethod
    def upload(self, source: Path, path: str, *, move: bool = False) -> Stored:
        """Put the content of a local file at `path`, replacing what is there.

        Args:
            move: remove `source` once its content is stored; on one file system this is a rename and copies nothing.

        Raises:
            FileNotFoundError: there is no `source`.
            DataError: `source` changes while it is read, or its bytes stay wrong on their way.
        """

    @abstractmethod
    def download(self, path: str, target: Path) -> Stored:
        """Put the file at `path` into the local file `target`, which is replaced only by the whole, verified content.

        Raises:
            FileNotFoundError: names the full address.
            DataError: the bytes that arrive stay wrong; `target` is as it was.
        """

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove the file at `path`, or everything below the folder; absent is success.

        Manifests go first, so that a removal that is interrupted never leaves a directory that looks complete.
        """


def open_storage(address: str) -> Storage:
    """The storage at gs://bucket/prefix or at a local path (`~` and relative ones are resolved). Asks nobody yet.

    Raises:
        UserError: another scheme, or no usable bucket or path.
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", address)
    if scheme is None:
        return LocalStorage(root=str(_local_root(address)))
    if not address.startswith("gs://"):
        raise UserError(f"{address!r} is neither gs://bucket/prefix nor a local path, and nothing else is supported")
    bucket, _, prefix = address.removeprefix("gs://").partition("/")
    # https://cloud.google.com/storage/docs/buckets#naming
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", bucket):
        raise UserError(
            f"{address!r} names no bucket: {bucket!r} is not 3 or more lower-case letters, digits, '-', '_' and '.'"
        )
    return BucketStorage(root=f"gs://{bucket}").within(prefix)


def crc32c_of(path: Path) -> str:
    """The file's crc32c as 8 lower-case hex digits."""
    with path.open("rb") as file:
        return _pour(file)[1]


def sha256_of(path: Path) -> str:
    """The file's sha256 as 64 lower-case hex digits."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _pour(source: BinaryIO, sink: BinaryIO | None = None) -> tuple[int, str]:
    """Read `source` to its end, into `sink` if there is one: how many bytes it was, and their crc32c."""
    size, crc32c = 0, 0
    while block := source.read(_BLOCK):
        if sink is not None:
            sink.write(block)
        crc32c = google_crc32c.extend(crc32c, block)
        size += len(block)
    return size, f"{crc32c:08x}"


# --- paths ------------------------------------------------------------------------------------------------------------


def _clean(path: str) -> str:
    """`path` without empty and `.` components; "" is the root."""
    parts = [part for part in path.split("/") if part not in {"", "."}]
    if path.startswith("/") or ".." in parts:
        raise UserError(f"path {path!r} leaves the storage's root; give one relative to the root, without '..'")
    if re.search(r"[\0\r\n]", path):
        raise UserError(f"path {path!r} holds a line break or a NUL, which no bucket takes; rename it")
    if parts and _is_partial(parts[-1]):
        raise UserError(f"path {path!r} is named like an unfinished write (.*.partial); choose another name")
    return "/".join(parts)


def _clean_file(path: str) -> str:
    clean = _clean(path)
    if not clean:
        raise UserError(f"path {path!r} is the storage's root itself; name a file below it")
    return clean


def _is_partial(name: str) -> bool:
    return name.startswith(".") and name.endswith(".partial")


def _local_root(address: str) -> Path:
    if not address.strip():
        raise UserError("the address of a storage is empty; give gs://bucket/prefix or a local path")
    try:
        return Path(address).expanduser().resolve()
    except RuntimeError as error:  # of expanduser: no such user
        raise UserError(
            f"{address!r}: {error}; write the path out, or ./{address} for a folder of that name"
        ) from error


def _manifests_first(paths: Iterable[str]) -> Names:
    return sorted(paths, key=lambda path: (path.rpartition("/")[2] != MANIFEST, path))


def _absent(address: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "no such file", address)


# --- a local folder ---------------------------------------------------------------------------------------------------

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {
    errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip


@dataclass(frozen=True)
class LocalStorage(Storage):
    """A folder of this machine, or one that is mounted."""

    def list(self, prefix: str = "") -> Names:
        root, found = Path(self.root), []
        with _explaining(self.address(prefix)):
            # Symbolic links to folders are followed, because `exists` and `read` follow them too.
            for folder, _, names in os.walk(root / _clean(prefix), followlinks=True, onerror=_unless_gone):
                files = (Path(folder, name) for name in names if not _is_partial(name))
                found += [file.relative_to(root).as_posix() for file in files if file.is_file()]
        return sorted(found)

    def exists(self, path: str) -> bool:
        with _explaining(self.address(path)):
            return self._file(path).is_file()

    def read(self, path: str) -> bytes:
        with _explaining(self.address(path)):
            return self._present(path).read_bytes()

    def write(self, path: str, data: bytes) -> Stored:
        final = self._file(path)
        with _explaining(self.address(path), needed=len(data)), _replacing(final) as partial:
            size, crc32c = _pour(io.BytesIO(data), partial)
        return Stored(_clean(path), size, crc32c)

    def stat(self, path: str) -> Stored:
        with _explaining(self.address(path)), self._present(path).open("rb") as file:
            return Stored(_clean(path), *_pour(file))

    def upload(self, source: Path, path: str, *, move: bool = False) -> Stored:
        final = self._file(path)
        with _explaining(str(source)):
            needed = source.stat().st_size
        with _explaining(self.address(path), needed=needed):
            if move and (content := _moved(source, final)):
                return Stored(_clean(path), *content)
            content = _copied(source, final)
            if move:
                source.unlink()
        return Stored(_clean(path), *content)

    def download(self, path: str, target: Path) -> Stored:
        with _explaining(self.address(path)):
            source = self._present(path)
            needed = source.stat().st_size
        with _explaining(str(target), needed=needed):
            return Stored(_clean(path), *_copied(source, target))

    def remove(self, path: str) -> None:
        folder = Path(self.address(path))
        if folder == Path(folder.anchor):
            raise UserError(f"will not remove everything below {folder}; name what is to go")
        with _explaining(str(folder)):
            if not folder.is_dir() or folder.is_symlink():
                with suppress(FileNotFoundError, NotADirectoryError):
                    folder.unlink()
                return
            for manifest in folder.rglob(MANIFEST):  # does not follow links, and neither does rmtree
                manifest.unlink(missing_ok=True)
            while folder.exists():
                with suppress(FileNotFoundError):  # someone else removes it too
                    shutil.rmtree(folder)

    def _file(self, path: str) -> Path:
        return Path(self.root, _clean_file(path))

    def _present(self, path: str) -> Path:
        file = self._file(path)
        if not file.is_file():
            raise _absent(str(file))
        return file


@contextmanager
def _replacing(final: Path) -> Iterator[BinaryIO]:
    """A new file beside `final` that takes its name when the block ends well, and is gone when it does not."""
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with partial.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _rename(partial, final)
    finally:
        partial.unlink(missing_ok=True)


def _rename(source: Path, final: Path) -> None:
    """Give `source` the name `final`, for good: the name itself is on disk only when its folder is."""
    source.replace(final)
    folder = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _copied(source: Path, final: Path) -> tuple[int, str]:
    with source.open("rb") as file, _replacing(final) as partial:
        return _pour(file, partial)


def _moved(source: Path, final: Path) -> tuple[int, str] | None:
    """Rename `source` to `final`; None where only a copy will do: across file systems, or when `source` is a link."""
    if source.is_symlink():
        return None
    final.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as file:
        content = _pour(file)
        os.fsync(file.fileno())
    try:
        _rename(source, final)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return None
    return content


def _unless_gone(error: BaseException) -> None:
    """Pass over what was removed meanwhile, or never was a folder."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


@contextmanager
def _explaining(address: str, *, needed: int = 0) -> Iterator[None]:
    """Say of the operating system's errors which fault they are and what to do.

    Args:
        needed: bytes that were to be written.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno is None:  # not the system's: requests derives its own from OSError
            raise
        where = f"{address}: {error.strerror}" + (f" ({error.filename})" if error.filename else "")
        if error.errno in _NO_ROOM:
            raise NodeError(f"{where}: {needed} bytes are needed, {_free(address)} are free; make room") from error
        if error.errno in _REFUSED:
            raise UserError(f"{where}; check what is there, its owner and mode, or choose another place") from error
        raise NodeError(f"{where}; this machine's disk or mount is not fit, use another") from error


def _free(address: str) -> int:
    """Bytes free where `address` is or would be."""
    path = Path(address).absolute()
    return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free


# --- a bucket ---------------------------------------------------------------------------------------------------------

_VIEWER, _ADMIN = "roles/storage.objectViewer", "roles/storage.objectAdmin"


class _UnsettledError(Exception):
    """An attempt ended without our knowing that it did what it should: look at the object and try again."""


@dataclass(frozen=True)
class BucketStorage(Storage):
    """A bucket of Google Cloud Storage, or of whatever STORAGE_EMULATOR_HOST points at. Safe to pickle and to fork."""

    patience: float = 600.0
    """Seconds without a good answer after which a request is given up; real outages outlast the client's own 120 s."""

    def list(self, prefix: str = "") -> Names:
        below = self._name(prefix) + "/" if self._name(prefix) else ""

        def attempt() -> Names:
            names = map(self._path, self._names(below))
            # Whatever is not spelt as we spell paths is left out: folder markers (`a/`) and names like `a//b`.
            return sorted(name for name in names if _is_ours(name))

        return self._settled(prefix, _VIEWER, attempt)

    def exists(self, path: str) -> bool:
        _clean_file(path)
        return self._settled(path, _VIEWER, lambda: self._look(path) is not None)

    def read(self, path: str) -> bytes:
        def attempt() -> bytes:
            content = io.BytesIO()
            self._fetch(self._found(path), content)
            return content.getvalue()

        return self._settled(path, _VIEWER, attempt)

    def write(self, path: str, data: bytes) -> Stored:
        wanted = Stored(_clean_file(path), *_pour(io.BytesIO(data)))
        return self._put(wanted, lambda: io.BytesIO(data))

    def stat(self, path: str) -> Stored:
        return self._settled(path, _VIEWER, lambda: self._stored(self._found(path)))

    def upload(self, source: Path, path: str, *, move: bool = False) -> Stored:
        with _explaining(str(source)):
            with source.open("rb") as file:
                wanted = Stored(_clean_file(path), *_pour(file))
            self._put(wanted, lambda: source.open("rb"))
            if move:
                source.unlink()
        return wanted

    def download(self, path: str, target: Path) -> Stored:
        def attempt() -> Stored:
            blob = self._found(path)
            with _explaining(str(target), needed=blob.size), _replacing(target) as partial:
                return self._fetch(blob, partial)

        return self._settled(path, _VIEWER, attempt)

    def remove(self, path: str) -> None:
        if not self._name(path):
            raise UserError(f"will not remove everything in {self.root}; name what is to go")

        def attempt() -> None:
            for name in [*_manifests_first(self._names(self._name(path) + "/")), self._name(path)]:
                self._delete(name)

        self._settled(path, _ADMIN, attempt)

    def _put(self, wanted: Stored, source: Callable[[], BinaryIO]) -> Stored:
        """Make the object be what `source` holds. Where it is that already, as after a lost answer, nothing is sent."""

        def attempt() -> Stored:
            there = self._look(wanted.path)
            if there is not None and self._stored(there) == wanted:
                return wanted
            blob = self._bucket.blob(self._name(wanted.path), chunk_size=_CHUNK)
            blob.crc32c = b64encode(bytes.fromhex(wanted.crc32c)).decode()  # the server compares before it commits
            with source() as file:
                blob.upload_from_file(
                    file,
                    size=wanted.size,
                    checksum=None,  # ours is the one: theirs deletes the object on a difference
                    # A request that timed out may be carried out later: then it must not land on a newer object.
                    if_generation_match=0 if there is None else there.generation,
                    retry=self._retry(),
                )
            return self._agreed(wanted, self._stored(blob))

        return self._settled(wanted.path, _ADMIN, attempt)

    def _fetch(self, blob: Any, sink: BinaryIO) -> Stored:
        """The object's bytes into `sink`, compared: the client does not compare what it resumed."""
        expected = self._stored(blob)
        # Raw: the bytes as they are stored, which size and checksum speak of, also of an object with Content-Encoding.
        blob.download_to_file(sink, raw_download=True, checksum=None, retry=self._retry(expected.size))
        sink.seek(0)
        return self._agreed(expected, Stored(expected.path, *_pour(sink)))

    def _agreed(self, expected: Stored, arrived: Stored) -> Stored:
        if arrived != expected:
            raise _UnsettledError(
                f"{arrived.size} bytes with crc32c {arrived.crc32c} arrived "
                f"where {expected.size} with {expected.crc32c} were expected"
            )
        return arrived

    def _look(self, path: str) -> Any | None:
        """The object's metadata as they are now."""
        blob = self._bucket.get_blob(self._name(path), retry=self._retry())
        if blob is None:
            # 404 is the answer to a missing bucket too.
            _confirm(_connection(), replace(self, root=f"gs://{self._bucket.name}"))
        return blob

    def _found(self, path: str) -> Any:
        _clean_file(path)
        blob = self._look(path)
        if blob is None:
            raise _absent(self.address(path))
        return blob

    def _stored(self, blob: Any) -> Stored:
        return Stored(self._path(blob.name), int(blob.size), b64decode(blob.crc32c).hex())

    def _names(self, prefix: str, limit: int | None = None) -> Names:
        from google.api_core.exceptions import NotFound

        fields = "items(name),nextPageToken"
        try:
            blobs = self._bucket.list_blobs(prefix=prefix, max_results=limit, fields=fields, retry=self._retry())
            return [blob.name for blob in blobs]
        except NotFound as error:
            raise UserError(
                f"{self.root}: there is no bucket {self._bucket.name!r}; check its name, or make it: "
                f"gcloud storage buckets create gs://{self._bucket.name}"
            ) from error

    def _delete(self, name: str) -> None:
        from google.api_core.exceptions import NotFound

        try:
            self._bucket.blob(name).delete(retry=self._retry())
        except NotFound:
            return  # gone before, or by a delete whose answer was lost

    def _settled(self, path: str, role: str, attempt: Callable[[], T]) -> T:
        """What `attempt` returns; with `_retry` the one retry policy, this for what the client does not try again."""
        reason = _UnsettledError()
        for _ in range(_TRIES):
            try:
                with _explaining_google(self.address(path), role):
                    return attempt()
            except _UnsettledError as error:
                reason = error
        raise DataError(
            f"{self.address(path)}: did not come out right in {_TRIES} tries, the last time: {reason}; "
            "see whether something else writes there, else try from another machine"
        ) from reason

    def _retry(self, size: int = 0) -> Any:
        """The client's retry with our patience; it counts working time too, so a large transfer is given more."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        return DEFAULT_RETRY.with_delay(maximum=30.0).with_timeout(self.patience + size / _SLOWEST)

    def _name(self, path: str) -> str:
        """The object's name in the bucket."""
        return self.address(path).removeprefix("gs://").partition("/")[2]

    def _path(self, name: str) -> str:
        """The path that `_name` makes this name of."""
        return name.removeprefix(self._name("")).removeprefix("/") if self._name("") else name

    @property
    def _bucket(self) -> Any:
        return _client(*_connection()).bucket(self.root.removeprefix("gs://").partition("/")[0])


def _connection() -> tuple[int, str | None]:
    """What a client belongs to: a process, because sockets must not be shared across a fork, and a service."""
    return os.getpid(), os.environ.get("STORAGE_EMULATOR_HOST")


@cache
def _client(_process: int, _service: str | None) -> Any:
    # Else each client asks for the bucket itself, in the background: with least roles a denied call in the audit log.
    os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    from google.cloud.storage import Client

    return Client(project=None)  # no object belongs to a project's request; without this one would have to be set


@cache
def _confirm(_at: tuple[int, str | None], bucket: BucketStorage) -> None:
    """See once per process that the bucket is there.

    Raises:
        UserError: it is not.
    """
    bucket._names("", limit=1)


def _is_ours(name: str) -> bool:
    try:
        return _clean(name) == name
    except UserError:
        return False


@contextmanager
def _explaining_google(address: str, role: str) -> Iterator[None]:
    """Say of the client's errors which fault they are and what to do.

    Raises:
        _UnsettledError: another attempt may well succeed, or find that this one did.
    """
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage.exceptions import DataCorruption
    from requests.exceptions import JSONDecodeError, RequestException

    try:
        yield
    except (JSONDecodeError, DataCorruption) as error:
        raise _UnsettledError(f"{type(error).__name__}: {error}") from error
    except (RetryError, RequestException) as error:
        raise NetworkError(f"{address}: the bucket does not answer: {error}; try again when it does") from error
    except GoogleAuthError as error:
        if error.retryable:
            raise NetworkError(f"{address}: no credentials could be had: {error}; try again") from error
        raise UserError(f"{address}: no usable credentials: {error}; gcloud auth application-default login") from error
    except GoogleAPICallError as error:
        raise _explained_answer(error.code or 0, str(error), address, role) from error


# 400 is GCS's answer to bytes that do not fit their checksum; 404 and 410: an upload session or a generation is gone;
# 412: the object was replaced, perhaps by our own request, whose answer was lost.
_UNSETTLED = {400, 404, 410, 412}


def _explained_answer(code: int, words: str, address: str, role: str) -> Exception:
    if code in _UNSETTLED:
        return _UnsettledError(words)
    if code in {401, 403}:
        bucket = address.removeprefix("gs://").partition("/")[0]
        return UserError(
            f"{address}: bucket {bucket} refused: {words}; {role} allows it: gcloud storage buckets "
            f"add-iam-policy-binding gs://{bucket} --member=<who runs this> --role={role}"
        )
    if code == 429 or code >= 500:
        return NetworkError(f"{address}: the bucket does not answer: {words}; try again when it does")
    return UserError(f"{address}: the bucket refused: {words}")
