"""Cancelling: everything of a job goes, and a listing proves it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gke_jobs import gke, job, started
from kubernetes_cluster import Cluster, running_cluster
from waiting import until

from launcher.errors import PlatformRefused, PlatformUnreachable
from launcher.job import JobState

KINDS = ("jobsets", "jobs", "pods", "services", "networkpolicies", "resourceclaimtemplates")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(simulate=True, nodes=4) as made:
        yield made


def left(cluster: Cluster) -> list[str]:
    return [one["metadata"]["name"] for plural in KINDS for one in cluster.objects(plural)]


@pytest.mark.parametrize("workload", ["jobset", "job"])
def test_nothing_of_a_cancelled_job_is_left(cluster: Cluster, tmp_path: Path, workload: str) -> None:
    platform = gke(cluster, workload=workload)
    other = started(cluster, platform, job(tmp_path, "other"))
    before = left(cluster)
    job_id = started(cluster, platform, job(tmp_path))
    platform.cancel(job_id)
    assert left(cluster) == before
    assert platform.status(job_id).state is JobState.ABSENT
    platform.cancel(job_id)
    assert platform.status(other).state is JobState.RUNNING


def test_another_attempt_of_the_same_run_is_left_alone(cluster: Cluster, tmp_path: Path) -> None:
    platform = gke(cluster)
    first = started(cluster, platform, job(tmp_path))
    second = started(cluster, platform, job(tmp_path, attempt=2, directory=str(tmp_path / "two")))
    platform.cancel(first)
    assert platform.status(second).state is JobState.RUNNING


def test_pods_whose_job_somebody_deleted_are_removed_too(cluster: Cluster, tmp_path: Path) -> None:
    """A Job deleted without saying more leaves its pods behind, with the GPUs."""
    platform = gke(cluster, workload="job")
    job_id = started(cluster, platform, job(tmp_path))
    alone: dict[str, Any] = {"ownerReferences": [], "finalizers": []}
    pods, (owner,) = cluster.pods("demo"), cluster.objects("jobs")

    def orphan() -> None:
        """All at once: a Job that is still there makes new pods for those that it has lost."""
        for pod in pods:
            cluster.store.change("pods", pod, lambda thing: thing["metadata"].update(alone))
        cluster.store.remove("jobs", owner)

    cluster.call(orphan)
    assert len(cluster.pods("demo")) == 2
    platform.cancel(job_id)
    assert left(cluster) == []


def test_claims_go_with_their_job(tmp_path: Path) -> None:
    with running_cluster(simulate=True, nodes=0) as cluster:
        platform = gke(cluster, machine="a4-highgpu-8g", network="gib", network_attach="dra")
        submission = platform.render(job(tmp_path, processes=8))
        job_id = platform.submit(submission)
        assert len(cluster.objects("resourceclaimtemplates")) == 1
        platform.cancel(job_id)
        assert left(cluster) == []


def test_what_does_not_go_is_named_with_what_holds_it(cluster: Cluster, tmp_path: Path) -> None:
    platform = gke(cluster, gone=0.0)
    job_id = started(cluster, platform, job(tmp_path))
    pod = cluster.pods("nodes-0-1-")[0]["metadata"]["name"]
    cluster.change("pods", pod, lambda thing: thing["metadata"]["finalizers"].append("example.com/stuck"))
    held = r"1 pods \(demo-1-nodes-0-1-\w+ on node-\d; held by .*example.com/stuck"
    until_it_says(held, lambda: platform.cancel(job_id))
    cluster.change("pods", pod, lambda thing: thing["metadata"]["finalizers"].remove("example.com/stuck"))
    gke(cluster).cancel(job_id)
    assert left(cluster) == []


def until_it_says(words: str, cancel: Callable[[], object]) -> None:
    """A cancellation that has no time says what is left, which in the end is only what is held."""

    def said() -> bool:
        with pytest.raises(PlatformUnreachable) as told:
            cancel()
        return re.search(words, str(told.value)) is not None

    until(said)


def test_beside_a_lost_machine_cancelling_says_which_one_does_not_answer(cluster: Cluster, tmp_path: Path) -> None:
    platform = gke(cluster, gone=2.0)
    job_id = started(cluster, platform, job(tmp_path))
    lost = cluster.pods("-0-1-")[0]["spec"]["nodeName"]
    cluster.hang(lost)
    with pytest.raises(PlatformUnreachable, match=rf"1 pods \(demo-1-nodes-0-1-\w+ on {lost}") as told:
        platform.cancel(job_id)
    assert f"{lost} has not answered since 20" in str(told.value)
    assert "kubectl delete node" in str(told.value)


def test_cancelling_takes_as_many_calls_for_many_nodes_as_for_few(tmp_path: Path) -> None:
    with running_cluster(simulate=True, nodes=60) as cluster:
        costs = []
        for nodes in (2, 50):
            platform = gke(cluster, nodes=nodes)
            job_id = started(cluster, platform, job(tmp_path, f"of-{nodes}", nodes=nodes))
            cluster.traffic.clear()
            platform.cancel(job_id)
            costs.append(cluster.traffic.calls["delete", "pods"] + cluster.traffic.calls["deletecollection", "jobsets"])
        assert costs == [1, 1]


OF_A_JOB = ["jobsets", "jobs", "services", "networkpolicies", "pods"]


def may_use(*resources: str, verbs: tuple[str, ...] = ("*",)) -> list[dict[str, Any]]:
    return [{"apiGroups": ["*"], "resources": [*resources], "verbs": [*verbs]}]


def test_a_kind_that_may_not_be_listed_is_named_and_the_rest_is_deleted(tmp_path: Path) -> None:
    with running_cluster(simulate=True, nodes=0) as cluster:
        platform = gke(cluster, machine="a4-highgpu-8g", network="gib", network_attach="dra")
        job_id = platform.submit(platform.render(job(tmp_path, processes=8)))
        cluster.allow(may_use(*OF_A_JOB))
        with pytest.raises(PlatformRefused, match=r'cannot list resource "resourceclaimtemplates".*rbac\.yaml') as told:
            platform.cancel(job_id)
        assert "what may be seen of it is gone" in str(told.value)
        until(lambda: left(cluster) == [])  # the claims go with their owner


def test_a_kind_that_may_not_be_deleted_is_named_with_what_is_still_there(cluster: Cluster, tmp_path: Path) -> None:
    platform = gke(cluster)
    job_id = started(cluster, platform, job(tmp_path))
    cluster.allow(may_use(*OF_A_JOB, verbs=("get", "list", "watch")))
    with pytest.raises(PlatformRefused, match=r'cannot deletecollection resource "jobsets"') as told:
        platform.cancel(job_id)
    assert "still there: 1 jobsets.jobset.x-k8s.io (demo-1)" in str(told.value)
