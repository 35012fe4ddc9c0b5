"""Jobs on Batch that are lost, refused, held up, taken up again: against the local services, without any training."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from batch import Cloud
from batch_jobs import IMAGE, end_of
from waiting import until

from launcher.errors import ConfigProblem, LoginProblem, PlatformRefused, PlatformUnreachable
from launcher.job import Job, JobId, JobState, JobStatus
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.settings import BatchPlatformConfig
from launcher.runs.diagnosis import Action, Verdict, diagnose
from litgpt_demo.errors import Fault

Make = Callable[..., BatchPlatform]
MakeJob = Callable[..., Job]


def running(platform: BatchPlatform, job: Job, cloud: Cloud) -> JobId:
    """The job, with all of its containers started."""
    before = len(cloud.started)
    job_id = platform.submit(platform.render(job))
    until(lambda: sum(one.kind == "container" for one in cloud.started[before:]) == job.nodes)
    return job_id


def verdict(status: JobStatus) -> Verdict:
    return diagnose(status, (), (), logs="here")


# --- lost nodes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lose", "code", "fault", "action"),
    [
        ("preempt", 50001, Fault.PREEMPTED, Action.RESTART),
        ("silence", 50002, Fault.NODE, Action.RESTART),
        ("reboot", 50003, Fault.NODE, Action.RESTART),
        ("freeze", 50004, Fault.NODE, Action.RESTART),
        ("remake", 50006, Fault.NODE, Action.RESTART),
    ],
)
def test_a_lost_node_ends_the_attempt_everywhere(
    lose: str, code: int, fault: Fault, action: Action, cloud: Cloud, platform_of: Make, job: MakeJob
) -> None:
    platform = platform_of(spot=True)
    job_id = running(platform, job(), cloud)
    getattr(cloud, lose)(job_id, 1)
    status = end_of(platform, job_id)
    assert status.state is JobState.FAILED
    assert status.exit_codes == {1: code}
    assert str(code) in status.native
    assert (verdict(status).fault, verdict(status).node, verdict(status).action) == (fault, 1, action)
    until(lambda: cloud.live() == [])  # Batch itself would have left the other node alone
    platform.cancel(job_id)
    assert cloud.vms() == []
    assert platform.status(job_id).state is JobState.FAILED  # not cancelled: it had been lost before
    assert platform.status(job_id).exit_codes[1] == code


def test_the_next_attempt_is_a_job_of_its_own(cloud: Cloud, platform_of: Make, job: MakeJob) -> None:
    platform = platform_of(spot=True)
    first = running(platform, job(), cloud)
    cloud.preempt(first, 0)
    end_of(platform, first)
    platform.cancel(first)
    second = running(platform, job(attempt=2), cloud)
    assert second != first
    assert platform.status(second).state is JobState.RUNNING
    assert cloud.live() == [second]
    names = [one.environment["LITGPT_ATTEMPT"] for one in cloud.started if one.kind == "container"]
    assert set(names) == {"owt-0123456789-1-0", "owt-0123456789-2-0"}


def test_the_peers_of_a_failed_node_have_a_moment_to_say_what_they_saw(
    cloud: Cloud, platform_of: Make, configured: Callable[..., BatchPlatformConfig], job: MakeJob
) -> None:
    cloud.options.recorded[IMAGE] = {0: 44}
    platform = BatchPlatform(configured(), grace=60, settle=0)
    job_id = platform.submit(platform.render(job()))
    seen = until(lambda: (now := platform.status(job_id)).exit_codes and now)
    assert (seen.state, seen.exit_codes) == (JobState.RUNNING, {0: 44})
    assert "node 0 ended with 44" in seen.native
    late = BatchPlatform(configured(), grace=60, settle=0, clock=lambda: time.time() + 61)
    assert late.status(job_id).state is JobState.FAILED
    late.cancel(job_id)


def test_a_single_node_is_restarted_in_place_on_another_vm(cloud: Cloud, platform_of: Make, job: MakeJob) -> None:
    platform = platform_of(nodes=1, spot=True, restarts=2)
    job_id = running(platform, job(nodes=1), cloud)
    cloud.preempt(job_id, 0)
    until(lambda: sum(one.kind == "container" for one in cloud.started) == 2)
    assert platform.status(job_id).state is JobState.RUNNING
    lives = [one.environment["LITGPT_ATTEMPT"] for one in cloud.started if one.kind == "container"]
    assert lives == ["owt-0123456789-1-0", "owt-0123456789-1-1"]
    assert cloud.started[-1].environment["LITGPT_RESTART"] == "1"
    assert platform.status(job_id).restarts == 1
    platform.cancel(job_id)
    assert platform.status(job_id).state is JobState.CANCELLED


def test_a_single_node_that_ends_well_after_a_restart_in_place_has_ended_well(
    cloud: Cloud, platform_of: Make, job: MakeJob
) -> None:
    platform = platform_of(nodes=1, spot=True, restarts=2)
    job_id = running(platform, job(nodes=1), cloud)
    cloud.options.recorded[IMAGE] = {0: 0}  # the second life's
    cloud.preempt(job_id, 0)
    status = end_of(platform, job_id)
    assert (status.state, status.exit_codes, status.restarts) == (JobState.SUCCEEDED, {0: 0}, 1)
    assert "50001" not in status.native


def test_a_single_node_is_judged_by_the_last_of_its_lives(cloud: Cloud, platform_of: Make, job: MakeJob) -> None:
    platform = platform_of(nodes=1, spot=True, restarts=2)
    job_id = running(platform, job(nodes=1), cloud)
    cloud.options.recorded[IMAGE] = {0: 40}
    cloud.preempt(job_id, 0)
    status = end_of(platform, job_id)
    assert (status.state, status.exit_codes) == (JobState.FAILED, {0: 40})
    assert (verdict(status).fault, verdict(status).action) == (Fault.USER, Action.STOP)


def test_a_job_that_is_cancelled_between_two_lives_has_no_exit_code(
    cloud: Cloud, platform_of: Make, job: MakeJob
) -> None:
    platform = platform_of(nodes=1, spot=True, restarts=2)
    job_id = running(platform, job(nodes=1), cloud)
    cloud.options.boot = 2
    cloud.preempt(job_id, 0)
    until(lambda: cloud.task_states(job_id) == ["PENDING"])
    platform.cancel(job_id)
    status = platform.status(job_id)
    assert (status.state, status.exit_codes) == (JobState.CANCELLED, {})


def test_preemptions_are_among_the_restarts_in_place_and_one_more_ends_the_attempt(
    cloud: Cloud, platform_of: Make, job: MakeJob
) -> None:
    platform = platform_of(nodes=1, spot=True, restarts=1)
    job_id = platform.submit(platform.render(job(nodes=1)))
    for lives in (1, 2):
        until(lambda lives=lives: sum(one.kind == "container" for one in cloud.started) == lives)
        cloud.preempt(job_id, 0)
    status = end_of(platform, job_id)
    assert (status.state, status.exit_codes) == (JobState.FAILED, {0: 50001})
    assert (verdict(status).fault, verdict(status).action) == (Fault.PREEMPTED, Action.RESTART)
    assert sum(one.kind == "container" for one in cloud.started) == 2


@pytest.mark.parametrize(("code", "lives"), [(40, 1), (1, 1), (43, 2), (45, 2)])
def test_what_a_restart_would_not_mend_is_not_restarted(
    code: int, lives: int, cloud: Cloud, platform_of: Make, job: MakeJob
) -> None:
    cloud.options.recorded[IMAGE] = {0: code}
    platform = platform_of(nodes=1)
    status = end_of(platform, platform.submit(platform.render(job(nodes=1))))
    assert (status.state, status.exit_codes) == (JobState.FAILED, {0: code})
    assert sum(one.kind == "container" for one in cloud.started) == lives


def test_a_job_whose_time_is_over_is_not_started_again(cloud: Cloud, platform_of: Make, job: MakeJob) -> None:
    platform = platform_of(max_seconds=1)
    status = end_of(platform, platform.submit(platform.render(job())))
    assert set(status.exit_codes.values()) == {50005}
    assert "(it ran longer than it may)" in status.native
    assert verdict(status).action is Action.STOP


def test_time_is_counted_by_life_and_a_node_alone_waits_for_nobody(
    cloud: Cloud, platform_of: Make, job: MakeJob
) -> None:
    platform = platform_of(nodes=1, spot=True, restarts=1, max_seconds=2)
    job_id = running(platform, job(nodes=1), cloud)
    cloud.preempt(job_id, 0)
    status = end_of(platform, job_id)
    assert status.exit_codes == {0: 50005}
    assert verdict(status).fault is Fault.USER


def test_nodes_that_wait_too_long_for_a_peer_are_a_network_fault(
    cloud: Cloud, platform_of: Make, job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = platform_of()
    submission = platform.render(job())
    group = submission.body["job"]["taskGroups"][0]
    group["parallelism"] = 1  # the second VM is never made
    next(one for one in group["taskSpec"]["runnables"] if "barrier" in one)["timeout"] = "1s"
    status = end_of(platform, platform.submit(submission))
    assert verdict(status).fault is Fault.NETWORK
    assert status.exit_codes == {0: 44}
    assert "node 0 ended with 44 (Batch's 50005: its peers were not there within platform.gather)" in status.native
    platform.cancel(submission.job_id)


# --- submitting -------------------------------------------------------------------------------------------------------


def test_a_create_whose_answer_is_lost_makes_one_job(cloud: Cloud, platform_of: Make, job: MakeJob) -> None:
    platform = platform_of()
    cloud.refuse("CreateJob", grpc.StatusCode.UNAVAILABLE, times=2, after=True)
    job_id = platform.submit(platform.render(job()))
    assert cloud.calls.count("CreateJob") == 3
    assert cloud.created == [job_id]


def test_two_who_submit_at_once_share_the_job(cloud: Cloud, platform_of: Make, job: MakeJob) -> None:
    submission = platform_of().render(job())
    with ThreadPoolExecutor(4) as pool:
        ids = set(pool.map(lambda platform: platform.submit(submission), [platform_of() for _ in range(4)]))
    assert ids == {submission.job_id}
    assert cloud.created == [submission.job_id]


def test_a_job_that_has_ended_is_not_started_again(cloud: Cloud, platform_of: Make, job: MakeJob) -> None:
    cloud.options.recorded[IMAGE] = {0: 0, 1: 0}
    platform = platform_of()
    submission = platform.render(job())
    assert end_of(platform, platform.submit(submission)).state is JobState.SUCCEEDED
    assert platform_of().submit(submission) == submission.job_id
    assert len(cloud.created) == 1


def test_a_platform_that_does_not_answer_is_waited_for(cloud: Cloud, platform_of: Make, job: MakeJob) -> None:
    platform = platform_of()
    job_id = platform.submit(platform.render(job()))
    cloud.refuse("GetJob", grpc.StatusCode.INTERNAL)
    with pytest.raises(PlatformUnreachable, match=job_id):
        platform.status(job_id)
    cloud.refuse("GetJob", grpc.StatusCode.UNAVAILABLE)  # the client asks again by itself
    assert platform.status(job_id).state.live


def test_access_is_refused_with_the_roles_and_silence_is_no_refusal(cloud: Cloud, platform_of: Make) -> None:
    assert platform_of().check_access() == "Batch answers for projects/my-project/locations/us-central1"
    cloud.refuse("ListJobs", grpc.StatusCode.PERMISSION_DENIED)
    with pytest.raises(LoginProblem, match=r"enable the Batch API in the project and give yourself roles/batch"):
        platform_of().check_access()
    cloud.refuse("ListJobs", grpc.StatusCode.INTERNAL)
    with pytest.raises(PlatformUnreachable, match="asking for the jobs of projects/my-project"):
        platform_of().check_access()


def test_a_job_without_quota_waits_and_says_so(cloud: Cloud, platform_of: Make, job: MakeJob) -> None:
    cloud.options.vms = 1
    platform = platform_of()
    job_id = platform.submit(platform.render(job()))
    seen = until(lambda: "quota" in (now := platform.status(job_id)).native.lower() and now)
    assert seen.state is JobState.PENDING
    assert seen.native.startswith("QUEUED; Quota checking process decides to delay scheduling")
    cloud.options.vms = 2
    until(lambda: platform.status(job_id).state is JobState.RUNNING)
    platform.cancel(job_id)


def test_a_job_that_waits_for_quota_can_be_cancelled(cloud: Cloud, platform_of: Make, job: MakeJob) -> None:
    cloud.options.vms = 1
    platform = platform_of()
    job_id = platform.submit(platform.render(job()))
    platform.cancel(job_id)
    assert platform.status(job_id).state is JobState.CANCELLED
    assert cloud.live() == []


def test_a_job_removed_by_hand_is_absent(cloud: Cloud, platform_of: Make, job: MakeJob) -> None:
    from google.cloud import batch_v1

    platform = platform_of()
    job_id = running(platform, job(), cloud)
    platform._clients.batch.delete_job(batch_v1.DeleteJobRequest(name=job_id))
    until(lambda: platform.status(job_id).state is JobState.ABSENT)
    platform.cancel(job_id)


def test_a_cancel_that_is_not_answered_can_be_repeated(cloud: Cloud, platform_of: Make, job: MakeJob) -> None:
    platform = platform_of()
    job_id = running(platform, job(), cloud)
    cloud.refuse("CancelJob", grpc.StatusCode.UNAVAILABLE, after=True)
    with pytest.raises(PlatformUnreachable):
        platform.cancel(job_id)
    platform.cancel(job_id)
    assert platform.status(job_id).state is JobState.CANCELLED


def test_an_image_that_is_not_built_is_refused(cloud: Cloud, platform_of: Make, job: MakeJob) -> None:
    platform = platform_of()
    with pytest.raises(PlatformRefused, match="no image"):
        platform.submit(platform.render(job(image=None)))
    assert cloud.created == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"project": "other-project"}, r"batch\.jobs\.create.*roles/batch\.jobsEditor"),
        ({"location": "us-east4", "machine": "a2-highgpu-1g"}, "a2-highgpu-1g is not available"),
        ({"machine": "n9-huge-1", "gpus": 0}, "n9-huge-1 does not exist"),
        ({"nfs": "10.9.9.9:/none"}, "NFS"),
    ],
)
def test_what_batch_refuses_is_told_with_its_reason(
    changes: dict[str, str], named: str, cloud: Cloud, platform_of: Make, job: MakeJob
) -> None:
    platform = platform_of(**changes)
    with pytest.raises(PlatformRefused, match=named):
        platform.submit(platform.render(job()))
    assert cloud.created == []


def test_without_credentials_it_says_how_to_sign_in(
    platform_of: Make, job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("BATCH_EMULATOR_HOST", "LOGGING_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "no-such-key.json"))
    platform = platform_of()
    with pytest.raises(LoginProblem, match="gcloud auth application-default login"):
        platform.status(platform.render(job()).job_id)


def test_without_the_extra_it_says_what_to_install(
    platform_of: Make, job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "google.cloud.batch_v1", None)
    platform = platform_of()
    with pytest.raises(ConfigProblem, match=r"train-litgpt\[batch\]"):
        platform.status(platform.render(job()).job_id)


# --- on the VMs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [True, False])
def test_every_node_learns_its_rank_and_where_node_0_is(
    samples: bool, cloud: Cloud, platform_of: Make, job: MakeJob
) -> None:
    """With the variables of Google's samples, and with those alone that are documented."""
    cloud.options.sample_variables = samples
    cloud.options.hosts_late = 0.3
    platform = platform_of(nodes=3)
    running(platform, job(nodes=3), cloud)
    told = {one.task: one.environment for one in cloud.started if one.kind == "container"}
    assert {task: variables["LITGPT_NODE_RANK"] for task, variables in told.items()} == {0: "0", 1: "1", 2: "2"}
    (master,) = {variables["LITGPT_MASTER"] for variables in told.values()}
    assert master == f"{told[0]['LITGPT_HOST']}:29500"


