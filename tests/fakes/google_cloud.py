"""Google Cloud as far as a launcher meets it: the GKE API over gRPC, tokens, and what one may do in a project."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.cloud.container_v1 import ClusterManagerClient
from google.cloud.container_v1.services.cluster_manager.transports import ClusterManagerGrpcTransport
from google.cloud.container_v1.types import Cluster, GetClusterRequest, ListClustersRequest, ListClustersResponse

PROJECT = "my-project"


@dataclass
class GoogleCloud:
    """One project."""

    permissions: set[str] = field(
        default_factory=lambda: {f"container.clusters.{verb}" for verb in ("get", "list", "connect")}
    )
    calls: list[str] = field(default_factory=list)
    """Methods of the GKE API that were called."""
    clusters: dict[str, Cluster] = field(default_factory=dict)
    """By full name: projects/…/locations/…/clusters/…"""
    token: Callable[[], str] = lambda: "token"
    lifetime: int = 3600
    """Seconds that a token says it is good for."""
    tokens: int = 0
    """How many were given out."""
    revoked: bool = False
    key: Path = Path()
    """A service account's key file."""
    manager: str = ""
    """Address of the Resource Manager."""
    address: str = ""
    """Of the GKE API."""

    def add(self, cluster: Cluster, location: str) -> None:
        cluster.location = location
        self.clusters[f"projects/{PROJECT}/locations/{location}/clusters/{cluster.name}"] = cluster

    def client(self, **_: Any) -> ClusterManagerClient:
        """The real client, with a connection to here."""
        transport = ClusterManagerGrpcTransport(channel=grpc.insecure_channel(self.address))
        return ClusterManagerClient(transport=transport)

    # --- the GKE API --------------------------------------------------------------------------------------------------

    def get(self, request: GetClusterRequest, context: grpc.ServicerContext) -> Cluster:
        self.calls.append("GetCluster")
        if "container.clusters.get" not in self.permissions:
            text = f'Required "container.clusters.get" permission(s) for "{request.name}".'
            context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
        if request.name not in self.clusters:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Not found: {request.name}.")
        return self.clusters[request.name]

    def list(self, request: ListClustersRequest, context: grpc.ServicerContext) -> ListClustersResponse:
        self.calls.append("ListClusters")
        if "container.clusters.list" not in self.permissions:
            text = f'Required "container.clusters.list" permission(s) for "{request.parent}".'
            context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
        return ListClustersResponse(clusters=list(self.clusters.values()))


@contextlib.contextmanager
def google_cloud(folder: Path) -> Iterator[GoogleCloud]:
    cloud = GoogleCloud()
    api = grpc.server(ThreadPoolExecutor(max_workers=2))
    methods = {
        "GetCluster": grpc.unary_unary_rpc_method_handler(
            cloud.get, request_deserializer=GetClusterRequest.deserialize, response_serializer=Cluster.serialize
        ),
        "ListClusters": grpc.unary_unary_rpc_method_handler(
            cloud.list,
            request_deserializer=ListClustersRequest.deserialize,
            response_serializer=ListClustersResponse.serialize,
        ),
    }
    api.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("google.container.v1.ClusterManager", methods),))
    cloud.address = f"127.0.0.1:{api.add_insecure_port('127.0.0.1:0')}"
    api.start()
    web = ThreadingHTTPServer(("127.0.0.1", 0), _handler(cloud))
    threading.Thread(target=web.serve_forever, daemon=True).start()
    cloud.manager = f"http://127.0.0.1:{web.server_address[1]}"
    cloud.key = folder / "key.json"
    cloud.key.write_text(json.dumps(_key(f"{cloud.manager}/token")))
    try:
        yield cloud
    finally:
        web.shutdown()
        web.server_close()
        api.stop(None).wait()


def _key(tokens: str) -> dict[str, str]:
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "type": "service_account", "project_id": PROJECT, "private_key_id": "1", "private_key": private.decode(),
        "client_email": f"launcher@{PROJECT}.iam.gserviceaccount.com", "client_id": "1", "token_uri": tokens,
    }  # fmt: skip


def _handler(cloud: GoogleCloud) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/token":
                self._token()
            elif self.path.endswith(":testIamPermissions"):
                asked = json.loads(body)["permissions"]
                self._answer(200, {"permissions": [one for one in asked if one in cloud.permissions]})
            else:
                self._answer(404, {})

        def _token(self) -> None:
            if cloud.revoked:
                self._answer(400, {"error": "invalid_grant", "error_description": "account is disabled"})
                return
            cloud.tokens += 1
            self._answer(200, {"access_token": cloud.token(), "expires_in": cloud.lifetime, "token_type": "Bearer"})

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
