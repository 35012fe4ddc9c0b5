"""A proxy in front of a bucket that spoils requests and answers on demand, over real connections."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from threading import Event, Lock
from typing import Literal

from bucket_emulator import RUNNING, Answer, BucketServer, Request
from serving_thread import served

FOREVER = 1_000_000


@dataclass(kw_only=True)
class FailureClass:
    """What is done to `times` requests of one kind, after `skip` of them went through."""

    on: Literal["begin", "upload", "download", "delete", "compose", "look"]
    """`begin` opens a resumable upload, `upload` carries an object's bytes, `look` is all that asks for metadata."""
    do: str
    """`refuse` answers with `status`; `lose`, `cut`, `shorten` and `flip` do that to an answer, and `drop zeros` leaves
    the size of empty objects out of it, `empty` all; `flip request` and `forget a source` change what is asked; `stall`
    lets the sender wait until the proxy is armed anew, `hold` ends the connection at once, `overtake` does `meanwhile`,
    the work of another writer, before the request."""
    status: int = 503
    meanwhile: Callable[[], object] = bool
    times: int = 1
    skip: int = 0
    rearmed: Event = field(default_factory=Event)

    def strikes(self, kind: str) -> bool:
        if kind != self.on or self.times == 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class FaultyBucket(BucketServer):
    """The proxy: `arm` it with faults, and count what it saw."""

    def __init__(self, upstream: str, bucket: str) -> None:
        super().__init__(self.spoilt)
        self.bucket, self._behind = bucket, RUNNING[upstream]
        self._lock, self._faults = Lock(), list[FailureClass]()
        self.arm()

    def arm(self, *faults: FailureClass, chance: Random | None = None) -> None:
        """Forget earlier faults and requests, and use these; the first that strikes is taken.

        Args:
            chance: refuses, loses, cuts or shortens one request in five, of whatever kind.
        """
        with self._lock:
            before, self._faults, self._chance = self._faults, list(faults), chance
            self.seen: list[str] = []
            """Kind of each request, in order."""
            self.held: list[Request] = []
            self.downloaded = 0
            """Bytes of objects that were asked for and sent."""
        for fault in before:
            fault.rearmed.set()

    def _fault_for(self, kind: str) -> FailureClass | None:
        with self._lock:
            self.seen.append(kind)
            if self._chance and self._chance.randrange(5) == 0:
                return FailureClass(on="look", do=self._chance.choice(["refuse", "lose", "cut", "shorten"]))
            return next((fault for fault in self._faults if fault.strikes(kind)), None)

    def forward(self, request: Request) -> Answer:
        status, content, headers = self._behind.answer(request)
        if _kind(*request[:2]) == "download" and status < 300:
            with self._lock:
                self.downloaded += len(content)
        return status, content, headers

    def spoilt(self, request: Request) -> Answer | None:
        method, path, body, headers = request
        fault = self._fault_for(_kind(method, path))
        do = fault.do if fault else ""
        request = (method, path, _OF_REQUESTS.get(do, bytes)(body), headers)
        if do == "hold":
            self.held.append(request)
            return None
        if fault and do == "stall":
            fault.rearmed.wait()
            return None
        if fault and do == "refuse":
            return fault.status, b"spoilt", {}
        if fault and do == "overtake":
            fault.meanwhile()
        status, content, headers = self.forward(request)
        if do == "cut":
            return status, content[: len(content) // 2], {**headers, "Content-Length": str(len(content))}
        return None if do == "lose" else (status, _OF_ANSWERS.get(do, bytes)(content), headers)

    def objects(self) -> dict[str, bytes]:
        """Every object by its name below `root/`, those too that no storage lists."""
        objects = self._behind.objects[self.bucket]
        return {name.removeprefix("root/"): found.content for name, found in sorted(objects.items())}

    def release(self) -> list[int]:
        """Let the held requests through, long after their sender gave them up: the statuses of the answers."""
        return [self.forward(request)[0] for request in self.held]


@contextmanager
def faulty_bucket(upstream: str, name: str = "") -> Iterator[FaultyBucket]:
    """A proxy before the `bucket_emulator` at `upstream`, without faults at first."""
    with served(bucket := FaultyBucket(upstream, name)):
        try:
            yield bucket
        finally:
            bucket.arm()  # what stalls goes on


def _kind(method: str, path: str) -> str:
    if path.startswith("/upload"):
        return "begin" if "uploadType=resumable" in path else "upload"
    if path.split("?")[0].endswith("/compose"):
        return "compose"
    if method == "DELETE":
        return "delete"
    return "download" if "alt=media" in path else "look"


def _without_a_source(body: bytes) -> bytes:
    request = json.loads(body)
    return json.dumps(request | {"sourceObjects": request["sourceObjects"][:-1]}).encode()


def _flipped(body: bytes) -> bytes:
    """One bit changed, a quarter before the end: in a multipart upload that is the file, not its description."""
    at = len(body) * 3 // 4
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


_OF_REQUESTS = {"flip request": _flipped, "forget a source": _without_a_source}
_OF_ANSWERS: dict[str, Callable[[bytes], bytes]] = {
    "flip": _flipped,
    "drop zeros": lambda body: re.sub(rb'"size": ?"0",', b"", body),
    "shorten": lambda body: body[:10],
    "empty": lambda body: b"{}",
}
