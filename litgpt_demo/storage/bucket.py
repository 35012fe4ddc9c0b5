"""A storage in a bucket, whose every request is repeated until it is known to have done what it should.

google-cloud-storage repeats requests that are refused or cut off. This module handles answers that were lost or cut
short, which look like refusals or like JSON that ends too early, and damaged bytes, which the client may not notice.
Large objects are uploaded in hidden parts, which the bucket joins, and downloaded by ranges, several at a time.
"""

from __future__ import annotations

import io
import os
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, wraps
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

from litgpt_demo.errors import DataError, NetworkError, Unreachable, UserError, one_line
from litgpt_demo.secrets import translating
from litgpt_demo.storage import base
from litgpt_demo.storage.base import SCHEME, Inventory, Names, ObjectInfo, ReadCursor, Storage
from litgpt_demo.storage.local import atomic_write, translate_os_errors

T = TypeVar("T")
Verb = TypeVar("Verb", bound=Callable[..., Any])
Item = TypeVar("Item")
Blobs: TypeAlias = list[Any]  # inside the class `list` is a verb

_VIEWER, _USER = "roles/storage.objectViewer", "roles/storage.objectUser"

_CHUNK = 16 << 20  # bytes per upload request; the client holds about twice that, and its default of 100 MB is too much
_TRIES = 5
_SLOWEST = 10e6  # bytes/s that a download may fall to and still be resumed
# 400 is GCS's answer to bytes that do not fit their checksum; 404 and 410: an upload session or a generation is gone;
# 412: the object was replaced, perhaps by our own request, whose answer was lost.
_RETRYABLE = {400, 404, 410, 412}
_CONNECTIONS = 64  # kept open; the client's default of 10 makes more threads than that shake hands for every request
_JOINED_AT_ONCE = 32  # https://cloud.google.com/storage/docs/composite-objects

_seen: set[tuple[int, str | None, str]] = set()
"""Buckets that this process has found to exist, each with its `_connection`."""


class RetryableError(Exception):
    """It is unknown whether an attempt did what it should: check the object and try again."""


def _retrying(role: str) -> Callable[[Verb], Verb]:
    def decorated(attempt: Verb) -> Verb:
        @wraps(attempt)
        def verb(self: BucketStorage, *args: Any, **named: Any) -> Any:
            return self._retry_transient(self.address(*args[:1]), role, lambda: attempt(self, *args, **named))

        return cast(Verb, verb)

    return decorated


