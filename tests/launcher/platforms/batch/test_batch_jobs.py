"""Jobs on Batch that are lost, refused, held up, taken up again, and their log: against the local services."""

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from batch import Cloud, Vm, running_batch
from batch_jobs import job_of, settings_of
from google.cloud.batch_v1 import types

from launcher.errors import ConfigProblem, LoginProblem, PlatformRefused, PlatformUnreachable
from launcher.job import JobId, JobState, JobStatus
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.states import status_of
from launcher.runs.diagnosis import Action, Diagnosis, diagnose
from litgpt_demo.errors import EXIT_CODES, FailureClass


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """Tasks end as the test says."""
    with running_batch() as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        yield made


def platform_of(**changes: Any) -> BatchPlatform:
    """A platform that does not wait for peers and log lines."""
    return BatchPlatform(settings_of(**changes), grace_period=0, settle=0, patience=60)


def submitted(platform: BatchPlatform, **changes: Any) -> JobId:
    return platform.submit(platform.render(job_of(platform._settings, **changes)))


def diagnosis(status: JobStatus) -> Diagnosis:
    return diagnose(status, (), (), logs="here")


# --- lost nodes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "fault"), [(50001, FailureClass.PREEMPTED), (50002, FailureClass.NODE)])
def test_lost_node_fails_the_job_and_only_cancel_ends_its_peers(code: int, fault: FailureClass, cloud: Cloud) -> None:
    platform = platform_of(spot=True)
    job_id = submitted(platform)
    cloud.end(job_id, 1, code)
    status = platform.status(job_id)
    assert (status.state, status.exit_codes, status.has_running_nodes) == (JobState.FAILED, {1: code}, True)
    assert (diagnosis(status).fault, diagnosis(status).node, diagnosis(status).action) == (fault, 1, Action.RESTART)
    assert platform.remaining_resources(job_id)
    assert "CancelJob" not in cloud.calls
    platform.cancel(job_id)
    assert platform.remaining_resources(job_id) == ()
    assert platform.status(job_id).state is JobState.FAILED, "not cancelled: it had been lost before"


@pytest.mark.parametrize(
    ("codes", "state", "fault"),
    [
        ([50001, 0], JobState.SUCCEEDED, None),
        ([50001, 40], JobState.FAILED, FailureClass.USER),
        ([50001, 50001], JobState.FAILED, FailureClass.PREEMPTED),
        ([40], JobState.FAILED, FailureClass.USER),
    ],
)
def test_single_node_restarts_in_place_and_its_last_life_counts(
    codes: list[int], state: JobState, fault: FailureClass | None, cloud: Cloud
) -> None:
    platform = platform_of(nodes=1, spot=True, in_place_restarts=1)
    job_id = submitted(platform)
    for code in codes:
        cloud.end(job_id, 0, code)
    status = platform.status(job_id)
    assert (status.state, status.exit_codes, status.restarts) == (state, {0: codes[-1]}, len(codes) - 1)
    assert fault is None or diagnosis(status).fault is fault
    assert submitted(platform) == job_id, "it has ended, and is not begun again"
    assert cloud.live() == []


# --- what Batch's events mean -----------------------------------------------------------------------------------------

Events = Sequence[tuple[int, str, int | None]]
NEW_YEAR = 1_767_225_600


def reported(*events: Events, job: str = "RUNNING") -> tuple[types.Job, list[types.Task]]:
    """A job and its tasks with these events: when, the state that a task went into, and the exit code with it."""
    tasks = []
    for number, of_task in enumerate(events):
        history = [
            {
                "task_state": state,
                "event_time": datetime.fromtimestamp(NEW_YEAR + moment, UTC),
                "task_execution": code and {"exit_code": code},
            }
            for moment, state, code in of_task
        ]
        status = {"state": of_task[-1][1], "status_events": history}
        tasks.append(types.Task(name=f"jobs/j/taskGroups/group0/tasks/{number}", status=status))
    spec = {"runnables": [{"barrier": {"name": "all-up"}, "timeout": "60s"}], "max_run_duration": "120s"}
    groups = [{"task_count": len(events), "task_spec": spec}]
    return types.Job(task_groups=groups, status={"state": job}), tasks


