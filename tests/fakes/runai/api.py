"""Run:ai's REST API over a cluster: filters that match too much, and tokens that end.

It speaks TLS where it is given a certificate, and has in front of it what real ones have: redirects and proxies.
"""

import contextlib
import json
import secrets
import shlex
import ssl
from collections.abc import Callable, Iterator, Mapping
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from serving_thread import Answering, served

from .cluster import Cluster, Lost, Refused, Training

MACHINES = ("gpu-node-7", "gpu-node-8")
CLUSTER = "0bdb2f0c-8d0a-4a35-9bd3-main"

# What a client has instead of a lost answer: a status and a body of whatever stands before the API, or neither.
LOST = {
    "502": (502, b"<html>Bad Gateway</html>"),
    "login page": (200, b"<html>Sign in</html>"),
    "cut": None,
}


class Api(ThreadingHTTPServer):
    """The control plane of one cluster."""

    def __init__(self, cluster: Cluster, *, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.server_address[1]}"
        self.cluster = cluster
        self.grant = "client_credentials"
        """Which of the two grants this version knows."""
        self.application = ("app", secrets.token_hex(16))
        self.lifetime = 3600
        """Seconds that a token is said to hold."""
        self.silent = 0
        """How many requests are answered by nobody."""
        self.instead: Callable[[str, str], tuple[int, bytes, dict[str, str]]] | None = None
        """Who stands before it answers, knowing the path and all that was sent: status, body, headers."""
        self.tokens: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        """Method and path of every request."""

    def credentials(self, secret: str | None = None) -> dict[str, str]:
        """Of the application, as an environment has them."""
        return {"RUNAI_CLIENT_ID": self.application[0], "RUNAI_CLIENT_SECRET": secret or self.application[1]}


@contextlib.contextmanager
def serving(cluster: Cluster, **settings: Any) -> Iterator[Api]:
    """The cluster's REST API."""
    with served(api := Api(cluster, **settings)):
        yield api


class _Handler(Answering):
    server: Api

    def do_POST(self) -> None:
        server, url = self.server, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server.requests.append((self.command, url.path))
        if server.silent > 0:
            server.silent -= 1
        elif server.instead is not None:
            self.answer(*server.instead(self.path, f"{self.headers}{body.decode()}"))
        else:
            try:
                content = self._route(url.path, parse_qs(url.query), json.loads(body or "{}"))
                self.answer(200, json.dumps(content).encode())
            except Refused as error:
                self.answer(error.status, json.dumps({"code": error.status, "message": str(error)}).encode())
            except Lost as error:
                if (instead := LOST[str(error)]) is not None:
                    self.answer(*instead)

    do_GET = do_DELETE = do_POST

    def _route(self, path: str, query: Mapping[str, list[str]], body: Any) -> Any:
        server, cluster = self.server, self.server.cluster
        if path == "/api/v1/token":
            return self._token(body)
        if self.headers.get("Authorization", "").removeprefix("Bearer ") not in server.tokens:
            raise Refused("Unauthorized", 401)
        like = next((part[6:] for part in query.get("filterBy", []) if part.startswith("name==")), "")
        projects = {str(4_500_000 + number): name for number, name in enumerate(cluster.projects)}
        match self.command, path.removeprefix("/api/v1/").split("/"):
            case "GET", ["clusters"]:
                return [{"uuid": CLUSTER, "name": "main"}]
            case "GET", ["org-unit", "projects"]:
                found = [{"id": uid, "name": name, "clusterId": CLUSTER} for uid, name in projects.items()]
                return {"projects": [entry for entry in found if like in entry["name"]]}
            case "GET", ["workloads"]:
                workloads = [
                    {"id": f"{project}.{name}", "name": name, "phase": phase, "projectId": uid}
                    for uid, project in projects.items()
                    for name, phase in cluster.phases(project).items()
                ]
                return {"workloads": [entry for entry in workloads if like in entry["name"]], "next": None}
            case "POST", ["workloads", "distributed"]:
                cluster.submit(_training(body, projects))
                return {}
            case "DELETE", ["workloads", "distributed", uid]:
                cluster.delete(*uid.split("."))
                return {}
        raise Refused(f"no route {path}")

    def _token(self, body: Mapping[str, str]) -> Any:
        fields = {"client_credentials": ("clientId", "clientSecret"), "app_token": ("AppId", "AppSecret")}
        grant = str(body.get("grantType"))
        if grant != self.server.grant or set(body) != {"grantType", *fields[grant]}:
            raise Refused(f"grantType {grant} is not supported")
        if tuple(body[name] for name in fields[grant]) != self.server.application:
            raise Refused("invalid credentials", 401)
        token = secrets.token_urlsafe(24)
        self.server.tokens.add(token)
        return {"accessToken": token, "expiresIn": self.server.lifetime}


def _training(body: Any, projects: Mapping[str, str]) -> Training:
    spec = body["spec"]
    assert body["clusterId"] == CLUSTER
    avoided = json.dumps(spec.get("nodeAffinityRequired", ""))
    machine = next(machine for machine in MACHINES if machine not in avoided)
    return Training(
        name=body["name"],
        project=projects[body["projectId"]],
        workers=spec["numWorkers"],
        command=(spec["command"], *shlex.split(spec["args"])),
        environment={entry["name"]: _value(entry, machine) for entry in spec["environmentVariables"]},
        pvcs={pvc["claimName"]: pvc["path"] for pvc in spec.get("storage", {}).get("pvc", [])},
    )


def _value(entry: Mapping[str, Any], machine: str) -> str:
    if secret := entry.get("secret"):
        return f"what the secret {secret['name']} has under {secret['key']}"
    return machine if entry.get("podFieldRef") == {"path": "spec.nodeName"} else str(entry["value"])
