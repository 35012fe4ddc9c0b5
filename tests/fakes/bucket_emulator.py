"""Google Cloud Storage in this process, as far as google-cloud-storage is used here: objects in memory, over HTTP.

Written after https://cloud.google.com/storage/docs/json_api: objects are inserted (multipart or resumable), looked at,
listed, read (ranges too), composed of up to 32 and deleted, on conditions of generations and with crc32c compared.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from itertools import count
from threading import Lock
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

import google_crc32c
from serving_thread import Answering, served

Request: TypeAlias = tuple[str, str, bytes, dict[str, str]]
"""Method, path, body and headers."""
Answer: TypeAlias = tuple[int, bytes, dict[str, str]]
Query: TypeAlias = dict[str, str]
RUNNING: dict[str, Buckets] = {}
"""By their address."""


@contextmanager
def bucket_emulator(*names: str) -> Iterator[str]:
    """The address of a service that holds these empty buckets, as STORAGE_EMULATOR_HOST takes it."""
    buckets = Buckets({name: {} for name in names})
    with served(server := BucketServer(buckets.answer)):
        RUNNING[server.url] = buckets
        yield server.url
        del RUNNING[server.url]


class _RefusedError(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class _Object:
    content: bytes
    generation: str

    @property
    def crc32c(self) -> str:
        return b64encode(google_crc32c.value(self.content).to_bytes(4, "big")).decode()

    def description(self, bucket: str, name: str) -> dict[str, str]:
        size = str(len(self.content))
        return {"bucket": bucket, "name": name, "generation": self.generation, "size": size, "crc32c": self.crc32c}


@dataclass
class _Upload:
    """A resumable one."""

    bucket: str
    metadata: dict[str, str]
    query: Query
    content: bytes = b""
    done: Answer | None = None


@dataclass
class Buckets:
    """The objects of each bucket by their names."""

    objects: dict[str, dict[str, _Object]]
    location: str = ""
    _uploads: list[_Upload] = field(default_factory=list)
    _generations: Iterator[int] = field(default_factory=lambda: count(1))
    _lock: Lock = field(default_factory=Lock)

    def answer(self, request: Request) -> Answer:
        method, path, body, headers = request
        url = urlsplit(path)
        query = dict(parse_qsl(url.query))
        parts = [unquote(part) for part in url.path.partition("/storage/v1/b/")[2].split("/")]
        try:
            with self._lock:
                return self._answer(method, parts, query, body, {name.lower(): headers[name] for name in headers})
        except _RefusedError as refused:
            error = {"error": {"code": refused.status, "message": str(refused)}}
            return refused.status, json.dumps(error).encode(), {}

    def _answer(self, method: str, parts: list[str], query: Query, body: bytes, headers: dict[str, str]) -> Answer:
        bucket = parts[0]
        if bucket not in self.objects:
            raise _RefusedError(404, "The specified bucket does not exist.")
        if parts[1:] == ["storageLayout"]:
            return _json({"bucket": bucket, "location": self.location})
        match method, parts[2:]:
            case "POST", [] if query["uploadType"] == "resumable":
                self._uploads.append(_Upload(bucket, json.loads(body), query))
                place = f"http://{headers['host']}/upload/storage/v1/b/{bucket}/o?upload_id={len(self._uploads) - 1}"
                return 200, b"", {"Location": place}
            case "POST", []:
                boundary = b"--" + headers["content-type"].partition("boundary=")[2].strip('"').encode()
                meta, _, file = body.removeprefix(boundary).partition(b"\r\n" + boundary)
                content = file.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n" + boundary + b"--")
                return self._put(bucket, json.loads(meta.partition(b"\r\n\r\n")[2]), query, content)
            case "PUT", []:
                return self._continue(self._uploads[int(query["upload_id"])], body, headers["content-range"])
            case "GET", []:
                names = sorted(name for name in self.objects[bucket] if name.startswith(query.get("prefix", "")))
                if "delimiter" in query:
                    names = [name for name in names if "/" not in name.removeprefix(query.get("prefix", ""))]
                return _json({"items": [self.objects[bucket][name].description(bucket, name) for name in names]})
            case "POST", [name, "compose"]:
                return self._compose(bucket, name, query, json.loads(body)["sourceObjects"])
            case "DELETE", [name]:
                self._found(bucket, name, query)
                self._check(bucket, name, query)
                del self.objects[bucket][name]
                return 204, b"", {}
            case "GET", [name]:
                found = self._found(bucket, name, query)
                if query.get("alt") != "media":
                    return _json(found.description(bucket, name))
                return _part(found.content, headers["range"]) if "range" in headers else (200, found.content, {})
        raise _RefusedError(501, f"{method} {parts} is nothing that the emulator knows")

    def _found(self, bucket: str, name: str, query: Query) -> _Object:
        found = self.objects[bucket].get(name)
        if found is None or query.get("generation", found.generation) != found.generation:
            raise _RefusedError(404, f"No such object: {bucket}/{name}")
        return found

    def _check(self, bucket: str, name: str, query: Query) -> None:
        current = self.objects[bucket].get(name)
        if query.get("ifGenerationMatch") not in {None, current.generation if current else "0"}:
            raise _RefusedError(412, "At least one of the pre-conditions you specified did not hold.")

    def _put(self, bucket: str, metadata: dict[str, str], query: Query, content: bytes) -> Answer:
        made = _Object(content, str(next(self._generations)))
        if metadata.get("crc32c") not in {None, made.crc32c}:
            raise _RefusedError(400, f"Provided CRC32C {metadata['crc32c']} doesn't match calculated {made.crc32c}.")
        self._check(bucket, metadata["name"], query)
        self.objects[bucket][metadata["name"]] = made
        return _json(made.description(bucket, metadata["name"]))

    def _continue(self, upload: _Upload, body: bytes, place: str) -> Answer:
        start, end, size = map(int, re.findall(r"\d+", place))
        upload.content = upload.content[:start] + body
        if end + 1 < size:
            return 308, b"", {"Range": f"bytes=0-{end}"}
        upload.done = upload.done or self._put(upload.bucket, upload.metadata, upload.query, upload.content)
        return upload.done

    def _compose(self, bucket: str, name: str, query: Query, sources: list[dict[str, Any]]) -> Answer:
        if not 1 <= len(sources) <= 32:
            raise _RefusedError(400, "The number of source components must be between 1 and 32.")
        parts = [self._found(bucket, source["name"], {"generation": str(source["generation"])}) for source in sources]
        return self._put(bucket, {"name": name}, query, b"".join(part.content for part in parts))


def _json(value: object) -> Answer:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}


def _part(content: bytes, wanted: str) -> Answer:
    start, _, end = wanted.removeprefix("bytes=").partition("-")
    part = content[int(start) : int(end or len(content)) + 1]
    return 206, part, {"Content-Range": f"bytes {start}-{int(start) + len(part) - 1}/{len(content)}"}


class BucketServer(ThreadingHTTPServer):
    """Answers requests over HTTP; where the answer is None it closes the connection."""

    request_queue_size = 128  # connections that wait their turn; the default of 5 makes those of more threads try again

    def __init__(self, answer: Callable[[Request], Answer | None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.url = answer, f"http://127.0.0.1:{self.server_port}"


class _Handler(Answering):
    server: BucketServer

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = self.server.answer((self.command, self.path, body, dict(self.headers)))
        if answer is not None:
            self.answer(*answer)

    do_GET = do_POST = do_PUT = do_DELETE = _serve
