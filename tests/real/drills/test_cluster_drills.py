"""Drills with the job on a Kubernetes cluster: its machines and its API fail."""

from collections.abc import Iterator
from typing import Any

import pytest
from bucket_emulator import bucket_emulator
from drill_ground import Scene, step
from kubernetes_cluster import Cluster, running_cluster

from launcher.images.settings import PrebuiltImage


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two machines, and a bucket that they and the launcher reach."""
    with bucket_emulator("drills") as address, running_cluster(nodes=2) as made:
        made.image_environment["STORAGE_EMULATOR_HOST"] = address
        yield made


@pytest.fixture(scope="module")
def place(cluster: Cluster, pushed_image: PrebuiltImage) -> tuple[dict[str, Any], dict[str, str]]:
    platform = {
        "kind": "kubernetes", "kubeconfig": str(cluster.kubeconfig), "nodes": 2, "processes_per_node": 1,
        "grace_period": 10, "network_test": 0, "workload": "jobset",
    }  # fmt: skip
    image = pushed_image.model_dump(mode="json")
    bucket = cluster.image_environment["STORAGE_EMULATOR_HOST"]
    return {"root": "gs://drills/there", "platform": platform, "image": image}, {"STORAGE_EMULATOR_HOST": bucket}


def api_away_for_a_minute(cluster: Cluster, scene: Scene) -> None:
    back = cluster.outage()
    scene.pause(60)
    back()


def token_expires(cluster: Cluster, scene: Scene) -> None:
    cluster.expire_token()
    assert cluster.kubeconfig.exists()  # which writes the new one into it
    cluster.expire_watches()


def node_preempted(cluster: Cluster, scene: Scene) -> None:
    cluster.preempt(cluster.pods("nodes-0-1-")[0]["metadata"]["name"])


@pytest.mark.parametrize(
    ("befall", "pattern", "attempts"),
    [
        (api_away_for_a_minute, "waiting, the job goes on", (1,)),
        (token_expires, "", (1,)),
        (node_preempted, "its platform restarted|preempted", (1, 2)),
    ],
)
def test_faults_of_a_cluster_cost_the_training_nothing(
    cluster: Cluster, scene: Scene, befall: Any, pattern: str, attempts: tuple[int, ...]
) -> None:
    command = scene.run()
    scene.until(step(16))
    befall(cluster, scene)
    assert scene.end_of(command) == 0
    scene.require_promises(pattern, attempts=attempts, kept=True)
