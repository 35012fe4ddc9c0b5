"""A job's state by watches: what becomes of it, and of the watches when the API misbehaves."""

from pathlib import Path

import pytest
from kubernetes_cluster import Cluster
from kubernetes_jobs import begun, end_of, job, kubernetes, started
from waiting import until

from launcher.errors import PlatformUnreachable
from launcher.job import JobId, JobState
from launcher.platforms.kubernetes import informer as watching
from launcher.platforms.kubernetes.platform import KubernetesPlatform
from launcher.platforms.kubernetes.states import JobName
from launcher.runs.diagnosis import Action, diagnose
from litgpt_demo.errors import EXIT_CODES, FailureClass

PREEMPTED = EXIT_CODES[FailureClass.PREEMPTED]


# --- the life of a job ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", ["jobset", "job"])
def test_job_waits_runs_and_succeeds(cluster: Cluster, tmp_path: Path, workload: str) -> None:
    platform, job_id = begun(cluster, tmp_path, workload=workload)
    status = platform.status(job_id)
    assert (status.native.endswith("runs on 2 nodes"), status.exit_codes) == (True, {})
    cluster.finish("demo")
    seen = end_of(platform, job_id)
    assert (seen.state, seen.exit_codes) == (JobState.SUCCEEDED, {0: 0, 1: 0})
    scheduled, pulled, since, ended = (
        moment or 0 for moment in (seen.scheduled, seen.pulled, seen.started, seen.ended)
    )
    assert 1 < since - 1 <= scheduled <= pulled + 1 <= ended + 2, "in whole seconds"


@pytest.mark.parametrize(("workload", "pod"), [("jobset", "-0-1"), ("job", "demo-1-000000-1")])
def test_status_has_exit_codes_of_deleted_pods(cluster: Cluster, tmp_path: Path, workload: str, pod: str) -> None:
    """The Job controller deletes the pods that still run when one has failed."""
    platform, job_id = begun(cluster, tmp_path, workload=workload)
    cluster.finish(pod, code=41)
    seen = end_of(platform, job_id)
    assert (seen.state, seen.exit_codes[1]) == (JobState.FAILED, 41)
    assert "exit code 41" in seen.native or "FailJobSet" in seen.native


def test_faults_and_preemptions_restart_the_job_in_place(cluster: Cluster, tmp_path: Path) -> None:
    """They do so `platform.in_place_restarts` times."""
    platform, job_id = begun(cluster, tmp_path, in_place_restarts=1)
    cluster.finish("-0-1", code=EXIT_CODES[FailureClass.NODE])
    until(lambda: platform.status(job_id).restarts == 1)
    until(lambda: platform.status(job_id).state is JobState.RUNNING)
    status = platform.status(job_id)
    assert status.native.endswith("runs on 2 nodes, restarted 1 times")
    assert status.exit_codes == {}  # those of the last life are not this one's
    cluster.preempt(cluster.pods("-0-1")[0]["metadata"]["name"])
    seen = end_of(platform, job_id)
    assert (seen.state, "ReachedMaxRestarts" in seen.native) == (JobState.FAILED, True)
    assert diagnose(seen, [], [], logs="").action is Action.RESTART


def test_job_that_is_always_preempted_is_not_restarted_forever(cluster: Cluster, tmp_path: Path) -> None:
    platform, job_id = begun(cluster, tmp_path, in_place_restarts=0)
    cluster.finish("-0-1", code=PREEMPTED)
    seen = end_of(platform, job_id)
    assert (seen.state, seen.restarts, seen.exit_codes[1]) == (JobState.FAILED, 0, PREEMPTED)


@pytest.mark.parametrize(
    ("workload", "resource", "fault", "action", "fix"),
    [
        ("jobset", "memory", FailureClass.OUT_OF_MEMORY, Action.STOP, "platform.memory"),
        ("job", "ephemeral-storage", FailureClass.NODE, Action.RESTART, "platform.local_ssd"),
    ],
)
def test_node_evicted_from_a_full_machine_was_not_preempted(
    cluster: Cluster, tmp_path: Path, workload: str, resource: str, fault: FailureClass, action: Action, fix: str
) -> None:
    platform, job_id = begun(cluster, tmp_path, workload=workload, in_place_restarts=0)
    cluster.run_out(cluster.pods("demo")[1]["metadata"]["name"], resource)
    seen = end_of(platform, job_id)
    diagnosis = diagnose(seen, [], [], logs="")
    assert (diagnosis.fault, diagnosis.node, diagnosis.action) == (fault, 1, action)
    assert diagnosis.evidence.startswith(f"evicted by its kubelet: The node was low on resource: {resource}.")
    assert fix in diagnosis.evidence


