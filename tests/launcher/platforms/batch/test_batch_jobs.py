"""Jobs on Batch that are lost, refused, held up, taken up again: against the local services, without any training."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from batch import Cloud
from batch_jobs import IMAGE, end_of, job_of, settings_of
from google.cloud.batch_v1 import types
from waiting import until

from launcher.errors import ConfigProblem, LoginProblem, PlatformRefused, PlatformUnreachable
from launcher.job import JobId, JobState, JobStatus
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.states import status_of
from launcher.runs.diagnosis import Action, Verdict, diagnose
from litgpt_demo.errors import Fault

ONE = {"nodes": 1, "spot": True}


def platform_of(**changes: Any) -> BatchPlatform:
    """A platform that does not wait for peers and log lines."""
    return BatchPlatform(settings_of(**changes), grace=0, settle=0)


def submitted(platform: BatchPlatform, **changes: Any) -> JobId:
    return platform.submit(platform.render(job_of(platform._settings, **changes)))


def containers(cloud: Cloud) -> list[dict[str, str]]:
    return [dict(one.environment) for one in cloud.started if one.kind == "container"]


def running(platform: BatchPlatform, cloud: Cloud, **changes: Any) -> JobId:
    """The job, with all of its containers started."""
    before, job_id = len(containers(cloud)), submitted(platform, **changes)
    until(lambda: len(containers(cloud)) - before == platform._settings.nodes)
    return job_id


def verdict(status: JobStatus) -> Verdict:
    return diagnose(status, (), (), logs="here")


# --- lost nodes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "fault"), [(50001, Fault.PREEMPTED), (50002, Fault.NODE)])
def test_a_lost_node_ends_the_attempt_everywhere_and_the_next_one_is_a_job_of_its_own(
    code: int, fault: Fault, cloud: Cloud
) -> None:
    platform = platform_of(spot=True)
    job_id = running(platform, cloud)
    cloud.lose(job_id, 1, code)
    status = end_of(platform, job_id)
    assert (status.state, status.exit_codes) == (JobState.FAILED, {1: code})
    assert (verdict(status).fault, verdict(status).node, verdict(status).action) == (fault, 1, Action.RESTART)
    until(lambda: cloud.live() == [])  # Batch itself would have left the other node alone
    platform.cancel(job_id)
    assert cloud.vms() == []
    assert platform.status(job_id).state is JobState.FAILED  # not cancelled: it had been lost before
    second = running(platform, cloud, attempt=2)
    assert cloud.live() == [second] != [job_id]
    assert {one["LITGPT_ATTEMPT"] for one in containers(cloud)} == {"owt-0123456789-1-0", "owt-0123456789-2-0"}


@pytest.mark.parametrize(
    ("ends_with", "state", "fault"), [(0, JobState.SUCCEEDED, None), (40, JobState.FAILED, Fault.USER)]
)
def test_a_single_node_is_restarted_in_place_and_judged_by_the_last_of_its_lives(
    ends_with: int, state: JobState, fault: Fault | None, cloud: Cloud
) -> None:
    platform = platform_of(**ONE, restarts=2)
    job_id = running(platform, cloud)
    cloud.options.recorded[IMAGE] = {0: ends_with}  # the second life's
    cloud.preempt(job_id, 0)
    status = end_of(platform, job_id)
    assert (status.state, status.exit_codes, status.restarts) == (state, {0: ends_with}, 1)
    assert fault is None or verdict(status).fault is fault
    assert "50001" not in status.native
    assert [one["LITGPT_ATTEMPT"] for one in containers(cloud)] == ["owt-0123456789-1-0", "owt-0123456789-1-1"]
    assert containers(cloud)[-1]["LITGPT_RESTART"] == "1"


def test_preemptions_are_among_the_restarts_in_place_and_one_more_ends_the_attempt(cloud: Cloud) -> None:
    platform = platform_of(**ONE, restarts=1)
    job_id = submitted(platform)
    for lives in (1, 2):
        until(lambda lives=lives: len(containers(cloud)) == lives)
        cloud.preempt(job_id, 0)
    status = end_of(platform, job_id)
    assert (status.state, status.exit_codes) == (JobState.FAILED, {0: 50001})
    assert (verdict(status).fault, verdict(status).action) == (Fault.PREEMPTED, Action.RESTART)
    assert len(containers(cloud)) == 2


def test_a_job_that_is_cancelled_between_two_lives_has_no_exit_code(cloud: Cloud) -> None:
    platform = platform_of(**ONE, restarts=2)
    job_id = running(platform, cloud)
    cloud.options.vms = 0
    cloud.preempt(job_id, 0)
    until(lambda: cloud.vms() == [])
    platform.cancel(job_id)
    status = platform.status(job_id)
    assert (status.state, status.exit_codes) == (JobState.CANCELLED, {})


@pytest.mark.parametrize(("code", "lives"), [(40, 1), (43, 2)])
def test_what_a_restart_would_not_mend_is_not_restarted(code: int, lives: int, cloud: Cloud) -> None:
    cloud.options.recorded[IMAGE] = {0: code}
    platform = platform_of(nodes=1)
    status = end_of(platform, submitted(platform))
    assert (status.state, status.exit_codes, len(containers(cloud))) == (JobState.FAILED, {0: code}, lives)


# --- what Batch's events mean -----------------------------------------------------------------------------------------

Events = Sequence[tuple[int, str, int | None]]


def told(*events: Events, limit: int = 3600, job: str = "RUNNING") -> tuple[types.Job, list[types.Task]]:
    """A job and its tasks with these events: when, the state that a task went into, and the exit code with it."""
    barrier = types.Runnable(barrier=types.Runnable.Barrier(name="all-up"), timeout="60s")
    spec = types.TaskSpec(runnables=[barrier], max_run_duration=f"{limit}s")
    tasks = []
    for number, of_task in enumerate(events):
        history = [
            types.StatusEvent(
                task_state=state,
                event_time=f"2026-01-01T00:{moment // 60:02}:{moment % 60:02}Z",
                task_execution=code and types.TaskExecution(exit_code=code),
            )
            for moment, state, code in of_task
        ]
        status = types.TaskStatus(state=of_task[-1][1], status_events=history)
        tasks.append(types.Task(name=f"jobs/j/taskGroups/group0/tasks/{number}", status=status))
    group = types.TaskGroup(task_count=len(events), task_spec=spec)
    return types.Job(task_groups=[group], status=types.JobStatus(state=job)), tasks


NEW_YEAR = 1767225600.0


def seen(job: types.Job, tasks: Sequence[types.Task], now: int = 1000, **patience: float) -> JobStatus:
    return status_of(job, tasks, now=NEW_YEAR + now, **{"grace": 0.0, "settle": 0.0, **patience})


LOST = [(0, "RUNNING", None), (9, "FAILED", 50001), (9, "PENDING", None)]


@pytest.mark.parametrize(
    ("events", "codes"),
    [
        ([*LOST, (10, "RUNNING", None), (20, "FAILED", 43)], {0: 43}),
        ([*LOST, (20, "FAILED", None)], {}),
        ([(0, "RUNNING", None), (9, "PENDING", 50001), (20, "FAILED", None)], {}),
        ([*LOST, (10, "RUNNING", None), (20, "FAILED", None)], {}),
    ],
)
def test_a_task_that_fails_has_the_code_of_its_last_life_alone(events: Events, codes: dict[int, int]) -> None:
    """One that was preempted and did not come back for want of machines is no preemption, which is restarted free."""
    assert seen(*told(events, job="FAILED")).exit_codes == codes


def test_a_job_whose_time_is_over_is_not_started_again_and_one_that_waited_for_a_peer_is() -> None:
    began = (0, "RUNNING", None)
    over = seen(*told([began, (120, "FAILED", 50005)], limit=120))
    assert (over.exit_codes, verdict(over).fault, verdict(over).action) == ({0: 50005}, Fault.USER, Action.STOP)
    alone = seen(*told([began, (60, "FAILED", 50005)], limit=120))
    assert (alone.exit_codes, verdict(alone).fault) == ({0: 44}, Fault.NETWORK)
    again = [began, (90, "FAILED", 50001), (90, "PENDING", None), (100, "RUNNING", None), (220, "FAILED", 50005)]
    assert seen(*told(again, limit=120)).exit_codes == {0: 50005}, "time is counted by life"


def test_the_peers_of_a_failed_node_have_a_moment_to_say_what_they_saw() -> None:
    job = told([(0, "RUNNING", None), (10, "FAILED", 44)], [(0, "RUNNING", None)])
    assert seen(*job, now=60, grace=60).state is JobState.RUNNING
    assert seen(*job, now=71, grace=60).state is JobState.FAILED


def test_a_job_is_not_over_before_its_last_lines_can_be_there() -> None:
    job = told([(0, "RUNNING", None), (10, "SUCCEEDED", None)], job="SUCCEEDED")
    assert seen(*job, now=15, settle=10).state is JobState.RUNNING
    assert seen(*job, now=21, settle=10).state is JobState.SUCCEEDED


# --- submitting -------------------------------------------------------------------------------------------------------


def test_a_create_whose_answer_is_lost_and_two_who_submit_at_once_make_one_job(cloud: Cloud) -> None:
    cloud.refuse("CreateJob", grpc.StatusCode.UNAVAILABLE, times=2, after=True)
    with ThreadPoolExecutor(4) as pool:
        ids = set(pool.map(lambda _: submitted(platform_of()), range(4)))
    assert list(ids) == cloud.created


def test_a_job_that_has_ended_is_not_started_again(cloud: Cloud) -> None:
    cloud.options.recorded[IMAGE] = {0: 0, 1: 0}
    platform = platform_of()
    job_id = submitted(platform)
    assert end_of(platform, job_id).state is JobState.SUCCEEDED
    assert submitted(platform_of()) == job_id
    assert len(cloud.created) == 1


def test_a_platform_that_does_not_answer_is_waited_for_and_a_cancel_can_be_repeated(cloud: Cloud) -> None:
    platform = platform_of()
    job_id = submitted(platform)
    cloud.refuse("GetJob", grpc.StatusCode.INTERNAL)
    with pytest.raises(PlatformUnreachable, match=job_id):
        platform.status(job_id)
    cloud.refuse("CancelJob", grpc.StatusCode.UNAVAILABLE, after=True)
    with pytest.raises(PlatformUnreachable):
        platform.cancel(job_id)
    platform.cancel(job_id)
    assert platform.status(job_id).state is JobState.CANCELLED


def test_access_is_refused_with_the_roles_and_silence_is_no_refusal(cloud: Cloud) -> None:
    cloud.refuse("ListJobs", grpc.StatusCode.PERMISSION_DENIED)
    with pytest.raises(LoginProblem, match=r"roles/batch"):
        platform_of().check_access()
    cloud.refuse("ListJobs", grpc.StatusCode.INTERNAL)
    with pytest.raises(PlatformUnreachable, match="projects/my-project"):
        platform_of().check_access()


def test_a_job_without_quota_waits_says_so_and_can_be_cancelled(cloud: Cloud) -> None:
    cloud.options.vms = 1
    platform = platform_of()
    job_id = submitted(platform)
    waits = until(lambda: "Quota" in (now := platform.status(job_id)).native and now)
    assert waits.state is JobState.PENDING
    platform.cancel(job_id)
    assert platform.status(job_id).state is JobState.CANCELLED
    assert cloud.live() == []


def test_a_job_removed_by_hand_is_absent(cloud: Cloud) -> None:
    platform = platform_of()
    job_id = running(platform, cloud)
    platform._clients.batch.delete_job(name=job_id)
    until(lambda: platform.status(job_id).state is JobState.ABSENT)
    platform.cancel(job_id)


def test_what_batch_refuses_is_told_with_its_reason(cloud: Cloud) -> None:
    with pytest.raises(PlatformRefused, match=r"batch\.jobs\.create.*roles/batch\.jobsEditor"):
        submitted(platform_of(project="other-project"))
    with pytest.raises(PlatformRefused, match="n9-huge-1 does not exist"):
        submitted(platform_of(machine="n9-huge-1", gpus=0))
    with pytest.raises(PlatformRefused, match="no image"):
        submitted(platform_of(), image=None)
    assert cloud.created == []


def test_without_credentials_or_the_extra_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "no-such-key.json"))
    with pytest.raises(LoginProblem, match="gcloud auth application-default login"):
        platform_of().check_access()
    monkeypatch.setitem(__import__("sys").modules, "google.cloud.batch_v1", None)
    with pytest.raises(ConfigProblem, match=r"train-litgpt\[batch\]"):
        platform_of().check_access()


# --- on the VMs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [True, False])
def test_every_node_learns_its_rank_and_where_node_0_is(samples: bool, cloud: Cloud) -> None:
    """With the variables of Google's samples, and with those alone that are documented."""
    cloud.options.sample_variables = samples
    running(platform_of(nodes=3), cloud)
    nodes = {one["BATCH_TASK_INDEX"]: one for one in containers(cloud)}
    assert {task: node["LITGPT_NODE_RANK"] for task, node in nodes.items()} == {"0": "0", "1": "1", "2": "2"}
    (master,) = {node["LITGPT_MASTER"] for node in nodes.values()}
    assert master.partition(":")[0] == nodes["0"]["LITGPT_HOST"]


