"""The step that runs a job, attempt by attempt: what is started again, how often, where, and by whom."""

import asyncio
import json
import logging
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from random import Random
from typing import Any

import pytest
from job_handles import handle_on
from slurm_commands import SlurmCommands, slurm_commands
from strict_platform import StrictPlatform
from waiting import until

from launcher.config import LaunchSettings, RunConfig
from launcher.errors import JobCancelled, JobFailed, JobRefused, PlatformRefused, PlatformUnreachable, RunIsLive
from launcher.events import Event, Listener, MetricsRow, Note, Output
from launcher.job import JobId, JobState, JobStatus, LogLine, Submission
from launcher.platforms.slurm.platform import SlurmPlatform
from launcher.platforms.slurm.settings import SlurmPlatformConfig
from launcher.reports.goodput import AttemptTimes, Part, ledger
from launcher.runs.attempts import CancelWatch, job_handle
from launcher.runs.diagnosis import ADVICE, Action
from launcher.runs.index import Index
from launcher.runs.lease import Lease
from launcher.runs.run import plan_run
from launcher.runs.waiting import retry_until_reachable
from litgpt_demo.config import RestartSettings
from litgpt_demo.documents import FileRecord
from litgpt_demo.errors import EXIT_CODES, FailureClass, Finding
from litgpt_demo.metrics import METRICS_MARK, to_log_line
from litgpt_demo.storage import MANIFEST, Storage, open_storage
from litgpt_demo.storage.local import LocalStorage
from litgpt_demo.training import checkpoints
from tasks import training
from tasks.report import LiveArtifacts
from tasks.training import run_job

PREEMPTED, BROKEN, WRONG = (
    EXIT_CODES[fault] for fault in (FailureClass.PREEMPTED, FailureClass.NODE, FailureClass.USER)
)
AT_ONCE = RestartSettings(longest_wait=0.05)


@pytest.fixture(autouse=True)
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's tasks are plain functions here, and no time passes: what Prefect adds is seen in whole flows."""

    async def at_once(*_: Any, **__: Any) -> None: ...

    monkeypatch.setattr(training, "submit_job", training.submit_job.fn)
    monkeypatch.setattr(training, "await_job", training.await_job.fn)
    monkeypatch.setattr(training, "opaque", lambda handle: handle)
    monkeypatch.setattr(training, "get_run_logger", lambda: logging.getLogger("job"))
    monkeypatch.setattr(training, "show_diagnosis", at_once)
    monkeypatch.setattr(training, "show_state", at_once)  # which would start a server of its own
    monkeypatch.setattr("tasks.training.LiveArtifacts.show", at_once)
    monkeypatch.setattr(training, "retry_until_reachable", partial(retry_until_reachable, pauses=(0.0, 0.0)))


def ended_well(
    folder: Path, platform: StrictPlatform, *, restarts: RestartSettings = AT_ONCE, max_restarts: int = 0
) -> int:
    """The number of the attempt that ended well; JobFailed if none did."""
    handle = handle_on(platform, folder, "demo", max_restarts=max_restarts, restart_policy=restarts)
    return asyncio.run(run_job(handle)).attempt


def notes(events: Iterable[Event], message: str) -> list[str]:
    return [event.what for event in events if isinstance(event, Note) and message in event.what]


class Fated(StrictPlatform):
    """Ends the attempts with these exit codes, one after the other; None is the death of the orchestrator."""

    poll_seconds = 0.05

    def __init__(self, codes: Iterable[int | None]) -> None:
        super().__init__()
        self._codes = iter(codes)
        self._next = next(self._codes)
        self.began: list[JobId] = []

    def submit(self, submission: Submission) -> JobId:
        if submission.job_id in self.began:
            return super().submit(submission)
        if self._next is not None:
            self.began.append(super().submit(submission))
        code, self._next = self._next, next(self._codes, 0)
        if code is None:
            raise SystemExit
        self.meet(submission.job_id, code)
        return submission.job_id

    def meet(self, job_id: JobId, code: int) -> None:
        self.end(job_id, JobState.FAILED if code else JobState.SUCCEEDED, {0: code})


