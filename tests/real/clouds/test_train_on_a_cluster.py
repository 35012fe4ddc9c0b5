"""The whole pipeline on the stand-in of a Kubernetes cluster of two nodes, of which one is preempted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from bucket_emulator import bucket_emulator
from kubernetes_cluster import running_cluster
from waiting import until

from launcher.config import RunConfig
from launcher.events import Note
from launcher.images.settings import PrebuiltImage
from launcher.runs.run import plan_run
from litgpt_demo.training import checkpoints

pytestmark = pytest.mark.prefect


def test_a_cluster_trains_through_the_loss_of_a_node_and_the_checkpoints_are_collected(
    tiny: Callable[..., RunConfig],
    pushed_image: PrebuiltImage,
    run_again: Callable[[RunConfig], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """JobSet restarts it from its last checkpoint, and the attempt goes on."""
    with (
        bucket_emulator("whole-cluster") as address,
        running_cluster(nodes=2) as cluster,
        ThreadPoolExecutor(1) as aside,
    ):
        # One address for all: the emulator writes it into the objects' links.
        reached = f"http://{cluster.check_access(int(address.rpartition(':')[2]))}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", reached)
        cluster.options.image_environment["STORAGE_EMULATOR_HOST"] = reached
        platform = {
            "kind": "gke", "kubeconfig": str(cluster.kubeconfig), "nodes": 2, "processes": 1, "grace": 5, "gate": 0,
            "workload": "jobset",
        }  # fmt: skip
        config = tiny({
            "root": "gs://whole-cluster/runs", "platform": platform, "image": pushed_image.model_dump(mode="json"),
            "train.micro_batch": 2, "train.max_steps": 40, "train.checkpoint_every": 4,
        })  # fmt: skip
        storage = plan_run(config).storage

        def strike() -> None:
            until(lambda: checkpoints.committed(storage))
            cluster.preempt(cluster.pods("nodes-0-1-")[0]["metadata"]["name"])

        struck = aside.submit(strike)
        done = run_again(config)
        struck.result()
        assert done.final.step == 40
        notes = [event.what for event in done.events if isinstance(event, Note)]
        assert any("was restarted by its platform" in note for note in notes)
        assert {one.environment["LITGPT_HOST"] for one in cluster.started} == {"node-0", "node-1"}
        # What the pods had is gone with them; the run has their logs.
        files = {"attempts/1/node-0.json", "attempts/1/node-1.json", "attempts/1/submission.json"}
        assert files <= set(storage.list())
        jobs = len(cluster.started)
        assert run_again(config).final == done.final
        assert len(cluster.started) == jobs, "nothing was started again"
