"""A container registry in one file, which has what tests put there and refuses what the real ones refuse."""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from serving_thread import Answering, served

WANTED = re.compile(r"/v2/(?P<name>[a-z0-9._/-]+)/(?P<kind>blobs|manifests)/(?P<reference>[\w.:-]+)")
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
SERVICE = "fake-registry"
IDENTITY_TOKEN = "an-identity-token"


@dataclass
class Running:
    """A running registry; how it behaves is set when it is started."""

    account: str = ""
    """`user:password` without which nothing is answered."""
    token_host: str = "127.0.0.1"
    """The name under which clients find the token service."""
    storage: str = ""
    """Blobs are at this machine's other name, which is another origin: `signed` refuses logins there, as signed
    addresses of Google and Amazon do; `asks` says that it wants one."""
    swapped: bool = False
    """The first manifest of a name, and another blob, is the answer, whatever is asked for."""
    first: list[str] = field(default_factory=list)
    """What the first requests for manifests get, one each: a status, or `cut`, a connection closed in mid-answer."""
    port: int = 0
    manifests: dict[tuple[str, str], tuple[str, bytes]] = field(default_factory=dict)
    """Media type and bytes by name and tag, or name and digest."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """Every request: its method and path."""

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def push(self, name: str, tag: str) -> str:
        """Put a manifest there that is like no other; returns its digest."""
        return self.put(name, tag, {"mediaType": OCI_INDEX, "annotations": {"number": str(len(self.manifests))}})

    def put(self, name: str, tag: str, body: dict[str, Any]) -> str:
        """Put a manifest there, whatever it says; returns its digest."""
        content = json.dumps(body).encode()
        for reference in (tag, digest_of(content)):
            self.manifests[name, reference] = (body["mediaType"], content)
        return digest_of(content)

    def push_image(self, name: str, labels: dict[str, str], *, architectures: tuple[str, ...] = ()) -> str:
        """Put an image with labels and without layers there, for several processors by an index; returns `…:1`."""
        if architectures:
            # BuildKit lists its attestations too.
            rows = [
                self._listed(name, labels, architecture, tag=f"1-{architecture}")
                for architecture in ("unknown", *architectures)
            ]
            self.put(name, "1", {"mediaType": OCI_INDEX, "manifests": rows})
        else:
            self._listed(name, labels, "amd64", tag="1")
        return f"{self.host}/{name}:1"

    def _listed(self, name: str, labels: dict[str, str], architecture: str, *, tag: str) -> dict[str, Any]:
        """Put an image for one processor there; returns its row for an index."""
        config = json.dumps({"architecture": architecture, "os": "linux", "config": {"Labels": labels}}).encode()
        self.blobs[digest_of(config)] = config
        digest = self.put(name, tag, {"mediaType": OCI_MANIFEST, "config": {"digest": digest_of(config)}})
        return {"digest": digest, "platform": {"os": "linux", "architecture": architecture}}


class _Handler(Answering):
    protocol_version = "HTTP/1.1"

    @property
    def registry(self) -> Running:
        return self.server.registry  # type: ignore[attr-defined, no-any-return]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if address.path == "/token":
            allowed = self.headers.get("Authorization") == basic(self.registry.account)
            self.grant(parse_qs(address.query), allowed=allowed)
        elif address.path.startswith("/storage/"):
            self.send_from_storage(address.path.removeprefix("/storage/"))
        elif self.registry.first and "/manifests/" in self.path:
            self.close_connection = (how := self.registry.first.pop(0)) == "cut"
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Le") if how == "cut" else self.answer(int(how))
        elif (wanted := WANTED.fullmatch(self.path)) is None:
            self.answer(404)
        elif not self.is_authorized(wanted["name"]):
            self.challenge(self.registry.token_host, f"repository:{wanted['name']}:pull")
        elif wanted["kind"] == "blobs":
            self.send_blob(wanted["reference"])
        else:
            self.send_manifest(wanted["name"], wanted["reference"])

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        known = form.get("refresh_token") == [IDENTITY_TOKEN] and form.get("grant_type") == ["refresh_token"]
        self.grant(form, allowed=known and "client_id" in form, field="access_token")

    def send_blob(self, digest: str) -> None:
        if self.registry.storage:
            self.answer(307, headers={"Location": f"http://localhost:{self.registry.port}/storage/{digest}"})
        else:
            self.answer(200, b"another" if self.registry.swapped else self.registry.blobs[digest])

    def send_from_storage(self, digest: str) -> None:
        if self.registry.storage == "asks":
            self.challenge("localhost", "all")
        elif "Authorization" in self.headers:
            self.answer(400, b"InvalidArgument: only one way to authenticate")
        else:
            self.answer(200, self.registry.blobs[digest])

    def send_manifest(self, name: str, reference: str) -> None:
        manifests = self.registry.manifests
        if self.registry.swapped:
            reference = next(tag for repository, tag in manifests if repository == name)
        kind, content = manifests.get((name, reference), ("", b""))
        accepted = {item.strip() for item in self.headers.get("Accept", "").split(",")}
        if kind not in accepted:  # Docker's registry: "OCI index found, but accept header does not support OCI indexes"
            self.answer(404)
            return
        self.answer(200, content, headers={"Content-Type": kind, "Docker-Content-Digest": digest_of(content)})

    def is_authorized(self, name: str) -> bool:
        authorization = self.headers.get("Authorization", "")
        return not self.registry.account or authorization == f"Bearer {token(f'repository:{name}:pull')}"

    def challenge(self, token_host: str, scope: str) -> None:
        realm = f"http://{token_host}:{self.registry.port}/token"
        self.answer(401, headers={"WWW-Authenticate": f'Bearer realm="{realm}",service="{SERVICE}",scope="{scope}"'})

    def grant(self, query: dict[str, list[str]], *, allowed: bool, field: str = "token") -> None:
        if allowed and query.get("service") == [SERVICE] and query.get("scope"):
            self.answer(200, json.dumps({field: token(query["scope"][0])}).encode())
        else:
            self.answer(401)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        self.registry.requests.append(f"{self.command} {self.path}")


def digest_of(content: bytes) -> str:
    return f"sha256:{sha256(content).hexdigest()}"


def token(scope: str) -> str:
    """Good for this scope only, as the real ones are."""
    return sha256(f"token for {scope}".encode()).hexdigest()


def basic(account: str) -> str:
    return "Basic " + base64.b64encode(account.encode()).decode()


@contextmanager
def registry(**how: Any) -> Iterator[Running]:
    """A registry on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.registry = running = Running(port=server.server_port, **how)  # type: ignore[attr-defined]
    with served(server):
        yield running
