"""A container registry in one file, as strict as the real ones: it keeps what is pushed and refuses what they refuse.

Run it as a program; it prints its address. `--account user:password` makes it private, by tokens (or `--basic`);
`--anonymous-tokens` gives a token to whoever asks, as Docker Hub does. `--token-host` is the name under which clients
find the token service. `--storage` sends whoever asks for a blob on to another server, which refuses logins, as signed
addresses of Google and Amazon do. `--no-digest-header`, `--broken` and `--swapped` misbehave; the last answers with the
first manifest of a name, and with another blob, whatever is asked for. `--first 429,503,cut` is what the first
requests for manifests get, one each: a status, or a connection that is closed in mid-answer; `--retry-after` goes with the
statuses. Every request is a line on standard error.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx

BLOB = re.compile(r"/v2/(?P<name>[a-z0-9._/-]+)/blobs/(?P<digest>sha256:[0-9a-f]{64})")
UPLOAD = re.compile(r"/v2/(?P<name>[a-z0-9._/-]+)/blobs/uploads/")
MANIFEST = re.compile(r"/v2/(?P<name>[a-z0-9._/-]+)/manifests/(?P<reference>[\w.:-]+)")
SERVICE = "fake-registry"
IDENTITY_TOKEN = "an-identity-token"


class Registry(BaseHTTPRequestHandler):
    """State is on the server: `manifests[name, tag or digest] = (media type, bytes)`, `blobs[digest]` and `options`."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer_manifest()

    def do_GET(self) -> None:
        if urlsplit(self.path).path == "/token":
            query = parse_qs(urlsplit(self.path).query)
            self.grant(query.get("service"), query.get("scope"), allowed=self.may_have_token())
        elif blob := BLOB.fullmatch(self.path):
            self.answer_blob(blob["name"], blob["digest"])
        else:
            self.answer_manifest()

    def do_POST(self) -> None:
        if UPLOAD.fullmatch(urlsplit(self.path).path):
            self.take_blob(parse_qs(urlsplit(self.path).query)["digest"][0])
            return
        form = parse_qs(self.body().decode())
        known = form.get("refresh_token") == [IDENTITY_TOKEN] and form.get("grant_type") == ["refresh_token"]
        self.grant(form.get("service"), form.get("scope"), allowed=known and "client_id" in form, field="access_token")

    def do_PUT(self) -> None:
        match, content = MANIFEST.fullmatch(self.path), self.body()
        kind = json.loads(content).get("mediaType")
        if match is None or kind != self.headers["Content-Type"]:
            self.send(400, error="MANIFEST_INVALID")
            return
        digest = f"sha256:{sha256(content).hexdigest()}"
        for reference in (match["reference"], digest):
            self.server.manifests[match["name"], reference] = (kind, content)
        self.send(201, headers={"Docker-Content-Digest": digest})

    def take_blob(self, digest: str) -> None:
        content = self.body()
        if digest != f"sha256:{sha256(content).hexdigest()}":
            self.send(400, error="DIGEST_INVALID")
            return
        self.server.blobs[digest] = content
        self.send(201, headers={"Docker-Content-Digest": digest})

    def answer_blob(self, name: str, digest: str) -> None:
        if not self.is_authorized(name):
            self.challenge(name)
        elif digest not in self.server.blobs:
            self.send(404, error="BLOB_UNKNOWN")
        elif self.server.storage:
            self.send(307, headers={"Location": f"http://localhost:{self.server.storage.server_port}/{digest}?signed"})
        else:
            content = b"another" if self.server.options.swapped else self.server.blobs[digest]
            self.send(200, content, kind="application/octet-stream")

    def answer_manifest(self) -> None:
        match = MANIFEST.fullmatch(self.path)
        if self.server.first:
            self.fail(self.server.first.pop(0))
        elif self.server.options.broken:
            self.send(503, error="UNAVAILABLE")
        elif match is None:
            self.send(404, error="NOT_A_MANIFEST")
        elif not self.is_authorized(match["name"]):
            self.challenge(match["name"])
        else:
            self.send_manifest(match["name"], match["reference"])

    def fail(self, how: str) -> None:
        if how == "cut":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Le")
            self.close_connection = True
            return
        seconds = self.server.options.retry_after
        self.send(int(how), headers={"Retry-After": seconds} if seconds else {}, error="TOOMANYREQUESTS")

    def send_manifest(self, name: str, reference: str) -> None:
        manifests = self.server.manifests
        if self.server.options.swapped:
            reference = next(tag for repository, tag in manifests if repository == name)
        kind, content = manifests.get((name, reference), ("", b""))
        accepted = {item.strip() for item in self.headers.get("Accept", "").split(",")}
        if kind not in accepted:  # Docker's registry: "OCI index found, but accept header does not support OCI indexes"
            self.send(404, error="MANIFEST_UNKNOWN")
            return
        digest = {"Docker-Content-Digest": f"sha256:{sha256(content).hexdigest()}"}
        self.send(200, content, headers={} if self.server.options.no_digest_header else digest, kind=kind)

    def is_authorized(self, name: str) -> bool:
        options, given = self.server.options, self.headers.get("Authorization", "")
        if options.basic:
            return given == basic(options.account)
        if options.account or options.anonymous_tokens:
            return given == f"Bearer {token(f'repository:{name}:pull')}"
        return True

    def challenge(self, name: str) -> None:
        if self.headers.get("Authorization"):
            self.send(403, error="DENIED")
            return
        host = self.server.options.token_host or "127.0.0.1"
        realm = f"http://{host}:{self.server.server_port}/token"
        bearer = f'Bearer realm="{realm}",service="{SERVICE}",scope="repository:{name}:pull"'
        wanted = f'Basic realm="{SERVICE}"' if self.server.options.basic else bearer
        self.send(401, headers={"WWW-Authenticate": wanted}, error="UNAUTHORIZED")

    def may_have_token(self) -> bool:
        given = self.headers.get("Authorization")
        return self.server.options.anonymous_tokens if given is None else given == basic(self.server.options.account)

    def grant(self, service: list[str] | None, scope: list[str] | None, *, allowed: bool, field: str = "token") -> None:
        if allowed and service == [SERVICE] and scope:
            self.send(200, json.dumps({field: token(scope[0])}).encode(), kind="application/json")
        else:
            self.send(401, error="UNAUTHORIZED")

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def send(
        self,
        status: int,
        content: bytes = b"",
        *,
        headers: dict[str, str] | None = None,
        kind: str = "",
        error: str = "",
    ) -> None:
        if error:
            content, kind = json.dumps({"errors": [{"code": error}]}).encode(), "application/json"
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class Storage(BaseHTTPRequestHandler):
    """The place of the blobs: the signature in the address is the permission, and a login beside it is an error."""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        allowed = address.query == "signed" and "Authorization" not in self.headers
        content = self.server.blobs[address.path[1:]] if allowed else b"InvalidArgument: only one way to authenticate"
        self.send_response(200 if allowed else 400)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def token(scope: str) -> str:
    """Good for this scope only, as the real ones are."""
    return sha256(f"token for {scope}".encode()).hexdigest()


