"""Run:ai's REST API over a cluster: the bodies that are documented and nothing else, and tokens that end.

It speaks TLS where it is given a certificate, and has in front of it what real ones have: redirects and proxies.
"""

from __future__ import annotations

import json
import secrets
import shlex
import ssl
import uuid
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from .cluster import Cluster, Lost, Refused, Training

# https://docs.nvidia.com/run-ai/self-hosted/reference/rest-api/endpoints/workloads/distributed/create-distributed
_FIELDS = {
    "body": {"name", "useGivenNameAsPrefix", "projectId", "clusterId", "spec", "masterSpecSameAsWorker", "masterSpec"},
    "spec": {
        "image", "command", "args", "workingDir", "environmentVariables", "annotations", "labels", "compute", "storage",
        "security", "numWorkers", "distributedFramework", "nodePools", "nodeType", "podAffinity",
        "nodeAffinityRequired", "tolerations", "backoffLimit", "restartPolicy", "cleanPodPolicy", "preemptibility",
        "priorityClass", "terminationGracePeriodSeconds", "imagePullPolicy", "imagePullSecrets",
    },
    "compute": {
        "gpuDevicesRequest", "gpuRequestType", "gpuPortionRequest", "gpuPortionLimit", "cpuCoreRequest",
        "cpuMemoryRequest", "largeShmRequest", "extendedResources",
    },
    "storage": {"pvc", "nfs", "hostPath", "emptyDirVolume", "dataVolume"},
    "security": {
        "uidGidSource", "runAsUid", "runAsGid", "hostIpc", "hostNetwork", "capabilities", "allowPrivilegeEscalation",
        "seccompProfileType", "runAsNonRoot", "readOnlyRootFilesystem",
    },
}  # fmt: skip

MACHINES = ("gpu-node-7", "gpu-node-8")

CLUSTER = "0bdb2f0c-8d0a-4a35-9bd3-main"

# What a client has instead of a lost answer: a status and a body of whatever stands before the API, or neither.
LOST = {
    "408": (408, b"<html>Request Timeout</html>"),
    "502": (502, b"<html>Bad Gateway</html>"),
    "login page": (200, b"<html>Sign in</html>"),
    "cut": None,
}


class Api(ThreadingHTTPServer):
    """The control plane of one cluster."""

    daemon_threads = False  # closing waits for them

    def __init__(self, cluster: Cluster, *, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._tls = tls
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.cluster = cluster
        self.grant = "client_credentials"
        """Which of the two grants this version knows."""
        self.application = ("app", secrets.token_hex(16))
        self.lifetime = 3600
        """Seconds that a token is said to hold."""
        self.silent = 0
        """How many requests are answered by nobody."""
        self.moved_to: str | None = None
        """The address that every request is redirected to, with what it held in the query, as login pages are."""
        self.echoing: int | None = None
        """Status of a proxy in between, which answers every request with its headers and body."""
        self.tokens: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        """Method and path of every request."""

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.server_address[1]}"

    def project_id(self, name: str) -> str:
        return str(4_500_000 + self.cluster.settings["projects"].index(name))

    def workload_id(self, project: str, name: str) -> str:
        return str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{name}.{project}"))