def test_the_runtime_is_set_up_before_the_container_that_needs_it(cloud: Cloud) -> None:
    running(platform_of(machine="g2-standard-24"), cloud)
    assert [one.name for one in cloud.started if one.task == 1] == ["gpus", "node", "train"]
    assert cloud.commands(1)[:4] == [
        "nvidia-smi -L", "nvidia-ctk runtime configure --runtime=docker", "systemctl restart docker", "docker info",
    ]  # fmt: skip


def test_on_container_optimized_os_the_firewall_is_opened_to_peers_alone(cloud: Cloud) -> None:
    running(platform_of(machine="g2-standard-24", os="cos"), cloud)
    opened = [line.split() for line in cloud.commands(0) if line.startswith("iptables")]
    assert [words[words.index("-s") + 1] for words in opened] == cloud.vms()
    assert containers(cloud)[0]["TRITON_LIBCUDA_PATH"] == "/usr/local/nvidia/lib64"


@pytest.mark.parametrize(("option", "os", "code"), [("toolkit", "debian", "toolkit"), ("driver", "cos", "libcuda")])
def test_a_vm_that_cannot_give_gpus_to_containers_is_a_node_fault_that_says_why(
    option: str, os: str, code: str, cloud: Cloud
) -> None:
    setattr(cloud.options, option, False)
    platform = platform_of(machine="g2-standard-24", os=os)
    job_id = submitted(platform)
    assert verdict(end_of(platform, job_id)).fault is Fault.NODE
    assert any(line.text.startswith(f"error [batch.{code}]") for line in platform.logs(job_id).lines)