def test_status_has_the_signal_or_the_lack_of_memory_of_a_node(cluster: Cluster, tmp_path: Path) -> None:
    platform = kubernetes(cluster, workload="job")
    for name, out_of_memory, code in (("one", False, -9), ("two", True, EXIT_CODES[FailureClass.OUT_OF_MEMORY])):
        job_id = started(cluster, platform, job(tmp_path, name))
        cluster.kill(cluster.pods(f"{name}-1-0")[0]["metadata"]["name"], out_of_memory=out_of_memory)
        assert end_of(platform, job_id).exit_codes[0] == code


def test_silent_machine_is_named_with_the_next_steps(cluster: Cluster, tmp_path: Path) -> None:
    platform, job_id = begun(cluster, tmp_path, in_place_restarts=0)
    lost = cluster.pods("-0-1-")[0]["spec"]["nodeName"]
    cluster.hang(lost)
    (reason,) = until(lambda: platform.status(job_id).reasons)
    assert reason.code == "kubernetes.machine-lost"
    assert reason.what.startswith(f"the machine of node 1 on {lost} has not answered since 20")
    assert "its pod is given up after 300 s" in reason.fix
    cluster.give_up(lost)
    until(lambda: any("its pod was given up" in reason.fix for reason in platform.status(job_id).reasons))
    cluster.remove_node(lost)
    assert end_of(platform, job_id).exit_codes[1] == PREEMPTED


def test_ended_node_is_reported_while_a_silent_one_has_not_ended(cluster: Cluster, tmp_path: Path) -> None:
    platform, job_id = begun(cluster, tmp_path)
    lost = cluster.pods("-0-1-")[0]["spec"]["nodeName"]
    cluster.silence(lost)
    cluster.finish("-0-0-", code=EXIT_CODES[FailureClass.NETWORK])
    (reason,) = until(lambda: platform.status(job_id).reasons)
    assert reason.what == "node 0 has ended (network fault, exit code 44), and others have not yet"
    cluster.hang(lost)
    until(lambda: [reason.code for reason in platform.status(job_id).reasons] == ["kubernetes.machine-lost"])


# --- an API that misbehaves -------------------------------------------------------------------------------------------


def seen(platform: KubernetesPlatform, job_id: JobId) -> JobState | None:
    """The job's state; None while nobody answers."""
    try:
        return platform.status(job_id).state
    except PlatformUnreachable:
        return None


def test_changes_during_a_broken_watch_are_not_missed(cluster: Cluster, tmp_path: Path) -> None:
    platform, job_id = begun(cluster, tmp_path)
    end = cluster.answer(503, verb="watch")
    cluster.expire_watches()
    cluster.finish("demo")
    until(lambda: not cluster.pods("demo"))
    cluster.expire_watches()  # and its history is forgotten meanwhile
    end()
    assert end_of(platform, job_id).exit_codes == {0: 0, 1: 0}


def test_status_raises_during_an_outage(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.platforms.kubernetes.cluster._PAUSES", (0.01,))
    monkeypatch.setattr(watching, "_PAUSES", (0.05,))
    platform, job_id = begun(cluster, tmp_path)
    end = cluster.answer(503)
    cluster.expire_watches()
    until(lambda: seen(platform, job_id) is None)
    with pytest.raises(PlatformUnreachable, match="does not answer"):
        platform.logs(job_id)
    end()
    until(lambda: seen(platform, job_id) is JobState.RUNNING)
    cluster.finish("demo")
    until(lambda: seen(platform, job_id) is JobState.SUCCEEDED)


def test_exit_code_is_of_the_second_pod_after_kueues_restart() -> None:
    """A job that was suspended and resumed has the same life; the first pods of its nodes ended."""

    def pod(uid: str, minute: int, state: dict[str, object]) -> dict[str, object]:
        labels = {"batch.kubernetes.io/job-completion-index": "0"}
        created = f"2026-11-28T11:0{minute}:00Z"
        meta = {"name": uid, "uid": uid, "creationTimestamp": created, "labels": labels}
        return {"metadata": meta, "status": {"containerStatuses": [{"name": "node", "state": state}]}}

    first = pod("first", 1, {"terminated": {"exitCode": PREEMPTED}})
    second = pod("second", 2, {"running": {"startedAt": "2026-11-28T11:02:30Z"}})
    watch = watching.JobWatch(None, JobName.parse("default/demo-1-000000"))  # type: ignore[arg-type]  # nothing is asked
    for event in (first, pod("second", 2, {"waiting": {}})):
        watch._apply(event, gone=False)
    assert [seen.code for seen in watch._seen.values()] == [PREEMPTED], "a pod that waits says nothing yet"
    for event in (second, first):
        watch._apply(event, gone=False)
    watch._apply(first, gone=True)
    assert [seen.code for seen in watch._seen.values()] == [None]