class Saving(Fated):
    """Each attempt commits a checkpoint further on before it ends."""

    def __init__(self, codes: Iterable[int], folder: Path, *, every: int = 10) -> None:
        super().__init__(codes)
        self._run, self._every = open_storage(str(folder / "demo")), every

    def meet(self, job_id: JobId, code: int) -> None:
        folder = checkpoints.folder_of(step := len(self.began) * self._every)
        stored = [self._run.write(f"{folder}/{name}", b"weights") for name in (checkpoints.INDEX, "0.distcp")]
        files = tuple(FileRecord.of(path, relative_to=folder) for path in stored)
        manifest = checkpoints.CheckpointManifest(
            format=2, run="demo", step=step, tokens=0, dataset_hash="k", validation_loss=None, world_size=2,
            versions={}, files=files,
        )  # fmt: skip
        checkpoints.commit(self._run, manifest)
        super().meet(job_id, code)


def test_preemptions_with_progress_are_not_counted(tmp_path: Path) -> None:
    platform = Saving([PREEMPTED, PREEMPTED, BROKEN, PREEMPTED, PREEMPTED, 0], tmp_path)
    assert ended_well(tmp_path, platform, max_restarts=1) == 6


def test_impossible_checkpoints_are_no_progress(tmp_path: Path) -> None:
    """Steps count that a training of 1,000 steps can reach."""
    platform = Saving(repeat(PREEMPTED), tmp_path, every=400)
    with pytest.raises(JobFailed, match="preempted on node 0"):
        ended_well(tmp_path, platform, max_restarts=1)
    assert len(platform.began) == 5


def test_run_that_is_always_preempted_ends_after_its_restarts(tmp_path: Path) -> None:
    platform, events = Fated(repeat(PREEMPTED)), list[Event]()
    with Listener(events.append), pytest.raises(JobFailed, match="preempted on node 0") as failure:
        ended_well(tmp_path, platform, max_restarts=2)
    assert len(platform.began) == 3
    assert failure.value.fault is FailureClass.PREEMPTED
    assert len(notes(events, "waiting 0 s before attempt")) == 2
    assert notes(events, "and max_restarts=2;")


def test_user_error_ends_the_run_and_its_diagnosis_is_stored(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="user error on node 0"):
        ended_well(tmp_path, Fated([WRONG, 0]), max_restarts=9)
    stored = json.loads((tmp_path / "runs/demo/attempts/1/diagnosis.json").read_bytes())
    assert (stored["fault"], stored["code"], stored["node"]) == (FailureClass.USER, "attempt.user-error", 0)
    assert (stored["action"], stored["advice"]) == (Action.STOP, ADVICE[FailureClass.USER])
    assert stored["evidence"]
    assert "record_crc32c" in stored


def test_resumed_flow_run_continues_its_count_of_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "flow_runs", lambda: ["trial", "sweep"])
    platform = Fated([PREEMPTED, PREEMPTED, None, PREEMPTED, PREEMPTED, 0])
    with pytest.raises(SystemExit):
        ended_well(tmp_path, platform, max_restarts=2)
    monkeypatch.setattr(training, "flow_runs", lambda: ["the same trial again", "sweep"])
    with pytest.raises(JobFailed):
        ended_well(tmp_path, platform, max_restarts=2)
    assert len(platform.began) == 3
    monkeypatch.setattr(training, "flow_runs", lambda: ["by hand"])
    assert ended_well(tmp_path, platform, max_restarts=1) == 5


def test_cancellation_ends_a_run_that_waits_for_its_next_attempt(tmp_path: Path) -> None:
    def heard(event: Event) -> None:
        if notes([event], "waiting"):
            Index.of(str(tmp_path)).request_cancel("demo")

    platform, slowly = Fated([BROKEN, 0]), RestartSettings.model_validate({"node_fault": {"wait": 86_400}})
    with Listener(heard), pytest.raises(JobCancelled):
        ended_well(tmp_path, platform, max_restarts=1, restarts=slowly)
    assert len(platform.began) == 1


