"""Google Cloud as far as a launcher meets it on its way to a cluster: the GKE API over gRPC, and tokens."""

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.cloud.container_v1 import ClusterManagerClient
from google.cloud.container_v1.services.cluster_manager.transports import ClusterManagerGrpcTransport
from google.cloud.container_v1.types import Cluster, GetClusterRequest, ListClustersResponse
from serving_thread import Answering, served

PROJECT = "my-project"


@dataclass
class GoogleCloud:
    """One project."""

    key: Path
    """A service account's key file."""
    address: str = ""
    """Of the GKE API."""
    permissions: set[str] = field(default_factory=lambda: {"container.clusters.get"})
    clusters: dict[str, Cluster] = field(default_factory=dict)
    """By full name: projects/…/locations/…/clusters/…"""
    token: Callable[[], str] = lambda: "token"
    tokens: int = 0
    """How many were given out."""

    def add(self, cluster: Cluster, location: str) -> None:
        cluster.location = location
        self.clusters[f"projects/{PROJECT}/locations/{location}/clusters/{cluster.name}"] = cluster

    def client(self, **_: Any) -> ClusterManagerClient:
        """The real client, with a connection to here."""
        transport = ClusterManagerGrpcTransport(channel=grpc.insecure_channel(self.address))
        return ClusterManagerClient(transport=transport)

    def get(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        name = GetClusterRequest.deserialize(request).name
        if "container.clusters.get" not in self.permissions:
            text = f'Required "container.clusters.get" permission(s) for "{name}".'
            context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
        if name not in self.clusters:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Not found: {name}.")
        return Cluster.serialize(self.clusters[name])

    def list(self, _request: bytes, _context: grpc.ServicerContext) -> bytes:
        return ListClustersResponse.serialize(ListClustersResponse(clusters=list(self.clusters.values())))


@contextlib.contextmanager
def google_cloud(folder: Path) -> Iterator[GoogleCloud]:
    cloud = GoogleCloud(folder / "key.json")
    api = grpc.server(ThreadPoolExecutor(max_workers=2))
    methods = {"GetCluster": cloud.get, "ListClusters": cloud.list}
    handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    api.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("google.container.v1.ClusterManager", handlers),)
    )
    cloud.address = f"127.0.0.1:{api.add_insecure_port('127.0.0.1:0')}"
    api.start()
    tokens = ThreadingHTTPServer(("127.0.0.1", 0), _Tokens)
    tokens.cloud = cloud  # type: ignore[attr-defined]
    cloud.key.write_text(json.dumps(_key(f"http://127.0.0.1:{tokens.server_port}/token")))
    try:
        with served(tokens):
            yield cloud
    finally:
        api.stop(None).wait()


def _key(tokens: str) -> dict[str, str]:
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "type": "service_account", "project_id": PROJECT, "private_key_id": "1", "private_key": private.decode(),
        "client_email": f"launcher@{PROJECT}.iam.gserviceaccount.com", "client_id": "1", "token_uri": tokens,
    }  # fmt: skip


class _Tokens(Answering):
    def do_POST(self) -> None:
        cloud: GoogleCloud = self.server.cloud  # type: ignore[attr-defined]
        self.rfile.read(int(self.headers["Content-Length"]))
        cloud.tokens += 1
        text = json.dumps({"access_token": cloud.token(), "expires_in": 3600, "token_type": "Bearer"}).encode()
        self.answer(200, text, {"Content-Type": "application/json"})
