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

_JSON = {"Content-Type": "application/json"}

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

    def __init__(
        self, cluster: Cluster, *, grant: str = "client_credentials", tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._tls = tls
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.cluster = cluster
        self.grant = grant
        """Which of the two grants this version knows."""
        self.application = ("app", secrets.token_hex(16))
        self.cluster_ids = {"main": str(uuid.uuid5(uuid.NAMESPACE_DNS, "main"))}
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

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, verb: Any) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, url.path))
        if self.server.silent > 0:
            self.server.silent -= 1
            self.close_connection = True
            return
        if self.server.moved_to is not None:
            held = urlencode({"token": self.headers.get("Authorization", ""), "body": body.decode()})
            self._send(307, b"", {"Location": f"{self.server.moved_to}{self.path}?{held}"})
            return
        if self.server.echoing is not None:
            self._send(self.server.echoing, json.dumps({"message": f"{self.headers}{body.decode()}"}).encode(), _JSON)
            return
        try:
            if url.path != "/api/v1/token":
                self._let_in()
            status, content = verb(url.path, parse_qs(url.query), json.loads(body) if body else None)
        except _No as error:
            status, content = error.status, {"code": error.status, "message": str(error)}
        except Refused as error:
            status = 409 if "already exists" in str(error) else 404 if "not found" in str(error) else 400
            content = {"code": status, "message": str(error)}
        except Lost as error:
            if (instead := LOST[str(error)]) is None:
                self.close_connection = True
            else:
                self._send(*instead, {"Content-Type": "text/html"})
            return
        self._send(status, json.dumps(content).encode(), _JSON)

    def _send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _let_in(self) -> None:
        kind, _, token = (self.headers.get("Authorization") or "").partition(" ")
        if kind != "Bearer" or token not in self.server.tokens:
            raise _No(401, "Unauthorized")

    # --- verbs ---

    def _post(self, path: str, _query: Mapping[str, list[str]], body: Any) -> tuple[int, Any]:
        if path == "/api/v1/token":
            return self._token(body)
        if path == "/api/v1/workloads/distributed":
            training = self._training(body)
            self.server.cluster.submit(training)
            return 202, {"workloadId": self.server.workload_id(training.project, training.name)}
        raise _No(404, f"no route {path}")

    def _token(self, body: Mapping[str, str]) -> tuple[int, Any]:
        fields = {"client_credentials": ("clientId", "clientSecret"), "app_token": ("AppId", "AppSecret")}
        grant = str(body.get("grantType"))
        if grant != self.server.grant or set(body) != {"grantType", *fields[grant]}:
            raise _No(400, f"grantType {grant} is not supported")
        if tuple(body[name] for name in fields[grant]) != self.server.application:
            raise _No(401, "invalid credentials")
        token = secrets.token_urlsafe(24)
        self.server.tokens.add(token)
        return 200, {"accessToken": token, "expiresIn": self.server.lifetime}

    def _get(self, path: str, query: Mapping[str, list[str]], _body: Any) -> tuple[int, Any]:
        server, cluster = self.server, self.server.cluster
        wanted = dict(part.split("==", 1) for part in query.get("filterBy", []))
        if path == "/api/v1/clusters":
            return 200, [{"uuid": uid, "name": name} for name, uid in server.cluster_ids.items()]
        if path == "/api/v1/org-unit/projects":
            found = [
                {"id": server.project_id(name), "name": name, "clusterId": server.cluster_ids["main"]}
                for name in cluster.settings["projects"]
                if wanted.get("name", name) in name  # a filter may match more than was asked for
            ]
            return 200, {"projects": found}
        if path == "/api/v1/workloads":
            rows = [
                {
                    "id": server.workload_id(project, name), "name": name, "phase": phase, "type": "Distributed",
                    "projectId": server.project_id(project), "projectName": project,
                    "clusterId": server.cluster_ids["main"],
                }
                for project in cluster.settings["projects"]
                for name, phase in cluster.phases(project).items()
                if wanted.get("name", name) in name
            ]  # fmt: skip
            return 200, {"workloads": rows, "next": None}
        raise _No(404, f"no route {path}")

    def _delete(self, path: str, _query: Mapping[str, list[str]], _body: Any) -> tuple[int, Any]:
        cluster = self.server.cluster
        wanted = path.removeprefix("/api/v1/workloads/distributed/")
        for project in cluster.settings["projects"]:
            for name in cluster.phases(project):
                if self.server.workload_id(project, name) == wanted:
                    cluster.delete(project, name)
                    return 202, {}
        raise _No(404, "workload not found")

    # --- what is asked for ---

    def _training(self, body: Any) -> Training:
        cluster = self.server.cluster
        _only(body, "body")
        spec = _only(body["spec"], "spec")
        compute, storage = (_only(spec.get(name, {}), name) for name in ("compute", "storage"))
        _only(spec.get("security", {}), "security")
        projects = {self.server.project_id(name): name for name in cluster.settings["projects"]}
        if body["clusterId"] not in self.server.cluster_ids.values():
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
            extra=spec,
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
