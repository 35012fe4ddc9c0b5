"""Submitting to a cluster: adopted or created whole, and never by halves."""

from pathlib import Path

import pytest
from kubernetes_cluster import Cluster, running_cluster
from kubernetes_jobs import begun, job, kubernetes, started
from waiting import until

from launcher.errors import PlatformRefused
from launcher.job import JobState, Submission


def test_submit_refuses_a_job_whose_jobset_exists(cluster: Cluster, tmp_path: Path) -> None:
    platform, second = kubernetes(cluster, workload="jobset"), kubernetes(cluster, workload="job")
    platform.submit(platform.render(job(tmp_path)))
    with pytest.raises(PlatformRefused, match="job default/demo-1-000000"):
        second.submit(second.render(job(tmp_path)))
    assert len(cluster.objects("jobsets")) == 1


def test_submit_does_not_restart_an_ended_job(cluster: Cluster, tmp_path: Path) -> None:
    platform, job_id = begun(cluster, tmp_path)
    cluster.finish("demo")
    until(lambda: platform.status(job_id).state is JobState.SUCCEEDED)
    assert platform.submit(platform.render(job(tmp_path))) == job_id
    assert platform.status(job_id).state is JobState.SUCCEEDED


def test_ended_job_is_not_submitted_as_a_jobset(cluster: Cluster, tmp_path: Path) -> None:
    """Also without a NetworkPolicy, which would belong to the first one."""
    platform, job_id = begun(cluster, tmp_path, workload="job", network_policy=False)
    cluster.finish("demo")
    until(lambda: platform.status(job_id).state is JobState.SUCCEEDED)
    second = kubernetes(cluster, workload="jobset", network_policy=False)
    with pytest.raises(PlatformRefused, match="two jobs would overwrite"):
        second.submit(second.render(job(tmp_path)))
    assert cluster.objects("jobsets") == []


def test_submit_makes_one_job_when_an_answer_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    platform = kubernetes(cluster)
    cluster.answer(500, times=1, verb="create", resource="jobsets")
    platform.submit(platform.render(job(tmp_path)))
    cluster.answer(429, times=1, verb="create", resource="jobsets", retry_after=0)
    platform.submit(platform.render(job(tmp_path)))
    assert len(cluster.objects("jobsets")) == 1


def test_submit_removes_its_objects_when_a_later_one_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    platform = kubernetes(cluster, workload="job")
    cluster.allow([{"apiGroups": ["*"], "resources": ["jobs", "jobsets"], "verbs": ["*"]}])
    with pytest.raises(PlatformRefused, match=r"cannot create resource .*have the Role of deployments/rbac.yaml"):
        platform.submit(platform.render(job(tmp_path)))
    until(lambda: not any(map(cluster.objects, ("jobs", "services", "networkpolicies"))))


def test_owned_objects_are_deleted_with_their_job(cluster: Cluster, tmp_path: Path) -> None:
    """A Job that is removed when its time is over takes its Service and its NetworkPolicy along."""
    platform = kubernetes(cluster, workload="job")
    platform.submit(platform.render(job(tmp_path)))
    until(lambda: len(cluster.pods("demo")) == 2)
    for owned in ("services", "networkpolicies"):
        assert [thing["metadata"]["name"] for thing in cluster.objects(owned)] == ["demo-1-000000"]
    cluster.remove("jobs", "demo-1-000000")
    until(lambda: not any(map(cluster.objects, ("services", "networkpolicies", "pods"))))


def test_submit_keeps_a_service_of_another_owner(cluster: Cluster, tmp_path: Path) -> None:
    platform = kubernetes(cluster, workload="job")
    cluster.apply("services", {"metadata": {"name": "demo-1-000000"}, "spec": {"clusterIP": "None"}})
    with pytest.raises(PlatformRefused, match="Service demo-1-000000 already exists, and this job did not create it"):
        platform.submit(platform.render(job(tmp_path)))
    until(lambda: not cluster.objects("jobs"))
    assert len(cluster.objects("services")) == 1


@pytest.mark.parametrize("workload", ["jobset", "job"])
def test_submit_keeps_a_job_of_another_run(cluster: Cluster, tmp_path: Path, workload: str) -> None:
    """A job of the same name whose label names another run, as of another root, is not taken for this one."""
    platform = kubernetes(cluster, workload=workload)
    platform.submit(platform.render(job(tmp_path, root="first")))
    before = cluster.objects(f"{workload}s")
    with pytest.raises(PlatformRefused, match="demo-1-000000 already exists, and this job did not create it"):
        platform.submit(platform.render(job(tmp_path, root="second")))
    assert [thing["metadata"]["uid"] for thing in cluster.objects(f"{workload}s")] == [before[0]["metadata"]["uid"]]


def test_submit_refuses_before_it_creates_anything(cluster: Cluster, tmp_path: Path) -> None:
    platform = kubernetes(cluster)
    nowhere = kubernetes(cluster, namespace="nowhere")
    bad: dict[str, Submission] = {
        "the submission has no image; build it, or": platform.render(job(tmp_path, image=None)),
        "create the namespace, or fix platform.namespace": nowhere.render(job(tmp_path)),
        "cannot be written": platform.render(job(tmp_path, directory="/dev/null/attempts/1")),
    }
    for problem, submission in bad.items():
        with pytest.raises(PlatformRefused, match=problem):
            platform.submit(submission)
    assert cluster.objects("jobsets") == []


def test_auto_renders_a_job_when_the_cluster_has_no_jobset(tmp_path: Path) -> None:
    with running_cluster(simulate=True, jobset=None) as cluster:
        blind, platform = kubernetes(cluster, workload="auto"), kubernetes(cluster, workload="auto")
        submission = blind.render(job(tmp_path))
        with pytest.raises(PlatformRefused, match=r"has no JobSet; install it .* or set platform\.workload=job"):
            blind.submit(submission)  # nobody has looked before
        platform.check_access()
        started(cluster, platform, job(tmp_path))
        assert [thing["metadata"]["name"] for thing in cluster.objects("jobs")] == ["demo-1-000000"]