def test_cancellation_during_submission_ends_the_job(tmp_path: Path) -> None:
    class CancelledMeanwhile(StrictPlatform):
        def submit(self, submission: Submission) -> JobId:
            assert handle_on(self, tmp_path, "demo").attempts.cancel() == [], "there is nothing to end yet"
            return super().submit(submission)

    platform = CancelledMeanwhile()
    with pytest.raises(JobCancelled, match="demo was cancelled"):
        ended_well(tmp_path, platform, max_restarts=3)
    assert platform.live() == []
    requests = Index.of(str(tmp_path)).cancellations("demo")
    assert len(requests) == 1, "a second request would end a command that was typed since"


def test_refused_job_is_cancelled_and_ends_the_run_with_the_fix(tmp_path: Path) -> None:
    class Full(StrictPlatform):
        def status(self, job_id: JobId) -> JobStatus:
            why = Finding("error", "kubernetes.quota", "the quota is used up", "raise it")
            return replace(super().status(job_id), refused=why)

    platform = Full()
    with pytest.raises(
        JobRefused, match=r"keeps refusing demo-1-\w+, so the job was cancelled: the quota is used up -> raise it"
    ):
        ended_well(tmp_path, platform, max_restarts=3)
    assert platform.live() == []


def test_refused_attempt_records_its_reason_and_books_no_time(tmp_path: Path) -> None:
    class Taken(StrictPlatform):
        def submit(self, submission: Submission) -> JobId:
            raise PlatformRefused("port 22971 is in use", fix="end who uses it")

    platform = Taken()
    with pytest.raises(PlatformRefused):
        ended_well(tmp_path, platform)
    attempts = handle_on(platform, tmp_path, "demo").attempts
    [attempt] = attempts.all()
    assert (attempt.status.state, "refused: port 22971 is in use" in attempt.status.native) == (JobState.FAILED, True)
    later = attempt.record.model_copy(
        update={"attempt": 2, "flow_run": "another", "created": attempt.record.created + 100}
    )
    times = [
        AttemptTimes(record=attempt.record, end=attempts.index.ends("demo")[1]),
        AttemptTimes(record=later, end=None),
    ]
    assert ledger(times, []).seconds[Part.STOPPED] > 90


def test_nodes_get_the_seconds_that_the_budget_pays(tmp_path: Path) -> None:
    programs, rest = list[list[str]](), iter((3600.0, 1800.4))

    class Noting(Fated):
        def submit(self, submission: Submission) -> JobId:
            programs.append(submission.body["program"])
            return super().submit(submission)

    handle = handle_on(Noting([BROKEN, 0]), tmp_path, "demo", max_restarts=1, restart_policy=AT_ONCE)
    asyncio.run(run_job(replace(handle, seconds=lambda: next(rest))))
    assert programs == [["a.py", "--seconds", seconds] for seconds in ("3600", "1800")]


