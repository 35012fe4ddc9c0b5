"""Drills with the job on a Kubernetes cluster: the orchestrator's own, and what befalls machines and API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bucket_emulator import bucket_emulator
from kubernetes_cluster import Cluster, running_cluster

from cli.drills.ground import Scene
from cli.drills.judging import DrillResult
from cli.drills.table import DRILLS, Drill, at_step, said, trains_again
from launcher.images.settings import PrebuiltImage

_OUTAGE = 60.0
ANYWHERE = [drill for drill in DRILLS if drill.anywhere and drill.name not in {"undisturbed", "server", "own-server"}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two machines, and a bucket that they and the launcher reach."""
    with bucket_emulator("drills") as address, running_cluster(nodes=2) as made:
        reached = f"http://{made.check_access(int(address.rpartition(':')[2]))}"
        made.options.image_environment["STORAGE_EMULATOR_HOST"] = reached
        yield made


@pytest.fixture(scope="module")
def held(
    cluster: Cluster, pushed_image: PrebuiltImage, held_on: Callable[..., Any]
) -> Iterator[Callable[[Drill], DrillResult]]:
    platform = {
        "kind": "gke", "kubeconfig": str(cluster.kubeconfig), "nodes": 2, "processes": 1, "grace": 10, "gate": 0,
        "workload": "jobset",
    }  # fmt: skip
    image = pushed_image.model_dump(mode="json")
    bucket = cluster.options.image_environment["STORAGE_EMULATOR_HOST"]
    with held_on({"root": "gs://drills/there", "platform": platform, "image": image}, bucket) as hold:
        yield hold


@pytest.mark.parametrize("drill", ANYWHERE, ids=lambda drill: drill.name)
def test_an_orchestrator_is_disturbed(held: Callable[[Drill], DrillResult], drill: Drill) -> None:
    assert held(drill).violations == ()


def test_the_clusters_api_is_gone_for_a_minute(cluster: Cluster, held: Callable[[Drill], DrillResult]) -> None:
    def away(scene: Scene) -> None:
        back = cluster.outage()
        scene.pause(_OUTAGE)
        back()

    drill = Drill(
        name="api", injected="the cluster's API gone for 60 s", when=at_step(16), inject=away, back=said("✓ 4/5"),
        told=("waiting, the job goes on",),
    )  # fmt: skip
    assert held(drill).violations == ()


def test_a_token_expires_while_the_job_is_watched(cluster: Cluster, held: Callable[[Drill], DrillResult]) -> None:
    def expire(scene: Scene) -> None:
        cluster.expire_token()
        assert cluster.kubeconfig.exists()  # which writes the new one into it
        cluster.expire_watches()

    drill = Drill(
        name="token", injected="an expired token in mid-watch", when=at_step(16), inject=expire, back=said("✓ 4/5")
    )
    assert held(drill).violations == ()


def test_a_node_is_preempted(cluster: Cluster, held: Callable[[Drill], DrillResult]) -> None:
    def preempt(scene: Scene) -> None:
        cluster.preempt(cluster.pods("nodes-0-1-")[0]["metadata"]["name"])

    drill = Drill(
        name="pod-preempted", injected="a preempted pod", when=at_step(16), inject=preempt, attempts=(1, 2),
        back=trains_again, told=("restarted by its platform|preempted",),
    )  # fmt: skip
    assert held(drill).violations == ()
