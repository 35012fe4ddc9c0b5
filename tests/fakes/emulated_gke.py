"""The console script `train-litgpt` as a program of its own, whose GKE API is the emulated one at $GKE_API."""

import os
import sys
from unittest.mock import patch

import grpc
from google.cloud.container_v1 import ClusterManagerClient
from google.cloud.container_v1.services.cluster_manager.transports import ClusterManagerGrpcTransport

from cli.main import main


def client(**_: object) -> ClusterManagerClient:
    """The real client, with a connection to there."""
    transport = ClusterManagerGrpcTransport(channel=grpc.insecure_channel(os.environ["GKE_API"]))
    return ClusterManagerClient(transport=transport)


if __name__ == "__main__":
    sys.argv[0] = "train-litgpt"
    with patch("google.cloud.container_v1.ClusterManagerClient", client):
        main()