def test_leader_announces_a_checkpoint_with_its_own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row comes when it is written, and the training has done another step meanwhile."""
    announced: list[dict[str, Any]] = []
    monkeypatch.setattr(training, "emit_milestone", lambda *_, **facts: announced.append(facts))
    record = handle_on(StrictPlatform(), tmp_path, "demo").reattach_or_create()
    rows: list[dict[str, Any]] = [{"kind": "step", "step": step, "loss": 9.0 - step} for step in (3, 4, 5)]
    rows.append({"kind": "checkpoint", "step": 4})
    open_storage(str(tmp_path)).within(f"runs/{record.run}/{checkpoints.folder_of(4)}").write(MANIFEST, b"{}")
    for leads in (True, False):
        root = str(tmp_path)
        router = training.LogRouter(
            record, root, LiveArtifacts("demo"), lambda _: None, leads=lambda leads=leads: leads
        )
        router.on_lines(LogLine(0, to_log_line(row)) for row in rows)
        router.announce_checkpoints()
    assert announced == [{"step": 4, "loss": 5.0}]


@pytest.mark.parametrize(("before", "now", "seconds"), [(10.0, 1.0, 3600), (1.0, 100.0, 360)])
def test_the_budget_counts_an_attempt_at_its_own_price(
    tiny: Callable[..., RunConfig], before: float, now: float, seconds: float
) -> None:
    """The first attempt has held its machine for an hour; the run has $11 and goes on elsewhere."""
    first, moved = (
        plan_run(tiny({"platform.usd_per_hour": usd, "platform.grace_period": 60, "budget.max_usd": 11}))
        for usd in (before, now)
    )
    assert first.name == moved.name
    record = job_handle(first).reattach_or_create()
    begun = record.created
    ended = JobStatus(state=JobState.FAILED, native="", scheduled=begun, pulled=begun, ended=begun + 3600)
    Index(first.root).record_end(record, ended)
    assert training._remaining_budget_seconds(moved) == pytest.approx(seconds - 60)


def test_leader_cancels_nodes_that_outlive_their_job(tmp_path: Path) -> None:
    class Lingering(Fated):
        def meet(self, job_id: JobId, code: int) -> None:
            super().meet(job_id, code)
            self.litter(job_id)

        def status(self, job_id: JobId) -> JobStatus:
            return replace(super().status(job_id), has_running_nodes=True)

    platform = Lingering([WRONG])
    with pytest.raises(JobFailed):
        ended_well(tmp_path, platform)
    assert platform.remaining_resources(platform.began[0]) == ()


def test_unreachable_platform_starts_each_attempt_once(tmp_path: Path) -> None:
    class Away(Fated):
        """Answers half of the questions."""

        def _answer(self) -> None:
            if chance.random() < 0.5:
                raise PlatformUnreachable("connection timed out")

    chance, platform = Random(7), Away([BROKEN, 0])
    assert ended_well(tmp_path, platform, max_restarts=1) == 2
    assert len(platform.began) == 2


class Machines(StrictPlatform):
    """Gives node 0 the first machine that its job does not avoid; where that is broken, node 1 loses its peer."""

    def __init__(self, *machines: str, broken: Collection[str]) -> None:
        super().__init__(spare=None)
        self._machines, self._broken = machines, broken
        self.taken: list[str] = []

    def submit(self, submission: Submission) -> JobId:
        job_id = super().submit(submission)
        self.taken.append(next(machine for machine in self._machines if machine not in submission.body["exclude"]))
        self.place(job_id, {0: self.taken[-1], 1: "sound"})
        if self.taken[-1] in self._broken:
            self.end(job_id, JobState.FAILED, {0: BROKEN, 1: EXIT_CODES[FailureClass.NETWORK]})
        else:
            self.end(job_id, JobState.SUCCEEDED, {0: 0, 1: 0})
        return job_id


def test_machine_blamed_twice_is_avoided_by_the_next_attempt(tmp_path: Path) -> None:
    platform, events = Machines("a", "b", broken={"a"}), list[Event]()
    with Listener(events.append):
        assert ended_well(tmp_path, platform, max_restarts=3) == 3
    assert platform.taken == ["a", "a", "b"]
    blamed = "machine a caused the ends of attempts 1, 2; the next attempt avoids it"
    assert notes(events, "caused the ends") == [blamed]
    handle = handle_on(platform, tmp_path, "demo")
    assert handle.job_as_rendered(4).exclude_nodes == ("a",), "a new command avoids it too"


class Repeating(Machines):
    """Each attempt ends as a GPU of its machine stops at the same step of the program."""

    def __init__(self, root: Storage) -> None:
        super().__init__("a", "b", "c", broken={"a", "b", "c"})
        self._root = root

    def submit(self, submission: Submission) -> JobId:
        error = {"rank": 0, "exit_code": 1, "message": "CUDA error: misaligned address", "step": 417}
        report = {
            "node": 0,
            "exit_code": BROKEN,
            "fault": FailureClass.NODE,
            "message": "",
            "ended": 1.0,
            "ranks": [error],
        }
        path = f"runs/demo/attempts/{len(self.taken) + 1}/node-0.json"
        self._root.write(path, json.dumps(report).encode())
        return super().submit(submission)


def test_gpu_error_on_a_second_machine_ends_the_run(tmp_path: Path) -> None:
    platform = Repeating(open_storage(str(tmp_path)))
    with pytest.raises(JobFailed, match="the program is the cause") as failure:
        ended_well(tmp_path, platform, max_restarts=3)
    assert failure.value.fault is FailureClass.USER
    assert platform.taken == ["a", "a", "b"]


class Followed(Fated):
    """Each attempt ends when two orchestrators follow it."""

    def __init__(self, codes: Iterable[int | None], index: Index) -> None:
        super().__init__(codes)
        self._index, self._fates = index, dict[JobId, int]()
        self._one_at_a_time = threading.Lock()

    def submit(self, submission: Submission) -> JobId:
        with self._one_at_a_time:  # both do
            return super().submit(submission)

    def meet(self, job_id: JobId, code: int) -> None:
        self.start(job_id)
        self._fates[job_id] = code

    def status(self, job_id: JobId) -> JobStatus:
        with self._one_at_a_time:  # both ask
            followers = self._index.flow_runs_of_attempts().get(("demo", len(self.began)), ())
            if job_id in self.live() and len(followers) == 2:
                super().meet(job_id, self._fates[job_id])
            return super().status(job_id)


def test_two_orchestrators_share_one_count_of_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow_runs, events, index = iter((["one"], ["another"])), list[Event](), Index.of(str(tmp_path))
    monkeypatch.setattr(training, "flow_runs", lambda: next(flow_runs))
    platform = Followed(repeat(BROKEN), index)
    handle = handle_on(platform, tmp_path, "demo", max_restarts=2, restart_policy=AT_ONCE)

    async def orchestrated() -> None:
        with pytest.raises(JobFailed):
            await run_job(handle)

    async def two() -> None:
        await asyncio.gather(orchestrated(), orchestrated())

    with Listener(events.append):
        asyncio.run(two())
    assert len(platform.began) == 3, "the first attempt and two restarts, not two of each"
    counted = [
        diagnosis.attempt
        for flow_run in ("one", "another")
        for diagnosis in index.diagnoses_of_flow_run("demo", flow_run)
    ]
    assert sorted(counted) == [1, 2, 3], "each end is judged once"
    assert len(notes(events, "no new attempt is left")) == 1


def test_follower_changes_nothing_and_starts_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower has another number of nodes. The attempt that it follows ends between its look and its next one."""
    events, written, index = list[str](), list[int](), Index.of(str(tmp_path))
    monkeypatch.setattr(training, "emit_milestone", lambda milestone, *_, **__: events.append(milestone))
    platform = Followed([BROKEN, 0], index)
    handle = handle_on(platform, tmp_path, "demo", max_restarts=1, restart_policy=AT_ONCE)
    leading = replace(handle, prepare=lambda record: written.append(2))
    make = leading.make_job
    following = replace(
        leading, make_job=lambda number: replace(make(number), nodes=4), prepare=lambda record: written.append(4)
    )

    async def two() -> list[int]:
        monkeypatch.setattr(training, "flow_runs", lambda: ["leader"])
        first = asyncio.create_task(run_job(leading))
        await asyncio.to_thread(until, lambda: index.flow_runs_of_attempts("leader"))
        monkeypatch.setattr(training, "flow_runs", lambda: ["follower"])
        records = await asyncio.gather(first, run_job(following))
        return [record.attempt for record in records]

    assert asyncio.run(two()) == [2, 2]
    assert written == [2, 2], "each attempt has the config of its creator"
    assert events.count("attempt.ended") == 2
    assert [judged.flow_run for judged in index.diagnoses("demo")] == ["leader"]