class _No(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        server, url = self.server, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server.asked.append((self.command, url.path))
        held = {"token": self.headers.get("Authorization", ""), "body": body.decode()}
        if server.silent > 0:
            server.silent -= 1
        elif server.moved_to is not None:
            self._send(307, b"", Location=f"{server.moved_to}{self.path}?{urlencode(held)}")
        elif server.echoing is not None:
            self._send(server.echoing, json.dumps({"message": f"{self.headers}{held}"}).encode())
        else:
            try:
                content = self._route(url.path, parse_qs(url.query), json.loads(body or "{}"))
                self._send(200, json.dumps(content).encode())
            except _No as error:
                self._refuse(error.status, error)
            except Refused as error:
                known = {"already exists": 409, "not found": 404}
                self._refuse(next((status for words, status in known.items() if words in str(error)), 400), error)
            except Lost as error:
                if (instead := LOST[str(error)]) is not None:
                    self._send(*instead)

    do_GET = do_DELETE = do_POST  # noqa: N815  as its base class calls them

    def log_message(self, *_: object) -> None:
        pass

    def _refuse(self, status: int, error: Exception) -> None:
        self._send(status, json.dumps({"code": status, "message": str(error)}).encode())

    def _send(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _route(self, path: str, query: Mapping[str, list[str]], body: Any) -> Any:
        server, cluster = self.server, self.server.cluster
        if path == "/api/v1/token":
            return self._token(body)
        if self.headers.get("Authorization", "").removeprefix("Bearer ") not in server.tokens:
            raise _No(401, "Unauthorized")
        wanted = dict(part.split("==", 1) for part in query.get("filterBy", []))
        like = wanted.get("name", "")  # a filter matches more than was asked for
        projects = {server.project_id(name): name for name in cluster.settings["projects"]}
        workloads = [
            {"id": server.workload_id(project, name), "name": name, "phase": phase, "projectId": uid}
            for uid, project in projects.items()
            for name, phase in cluster.phases(project).items()
        ]
        match self.command, path.removeprefix("/api/v1/").split("/"):
            case "GET", ["clusters"]:
                return [{"uuid": CLUSTER, "name": "main"}]
            case "GET", ["org-unit", "projects"]:
                found = [{"id": uid, "name": name, "clusterId": CLUSTER} for uid, name in projects.items()]
                return {"projects": [one for one in found if like in one["name"]]}
            case "GET", ["workloads"]:
                return {"workloads": [one for one in workloads if like in one["name"]], "next": None}
            case "POST", ["workloads", "distributed"]:
                cluster.submit(self._training(body, projects))
                return {}
            case "DELETE", ["workloads", "distributed", uid]:
                (one,) = [one for one in workloads if one["id"] == uid]
                cluster.delete(projects[one["projectId"]], one["name"])
                return {}
        raise _No(404, f"no route {path}")

    def _token(self, body: Mapping[str, str]) -> Any:
        fields = {"client_credentials": ("clientId", "clientSecret"), "app_token": ("AppId", "AppSecret")}
        grant = str(body.get("grantType"))
        if grant != self.server.grant or set(body) != {"grantType", *fields[grant]}:
            raise _No(400, f"grantType {grant} is not supported")
        if tuple(body[name] for name in fields[grant]) != self.server.application:
            raise _No(401, "invalid credentials")
        token = secrets.token_urlsafe(24)
        self.server.tokens.add(token)
        return {"accessToken": token, "expiresIn": self.server.lifetime}

    # --- what is asked for ---

    def _training(self, body: Any, projects: Mapping[str, str]) -> Training:
        _only(body, "body")
        spec = _only(body["spec"], "spec")
        compute, storage = (_only(spec.get(name, {}), name) for name in ("compute", "storage"))
        _only(spec.get("security", {}), "security")
        if body["clusterId"] != CLUSTER:
            raise _No(400, f"cluster {body['clusterId']} not found")
        machine = _machine(spec.get("nodeAffinityRequired", {"nodeSelectorTerms": []}))
        return Training(
            name=body["name"],
            project=projects[body["projectId"]],
            workers=spec["numWorkers"],
            command=(spec["command"], *shlex.split(spec["args"])),
            environment=dict(_variable(one, machine) for one in spec.get("environmentVariables", [])),
            gpus=compute.get("gpuPortionRequest", compute.get("gpuDevicesRequest", 0)),
            claims=tuple((claim["claimName"], claim["path"]) for claim in storage.get("pvc", [])),
            labels={one["name"]: one["value"] for one in spec.get("labels", [])},
        )


def _only(given: Any, where: str) -> Mapping[str, Any]:
    if unknown := sorted(given.keys() - _FIELDS[where]):
        raise _No(400, f"{where}: unknown field {unknown[0]!r}")
    read: Mapping[str, Any] = given
    return read


def _machine(affinity: Mapping[str, Any]) -> str:
    """The first machine that the training does not avoid."""
    avoided: set[str] = set()
    for term in affinity["nodeSelectorTerms"]:
        for rule in term["matchExpressions"]:
            assert (rule["key"], rule["operator"]) == ("kubernetes.io/hostname", "NotIn"), rule
            avoided |= set(rule["values"])
    return next(machine for machine in MACHINES if machine not in avoided)


def _variable(one: Mapping[str, Any], machine: str) -> tuple[str, str]:
    """A variable has one source."""
    match sorted(one.items()):
        case [("name", name), ("value", value)]:
            return name, value
        case [("name", name), ("podFieldRef", {"path": "spec.nodeName"})]:
            return name, machine
        case [("name", name), ("secret", {"name": secret, "key": key})]:
            return name, f"what the secret {secret} has under {key}"
    raise _No(400, f"environment variable {dict(one)} must have exactly one source")
