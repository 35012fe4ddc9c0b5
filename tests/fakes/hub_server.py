"""The part of the Hugging Face Hub that huggingface_hub calls to list a dataset and to fetch files.

Written against huggingface_hub's own source (hf_api.dataset_info, file_download, utils/_http.hf_raise_for_status):

    GET  /api/datasets/{owner}/{name}/revision/{revision}?blobs=true   the listing; without blobs, names alone
    HEAD /datasets/{owner}/{name}/resolve/{revision}/{path}            size, ETag and commit; large files redirect
    GET  /datasets/{owner}/{name}/resolve/{revision}/{path}            a small file
    GET  /large/{sha256}                                               a large (LFS) file, with ranges

and of a model repository the same, /api/models/… and /{owner}/{name}/resolve/{revision}/{path}.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from serving_thread import Answering, served


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

    def entry(self, path: str) -> dict[str, object]:
        data = self.files[path]
        lfs = {"lfs": {"sha256": sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}}
        blob = {"rfilename": path, "size": len(data), "blobId": git_id(data)}
        return blob | lfs if path in self.large else blob


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


class _Handler(Answering):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        match [unquote(part) for part in url.path.split("/")[1:]]:
            case _ if self.hub.failing is not None:
                self.answer(self.hub.failing)
            case ["api", "datasets" | "models", owner, name, "revision", revision]:
                if (repository := self._repository(f"{owner}/{name}", revision)) is not None:
                    blobs = [repository.entry(path) for path in repository.files]
                    names = blobs if url.query == "blobs=true" else [{"rfilename": path} for path in repository.files]
                    listing = {"id": name, "sha": repository.commit, "private": False, "siblings": names}
                    self.answer(200, json.dumps(listing).encode())
            case ["datasets", owner, name, "resolve", revision, *path] | [owner, name, "resolve", revision, *path]:
                if (repository := self._repository(f"{owner}/{name}", revision)) is not None:
                    self._resolve(repository, "/".join(path))
            case ["large", digest]:
                self._large(digest)
            case _:
                self.answer(501)

    do_HEAD = do_GET

    def _resolve(self, repository: Repository, path: str) -> None:
        if repository.gated:
            self._refuse(403, "GatedRepo")
        elif path not in repository.files:
            self._refuse(404, "EntryNotFound")
        elif path in repository.large:
            data = repository.files[path]
            digest = sha256(data).hexdigest()
            linked = {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{digest}"'}
            location = {"X-Repo-Commit": repository.commit, "Location": f"{self.hub.endpoint}/large/{digest}"}
            self.answer(302, headers=linked | location)
        else:
            data = repository.files[path]
            self.answer(200, data, {"X-Repo-Commit": repository.commit, "ETag": f'"{git_id(data)}"'})

    def _large(self, digest: str) -> None:
        files = [data for repository in self.hub.repositories.values() for data in repository.files.values()]
        data = next(data for data in files if sha256(data).hexdigest() == digest)
        if self.hub.spoil:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        content_range = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        rest = data[start:]
        self.answer(206 if start else 200, headers=content_range | {"Content-Length": str(len(rest))})
        if self.command == "HEAD":
            return
        self.hub.starts.append(start)
        self.wfile.write(rest[: len(rest) // 2])
        self.hub.gate.wait()
        if self.hub.cuts:
            self.hub.cuts -= 1
            self.close_connection = True
        else:
            self.wfile.write(rest[len(rest) // 2 :])

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
        self.answer(status, headers={"X-Error-Code": code, "X-Error-Message": code})
