"""The objects of one bucket by their names, every call tried again until it is known to have done what it should.

google-cloud-storage tries again what is refused or cut off. Left to us: answers that were lost or cut short, which look
like refusals or like JSON that ends too early, and bytes that arrive damaged, which it may not notice.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, BinaryIO, TypeVar

from litgpt_demo.errors import DataError, NetworkError, Unreachable, UserError, words_of
from litgpt_demo.secrets import translating
from litgpt_demo.storage.base import ObjectInfo, absent
from litgpt_demo.storage.checksums import EMPTY, copy_with_crc

T = TypeVar("T")
Item = TypeVar("Item")

VIEWER, USER = "roles/storage.objectViewer", "roles/storage.objectUser"

_CHUNK = 16 << 20  # bytes per upload request; the client holds about twice that, and its default of 100 MB is too much
_TRIES = 5
_SLOWEST = 10e6  # bytes/s that a download may fall to and still be resumed
# 400 is GCS's answer to bytes that do not fit their checksum; 404 and 410: an upload session or a generation is gone;
# 412: the object was replaced, perhaps by our own request, whose answer was lost.
_UNSETTLED = {400, 404, 410, 412}
_CONNECTIONS = 64  # kept open; the client's default of 10 makes more threads than that shake hands for every request


class UnsettledError(Exception):
    """An attempt ended without our knowing that it did what it should: look at the object and try again."""


@dataclass(frozen=True)
class Objects:
    """The objects of a bucket. A `ObjectInfo` of theirs has the object's whole name as its path.

    `put` is settled in itself; the other verbs belong inside an attempt of `retry_transient`.
    """

    bucket: str
    patience: float
    """Seconds without a good answer after which a request is given up."""
    parallel: int
    """Requests at a time."""

    def address(self, name: str) -> str:
        """The object's name for people."""
        return f"gs://{self.bucket}/{name}" if name else f"gs://{self.bucket}"

    def retry_transient(self, name: str, role: str, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`; with `_retry` the one retry policy, for what the client does not try again.

        Args:
            role: what allows the calls of the attempt, named where they are refused.
        """
        reason = UnsettledError()
        for _ in range(_TRIES):
            try:
                with _explaining(self.address(name), role):
                    return attempt()
            except UnsettledError as error:
                reason = error
        raise DataError(
            f"{self.address(name)}: did not come out right in {_TRIES} tries, the last time: {reason}; "
            "see whether something else writes there, else try from another machine"
        ) from reason

    def each(self, action: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
        """`action` of every item, several at a time; after one that fails no more are begun."""
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(action, items))

    def look(self, name: str) -> Any | None:
        """The object as it is now, None where there is none."""
        blob = self._handle.get_blob(name, retry=self._retry())
        if blob is None:
            _confirm(_connection(), self)  # 404 is the answer to a missing bucket too
        return blob

    def found(self, name: str) -> Any:
        blob = self.look(name)
        if blob is None:
            raise absent(self.address(name))
        return blob

    def listed(self, prefix: str, *, direct: bool = False, limit: int | None = None) -> list[Any]:
        """The objects whose names begin so, with generation, size and checksum; `direct`: without a further `/`."""
        from google.api_core.exceptions import NotFound

        try:
            return list(
                self._handle.list_blobs(
                    prefix=prefix,
                    delimiter="/" if direct else None,
                    max_results=limit,
                    fields="items(name,generation,size,crc32c),nextPageToken",
                    retry=self._retry(),
                )
            )
        except NotFound:
            raise UserError(
                f"{self.address('')}: there is no bucket {self.bucket!r}; check its name, or make it: "
                f"gcloud storage buckets create {self.address('')}"
            ) from None

    def put(self, wanted: ObjectInfo, source: Callable[[], BinaryIO]) -> None:
        """Make the object be what `source` holds. Where it is that already, as after a lost answer, nothing is sent."""

        def attempt() -> None:
            there = self.look(wanted.path)
            if there is None or metadata(there) != wanted:
                self.send(wanted, source, there)

        self.retry_transient(wanted.path, USER, attempt)

    def send(self, wanted: ObjectInfo, source: Callable[[], BinaryIO], there: Any | None) -> None:
        """Upload in place of `there`, the object as it was seen last."""
        blob = self._handle.blob(wanted.path, chunk_size=_CHUNK)
        blob.crc32c = b64encode(bytes.fromhex(wanted.crc32c)).decode()  # the server compares before it commits
        with source() as file:
            try:
                blob.upload_from_file(
                    file,
                    size=wanted.size,
                    checksum=None,  # ours is the one: theirs deletes the object on a difference
                    # A request that timed out may be carried out later: then it must not land on a newer object.
                    if_generation_match=0 if there is None else int(there.generation),
                    retry=self._retry(wanted.size),
                )
            except ValueError as error:  # the client's, of a source that ends early and of an answer cut short
                raise UnsettledError(f"{type(error).__name__}: {error}") from error
        require_same(wanted, metadata(blob))

    def fetch(self, blob: Any, sink: BinaryIO) -> None:
        """The object's bytes into `sink`, compared: the client does not compare what it resumed."""
        expected = metadata(blob)
        # Raw: the bytes as they are stored, which size and checksum speak of, also of an object with Content-Encoding.
        blob.download_to_file(sink, raw_download=True, checksum=None, retry=self._retry(expected.size))
        sink.seek(0)
        require_same(expected, ObjectInfo(expected.path, *copy_with_crc(sink)))

    def fetch_range(self, blob: Any, start: int, end: int, sink: Any) -> None:
        """The bytes from `start` up to and without `end` into `sink`, which no checksum of the bucket speaks of."""
        # By a handle of its own: an answer changes what the handle says of the object.
        part = self._handle.blob(blob.name, generation=blob.generation)
        retry = self._retry(end - start)
        part.download_to_file(sink, start=start, end=end - 1, raw_download=True, checksum=None, retry=retry)

    def compose(self, sources: Sequence[Any], wanted: ObjectInfo) -> Any:
        """Make the object be at most 32 `sources` of known generations behind one another; the bucket does it."""
        there = self.look(wanted.path)
        if there is not None and metadata(there) == wanted:
            return there
        whole = self._handle.blob(wanted.path)
        whole.content_type = "application/octet-stream"
        # As with uploads: carried out late, it must not land on a newer object.
        whole.compose(sources, if_generation_match=0 if there is None else int(there.generation), retry=self._retry())
        if metadata(whole) != wanted:
            self.delete(whole)
        require_same(wanted, metadata(whole))
        return whole

    def delete(self, blob: Any) -> None:
        """Remove this generation of the object: a request that is carried out late must not take a newer one."""
        from google.api_core.exceptions import NotFound

        try:
            # By a handle that names no generation: else the object would be gone for good where versions are kept.
            self._handle.blob(blob.name).delete(if_generation_match=blob.generation, retry=self._retry())
        except NotFound:
            return  # gone before, or by a delete whose answer was lost

    def _retry(self, size: int = 0) -> Any:
        """The client's retry with our patience; it counts working time too, so a large transfer is given more."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        return DEFAULT_RETRY.with_delay(maximum=30.0).with_timeout(self.patience + size / _SLOWEST)

    @property
    def _handle(self) -> Any:
        return _client(*_connection()).bucket(self.bucket)


def metadata(blob: Any) -> ObjectInfo:
    """Return the bucket's record of the object. An answer for an empty one may lack the size: JSON made of protocol
    buffers has no members that are zero."""
    size = int(blob.size or 0)
    crc32c = EMPTY if size == 0 else b64decode(blob.crc32c).hex()
    return ObjectInfo(blob.name, size, crc32c)


def require_same(expected: ObjectInfo, arrived: ObjectInfo) -> None:
    if arrived != expected:
        raise UnsettledError(
            f"{arrived.size} bytes with crc32c {arrived.crc32c} arrived "
            f"where {expected.size} with {expected.crc32c} were expected"
        )


def _connection() -> tuple[int, str | None]:
    """The owner of a client: a process, because sockets must not be shared across a fork, and a service."""
    return os.getpid(), os.environ.get("STORAGE_EMULATOR_HOST")


@cache
def _client(_process: int, _service: str | None) -> Any:
    # Else each client asks for the bucket itself, in the background: with least roles a denied call in the audit log.
    os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    from google.cloud.storage import Client
    from requests.adapters import HTTPAdapter

    client = Client(project=None)  # no object belongs to a project's request; without this one would have to be set
    if not client._http.is_mtls:  # which is an adapter too
        client._http.mount("https://", HTTPAdapter(pool_maxsize=_CONNECTIONS))
    return client


@cache
def _confirm(_at: tuple[int, str | None], objects: Objects) -> None:
    """See once per process that the bucket is there."""
    objects.listed("", limit=1)


@translating
def _explaining(address: str, role: str) -> Iterator[None]:
    """Say of the client's errors which fault they are and what to do.

    Nothing is chained: a traceback may show the headers that were sent, and the token is one of them.
    """
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage.exceptions import DataCorruption
    from requests.exceptions import JSONDecodeError, RequestException

    try:
        yield
    except (JSONDecodeError, DataCorruption) as error:
        raise UnsettledError(f"{type(error).__name__}: {words_of(error)}") from None
    except (RetryError, RequestException) as error:
        raise NetworkError(
            f"{address}: the bucket does not answer: {words_of(error)}; try again when it does",
            given_up=isinstance(error, RetryError),
        ) from None
    except GoogleAuthError as error:
        if error.retryable:
            raise NetworkError(f"{address}: no credentials could be had: {words_of(error)}; try again") from None
        raise Unreachable(
            f"{address}: no usable credentials: {words_of(error)}; run `gcloud auth application-default login`"
        ) from None
    except GoogleAPICallError as error:
        code, words = error.code or 0, words_of(error)
        if code in _UNSETTLED:
            raise UnsettledError(words) from None
        if code in {401, 403}:
            bucket = address.removeprefix("gs://").partition("/")[0]
            raise UserError(
                f"{address}: bucket {bucket} refused: {words}; {role} allows it: gcloud storage buckets "
                f"add-iam-policy-binding gs://{bucket} --member=<who runs this> --role={role}"
            ) from None
        if code == 429 or code >= 500:
            raise NetworkError(f"{address}: the bucket does not answer: {words}; try again when it does") from None
        raise UserError(f"{address}: the bucket refused: {words}") from None
    except AttributeError as error:  # Google's library, of an error that is not {"error": {"message": …}}
        raise NetworkError(
            f"{address}: the answer is no bucket's ({words_of(error)}); see whether a proxy sent it, then try again"
        ) from None
