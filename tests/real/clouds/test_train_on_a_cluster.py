"""The whole pipeline on a Kubernetes cluster of two nodes: from text to a model, through what befalls its machines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bucket_emulator import bucket_emulator
from kubernetes_cluster import Cluster, running_cluster
from waiting import until

from flows.run_torchrun import run_torchrun
from launcher.config import RunConfig, ScriptConfig, validated
from launcher.events import MetricsRow, Note, StepDone
from launcher.images.settings import PrebuiltImage
from launcher.runs.run import plan_run
from litgpt_demo.storage import open_storage
from litgpt_demo.training import checkpoints

pytestmark = [pytest.mark.long, pytest.mark.prefect, pytest.mark.training, pytest.mark.timeout(600)]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two machines, and a bucket that they and the launcher reach."""
    with bucket_emulator("training") as address, running_cluster(nodes=2) as made:
        # One address for all: the emulator writes it into the objects' links.
        reached = f"http://{made.check_access(int(address.rpartition(':')[2]))}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", reached)
        made.options.image_environment["STORAGE_EMULATOR_HOST"] = reached
        yield made


@pytest.fixture
def on_cluster(
    tiny: Callable[..., RunConfig], pushed_image: PrebuiltImage, cluster: Cluster
) -> Callable[..., RunConfig]:
    def make(**changes: Any) -> RunConfig:
        platform = {
            "kind": "gke", "kubeconfig": str(cluster.kubeconfig), "nodes": 2, "processes": 1, "grace": 5, "gate": 0,
            "workload": "jobset", **changes.pop("platform", {}),
        }  # fmt: skip
        return tiny({
            "root": "gs://training/runs-of-tests", "platform": platform, "train.micro_batch": 2,
            "image": pushed_image.model_dump(mode="json"), **changes,
        })  # fmt: skip

    return make


def test_a_cluster_trains_and_the_checkpoints_are_collected(
    cluster: Cluster, on_cluster: Callable[..., RunConfig], run_again: Callable[[RunConfig], Any]
) -> None:
    config = on_cluster()
    done = run_again(config)
    steps = {event.step: event.what for event in done.events if isinstance(event, StepDone)}
    assert list(steps) == ["dataset", "image", "credentials", "training", "checkpoints"]
    assert "answers (v1.36" in steps["credentials"]
    assert done.final.step == 8
    rows = [event.row for event in done.events if isinstance(event, MetricsRow)]
    assert max(row.get("step", 0) for row in rows) == 8
    where = {one.environment["LITGPT_HOST"] for one in cluster.started}
    assert where == {"node-0", "node-1"}
    # What the pods had is gone with them; the run has their logs.
    storage = plan_run(config).storage
    assert {"attempts/1/node-0.json", "attempts/1/node-1.json", "attempts/1/submission.json"} <= set(storage.list())
    jobs = len(cluster.started)
    assert run_again(config).final == done.final
    assert len(cluster.started) == jobs  # nothing was started again


@pytest.mark.long
def test_a_training_survives_a_preempted_node(
    cluster: Cluster, on_cluster: Callable[..., RunConfig], run_again: Callable[[RunConfig], Any]
) -> None:
    """JobSet restarts it from its last checkpoint, and the attempt goes on."""
    config = on_cluster(**{"train.max_steps": 40, "train.checkpoint_every": 4})
    storage = plan_run(config).storage

    def strike() -> None:
        until(lambda: checkpoints.committed(storage), seconds=300)
        cluster.preempt(cluster.pods("nodes-0-1-")[0]["metadata"]["name"])

    threading.Thread(target=strike, daemon=True).start()
    done = run_again(config)
    assert done.final.step == 40
    notes = [event.what for event in done.events if isinstance(event, Note)]
    assert any("was restarted by its platform" in note for note in notes)
    lives = {one.environment["LITGPT_ATTEMPT"][-2:] for one in cluster.started}
    assert lives == {"-0", "-1"}


def test_code_that_is_mounted_reaches_the_pods_through_the_bucket(
    tmp_path: Path, cluster: Cluster, pushed_image: PrebuiltImage
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "second.py").write_text("WORD = 'through the bucket'")
    (tmp_path / "train.py").write_text(
        "import torch.distributed as world\n"
        "from lib import second\n"
        "world.init_process_group('gloo')\n"
        "print(f'rank {world.get_rank()} of {world.get_world_size()} reads {second.WORD}')\n"
    )
    platform = {"kind": "gke", "kubeconfig": str(cluster.kubeconfig), "nodes": 2, "grace": 5, "gate": 0}
    given = {
        "script": "train.py", "code": {"mount": str(tmp_path)}, "root": "gs://training/scripts", "platform": platform,
        "image": pushed_image.model_dump(mode="json"),
    }  # fmt: skip
    config = validated(ScriptConfig, given, where="test")
    attempt = open_storage(
        asyncio.run(run_torchrun(**{name: getattr(config, name) for name in ScriptConfig.model_fields}))
    )
    said = [attempt.read(f"node-{number}.log").decode() for number in (0, 1)]
    assert [f"rank {number} of 2 reads through the bucket" in text for number, text in enumerate(said)] == [True, True]
    assert len(open_storage("gs://training/scripts").list("code")) == 1
