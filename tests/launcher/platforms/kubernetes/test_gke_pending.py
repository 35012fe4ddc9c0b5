"""Why a job waits, in findings: by what the scheduler, kubelets, controllers, the autoscaler and Kueue say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gke_jobs import IMAGE, gke, job
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_cluster import Cluster, running_cluster
from waiting import until

from launcher.job import JobState
from launcher.platforms.kubernetes import platform as gke_module
from launcher.platforms.kubernetes.pending import unschedulable
from litgpt_demo.findings import Finding

H100 = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
A3: dict[str, Any] = {"machine": "a3-highgpu-8g", "processes": 8}
SMALL = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}}}


@pytest.fixture(autouse=True)
def _asked_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gke_module, "_EXPLAIN", 0.0)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(simulate=True, nodes=0, kueue=True) as made:
        yield made


def reason(cluster: Cluster, folder: Path, code: str, **settings: Any) -> Finding:
    """The finding of that code, of a job that waits."""
    platform = gke(cluster, **settings)
    job_id = platform.submit(platform.render(job(folder, processes=settings.get("processes", 1))))

    def found() -> Finding | None:
        status = platform.status(job_id)
        assert status.state is JobState.PENDING
        return next((one for one in status.reasons if one.code == f"gke.pending.{code}"), None)

    told = until(found)
    platform.close()
    return told


# --- the scheduler ----------------------------------------------------------------------------------------------------

CLAIMS = "no new claims to deallocate, preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
MESSAGES = {
    # Of Kubernetes 1.30 to 1.33, of 1.34, and of 1.36.
    "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, "
    "2 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available: 3 No preemption victims found.": [
        "taint", "gpus",
    ],
    '0/3 nodes are available: persistentvolumeclaim "shared" not found. ' + CLAIMS: ["claim"],
    "no nodes available to schedule pods": ["nodes"],
    "0/3 nodes are available: 3 cannot allocate all claims. " + CLAIMS: ["claims"],
    "0/6 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient cpu, 3 node(s) didn't match Pod's "
    "node affinity/selector. " + CLAIMS: ["taint", "resources", "selector"],
    "0/3 nodes are available: 1 a reason of tomorrow, 2 Insufficient cpu. " + CLAIMS: ["unscheduled", "resources"],
}  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES)
def test_every_reason_of_the_scheduler_is_told_with_its_fix(message: str) -> None:
    told = list(unschedulable(message))
    assert [one.code.removeprefix("gke.pending.") for one in told] == MESSAGES[message]
    assert all(one.fix for one in told)
    assert not any("preemption" in one.what or "deallocate" in one.what for one in told)


@given(st.text())
def test_whatever_the_scheduler_says_there_is_something_to_do(message: str) -> None:
    told = list(unschedulable(message))
    assert told
    assert all(one.fix for one in told)


def test_gpus_that_are_taken_are_told_once_for_all_nodes(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2, gpus=4, labels=H100)
    told = reason(cluster, tmp_path, "gpus", **A3)
    assert told.what == "2 nodes (node 0 first): 2 machines have not enough free GPUs"
    assert "platform.nodes" in told.fix


# --- kubelets, admission, the autoscaler ------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", ["job", "jobset"])
def test_an_image_that_cannot_be_pulled(cluster: Cluster, tmp_path: Path, workload: str) -> None:
    cluster.add_nodes(2)
    cluster.break_image(IMAGE)
    told = reason(cluster, tmp_path, "image", workload=workload)
    assert (told.severity, IMAGE in told.what) == ("error", True)
    assert "roles/artifactregistry.reader" in told.fix


@pytest.mark.parametrize(
    ("event", "message", "code"),
    [
        ("FailedMount", "MountVolume.SetUp failed: no such bucket", "volume"),
        ("FailedCreatePodSandBox", "networks.networking.gke.io vpc3 not found", "network"),
        ("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 max node group size reached", "scale-up"),
        ("FailedScaleUp", "Node scale up in zones europe-west4-b failed: GCE out of resources", "capacity"),
        ("FailedScaleUp", "Node scale up failed: GCE quota exceeded", "project-quota"),
    ],
)
def test_what_others_say_of_a_pod(cluster: Cluster, tmp_path: Path, event: str, message: str, code: str) -> None:
    platform = gke(cluster)
    job_id = platform.submit(platform.render(job(tmp_path)))
    cluster.tell(until(lambda: cluster.pods("nodes-0-0-"))[0]["metadata"]["name"], event, message, source="test")
    told = until(lambda: [one for one in platform.status(job_id).reasons if message in one.what])
    assert [one.code for one in told] == [f"gke.pending.{code}"]


def test_a_quota_of_the_namespace_is_told_until_all_pods_are_there(cluster: Cluster, tmp_path: Path) -> None:
    cluster.apply("resourcequotas", SMALL)
    platform = gke(cluster)
    job_id = platform.submit(platform.render(job(tmp_path)))
    until(lambda: any(one.code == "gke.pending.quota" for one in platform.status(job_id).reasons))
    cluster.remove("resourcequotas", "small")
    until(lambda: [one.code for one in platform.status(job_id).reasons] == ["gke.pending.nodes"])


# --- Kueue ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conditions", "code", "severity", "words"),
    [
        ({"QuotaReserved": ("False", "Pending", "insufficient quota, 1 more needed")}, "queue", "warning", "1 more"),
        ({"QuotaReserved": ("False", "Pending", "request > maximum capacity")}, "queue", "error", "maximum capacity"),
        ({"QuotaReserved": ("False", "Inadmissible", "LocalQueue reserch doesn't exist")}, "queue", "error", "reserch"),
        ({"Evicted": ("True", "Preempted", "for another")}, "evicted", "warning", "taken the machines back"),
        (None, "queue", "warning", "has not taken notice"),
    ],
)
def test_what_kueue_says_of_a_job_in_its_queue(
    cluster: Cluster, tmp_path: Path, conditions: dict[str, Any] | None, code: str, severity: str, words: str
) -> None:
    platform = gke(cluster, queue="research")
    job_id = platform.submit(platform.render(job(tmp_path)))
    if conditions is not None:
        cluster.workload("demo-1", **conditions)
    told = until(lambda: [one for one in platform.status(job_id).reasons if words in one.what])
    assert [(one.code, one.severity) for one in told] == [(f"gke.pending.{code}", severity)]
    assert platform.status(job_id).native == "JobSet Suspended"


def test_a_queue_where_there_is_no_kueue(tmp_path: Path) -> None:
    with running_cluster(simulate=True, nodes=2, kueue=False) as cluster:
        told = reason(cluster, tmp_path, "queue", queue="research")
        assert told.what == "the job waits in queue research, and Kueue, which would start it, is not installed"


# --- asking -----------------------------------------------------------------------------------------------------------


def test_asking_why_costs_the_same_for_any_number_of_nodes(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2, gpus=4, labels=H100)
    costs = []
    for nodes in (2, 40):
        platform = gke(cluster, nodes=nodes, **A3)
        job_id = platform.submit(platform.render(job(tmp_path, f"of-{nodes}", nodes=nodes, processes=8)))
        until(lambda nodes=nodes: len(cluster.pods(f"of-{nodes}-1-nodes")) == nodes)
        cluster.traffic.clear()
        until(lambda p=platform, i=job_id: p.status(i).reasons)
        platform.status(job_id)  # who asks twice is taken to wait
        until(lambda: {("watch", "pods"), ("watch", "jobsets")} <= cluster.traffic.calls.keys())
        cluster.traffic.clear()
        platform.status(job_id)
        costs.append(cluster.traffic.calls.copy())
        platform.close()
    assert costs[0] == costs[1] == {("list", "events"): 3}  # of the JobSet, its Job and one pod


# --- what waiting does not change -------------------------------------------------------------------------------------


def test_a_refusal_that_does_not_go_away_is_told_as_such_and_one_that_does_is_not(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.add_nodes(2)
    cluster.apply("resourcequotas", SMALL)
    platform = gke(cluster, refused_after=1)
    job_id = platform.submit(platform.render(job(tmp_path)))
    refused = until(lambda: platform.status(job_id).refused)
    assert (refused.code, "have the quota raised" in refused.fix) == ("gke.pending.quota", True)
    cluster.remove("resourcequotas", "small")
    until(lambda: platform.status(job_id).state is JobState.RUNNING)
    assert platform.status(job_id).refused is None


def test_machines_that_are_not_free_are_waited_for_however_long_it_takes(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2, gpus=4, labels=H100)
    platform = gke(cluster, refused_after=0, **A3)
    job_id = platform.submit(platform.render(job(tmp_path, processes=8)))
    until(lambda: any(one.code == "gke.pending.gpus" for one in platform.status(job_id).reasons))
    assert platform.status(job_id).refused is None
