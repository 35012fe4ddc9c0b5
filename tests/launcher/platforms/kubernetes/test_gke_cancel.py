"""Cancelling: everything of a job goes, and a listing proves it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gke_jobs import gke, job, started
from kubernetes_cluster import Cluster, Timing, running_cluster

from launcher.errors import LoginProblem, PlatformRefused, PlatformUnreachable
from launcher.job import JobId, JobState

KINDS = ("jobsets", "jobs", "pods", "services", "networkpolicies", "resourceclaimtemplates")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(simulate=True, nodes=4) as made:
        yield made


def left(cluster: Cluster) -> list[str]:
    return [one["metadata"]["name"] for plural in KINDS for one in cluster.objects(plural)]


def hold(cluster: Cluster, pod: dict[str, Any]) -> None:
    """The pod stays when it is deleted."""

    def change(thing: dict[str, Any]) -> None:
        thing["metadata"].setdefault("finalizers", []).append("example.com/stuck")

    cluster.call(lambda: cluster.store.change("pods", pod, change))


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
    thing = cluster.objects("jobs")[0]
    cluster.call(lambda: cluster.api.delete("jobs", thing, {"propagationPolicy": "Orphan"}))
    cluster.wait(lambda: not cluster.objects("jobs"))
    assert len(cluster.pods("demo")) == 2
    platform.cancel(job_id)
    assert left(cluster) == []


def test_a_role_without_network_policies_is_enough_where_the_job_has_none(cluster: Cluster, tmp_path: Path) -> None:
    others = (one for one in OF_A_JOB if one != "networkpolicies")
    cluster.allow(may_use(*others, "pods/log", "events"))
    with pytest.raises(LoginProblem, match=r"create networkpolicies.*platform\.network_policy: false"):
        gke(cluster).check_access()
    platform = gke(cluster, network_policy=False)
    platform.check_access()
    platform.cancel(platform.submit(platform.render(job(tmp_path))))
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
    pod = cluster.pods("nodes-0-1-")[0]

    hold(cluster, pod)
    with pytest.raises(
        PlatformUnreachable, match=r"1 pods \(demo-1-nodes-0-1-\w+ on node-\d; held by .*example.com/stuck"
    ):
        platform.cancel(job_id)

    def let_go(thing: dict[str, Any]) -> None:
        thing["metadata"]["finalizers"].remove("example.com/stuck")

    cluster.call(lambda: cluster.store.change("pods", pod, let_go))
    platform.cancel(job_id)
    assert left(cluster) == []


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


def test_a_job_that_waits_for_machines_is_cancelled_as_well(tmp_path: Path) -> None:
    with running_cluster(simulate=True, nodes=0) as cluster:
        platform = gke(cluster)
        job_id: JobId = platform.submit(platform.render(job(tmp_path)))
        cluster.wait(lambda: len(cluster.pods("demo")) == 2)
        platform.cancel(job_id)
        assert left(cluster) == []


OF_A_JOB = ["jobsets", "jobs", "services", "networkpolicies", "pods"]


def may_use(*resources: str, verbs: tuple[str, ...] = ("*",)) -> list[dict[str, Any]]:
    return [{"apiGroups": ["*"], "resources": [*resources], "verbs": [*verbs]}]


@pytest.mark.parametrize("network", ["plain", "gib", "tcpx"])
def test_a_role_without_claims_is_enough_where_the_job_has_none(tmp_path: Path, network: str) -> None:
    machine = {"gib": "a4-highgpu-8g", "tcpx": "a3-highgpu-8g"}.get(network)
    with running_cluster(simulate=True, nodes=0) as cluster:
        cluster.allow(may_use(*OF_A_JOB))
        platform = gke(cluster, network=network, machine=machine)
        job_id = platform.submit(platform.render(job(tmp_path, processes=8 if machine else 1)))
        platform.cancel(job_id)
        assert left(cluster) == []


def test_a_kind_that_may_not_be_listed_is_named_and_the_rest_is_deleted(tmp_path: Path) -> None:
    with running_cluster(simulate=True, nodes=0) as cluster:
        platform = gke(cluster, machine="a4-highgpu-8g", network="gib", network_attach="dra")
        job_id = platform.submit(platform.render(job(tmp_path, processes=8)))
        cluster.allow(may_use(*OF_A_JOB))
        with pytest.raises(PlatformRefused, match=r'cannot list resource "resourceclaimtemplates".*rbac\.yaml') as told:
            platform.cancel(job_id)
        assert "what may be seen of it is gone" in str(told.value)
        cluster.wait(lambda: left(cluster) == [])  # the claims go with their owner


def test_a_kind_that_may_not_be_deleted_is_named_with_what_is_still_there(cluster: Cluster, tmp_path: Path) -> None:
    platform = gke(cluster)
    job_id = started(cluster, platform, job(tmp_path))
    cluster.allow(may_use(*OF_A_JOB, verbs=("get", "list", "watch")))
    with pytest.raises(PlatformRefused, match=r'cannot deletecollection resource "jobsets"') as told:
        platform.cancel(job_id)
    assert "still there: 1 jobsets.jobset.x-k8s.io (demo-1)" in str(told.value)


def test_beside_a_lost_machine_cancelling_ends_within_its_limit_and_says_what_is_still_there(tmp_path: Path) -> None:
    with running_cluster(simulate=True, nodes=2, timing=Timing(unreachable=600)) as cluster:
        platform = gke(cluster, gone=2.0)  # and a second of grace
        job_id = started(cluster, platform, job(tmp_path))
        lost = cluster.pods("-0-1-")[0]["spec"]["nodeName"]
        cluster.hang(lost)
        began = time.monotonic()
        with pytest.raises(PlatformUnreachable, match=rf"1 pods \(demo-1-nodes-0-1-\w+ on {lost}") as told:
            platform.cancel(job_id)
        assert time.monotonic() - began < 3.5
        assert f"{lost} has not answered since 20" in str(told.value)
        assert "kubectl delete node" in str(told.value)


def test_a_server_that_does_not_answer_cannot_stretch_the_limit(cluster: Cluster, tmp_path: Path) -> None:
    platform = gke(cluster, gone=1.0)
    job_id = started(cluster, platform, job(tmp_path))
    cluster.answer(503, retry_after=30)
    began = time.monotonic()
    with pytest.raises(PlatformUnreachable, match=r"may not be gone; .* cancel it again"):
        platform.cancel(job_id)
    assert time.monotonic() - began < 2.5
