"""Why a job waits, in findings: by what the scheduler, kubelets, controllers, the autoscaler and Kueue say."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gke_jobs import IMAGE, gke, job
from kubernetes_cluster import Cluster, running_cluster
from waiting import until

from launcher.job import JobState
from launcher.platforms.kubernetes import platform as gke_module
from litgpt_demo.findings import Finding

H100 = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
A3: dict[str, Any] = {"machine": "a3-highgpu-8g", "processes": 8}


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


def test_no_machine_at_all(cluster: Cluster, tmp_path: Path) -> None:
    assert "no machine at all" in reason(cluster, tmp_path, "nodes").what


def test_gpus_that_are_taken(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2, gpus=4, labels=H100)
    told = reason(cluster, tmp_path, "gpus", **A3)
    assert told.what == "2 nodes (node 0 first): 2 machines have not enough free GPUs"
    assert "platform.nodes" in told.fix


def test_memory_that_is_not_there(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2, memory="1Gi")
    assert "enough free memory" in reason(cluster, tmp_path, "resources", memory="64Gi").what


def test_a_taint_that_nobody_tolerates(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2, taints=[{"key": "team", "value": "other", "effect": "NoSchedule"}])
    told = reason(cluster, tmp_path, "taint")
    assert told.severity == "error"
    assert "2 machines have a taint that the pods do not tolerate" in told.what
    assert "kubectl get nodes" in told.fix


def test_labels_that_no_machine_has(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2, gpus=8, labels={"cloud.google.com/gke-accelerator": "nvidia-l4"})
    assert "platform.machine" in reason(cluster, tmp_path, "selector", **A3).fix


@pytest.mark.parametrize("workload", ["job", "jobset"])
def test_an_image_that_cannot_be_pulled(cluster: Cluster, tmp_path: Path, workload: str) -> None:
    cluster.add_nodes(2)
    cluster.break_image(IMAGE)
    told = reason(cluster, tmp_path, "image", workload=workload)
    assert told.severity == "error"
    assert IMAGE in told.what
    assert "roles/artifactregistry.reader" in told.fix


def test_a_quota_of_the_namespace(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2)
    cluster.apply("resourcequotas", {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}}})
    told = reason(cluster, tmp_path, "quota")
    assert told.what == "the namespace's quota small has no room: pods=1 asked for, pods=1 in use, pods=1 allowed"
    assert "have the quota raised" in told.fix


def test_a_service_account_that_is_not_there(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2)
    told = reason(cluster, tmp_path, "service-account", service_account="trainer")
    assert told.what == "the service account trainer is not there"
    assert told.fix.startswith("kubectl create serviceaccount trainer")


def test_a_volume_that_cannot_be_mounted(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2)
    told = reason_by_event(cluster, tmp_path, "FailedMount", "MountVolume.SetUp failed: no such bucket")
    assert told.code == "gke.pending.volume"


@pytest.mark.parametrize(
    ("event", "message", "code"),
    [
        ("FailedCreatePodSandBox", "networks.networking.gke.io vpc3 not found", "network"),
        ("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 max node group size reached", "scale-up"),
        ("FailedScaleUp", "Node scale up in zones europe-west4-b failed: GCE out of resources", "capacity"),
        ("FailedScaleUp", "Node scale up failed: GCE quota exceeded", "project-quota"),
    ],
)
def test_what_others_say_of_a_pod(cluster: Cluster, tmp_path: Path, event: str, message: str, code: str) -> None:
    told = reason_by_event(cluster, tmp_path, event, message)
    assert told.code == f"gke.pending.{code}"
    assert message in told.what


def reason_by_event(cluster: Cluster, folder: Path, event: str, message: str) -> Finding:
    platform = gke(cluster, cpus="500")  # which no machine has: it waits
    job_id = platform.submit(platform.render(job(folder)))
    pod = until(lambda: cluster.pods("nodes-0-0-"))[0]["metadata"]["name"]
    cluster.tell(pod, event, message, source="test")

    def found() -> Finding | None:
        return next((one for one in platform.status(job_id).reasons if message in one.what), None)

    return until(found)


def test_a_queue_whose_quota_is_in_use(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2)
    cluster.add_queue("research", quota={"cpu": 3})
    first = gke(cluster, queue="research", cpus="1")
    first.submit(first.render(job(tmp_path, "first")))
    told = reason(cluster, tmp_path, "queue", queue="research", cpus="1")
    assert (told.severity, "1 more needed" in told.what) == ("warning", True)


def test_a_queue_that_can_never_hold_the_job(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_queue("research", quota={"cpu": 3})
    told = reason(cluster, tmp_path, "queue", queue="research", cpus="2")
    assert (told.severity, "maximum capacity" in told.what) == ("error", True)


def test_a_queue_that_is_not_there(cluster: Cluster, tmp_path: Path) -> None:
    told = reason(cluster, tmp_path, "queue", queue="reserch")
    assert told.severity == "error"
    assert "LocalQueue reserch doesn't exist" in told.what


def test_a_queue_where_there_is_no_kueue(tmp_path: Path) -> None:
    with running_cluster(simulate=True, nodes=2, kueue=False) as cluster:
        told = reason(cluster, tmp_path, "queue", queue="research")
        assert told.what == "the job waits in queue research, and Kueue, which would start it, is not installed"
        assert "install Kueue" in told.fix


def test_what_once_kept_a_pod_away_is_over_when_all_are_there(cluster: Cluster, tmp_path: Path) -> None:
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}}}
    made = cluster.apply("resourcequotas", quota)
    platform = gke(cluster)
    job_id = platform.submit(platform.render(job(tmp_path)))
    until(lambda: any(one.code == "gke.pending.quota" for one in platform.status(job_id).reasons))
    cluster.call(lambda: cluster.store.remove("resourcequotas", made))
    until(lambda: [one.code for one in platform.status(job_id).reasons] == ["gke.pending.nodes"])


def test_machines_that_kueue_has_taken_back(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2)
    cluster.add_queue("research", quota={"cpu": 8})
    platform = gke(cluster, queue="research", cpus="1")
    job_id = platform.submit(platform.render(job(tmp_path)))
    until(lambda: platform.status(job_id).state is JobState.RUNNING)
    cluster.suspend("demo-1")
    told = until(lambda: platform.status(job_id).reasons)
    assert told[-1].code == "gke.pending.evicted"  # its pods may still be ending, which is told first


def test_a_reason_that_may_not_be_asked_for_does_not_hide_the_others(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2, gpus=4, labels=H100)
    everything_else = ["jobsets", "jobs", "pods", "services", "networkpolicies"]
    cluster.allow([{"apiGroups": ["*"], "resources": everything_else, "verbs": ["*"]}])
    assert reason(cluster, tmp_path, "gpus", **A3).severity == "warning"


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
        costs.append(sum(cluster.traffic.calls.values()))
        platform.close()
    assert costs == [3, 3]  # the events of the JobSet, its Job and one pod


# --- what waiting does not change -------------------------------------------------------------------------------------


def test_a_refusal_that_does_not_go_away_is_told_as_such_and_one_that_does_is_not(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.add_nodes(2)
    made = cluster.apply("resourcequotas", {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}}})
    platform = gke(cluster, refused_after=1)
    job_id = platform.submit(platform.render(job(tmp_path)))
    until(lambda: platform.status(job_id).reasons)
    assert platform.status(job_id).refused is None
    refused = until(lambda: platform.status(job_id).refused)
    assert (refused.code, "have the quota raised" in refused.fix) == ("gke.pending.quota", True)
    cluster.call(lambda: cluster.store.remove("resourcequotas", made))
    until(lambda: platform.status(job_id).state is JobState.RUNNING)
    assert platform.status(job_id).refused is None


def test_machines_that_are_not_free_are_waited_for_however_long_it_takes(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2, gpus=4, labels=H100)
    platform = gke(cluster, refused_after=0, **A3)
    job_id = platform.submit(platform.render(job(tmp_path, processes=8)))
    until(lambda: any(one.code == "gke.pending.gpus" for one in platform.status(job_id).reasons))
    assert platform.status(job_id).refused is None


def test_pod_security_and_limits_that_refuse_the_pods_are_told_with_their_fix(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2)
    space = next(one for one in cluster.objects("namespaces") if one["metadata"]["name"] == "default")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.call(lambda: cluster.store.change("namespaces", space, lambda one: one["metadata"].update(labels=labels)))
    told = reason(cluster, tmp_path, "pod-security", uid=0)
    assert (told.severity, "runAsUser=0" in told.what) == ("error", True)
    assert "another platform.namespace" in told.fix


def test_a_secret_that_is_not_there_keeps_a_container_from_starting(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2)
    told = reason(cluster, tmp_path, "configuration", secrets={"HF_TOKEN": "hub/token"})
    assert 'secret "hub" not found' in told.what
    assert "Secret" in told.fix


# --- private registries -----------------------------------------------------------------------------------------------


def test_without_its_pull_secret_a_pod_is_created_and_waits_for_its_image(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2)
    cluster.lock_image(IMAGE)
    told = reason(cluster, tmp_path, "image", image_pull_secrets=("nowhere",))
    assert "ImagePullBackOff" in told.what or "401 Unauthorized" in told.what


def test_with_its_pull_secret_a_pod_gets_its_image(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_nodes(2)
    cluster.lock_image(IMAGE)
    config = json.dumps({"auths": {IMAGE.partition("/")[0]: {"auth": "YTpi"}}}).encode()
    data = {".dockerconfigjson": base64.b64encode(config).decode()}
    secret = {"metadata": {"name": "login"}, "type": "kubernetes.io/dockerconfigjson", "data": data}
    cluster.apply("secrets", secret)
    platform = gke(cluster, image_pull_secrets=("login",))
    job_id = platform.submit(platform.render(job(tmp_path)))
    until(lambda: platform.status(job_id).state is JobState.RUNNING)
    platform.close()