@dataclass(frozen=True)
class BucketStorage(Storage):
    """A bucket of Google Cloud Storage, or of whatever STORAGE_EMULATOR_HOST points at. Safe to pickle and to fork.

    Private functions take an object's full name in the bucket, which is then the path of an `ObjectInfo`. All
    requests but those of `_put`, which retries by itself, belong inside an attempt of `_retry_transient`.
    """

    parallel: int = 8
    """Requests at a time that one verb makes."""
    part_size: int = 32 << 20
    """Bytes. Objects of more than two parts are transferred in parts; an interrupted upload continues."""

    def local_path(self, path: str = "") -> None:
        return None

    def list(self, prefix: str = "") -> Names:
        return [stored.path for stored in self.inventory(prefix)]

    @_retrying(_VIEWER)
    def inventory(self, prefix: str = "", *, odd: bool = False) -> Inventory:
        # Unclean paths are left out: folder markers (`a/`; the folder's own has the empty path) and `a//b`.
        inventory = [
            stored
            for stored in map(self._stored, self._listed(self._folder(prefix)))
            if _is_clean(stored.path) or (odd and stored.path and not stored.path.endswith("/"))
        ]
        return sorted(inventory, key=lambda stored: stored.path)

    @_retrying(_VIEWER)
    def exists(self, path: str) -> bool:
        return self._head(self._file(path)) is not None

    @_retrying(_VIEWER)
    def read(self, path: str, *, most: int = base.MOST_READ) -> bytes:
        blob = self._found(self._file(path))
        base.require_size(metadata(blob).size, most, self.address(path))
        return self._content(blob)

    @_retrying(_VIEWER)
    def read_from(self, path: str, position: ReadCursor, *, most: int = base.MOST_READ) -> tuple[ReadCursor, bytes]:
        blob = self._found(self._file(path))
        stored = metadata(blob)
        end = ReadCursor(stored.size, stored.crc32c)
        if end == position:
            return position, b""
        if end.size > position.size > 0:
            data = self._range(blob, range(position.size, min(end.size, position.size + most)))
            is_last = position.size + len(data) == end.size
            if not is_last or position.after(data) == end:
                return position, data
        if end.size > most:  # its checksum is compared when the last bytes are read
            return ReadCursor(), self._range(blob, range(most))
        content = self._content(blob)
        # If the range came damaged, it is the same file all the same.
        if ReadCursor().after(content[: position.size]) == position:
            return position, content[position.size :]
        return ReadCursor(), content

    def write(self, path: str, data: bytes) -> ObjectInfo:
        wanted = ObjectInfo(self._file(path), *base.copy_with_crc(io.BytesIO(data)))
        self._put(wanted, lambda: io.BytesIO(data))
        return replace(wanted, path=base.clean_path(path))

    def create(self, path: str, data: bytes) -> bool:
        wanted = ObjectInfo(self._file(path), *base.copy_with_crc(io.BytesIO(data)))
        return self._put(wanted, lambda: io.BytesIO(data), is_new=True, replaces=False)

    @_retrying(_VIEWER)
    def stat(self, path: str) -> ObjectInfo:
        return self._stored(self._found(self._file(path)))

    def upload(self, source: Path, path: str, *, move: bool = False, is_new: bool = False) -> ObjectInfo:
        name = self._file(path)
        with translate_os_errors(str(source)):
            if source.stat().st_size > 2 * self.part_size:
                wanted = self._upload_in_parts(source, name)
            else:
                wanted = ObjectInfo(name, *base.content_of(source))
                self._put(wanted, lambda: source.open("rb"), is_new=is_new)
            if move:
                source.unlink()
        return replace(wanted, path=base.clean_path(path))

    def _upload_in_parts(self, source: Path, name: str) -> ObjectInfo:
        # Parts are named after the file's size and checksum, so the next upload of the same file finds them.
        places = _ranges(source.stat().st_size, self.part_size)

        def content(place: range) -> io.BytesIO:
            with source.open("rb") as file:
                file.seek(place.start)
                return io.BytesIO(file.read(len(place)))

        contents = [ObjectInfo("", *base.copy_with_crc(content(place))) for place in places]
        wanted = base.combine_crc32c(name, contents)
        key = _hidden(name, f"{wanted.size}-{wanted.crc32c}")
        parts = {
            replace(part, path=f"{key}-{number:05d}.partial"): place
            for number, (part, place) in enumerate(zip(contents, places, strict=True))
        }

        def attempt() -> None:
            existing = self._head(name)
            if existing is None or metadata(existing) != wanted:
                stored = set(map(metadata, self._listed(key)))
                self._each(
                    lambda part: self._put(part, lambda: content(parts[part]), is_new=True),
                    [part for part in parts if part not in stored],
                )
                blobs = {metadata(blob): blob for blob in self._listed(key)}
                if not blobs.keys() >= parts.keys():
                    raise RetryableError("its parts were swept by someone who uploads to the same name")
                self._join([blobs[part] for part in parts], name)
            self._sweep(name)

        self._retry_transient(self._address(name), _USER, attempt)
        return wanted

    @_retrying(_VIEWER)
    def download(self, path: str, target: Path) -> ObjectInfo:
        blob = self._found(self._file(path))
        stored = self._stored(blob)
        with translate_os_errors(str(target), needed=stored.size):
            has_size = target.is_file() and target.stat().st_size == stored.size
            if not has_size or base.content_of(target) != (stored.size, stored.crc32c):
                with atomic_write(target) as partial:
                    self._fetch(blob, partial, Path(partial.name))
        return stored

    def join(self, parts: Sequence[str], path: str) -> ObjectInfo:
        name, names = self._file(path), [self._file(part) for part in parts]
        folders = {"".join(part.rpartition("/")[:2]) for part in names}

        def attempt() -> ObjectInfo:
            lists = self._each(lambda folder: self._listed(folder, direct=True), folders)
            by_name = {blob.name: blob for blobs in lists for blob in blobs}
            for part in names:
                if part not in by_name:
                    raise base.absent(self._address(part))
            joined = self._join([by_name[part] for part in names], name)
            self._sweep(name)
            return joined

        if not names:
            return self.write(path, b"")
        return replace(self._retry_transient(self.address(path), _USER, attempt), path=base.clean_path(path))

    def move(self, folder: str, target: str) -> None:
        for path in self.within(folder).list():
            self.join([f"{folder}/{path}"], f"{target}/{path}")  # the bucket copies by itself
        self.remove(folder)

    @_retrying(_USER)
    def remove(self, path: str) -> None:
        blobs = self._listed(self._folder(base.checked_remove_path(path)))
        blob = self._head(self._name(path))
        if blob is not None:
            blobs.append(blob)
        manifests = [blob for blob in blobs if blob.name.rpartition("/")[2] == base.MANIFEST]
        self._each(self._delete, manifests)
        self._each(self._delete, [blob for blob in blobs if blob not in manifests])

    @_retrying(_USER)
    def remove_unfinished(self) -> None:
        blobs = self._listed(self._folder(""))
        self._each(self._delete, [blob for blob in blobs if base.is_partial(blob.name.rpartition("/")[2])])

    # --- names --------------------------------------------------------------------------------------------------------

    def _file(self, path: str) -> str:
        return self._name(base.clean_file(path))

    def _name(self, path: str) -> str:
        return self.address(path).removeprefix(SCHEME).partition("/")[2]

    def _folder(self, path: str) -> str:
        name = self._name(path)
        return f"{name}/" if name else ""

    def _stored(self, blob: Any) -> ObjectInfo:
        root = self._name("")
        return replace(metadata(blob), path=blob.name.removeprefix(root).removeprefix("/") if root else blob.name)

    def _address(self, name: str) -> str:
        return f"{SCHEME}{self._bucket}/{name}" if name else f"{SCHEME}{self._bucket}"

    def location(self) -> str:
        """Return the bucket's region, or its larger area, in lower case: europe-west4, eu, nam4."""
        # https://docs.cloud.google.com/storage/docs/json_api/v1/buckets/getStorageLayout says which right it takes.
        with _explaining(self.root, _VIEWER):
            layout = _client(*_connection())._get_resource(f"/b/{self._bucket}/storageLayout", timeout=20, retry=None)
        return str(layout.get("location", "")).lower()

    @property
    def _bucket(self) -> str:
        return self.root.removeprefix(SCHEME).partition("/")[0]

    # --- requests -----------------------------------------------------------------------------------------------------

    @property
    def _handle(self) -> Any:
        return _client(*_connection()).bucket(self._bucket)

    def _retry(self, size: int = 0) -> Any:
        """Return the client's retry with our patience; it counts working time too, so a large transfer gets more."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        return DEFAULT_RETRY.with_delay(maximum=30.0).with_timeout(self.patience + size / _SLOWEST)

    def _retry_transient(self, address: str, role: str, attempt: Callable[[], T]) -> T:
        # With `_retry` the one retry policy, for what the client does not try again.
        reason = RetryableError()
        for _ in range(_TRIES):
            try:
                with _explaining(address, role):
                    return attempt()
            except RetryableError as error:
                reason = error
        raise DataError(
            f"{address}: could not be transferred intact in {_TRIES} tries; the last time: {reason}",
            fix="check whether something else writes there, or try from another machine",
        ) from reason

    def _each(self, action: Callable[[Item], T], items: Iterable[Item]) -> Sequence[T]:
        with ThreadPoolExecutor(self.parallel) as pool:
            return [*pool.map(action, items)]

    def _head(self, name: str) -> Any | None:
        blob = self._handle.get_blob(name, retry=self._retry())
        if blob is None and (*_connection(), self._bucket) not in _seen:  # 404 is the answer to a missing bucket too
            self._listed("", limit=1)
            _seen.add((*_connection(), self._bucket))
        return blob

    def _found(self, name: str) -> Any:
        blob = self._head(name)
        if blob is None:
            raise base.absent(self._address(name))
        return blob

    def _listed(self, prefix: str, *, direct: bool = False, limit: int | None = None) -> Blobs:
        """Return the objects whose names begin so, with their metadata; `direct`: those without a further `/`."""
        from google.api_core.exceptions import NotFound

        fields, delimiter = "items(name,generation,size,crc32c),nextPageToken", "/" if direct else None
        found = self._handle.list_blobs(
            prefix=prefix, delimiter=delimiter, max_results=limit, fields=fields, retry=self._retry()
        )
        try:
            return [*found]
        except NotFound:
            raise UserError(
                f"{self._address('')}: the bucket {self._bucket!r} does not exist",
                fix=f"check its name, or run `gcloud storage buckets create {self._address('')}`",
            ) from None

    def _put(
        self, wanted: ObjectInfo, source: Callable[[], BinaryIO], *, is_new: bool = False, replaces: bool = True
    ) -> bool:
        """Upload `source` to the object, and return whether it has that content. If it has it already, as after a lost
        answer, nothing is sent. A new one is sent at once: one request instead of two. If it exists, 412 makes another
        one."""

        def attempt() -> bool:
            nonlocal is_new
            existing = None if is_new else self._head(wanted.path)
            is_new = False
            if existing is not None and (metadata(existing) == wanted or not replaces):
                return metadata(existing) == wanted
            self._send(wanted, source, existing)
            return True

        return self._retry_transient(self._address(wanted.path), _USER, attempt)

    def _send(self, wanted: ObjectInfo, source: Callable[[], BinaryIO], existing: Any | None) -> None:
        blob = self._handle.blob(wanted.path, chunk_size=_CHUNK)
        blob.crc32c = b64encode(bytes.fromhex(wanted.crc32c)).decode()  # the server compares before it commits
        with source() as file:
            try:
                blob.upload_from_file(
                    file,
                    size=wanted.size,
                    checksum=None,  # ours is the one: theirs deletes the object on a difference
                    # A request that timed out may be carried out later: then it must not land on a newer object.
                    if_generation_match=0 if existing is None else int(existing.generation),
                    retry=self._retry(wanted.size),
                )
            except ValueError as error:  # the client's, of a source that ends early and of an answer cut short
                raise RetryableError(f"{type(error).__name__}: {error}") from error
        _require_same(wanted, metadata(blob))

    def _content(self, blob: Any) -> bytes:
        content = io.BytesIO()
        self._fetch(blob, content)
        return content.getvalue()

    def _range(self, blob: Any, place: range) -> bytes:
        content = io.BytesIO()
        self._fetch_range(blob, place, content)
        return content.getvalue()

    def _fetch(self, blob: Any, sink: BinaryIO, file: Path | None = None) -> None:
        # Compared here, because the client does not compare what it resumed.
        expected = metadata(blob)
        if file is not None and expected.size > 2 * self.part_size:

            def fill(place: range) -> None:
                with file.open("r+b") as part:
                    for _ in range(_TRIES):
                        part.seek(place.start)
                        self._fetch_range(blob, place, part)
                        if part.tell() == place.stop:
                            return
                raise RetryableError(f"a range of {len(place)} bytes did not arrive whole")

            self._each(fill, _ranges(expected.size, self.part_size))
        else:
            # Raw: as they are stored, which size and checksum speak of, also of an object with Content-Encoding.
            blob.download_to_file(sink, raw_download=True, checksum=None, retry=self._retry(expected.size))
        sink.seek(0)
        _require_same(expected, ObjectInfo(expected.path, *base.copy_with_crc(sink)))

    def _fetch_range(self, blob: Any, place: range, sink: BinaryIO) -> None:
        # By a handle of its own: an answer changes what the handle says of the object.
        part = self._handle.blob(blob.name, generation=blob.generation)
        part.download_to_file(
            sink, start=place.start, end=place.stop - 1, raw_download=True, checksum=None, retry=self._retry(len(place))
        )

    def _join(self, blobs: Sequence[Any], name: str) -> ObjectInfo:
        wanted, existing = base.combine_crc32c(name, map(metadata, blobs)), self._head(name)
        if existing is not None and metadata(existing) == wanted:
            return wanted
        while len(blobs) > _JOINED_AT_ONCE:
            starts = range(0, len(blobs), _JOINED_AT_ONCE)
            groups = [blobs[start : start + _JOINED_AT_ONCE] for start in starts]
            blobs = self._each(lambda group: self._join_hidden(group, name), groups)
        if existing is not None:  # only an object that is known to be right replaces it
            blobs = [self._join_hidden(blobs, name)]
        self._compose(blobs, wanted)
        return wanted

    def _join_hidden(self, blobs: Sequence[Any], name: str) -> Any:
        part = base.combine_crc32c("", map(metadata, blobs))
        return self._compose(blobs, replace(part, path=_hidden(name, f"{part.size}-{part.crc32c}.partial")))

    def _compose(self, sources: Sequence[Any], wanted: ObjectInfo) -> Any:
        existing = self._head(wanted.path)
        if existing is not None and metadata(existing) == wanted:
            return existing
        composed = self._handle.blob(wanted.path)
        composed.content_type = "application/octet-stream"
        # As with uploads: carried out late, it must not replace a newer object.
        generation = 0 if existing is None else int(existing.generation)
        composed.compose(sources, if_generation_match=generation, retry=self._retry())
        if metadata(composed) != wanted:
            self._delete(composed)
        _require_same(wanted, metadata(composed))
        return composed

    def _sweep(self, name: str) -> None:
        self._each(self._delete, self._listed(_hidden(name)))

    def _delete(self, blob: Any) -> None:
        """Remove this generation of the object: a request that is carried out late must not take a newer one."""
        from google.api_core.exceptions import NotFound

        with suppress(NotFound):  # gone before, or by a delete whose answer was lost
            # By a handle that names no generation: else the object would be gone for good where versions are kept.
            self._handle.blob(blob.name).delete(if_generation_match=blob.generation, retry=self._retry())


def _is_clean(name: str) -> bool:
    try:
        return bool(name) and base.clean_path(name) == name
    except UserError:
        return False


def metadata(blob: Any) -> ObjectInfo:
    # An answer for an empty object may lack the size: JSON made of protocol buffers has no members that are zero.
    try:
        size, _ = int(blob.size or 0), int(blob.generation)
        crc32c = base.EMPTY if size == 0 else b64decode(blob.crc32c).hex()
    except (TypeError, ValueError):  # as from a proxy, which answers 200 to everything
        raise RetryableError("the answer for an object lacks its generation, size or checksum") from None
    return ObjectInfo(blob.name, size, crc32c)


def _require_same(expected: ObjectInfo, arrived: ObjectInfo) -> None:
    if arrived != expected:
        raise RetryableError(
            f"{arrived.size} bytes with crc32c {arrived.crc32c} arrived "
            f"where {expected.size} with {expected.crc32c} were expected"
        )


def _ranges(size: int, part_size: int) -> list[range]:
    return [range(start, min(start + part_size, size)) for start in range(0, size, part_size)]


def _hidden(name: str, rest: str = "") -> str:
    """The name of an object that is made on the way to the object `name`, next to it; no verb shows `*.partial`."""
    folder, slash, _ = name.rpartition("/")
    return f"{folder}{slash}.{sha256(name.encode()).hexdigest()[:16]}-{rest}"


def _connection() -> tuple[int, str | None]:
    """The owner of a client: a process, because sockets must not be shared across a fork, and a service."""
    return os.getpid(), os.environ.get("STORAGE_EMULATOR_HOST")


@cache
def _client(_process: int, _service: str | None) -> Any:
    # Else each client requests the bucket itself, in the background: with least roles a denied call in the audit log.
    os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    from google.cloud.storage import Client
    from requests.adapters import HTTPAdapter

    client = Client(project=None)  # no object belongs to a project's request; without this one would have to be set
    if not client._http.is_mtls:  # which is an adapter too
        client._http.mount("https://", HTTPAdapter(pool_maxsize=_CONNECTIONS))
    return client


@translating
def _explaining(address: str, role: str) -> Iterator[None]:
    """Nothing is chained: a traceback may show the headers that were sent, and the token is one of them."""
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage.exceptions import DataCorruption
    from requests.exceptions import JSONDecodeError, RequestException

    try:
        yield
    except (JSONDecodeError, DataCorruption) as error:
        raise RetryableError(f"{type(error).__name__}: {one_line(error)}") from None
    except GoogleAuthError as error:
        if error.retryable:
            raise NetworkError(f"{address}: credentials are missing: {one_line(error)}", fix="try again") from None
        fix = "run `gcloud auth application-default login`"
        raise Unreachable(f"{address}: no usable credentials: {one_line(error)}", fix=fix) from None
    except (GoogleAPICallError, RetryError, RequestException) as error:
        code, reason = getattr(error, "code", None) or 503, one_line(error)  # without a code: no answer came
        if code in _RETRYABLE:
            raise RetryableError(reason) from None
        if code in {401, 403}:
            bucket = address.removeprefix(SCHEME).partition("/")[0]
            raise UserError(
                f"{address}: bucket {bucket} refused: {reason}",
                fix=f"grant {role}: gcloud storage buckets add-iam-policy-binding gs://{bucket} "
                f"--member=<account of this machine> --role={role}",
            ) from None
        if code == 429 or code >= 500:
            no_retry, fix = isinstance(error, RetryError), "try again later"
            raise NetworkError(f"{address}: the bucket does not answer: {reason}", fix=fix, no_retry=no_retry) from None
        raise UserError(f"{address}: the bucket refused: {reason}") from None
    except AttributeError as error:  # Google's library, of an error that is not {"error": {"message": …}}
        fix = "check whether a proxy sent it, then try again"
        raise NetworkError(f"{address}: the answer is not a bucket's ({one_line(error)})", fix=fix) from None
