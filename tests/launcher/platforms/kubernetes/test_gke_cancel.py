"""Cancelling: everything of a job goes, and a listing proves it."""

import re
from pathlib import Path

import pytest
from gke_jobs import begun, gke, job, started
from kubernetes_cluster import Cluster
from waiting import until

from launcher.errors import PlatformRefused, PlatformUnreachable
from launcher.job import JobState

KINDS = ("jobsets", "jobs", "pods", "services", "networkpolicies", "resourceclaimtemplates")


def left(cluster: Cluster) -> list[str]:
    return [one["metadata"]["name"] for plural in KINDS for one in cluster.objects(plural)]


@pytest.mark.parametrize("workload", ["jobset", "job"])
def test_all_of_a_cancelled_job_goes_and_nothing_of_others(cluster: Cluster, tmp_path: Path, workload: str) -> None:
    cluster.add_nodes(4)
    platform = gke(cluster, workload=workload)
    other = started(cluster, platform, job(tmp_path, "other"))
    second = started(cluster, platform, job(tmp_path, nonce="bbbbbb", root="second", directory=str(tmp_path / "two")))
    before = left(cluster)
    job_id = started(cluster, platform, job(tmp_path))
    cluster.traffic.clear()
    platform.cancel(job_id)
    assert left(cluster) == before
    assert ("delete", "pods") not in cluster.traffic.calls, "there may be thousands"
    assert platform.status(job_id).state is JobState.ABSENT
    platform.cancel(job_id)
    assert {platform.status(one).state for one in (other, second)} == {JobState.RUNNING}


def test_what_somebody_has_cut_loose_from_its_job_is_removed_too(cluster: Cluster, tmp_path: Path) -> None:
    """A Job deleted without saying more leaves its pods behind, with the GPUs."""
    labels = {"train-litgpt/job": "demo-1-000000"}
    pod = {"containers": [{"name": "node", "image": "x"}], "restartPolicy": "Never"}
    cluster.apply("pods", {"metadata": {"name": "demo-1-000000-0", "labels": labels}, "spec": pod})
    cluster.apply("services", {"metadata": {"name": "demo-1-000000"}, "spec": {"clusterIP": "None"}})
    platform = gke(cluster, workload="job")
    platform.cancel(platform.render(job(tmp_path)).job_id)
    assert left(cluster) == []


def test_what_does_not_go_is_named_with_what_holds_it(cluster: Cluster, tmp_path: Path) -> None:
    platform, job_id = begun(cluster, tmp_path, removal=0.0)
    pod = cluster.pods("nodes-0-1-")[0]["metadata"]["name"]
    cluster.change("pods", pod, lambda thing: thing["metadata"]["finalizers"].append("example.com/stuck"))

    def said() -> str:
        """What a cancellation that has no time names: in the end only what is held."""
        with pytest.raises(PlatformUnreachable) as told:
            platform.cancel(job_id)
        return str(told.value)

    held = r"1 pods \(demo-1-000000-nodes-0-1-\w+ on node-\d; held by .*example.com/stuck"
    until(lambda: re.search(held, said()))
    cluster.change("pods", pod, lambda thing: thing["metadata"]["finalizers"].remove("example.com/stuck"))
    gke(cluster).cancel(job_id)
    assert left(cluster) == []


def test_beside_a_lost_machine_cancelling_says_which_one_does_not_answer(cluster: Cluster, tmp_path: Path) -> None:
    platform, job_id = begun(cluster, tmp_path, removal=2.0)
    lost = cluster.pods("-0-1-")[0]["spec"]["nodeName"]
    cluster.hang(lost)
    words = rf"demo-1-000000-nodes-0-1-\w+ on {lost}, which has not answered since 20.*kubectl delete node"
    with pytest.raises(PlatformUnreachable, match=words):
        platform.cancel(job_id)


@pytest.mark.parametrize(
    ("kinds", "verbs", "refused", "rest"),
    [
        (KINDS[:-1], ["*"], r'cannot list resource "resourceclaimtemplates".*rbac\.yaml', "seen of it is gone"),
        (KINDS, ["list"], r'cannot deletecollection resource "jobsets"', "still there: 1 jobsets.jobset.x-k8s.io"),
    ],
)
def test_a_kind_that_may_not_be_listed_or_deleted_is_named_and_the_rest_is_deleted(
    bare: Cluster, tmp_path: Path, kinds: list[str], verbs: list[str], refused: str, rest: str
) -> None:
    platform = gke(bare, machine="a4-highgpu-8g", network="gib", network_attach="dra")
    job_id = platform.submit(platform.render(job(tmp_path, processes=8)))
    assert len(bare.objects("resourceclaimtemplates")) == 1
    bare.allow([{"apiGroups": ["*"], "resources": kinds, "verbs": verbs}])
    with pytest.raises(PlatformRefused, match=refused) as told:
        platform.cancel(job_id)
    assert rest in str(told.value)
    bare.allow(None)
    platform.cancel(job_id)
    assert left(bare) == []