def seen(job: types.Job, tasks: Sequence[types.Task], now: int = 1000, **patience: float) -> JobStatus:
    return status_of(job, tasks, now=NEW_YEAR + now, **{"grace_period": 0.0, "settle": 0.0, **patience})


BEGAN = (0, "RUNNING", None)
LOST = [BEGAN, (9, "FAILED", 50001), (9, "PENDING", None)]
NOT_THERE = EXIT_CODES[FailureClass.NETWORK]


@pytest.mark.parametrize(
    ("events", "codes"),
    [
        ([*LOST, (20, "FAILED", None)], {}),
        ([*LOST, (20, "UNEXECUTED", None)], {}),
        ([BEGAN, (120, "FAILED", 50005)], {0: 50005}),
        ([BEGAN, (60, "FAILED", 50005)], {0: NOT_THERE}),
        ([*LOST, (100, "RUNNING", None), (160, "FAILED", 50005)], {0: NOT_THERE}),
    ],
    ids=["no machine again", "not begun again", "its time is over", "it waited for a peer", "in its second life"],
)
def test_timeout_at_a_barrier_is_a_network_fault(events: Events, codes: dict[int, int]) -> None:
    """A preemption is restarted free, and Batch has one code for a job's time and a barrier's."""
    assert seen(*reported(events, job="FAILED")).exit_codes == codes


def test_peers_and_last_lines_have_time_after_a_failed_node() -> None:
    job = reported([BEGAN, (10, "FAILED", 44)], [BEGAN])
    assert [seen(*job, now=now, grace_period=60).state.is_live for now in (60, 71)] == [True, False]
    job = reported([BEGAN, (10, "SUCCEEDED", None)], job="SUCCEEDED")
    assert [seen(*job, now=now, settle=10).state.is_live for now in (15, 21)] == [True, False]


# --- submitting -------------------------------------------------------------------------------------------------------


def test_lost_answer_or_two_submitters_make_one_job(cloud: Cloud) -> None:
    cloud.refuse("CreateJob", grpc.StatusCode.UNAVAILABLE, times=2, after=True)
    with ThreadPoolExecutor(4) as pool:
        ids = set(pool.map(lambda _: submitted(platform_of()), range(4)))
    assert list(ids) == list(cloud.records)


def test_cancel_can_be_repeated_when_batch_did_not_answer(cloud: Cloud) -> None:
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


def test_a_job_without_quota_waits_says_so_and_can_be_cancelled(cloud: Cloud) -> None:
    cloud.quota = False
    platform = platform_of()
    job_id = submitted(platform)
    waits = platform.status(job_id)
    assert (waits.state, "Quota" in waits.native) == (JobState.PENDING, True)
    platform.cancel(job_id)
    assert platform.status(job_id).state is JobState.CANCELLED


def test_refusal_of_batch_has_its_reason(cloud: Cloud) -> None:
    with pytest.raises(PlatformRefused, match=r"batch\.jobs\.create.*roles/batch\.jobsEditor"):
        submitted(platform_of(project="other-project"))
    with pytest.raises(PlatformRefused, match="no image"):
        submitted(platform_of(), image=None)
    assert cloud.records == {}


def test_missing_access_credentials_or_extra_has_a_fix(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cloud.refuse("ListJobs", grpc.StatusCode.PERMISSION_DENIED)
    with pytest.raises(LoginProblem, match=r"roles/batch"):
        platform_of().check_access()
    monkeypatch.delenv("BATCH_EMULATOR_HOST")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "no-such-key.json"))
    with pytest.raises(LoginProblem, match="gcloud auth application-default login"):
        platform_of().check_access()
    monkeypatch.setitem(__import__("sys").modules, "google.cloud.batch_v1", None)
    with pytest.raises(ConfigProblem, match=r"pip install '\.\[batch\]'"):
        platform_of().check_access()


# --- its log ----------------------------------------------------------------------------------------------------------