def test_the_runtime_is_set_up_before_the_container_that_needs_it(
    cloud: Cloud, platform_of: Make, job: MakeJob
) -> None:
    platform = platform_of(machine="g2-standard-24")
    running(platform, job(processes=2), cloud)
    assert cloud.commands(1) == [
        "nvidia-smi -L", "nvidia-ctk runtime configure --runtime=docker", "systemctl restart docker", "docker info",
        "ldconfig -p",
    ]  # fmt: skip
    kinds = [one.name for one in cloud.started if one.task == 1]
    assert kinds == ["gpus", "node", "train"]


def test_on_container_optimized_os_the_driver_is_mounted_and_the_firewall_opened_to_peers_alone(
    cloud: Cloud, platform_of: Make, job: MakeJob
) -> None:
    platform = platform_of(machine="g2-standard-24", os="cos")
    running(platform, job(processes=2), cloud)
    hosts = sorted(one.environment["LITGPT_HOST"] for one in cloud.started if one.kind == "container")
    opened = [line.split() for line in cloud.commands(0) if line.startswith("iptables")]
    assert [words[words.index("-s") + 1] for words in opened] == hosts
    assert not any("nvidia-ctk" in line for line in cloud.commands(0))
    environment = next(one.environment for one in cloud.started if one.kind == "container")
    assert environment["TRITON_LIBCUDA_PATH"] == "/usr/local/nvidia/lib64"


@pytest.mark.parametrize(
    ("option", "os", "said"),
    [
        ("driver", "debian", "error [batch.driver]"),
        ("toolkit", "debian", "error [batch.toolkit]"),
        ("driver", "cos", "error [batch.libcuda]"),
    ],
)
def test_a_vm_that_cannot_give_gpus_to_containers_is_a_node_fault_that_says_why(
    option: str, os: str, said: str, cloud: Cloud, platform_of: Make, job: MakeJob
) -> None:
    setattr(cloud.options, option, False)
    platform = platform_of(machine="g2-standard-24", os=os)
    job_id = platform.submit(platform.render(job(processes=2)))
    status = end_of(platform, job_id)
    assert verdict(status).fault is Fault.NODE
    assert any(line.text.startswith(said) and "->" in line.text for line in platform.logs(job_id).lines)
    platform.cancel(job_id)