@pytest.mark.parametrize("followed", [0, 1])
def test_attempt_that_ended_well_between_looks_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, followed: int
) -> None:
    """Its follower has seen its record alone, or has followed the attempt before it to a bad end."""

    async def refuse(*_: Any) -> bool:
        raise AssertionError("it was started again")

    monkeypatch.setattr(training, "submit_job", refuse)
    platform = StrictPlatform()
    handle = handle_on(platform, tmp_path, "demo", max_restarts=1, restart_policy=AT_ONCE)
    leader, started = Lease(handle.attempts.index, "demo"), list[JobId]()

    def start() -> None:
        started.append(platform.submit(platform.render(handle.job_of(handle.reattach_or_create()))))

    def lead(event: Event) -> None:
        what = event.what if isinstance(event, Note) else ""
        if "leads demo-1" in what:
            platform.end(started[0], JobState.FAILED, {0: BROKEN})
            start()
            platform.end(started[1], JobState.SUCCEEDED)
        elif "is orchestrated by" in what:
            if not followed:
                start()
                platform.end(started[0], JobState.SUCCEEDED)
            leader.release()

    if followed:
        start()
    else:
        handle.reattach_or_create()
    with leader, Listener(lead):
        assert leader.take()
        assert asyncio.run(run_job(handle)).attempt == followed + 1