def test_late_and_unordered_lines_are_read_once(cloud: Cloud) -> None:
    platform = platform_of()
    job_id = submitted(platform)
    # Nodes are told apart above ten.
    coming = [cloud.entry(job_id, number % 12, f"line {number}") for number in range(1200)]
    random.Random(0).shuffle(coming)
    lines, position = [], ""
    for some in (coming[:500], coming[500:]):
        cloud.entries += some
        page = platform.logs(job_id, position)
        lines, position = [*lines, *page.lines], page.position
    expected = sorted((number % 12, f"line {number}") for number in range(1200))
    assert sorted((line.node, line.text) for line in lines) == expected
    assert {line.time for line in lines} == {entry.timestamp.timestamp() for entry in coming}
    assert platform.logs(job_id, position).lines == ()


def test_multiline_and_json_entries_arrive_as_text(
    cloud: Cloud,
) -> None:
    """Entries that cannot be read are read again."""
    platform = platform_of()
    job_id = submitted(platform)
    row = {"step": 3, "loss": 2.5, "more": {"list": [1, None, True]}}
    for text in ("two\nlines", '{"message": "said"}', json.dumps(row)):
        cloud.write(job_id, 0, text)
    cloud.refuse("ListLogEntries", grpc.StatusCode.RESOURCE_EXHAUSTED)
    with pytest.raises(PlatformUnreachable, match="reading the log"):
        platform.logs(job_id)
    page = platform.logs(job_id)
    first, second, message, structured = [line.text for line in page.lines]
    assert (first, second, message, json.loads(structured)) == ("two", "lines", "said", row)
    another_life = json.loads(page.position) | {"uid": "somebody-else", "newest": "2999-01-01T00:00:00+00:00"}
    assert platform.logs(job_id, json.dumps(another_life)).lines == page.lines


# --- on the VMs -------------------------------------------------------------------------------------------------------


def vms_of(folder: Path, **changes: Any) -> list[Vm]:
    """The VMs of a job."""
    settings = settings_of(**changes)
    job = types.Job.from_json(json.dumps(BatchPlatform(settings).render(job_of(settings)).body["job"]))
    hosts = [f"10.0.0.{number + 2}" for number in range(settings.nodes)]
    return [Vm(folder, job, task, hosts=hosts) for task in range(settings.nodes)]


@pytest.mark.parametrize("samples", [True, False])
def test_every_node_learns_its_rank_and_where_node_0_is(samples: bool, tmp_path: Path) -> None:
    """With the variables of Google's samples, and with those alone that are documented."""
    nodes = vms_of(tmp_path, nodes=3)
    for vm in nodes:
        for name in () if samples else ("BATCH_NODE_INDEX", "BATCH_MAIN_NODE_HOSTNAME"):
            del vm.variables[name]
        assert vm.run(print, contained=False) == 0
    assert [vm.node["LITGPT_NODE_RANK"] for vm in nodes] == ["0", "1", "2"]
    assert {vm.node["LITGPT_MASTER"] for vm in nodes} == {"10.0.0.2:29500"}


def test_gpus_and_cos_firewall_are_set_up_before_the_container(tmp_path: Path) -> None:
    vm, _ = vms_of(tmp_path / "debian", machine="g2-standard-24")
    assert vm.run(print, contained=False) == 0
    assert "nvidia-ctk runtime configure --runtime=docker" in vm.commands
    vm, _ = vms_of(tmp_path / "cos", machine="g2-standard-24", os="cos")
    assert vm.run(print, contained=False) == 0
    opened = [line.split() for line in vm.commands if line.startswith("iptables")]
    assert [command[command.index("-s") + 1] for command in opened] == ["10.0.0.2", "10.0.0.3"]


@pytest.mark.parametrize(
    ("os", "lacks", "code"),
    [("debian", "bin/nvidia-ctk", "toolkit"), ("cos", "var/lib/nvidia/lib64/libcuda.so.1", "libcuda")],
)
def test_vm_without_gpus_for_containers_is_a_node_fault(os: str, lacks: str, code: str, tmp_path: Path) -> None:
    vm, _ = vms_of(tmp_path, machine="g2-standard-24", os=os)
    (vm.folder / lacks).unlink()
    lines: list[str] = []
    assert vm.run(lines.append, contained=False) == EXIT_CODES[FailureClass.NODE]
    assert lines[-1].startswith(f"error [batch.{code}]")
