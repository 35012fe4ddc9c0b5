"""Cancelling: everything of a job goes, and a listing proves it."""

import re
from pathlib import Path

import pytest
from kubernetes_cluster import Cluster
from kubernetes_jobs import begun, job, kubernetes, started
from waiting import until

from launcher.errors import PlatformRefused, PlatformUnreachable
from launcher.job import JobState
from launcher.platforms.kubernetes.cluster import SERVICES

KINDS = ("jobsets", "jobs", "pods", "services", "networkpolicies", "resourceclaimtemplates")


def remaining(cluster: Cluster) -> list[str]:
    return [thing["metadata"]["name"] for plural in KINDS for thing in cluster.objects(plural)]


@pytest.mark.parametrize("workload", ["jobset", "job"])
def test_cancel_removes_all_of_a_job_but_nothing_of_others(cluster: Cluster, tmp_path: Path, workload: str) -> None:
    cluster.add_nodes(4)
    platform = kubernetes(cluster, workload=workload)
    first = started(cluster, platform, job(tmp_path, "other"))
    second = started(cluster, platform, job(tmp_path, nonce="bbbbbb", root="second", directory=str(tmp_path / "two")))
    before = remaining(cluster)
    job_id = started(cluster, platform, job(tmp_path))
    cluster.traffic.clear()
    platform.cancel(job_id)
    assert remaining(cluster) == before
    assert ("delete", "pods") not in cluster.traffic.calls, "there may be thousands"
    assert platform.status(job_id).state is JobState.ABSENT
    platform.cancel(job_id)
    assert {platform.status(job_id).state for job_id in (first, second)} == {JobState.RUNNING}


def test_cancel_removes_objects_that_have_lost_their_owner(cluster: Cluster, tmp_path: Path) -> None:
    """A Job deleted without saying more leaves its pods behind, with the GPUs."""
    labels = {"train-litgpt/job": "demo-1-000000"}
    pod = {"containers": [{"name": "node", "image": "x"}], "restartPolicy": "Never"}
    cluster.apply("pods", {"metadata": {"name": "demo-1-000000-0", "labels": labels}, "spec": pod})
    cluster.apply("services", {"metadata": {"name": "demo-1-000000"}, "spec": {"clusterIP": "None"}})
    platform = kubernetes(cluster, workload="job")
    platform.cancel(platform.render(job(tmp_path)).job_id)
    assert remaining(cluster) == []


def test_delete_keeps_a_later_object_of_the_same_name(cluster: Cluster) -> None:
    """Another user deleted the object between its listing and its deletion, and made one of that name."""
    service = {"metadata": {"name": "demo"}, "spec": {"clusterIP": "None"}}
    cluster.apply("services", service)
    [old] = cluster.objects("services")
    cluster.remove("services", "demo")
    until(lambda: not cluster.objects("services"))
    cluster.apply("services", service)
    [new] = cluster.objects("services")
    for thing, kept in ((old, [new]), (new, []), (new, [])):
        kubernetes(cluster).cluster.delete_one(SERVICES, thing)
        assert cluster.objects("services") == kept


def test_cancel_names_what_remains_with_its_finalizer(cluster: Cluster, tmp_path: Path) -> None:
    platform, job_id = begun(cluster, tmp_path, removal=0.0)
    pod = cluster.pods("nodes-0-1-")[0]["metadata"]["name"]
    cluster.change("pods", pod, lambda thing: thing["metadata"]["finalizers"].append("example.com/stuck"))

    def message() -> str:
        """What a cancellation that has no time names: in the end only what is held."""
        with pytest.raises(PlatformUnreachable) as raised:
            platform.cancel(job_id)
        return str(raised.value)

    held = r"1 pods \(demo-1-000000-nodes-0-1-\w+ on node-\d; held by .*example.com/stuck"
    until(lambda: re.search(held, message()))
    cluster.change("pods", pod, lambda thing: thing["metadata"]["finalizers"].remove("example.com/stuck"))
    kubernetes(cluster).cancel(job_id)
    assert remaining(cluster) == []


def test_cancel_names_the_machine_that_does_not_answer(cluster: Cluster, tmp_path: Path) -> None:
    platform, job_id = begun(cluster, tmp_path, removal=2.0)
    lost = cluster.pods("-0-1-")[0]["spec"]["nodeName"]
    cluster.hang(lost)
    message = rf"demo-1-000000-nodes-0-1-\w+ on {lost}, which has not answered since 20.*kubectl delete node"
    with pytest.raises(PlatformUnreachable, match=message):
        platform.cancel(job_id)


@pytest.mark.parametrize(
    ("kinds", "verbs", "refused", "rest"),
    [
        (KINDS[:-1], ["*"], r'cannot list resource "resourceclaimtemplates".*rbac\.yaml', "can list is gone"),
        (KINDS, ["list"], r'cannot deletecollection resource "jobsets"', "still there: 1 jobsets.jobset.x-k8s.io"),
    ],
)
def test_cancel_names_forbidden_kinds_and_deletes_the_rest(
    bare: Cluster, tmp_path: Path, kinds: list[str], verbs: list[str], refused: str, rest: str
) -> None:
    """A kind is forbidden if it may not be listed or deleted."""
    platform = kubernetes(bare, machine="a4-highgpu-8g", network="gib", network_attach="dra")
    job_id = platform.submit(platform.render(job(tmp_path, processes=8)))
    assert len(bare.objects("resourceclaimtemplates")) == 1
    bare.allow([{"apiGroups": ["*"], "resources": kinds, "verbs": verbs}])
    with pytest.raises(PlatformRefused, match=refused) as raised:
        platform.cancel(job_id)
    assert rest in str(raised.value)
    bare.allow(None)
    platform.cancel(job_id)
    assert remaining(bare) == []