@pytest.mark.parametrize("state", [JobState.ABSENT, JobState.CANCELLED])
def test_removed_job_ended_as_the_leader_saw_it(tmp_path: Path, state: JobState) -> None:
    """The leader removes a job that has failed before it starts the next one. Its follower was between two looks."""

    class Removed(StrictPlatform):
        def status(self, job_id: JobId) -> JobStatus:
            return JobStatus(state=state, native="deleted")

    handle = handle_on(Removed(), tmp_path, "demo")
    record = handle.reattach_or_create()
    handle.attempts.index.record_end(record, JobStatus(state=JobState.FAILED, native="BackoffLimitExceeded"))
    with Lease(handle.attempts.index, "demo") as lease:
        diagnosis = asyncio.run(training.await_job(handle, record, lambda row: None, lease))
    assert "BackoffLimitExceeded" in str(diagnosis)


def test_index_that_is_deleted_between_attempts_stops_no_run(tmp_path: Path) -> None:
    class Deleting(Fated):
        def meet(self, job_id: JobId, code: int) -> None:
            super().meet(job_id, code)
            if code:
                shutil.rmtree(tmp_path / "index")

    assert ended_well(tmp_path, Deleting([BROKEN, 0]), max_restarts=1) == 2


def test_diagnosis_counts_the_nodes_of_the_submitted_attempt(tmp_path: Path) -> None:
    class Ended(Fated):
        def meet(self, job_id: JobId, code: int) -> None:
            self.end(job_id, JobState.FAILED, dict.fromkeys((0, 1), EXIT_CODES[FailureClass.NETWORK]))

    handle = handle_on(Ended([BROKEN]), tmp_path, "demo", platform={"kind": "local", "nodes": 2})
    record = handle.reattach_or_create()
    handle.platform.submit(handle.platform.render(handle.job_of(record)))
    more = replace(
        handle, config=handle_on(handle.platform, tmp_path, "demo", platform={"kind": "local", "nodes": 4}).config
    )
    with Lease(handle.attempts.index, "demo") as lease:
        diagnosis = asyncio.run(training.await_job(more, record, lambda row: None, lease))
    assert (diagnosis.fault, diagnosis.node) == (FailureClass.NETWORK, 0), "nodes 2 and 3 never existed"


def test_cancellation_before_the_job_step_ends_the_run(tmp_path: Path) -> None:
    """It was asked for while the dataset was prepared: nothing ran that could be cancelled."""
    platform = Fated([0])
    handle = handle_on(platform, tmp_path, "demo")
    watch = CancelWatch(handle.attempts.index, handle.names)
    assert handle.attempts.cancel() == []
    with pytest.raises(JobCancelled):
        asyncio.run(run_job(handle, watch=watch))
    assert platform.began == []


def test_run_moves_to_another_platform_when_cancelled_first(tmp_path: Path) -> None:
    old, new = StrictPlatform(), Fated([0])
    first = handle_on(old, tmp_path, "demo")
    old_job = old.submit(old.render(first.job_of(first.reattach_or_create())))
    slurm = {"kind": "slurm", "nodes": 2}
    kinds = {"local": old, "slurm": new}
    elsewhere = handle_on(new, tmp_path, "demo", platform=slurm, launch={"if_running": "cancel"})
    moved = replace(
        elsewhere, attempts=replace(elsewhere.attempts, open_platform=lambda section: kinds[section["kind"]])
    )
    refused = replace(moved, config=moved.config.model_copy(update={"launch": LaunchSettings()}))
    with pytest.raises(RunIsLive, match="--replace"):
        asyncio.run(run_job(refused))
    assert old.live() == [old_job]
    assert asyncio.run(run_job(moved)).attempt == 2
    assert (old.live(), len(new.began)) == ([], 1)