def basic(account: str) -> str:
    return "Basic " + base64.b64encode(account.encode()).decode()


# --- for tests --------------------------------------------------------------------------------------------------------

OCI_INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass(frozen=True)
class Running:
    """A registry in a process of its own."""

    host: str
    log: Path

    def push(self, name: str, tag: str, kind: str = OCI_INDEX) -> str:
        """Put a manifest there that is like no other; returns its digest."""
        content = json.dumps({"mediaType": kind, "annotations": {"for": f"{name}:{tag}"}}).encode()
        url = f"http://{self.host}/v2/{name}/manifests/{tag}"
        httpx.put(url, content=content, headers={"Content-Type": kind}, trust_env=False).raise_for_status()
        return f"sha256:{sha256(content).hexdigest()}"

    def requests(self) -> list[str]:
        return re.findall(r'"(\w+ \S+) HTTP', self.log.read_text())


@contextmanager
def registry(folder: Path, *options: str) -> Iterator[Running]:
    log = folder / "registry.log"
    command = [sys.executable, __file__, *options]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            yield Running(process.stdout.readline().strip(), log)
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--account", default="")
    parser.add_argument("--token-host", default="")
    parser.add_argument("--first", default="")
    parser.add_argument("--retry-after", default="")
    for flag in ("--basic", "--anonymous-tokens", "--no-digest-header", "--broken", "--swapped", "--storage"):
        parser.add_argument(flag, action="store_true")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    server.options, server.manifests, server.blobs, server.storage = parser.parse_args(), {}, {}, None
    server.first = [how for how in server.options.first.split(",") if how]
    if server.options.storage:
        server.storage = ThreadingHTTPServer(("127.0.0.1", 0), Storage)
        server.storage.blobs = server.blobs
        threading.Thread(target=server.storage.serve_forever, daemon=True).start()
    print(f"127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
