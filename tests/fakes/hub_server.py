"""The part of the Hugging Face Hub that huggingface_hub 1.3.7 calls to list a dataset and to fetch files.

Written against huggingface_hub's own source (hf_api.dataset_info, file_download, utils/_http.hf_raise_for_status):

    GET  /api/datasets/{owner}/{name}/revision/{revision}?blobs=true   the listing; without blobs, names alone
    HEAD /datasets/{owner}/{name}/resolve/{revision}/{path}            size, ETag and commit; large files redirect
    GET  /datasets/{owner}/{name}/resolve/{revision}/{path}            a small file
    GET  /large/{sha256}                                               a large (LFS) file, with ranges

and of a model repository the two that fetch a file, /{owner}/{name}/resolve/{revision}/{path}.

Anything else is answered by 501, so that a new call of the library shows up.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from serving_thread import served


@dataclass
class Repository:
    """A repository of a dataset or a model with one branch, `main`."""

    files: dict[str, bytes]
    large: set[str] = field(default_factory=set)
    """Paths that are stored in LFS."""
    gated: bool = False
    """As on the Hub: anyone sees the list, only the admitted get the files."""

    @property
    def commit(self) -> str:
        return sha1(repr(sorted((path, git_id(data)) for path, data in self.files.items())).encode()).hexdigest()

    def listing(self, name: str, *, blobs: bool) -> dict[str, object]:
        siblings = [self._entry(path) if blobs else {"rfilename": path} for path in self.files]
        return {"id": name, "sha": self.commit, "private": False, "siblings": siblings}

    def _entry(self, path: str) -> dict[str, object]:
        data = self.files[path]
        entry: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": git_id(data)}
        if path in self.large:
            entry["lfs"] = {"sha256": sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry


def git_id(data: bytes) -> str:
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Hub:
    """A running server; what is in it can be changed while it runs."""

    endpoint: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    cuts: int = 0
    """How many of the next downloads of large files break off in the middle."""
    failing: int | None = None
    """Status that every request is answered with."""
    spoil: bool = False
    """Flip a bit in the middle of each large file sent."""
    gate: threading.Event = field(default_factory=threading.Event)
    """While it is not set, large files are sent to their middle and no further."""
    starts: list[int] = field(default_factory=list)
    """First byte of each large file asked for, in order: 0, or where a download is taken up."""


@contextmanager
def running_hub(repositories: dict[str, Repository]) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}", repositories)
    hub.gate.set()
    server.hub = hub  # type: ignore[attr-defined]
    with served(server):
        try:
            yield hub
        finally:
            hub.gate.set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def do_GET(self) -> None:
        self._route()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _route(self) -> None:
        url = urlsplit(self.path)
        if self.hub.failing is not None:
            self._answer(self.hub.failing, b"")
            return
        match [unquote(part) for part in url.path.split("/")[1:]]:
            case ["api", "datasets", owner, name, "revision", revision]:
                self._list(f"{owner}/{name}", revision, blobs=parse_qs(url.query).get("blobs") == ["true"])
            case ["datasets", owner, name, "resolve", revision, *path] | [owner, name, "resolve", revision, *path]:
                self._resolve(f"{owner}/{name}", revision, "/".join(path))
            case ["large", digest]:
                self._large(digest)
            case _:
                self._answer(501, b"the fake Hub knows no such call")

    def _list(self, name: str, revision: str, *, blobs: bool) -> None:
        if (repository := self._repository(name, revision)) is not None:
            self._answer(200, json.dumps(repository.listing(name, blobs=blobs)).encode())

    def _resolve(self, name: str, revision: str, path: str) -> None:
        if (repository := self._repository(name, revision)) is None:
            return
        if repository.gated:
            self._refuse(403, "GatedRepo")
        elif path not in repository.files:
            self._refuse(404, "EntryNotFound")
        else:
            self._file(repository, path)

    def _file(self, repository: Repository, path: str) -> None:
        data = repository.files[path]
        commit = {"X-Repo-Commit": repository.commit}
        if path not in repository.large:
            self._answer(200, data, commit | {"ETag": f'"{git_id(data)}"'})
            return
        digest = sha256(data).hexdigest()
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{digest}"'}
        self._answer(302, b"", commit | linked | {"Location": f"{self.hub.endpoint}/large/{digest}"})

    def _large(self, digest: str) -> None:
        files = [data for repository in self.hub.repositories.values() for data in repository.files.values()]
        data = next(data for data in files if sha256(data).hexdigest() == digest)
        if self.hub.spoil:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if self.command == "GET":
            self.hub.starts.append(start)
        content_range = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        self._answer(206 if start else 200, data[start:], content_range)

    def _repository(self, name: str, revision: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._refuse(404, "RepoNotFound")
        elif revision not in ("main", repository.commit):
            self._refuse(404, "RevisionNotFound")
        else:
            return repository
        return None

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.path.startswith("/large/") and self.hub.cuts:
            self.hub.cuts -= 1
            self.close_connection = True
            body = body[: len(body) // 2]
        self.wfile.write(body[: len(body) // 2])
        if self.path.startswith("/large/"):
            self.hub.gate.wait()
        self.wfile.write(body[len(body) // 2 :])