@pytest.mark.parametrize("position", ["[]", "[" * 9_999, '{"0": null}', '{"x": [1, 2]}', "null", '{"0": [-1, 2, 3]}'])
def test_malformed_position_in_the_log_is_not_believed(tmp_path: Path, position: str) -> None:
    """Nodes can write to the index where they share a disk with it; each platform's is tried by its own tests."""
    platform = Fated([None, 0])
    with pytest.raises(SystemExit):
        ended_well(tmp_path, platform)
    Index.of(str(tmp_path)).save_log_position(handle_on(platform, tmp_path, "demo").attempts.records()[0], position)
    assert ended_well(tmp_path, platform) == 1


HOSTILE = [
    '{"kind":"step"}', '{"kind":"step","step":' + "[" * 100_000, '{"kind":"step","step":1' + "0" * 5000 + "}",
    '{"kind":"step","step":1,"loss":{}}', '{"kind":"start","step":0,"steps":Infinity}', '{"step":"\\ud800"}',
    "[", "\x00",
]  # fmt: skip


def test_hostile_metrics_are_reported_once(tmp_path: Path) -> None:
    class Hostile(Fated):
        def meet(self, job_id: JobId, code: int) -> None:
            self.start(job_id)
            self.say(job_id, *(METRICS_MARK + line for line in HOSTILE), "x" * (4 << 20))
            self.say(job_id, to_log_line({"kind": "step", "step": 1, "loss": 2.5, "step_seconds": 1.0}))
            open_storage(str(tmp_path)).write("runs/demo/attempts/1/node-0.json", b'{"node":' + b"[" * 100_000)
            super().meet(job_id, code)

    events: list[Event] = []
    with Listener(events.append), pytest.raises(JobFailed, match="node fault on node 0") as failure:
        ended_well(tmp_path, Hostile([BROKEN]))
    assert len(str(failure.value)) < 11_000
    rows: list[Mapping[str, Any]] = [event.row for event in events if isinstance(event, MetricsRow)]
    assert [row["step"] for row in rows] == [1]
    assert len(notes(events, "8 lines of metrics could not be read; the first: ")) == 1
    assert len(notes(events, "1 nodes' reports could not be read; the first: ")) == 1


def test_secret_in_an_error_or_a_log_is_in_no_event_log_or_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that this process knows, nor one of a usual form that only the node knew."""
    monkeypatch.setenv("MY_TOKEN", "known-secret")
    leaking = "known-secret https://hooks.slack.com/services/T0/B0/of-the-node"

    class Leaking(Fated):
        def meet(self, job_id: JobId, code: int) -> None:
            self.start(job_id)
            self.say(job_id, f"printed {leaking}", f"warning: {leaking}")
            report = {"node": 0, "exit_code": BROKEN, "fault": FailureClass.NODE, "message": leaking, "ended": 1.0}
            open_storage(str(tmp_path)).write("runs/demo/attempts/1/node-0.json", json.dumps(report).encode())
            super().meet(job_id, code)

    reached: list[Any] = []
    monkeypatch.setattr("tasks.training.emit_milestone", lambda *of, **facts: reached.append(facts))
    events: list[Event] = []
    with caplog.at_level(logging.INFO), Listener(events.append), pytest.raises(JobFailed) as failure:
        ended_well(tmp_path, Leaking([BROKEN]))
    diagnosis = (tmp_path / "runs/demo/attempts/1/diagnosis.json").read_text()
    everything = f"{failure.value} {events} {caplog.text} {diagnosis} {reached}"
    assert "printed [secure]" in everything
    assert [secret for secret in ("known-secret", "of-the-node") if secret in everything] == []


def test_event_of_a_checkpoint_needs_one_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any program can print the rows of a training, as often as it likes."""

    class Boasting(Fated):
        def meet(self, job_id: JobId, code: int) -> None:
            self.start(job_id)
            run = open_storage(str(tmp_path / "runs/demo"))
            run.write(f"{checkpoints.folder_of(10)}/{MANIFEST}", b"{}")
            rows = [{"kind": "checkpoint", "step": step} for step in (3, 10, 10, *range(100, 200))]
            self.say(job_id, *map(to_log_line, rows))
            super().meet(job_id, code)

    looks: list[str] = []
    exists = LocalStorage.exists

    def look(storage: LocalStorage, path: str) -> bool:
        if "checkpoints" in path:  # a bucket that is away must not hold up the event loop
            looks.append(threading.current_thread().name)
        return exists(storage, path)

    monkeypatch.setattr(LocalStorage, "exists", look)
    reached: list[Any] = []
    monkeypatch.setattr(
        "tasks.training.emit_milestone", lambda milestone, *of, **facts: reached.append((milestone, facts))
    )
    ended_well(tmp_path, Boasting([0]))
    assert [facts["step"] for milestone, facts in reached if milestone == "checkpoint.committed"] == [10]
    assert "MainThread" not in looks
    assert 1 < len(looks) < 30


def test_prefect_log_has_newest_lines_and_each_warning_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Wordy(Fated):
        def meet(self, job_id: JobId, code: int) -> None:
            self.start(job_id)
            for node in (0, 1):
                self.say(job_id, *(f"NCCL INFO channel {number}" for number in range(3000)), node=node)
                self.say(job_id, "[default1]:warning: step 14 was not saved", "their warnings: none", node=node)
                self.say(job_id, "warning [network.slow] eth0 gives 1 GB/s -> go on", node=node)
            self.say(job_id, *(f"warning: batch {number} is odd" for number in range(3000)), "bye")
            super().meet(job_id, code)

    events: list[Event] = []
    with caplog.at_level(logging.INFO, "job"), Listener(events.append):
        ended_well(tmp_path, Wordy([0]))
    kept = [line for record in caplog.records if record.name == "job" for line in record.getMessage().splitlines()]
    assert (len(kept), kept[-1]) == (41, "[node 0] bye")
    assert not any(line.startswith("[node 1]") for line in kept)
    for message, times in (("was not saved", 1), ("network.slow", 1), ("is odd", 18), ("prints more warnings", 1)):
        assert len(notes(events, message)) == times
    assert len([event for event in events if isinstance(event, Output) and "NCCL" in event.line]) == 6000


def run_on_slurm(cluster: SlurmCommands, folder: Path, **fate: str) -> None:
    """Run a job that Slurm takes, and that then has this fate."""
    cluster.fate = fate
    section = {"kind": "slurm", "nodes": 2, "admission_timeout": 0}
    platform = SlurmPlatform(SlurmPlatformConfig.model_validate(section), settle=0)
    handle = handle_on(platform, folder, "demo", platform=section, max_restarts=3, restart_policy=AT_ONCE)
    asyncio.run(run_job(handle))


def test_run_on_slurm_ends_when_its_nodes_cannot_start(tmp_path: Path) -> None:
    comment = "error [slurm.venv] platform.venv=/nosuch has no python with train-litgpt (on n0)"
    message = r"^user error on node 0: \[slurm.venv\] platform.venv=/nosuch has no python"
    with slurm_commands() as cluster, pytest.raises(JobFailed, match=message):
        run_on_slurm(cluster, tmp_path, state="FAILED", comment=comment)
    assert len(cluster.jobs) == 1


def test_run_on_slurm_ends_when_its_job_is_never_started(tmp_path: Path) -> None:
    message = "so the job was cancelled: job 77: no nodes match platform.constraint"
    with slurm_commands() as cluster, pytest.raises(JobRefused, match=message):
        run_on_slurm(cluster, tmp_path, state="PENDING", reason="(BadConstraints)")
    assert [job.state for job in cluster.jobs.values()] == ["CANCELLED"]


def test_run_on_slurm_prints_the_number_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its user looks it up with Slurm's own commands, also where it ran at the first look."""
    monkeypatch.setattr(SlurmPlatform, "poll_seconds", 0.0)
    monkeypatch.setattr("launcher.platforms.slurm.platform._FRESH", 0.0)
    cancelled, events = {"state": "CANCELLED"}, list[Event]()
    with slurm_commands() as cluster, Listener(events.append):
        monkeypatch.setattr(training.LogRouter, "on_lines", lambda *_: vars(cluster.jobs[77]).update(cancelled))
        with pytest.raises(JobCancelled):
            run_on_slurm(cluster, tmp_path)
    assert notes(events, "runs: RUNNING (job 77)")
