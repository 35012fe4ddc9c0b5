"""The step that runs a job: how it ends where the cluster took the job and does not run it, or refuses to talk."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from gke_jobs import job
from kubernetes_cluster import Cluster, running_cluster
from prefect import flow
from prefect.artifacts import Artifact
from strict_platform import StrictPlatform
from waiting import until

from launcher.config import ScriptConfig
from launcher.errors import JobCancelled, JobFailed, JobRefused, PlatformUnreachable
from launcher.events import Event, Listener, Note
from launcher.job import Job, JobId, JobState, JobStatus, Submission
from launcher.platforms.kubernetes import platform as gke_module
from launcher.runs.attempts import Attempts, Claim
from launcher.runs.diagnosis import Action, Verdict, read_verdict
from launcher.runs.index import Index
from launcher.runs.waiting import asked
from litgpt_demo.config import RestartSettings
from litgpt_demo.errors import EXIT_CODES, Fault, was_given_up
from litgpt_demo.manifests import FileRecord
from litgpt_demo.metrics import METRICS_MARK, marked
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training import checkpoints
from tasks.training import await_job, run_job

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(300)]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(gke_module, "_EXPLAIN", 0.0)
    monkeypatch.setattr(gke_module.GkePlatform, "poll_seconds", 0.1)
    with running_cluster(simulate=True, nodes=2) as made:
        yield made


def script(cluster: Cluster, folder: Path, **platform: Any) -> ScriptConfig:
    given = {"kind": "gke", "kubeconfig": str(cluster.kubeconfig), "nodes": 2, "grace": 1, "gate": 0, **platform}
    return ScriptConfig.model_validate({"root": str(folder), "script": "/train.py", "platform": given})


def claim_on(config: ScriptConfig, folder: Path) -> Claim:
    """The claim on the attempts of a job called `demo`."""

    def make_job(attempt: int) -> Job:
        return job(folder, attempt=attempt, directory=str(folder / "runs" / "demo" / "attempts" / str(attempt)))

    attempts = Attempts(index=Index.of(config.root), run="demo")
    return Claim(attempts=attempts, config=config, platform=config.platform.open(), make_job=make_job)


def awaited(claim: Claim, during: Callable[[JobId], None] = lambda _: None) -> list[str]:
    """What was told while the job was waited for."""
    record = claim.take()
    job_id = claim.platform.submit(claim.platform.render(claim.make_job(record.attempt)))
    told: list[Event] = []

    @flow(name="scene")
    def scene() -> None:
        with Listener(told.append):
            asyncio.run(await_job(claim, record))

    thread = threading.Thread(target=during, args=(job_id,))
    thread.start()
    try:
        scene()
    finally:
        thread.join()
    return [one.what for one in told if isinstance(one, Note)]


def test_pods_that_are_refused_for_too_long_end_the_run_with_the_fix_and_nothing_is_left(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.apply("resourcequotas", {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}}})
    config = script(cluster, tmp_path, refused_after=1)
    with pytest.raises(
        JobRefused, match=r"demo-1 is not let in, and was taken back: .*quota small.*have the quota raised"
    ):
        awaited(claim_on(config, tmp_path))
    assert cluster.objects("jobsets") == cluster.pods("demo") == []


def test_a_token_that_is_refused_while_a_job_runs_is_waited_for(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.platforms.kubernetes.cluster._PAUSES", (0.01,))
    config = script(cluster, tmp_path)
    said = threading.Event()

    def strike(job_id: JobId) -> None:
        platform = config.platform.open()
        until(lambda: platform.status(job_id).state is JobState.RUNNING)
        end = cluster.answer(401)
        cluster.break_streams()
        assert said.wait(30)
        end()
        cluster.finish("demo")

    def heard(event: Event) -> None:
        if isinstance(event, Note) and "refuses the credentials" in event.what:
            said.set()

    with Listener(heard):
        told = awaited(claim_on(config, tmp_path), strike)
    assert [one for one in told if "refuses the credentials" in one and one.endswith("waiting, the job goes on")]


def test_a_script_that_ended_well_says_where_its_logs_are(cluster: Cluster, tmp_path: Path) -> None:
    claim = claim_on(script(cluster, tmp_path), tmp_path)

    @flow(name="scene")
    def scene() -> str:
        return asyncio.run(run_job(claim, max_restarts=0)).directory

    def finish() -> None:
        until(lambda: cluster.finish("demo") == 2)

    thread = threading.Thread(target=finish)
    thread.start()
    assert scene() == str(tmp_path / "runs" / "demo" / "attempts" / "1")
    thread.join()


# --- one attempt after the other --------------------------------------------------------------------------------------

PREEMPTED, BROKEN, WRONG = (EXIT_CODES[fault] for fault in (Fault.PREEMPTED, Fault.NODE, Fault.USER))
SLOWLY = {"wait": 600}
AT_ONCE = RestartSettings(longest_wait=0.05)


class Fated(StrictPlatform):
    """Ends the attempts with these exit codes, one after the other; None is the death of the orchestrator."""

    def __init__(self, codes: Iterable[int | None]) -> None:
        super().__init__()
        self._codes = iter(codes)
        self.began: list[JobId] = []

    def submit(self, submission: Submission) -> JobId:
        if (code := next(self._codes)) is None:
            raise SystemExit
        self.began.append(job_id := super().submit(submission))
        self.end(job_id, JobState.FAILED if code else JobState.SUCCEEDED, {0: code})
        return job_id


class Saving(Fated):
    """Each attempt commits a checkpoint further on before it ends, or only a manifest that says so."""

    def __init__(self, codes: Iterable[int], run: Storage, *, every: int = 10, forged: bool = False) -> None:
        super().__init__(codes)
        self._run, self._every, self._forged = run, every, forged

    def submit(self, submission: Submission) -> JobId:
        step = (len(self.began) + 1) * self._every
        folder = checkpoints.folder_of(step)
        stored = [] if self._forged else [self._run.write(f"{folder}/0.distcp", b"weights")]
        manifest = checkpoints.CheckpointManifest(
            format=2, run="demo", step=step, tokens=0, dataset_key="k", validation_loss=None, world_size=2,
            versions={}, files=tuple(FileRecord.of(one, relative_to=folder) for one in stored),
        )  # fmt: skip
        checkpoints.commit(self._run, manifest)
        return super().submit(submission)


def ended_well(
    folder: Path, platform: StrictPlatform, *, max_restarts: int, restarts: RestartSettings = AT_ONCE,
    steps: int | None = None, config: ScriptConfig | None = None,
) -> int:  # fmt: skip
    """The number of the attempt that ended well. Its training has its checkpoints in the folder `demo`.

    Raises:
        JobFailed: none did.
    """
    claim = claim_on(config or ScriptConfig(root=str(folder), script="/train.py", restarts=restarts), folder)
    claim = replace(
        claim,
        platform=platform,
        attempts=replace(claim.attempts, open=lambda section: platform),
        progress=lambda: checkpoints.newest_step(open_storage(str(folder / "demo")), most=steps),
    )

    @flow(name="scene")
    def scene() -> int:
        return asyncio.run(run_job(claim, max_restarts=max_restarts, restarts=restarts)).attempt

    return scene()


def test_a_machine_that_is_taken_away_is_not_counted_while_the_training_gets_on(tmp_path: Path) -> None:
    codes = [PREEMPTED, PREEMPTED, BROKEN, PREEMPTED, PREEMPTED, 0]
    platform = Saving(codes, open_storage(str(tmp_path / "demo")))
    assert ended_well(tmp_path, platform, max_restarts=1) == 6


@pytest.mark.parametrize(("forged", "steps", "attempts"), [(True, 1000, 2), (False, 3, 5)])
def test_checkpoints_that_are_made_up_do_not_keep_a_job_alive_for_ever(
    tmp_path: Path, forged: bool, steps: int, attempts: int
) -> None:
    """The first attempt, one more for each step that is committed at the most, and `max_restarts`."""
    platform = Saving(repeat(PREEMPTED), open_storage(str(tmp_path / "demo")), every=1, forged=forged)
    with pytest.raises(JobFailed, match="preempted on node 0"):
        ended_well(tmp_path, platform, max_restarts=1, steps=steps)
    assert len(platform.began) == attempts


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_a_program_that_always_says_it_was_preempted_ends_after_its_restarts(tmp_path: Path, max_restarts: int) -> None:
    platform, told = Fated(repeat(PREEMPTED)), list[Event]()
    with Listener(told.append), pytest.raises(JobFailed, match="preempted on node 0") as failure:
        ended_well(tmp_path, platform, max_restarts=max_restarts)
    assert len(platform.began) == max_restarts + 1
    assert failure.value.fault is Fault.PREEMPTED
    (why,) = [one.what for one in told if isinstance(one, Note) and one.severity == "error"]
    assert f"restarts.preempted allows {max_restarts} new ones" in why


def test_a_wait_is_told_with_its_reason(tmp_path: Path) -> None:
    told: list[Event] = []
    with Listener(told.append):
        ended_well(tmp_path, Fated([PREEMPTED, BROKEN, 0]), max_restarts=2)
    notes = [one.what for one in told if isinstance(one, Note) and one.what.startswith("waiting")]
    assert notes == [
        f"waiting 0 s before attempt {number}: {fault}: 1 of 2 new attempts; attempts in a row that committed no new "
        f"checkpoint: {number - 1}"
        for number, fault in ((2, Fault.PREEMPTED), (3, Fault.NODE))
    ]


def test_who_cancels_a_run_that_waits_for_its_next_attempt_has_it_end_at_once(tmp_path: Path) -> None:
    platform = Fated([BROKEN, 0])

    def heard(event: Event) -> None:
        if isinstance(event, Note) and event.what.startswith("waiting"):
            Index.of(str(tmp_path)).request_cancel("demo")

    began = time.monotonic()
    with Listener(heard), pytest.raises(JobCancelled):
        ended_well(tmp_path, platform, max_restarts=1, restarts=RestartSettings.model_validate({"node_fault": SLOWLY}))
    assert time.monotonic() - began < 60
    assert len(platform.began) == 1


def test_a_flow_run_that_is_resumed_goes_on_with_its_count_and_another_command_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.training.flow_runs", lambda: ["trial", "sweep"])
    platform = Fated([PREEMPTED, PREEMPTED, None, PREEMPTED, PREEMPTED, 0])
    with pytest.raises(SystemExit):
        ended_well(tmp_path, platform, max_restarts=2)
    monkeypatch.setattr("tasks.training.flow_runs", lambda: ["the same trial again", "sweep"])
    with pytest.raises(JobFailed):
        ended_well(tmp_path, platform, max_restarts=2)
    assert len(platform.began) == 3
    monkeypatch.setattr("tasks.training.flow_runs", lambda: ["by hand"])
    assert ended_well(tmp_path, platform, max_restarts=1) == 5


def test_the_lines_that_are_kept_for_the_verdict_are_cut(tmp_path: Path) -> None:
    class Wordy(StrictPlatform):
        def submit(self, submission: Submission) -> JobId:
            job_id = super().submit(submission)
            self.start(job_id)
            self.say(job_id, "x" * (4 << 20), "the last words")
            self.end(job_id, JobState.FAILED)
            return job_id

    with pytest.raises(JobFailed, match="the last words") as failure:
        ended_well(tmp_path, Wordy(), max_restarts=0)
    assert 10_000 <= len(str(failure.value)) < 11_000


def test_more_restarts_than_are_allowed_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="node fault on node 0"):
        ended_well(tmp_path, Fated([BROKEN, BROKEN, 0]), max_restarts=1)


def test_what_another_attempt_would_not_mend_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="user error on node 0"):
        ended_well(tmp_path, Fated([WRONG, 0]), max_restarts=9)


def test_why_an_attempt_ended_is_in_its_folder_and_on_a_page_in_prefect(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="user error on node 0"):
        ended_well(tmp_path, Fated([WRONG, 0]), max_restarts=9)
    stored = read_verdict(open_storage(str(tmp_path / "runs" / "demo" / "attempts" / "1")))
    assert stored is not None
    assert (stored.fault, stored.node, stored.action) == (Fault.USER, 0, Action.STOP)
    page = Artifact.get("verdict-demo-1")
    assert page is not None
    assert "user error on node 0" in str(page.data)
    assert "the node's process ended with exit code 40" in str(page.data)


class CancelledMeanwhile(StrictPlatform):
    """Somebody cancels the run when its attempt is written down, and its platform does not know it yet."""

    def __init__(self, index: Index) -> None:
        super().__init__()
        self._index = index

    def submit(self, submission: Submission) -> JobId:
        attempts = Attempts(index=self._index, run="demo", open=lambda section: self)
        assert attempts.cancel() == [], "there is nothing to end yet"
        return super().submit(submission)


def test_a_cancellation_that_comes_while_the_job_is_submitted_ends_it(tmp_path: Path) -> None:
    platform = CancelledMeanwhile(Index.of(str(tmp_path)))
    with pytest.raises(JobCancelled, match="demo was cancelled"):
        ended_well(tmp_path, platform, max_restarts=3)
    (record,) = Index.of(str(tmp_path)).records("demo")
    assert platform.status(record.job_id).state is JobState.CANCELLED


# --- a platform that is away ------------------------------------------------------------------------------------------


class Away(Fated):
    """Does not answer the first questions of each kind; another one is asked first."""

    poll_seconds = 0.05

    def __init__(self, codes: Iterable[int | None], *, times: float) -> None:
        super().__init__(codes)
        self._times = times
        self.asked = Counter[str]()

    def status(self, job_id: JobId) -> JobStatus:
        self._may_be_away("status")
        return super().status(job_id)

    def submit(self, submission: Submission) -> JobId:
        self._may_be_away("submit")
        return super().submit(submission)

    def cancel(self, job_id: JobId) -> None:
        self._may_be_away("cancel")
        super().cancel(job_id)

    def _may_be_away(self, verb: str) -> None:
        self.asked[verb] += 1
        if self.asked[verb] <= self._times:
            raise PlatformUnreachable(f"{verb} was not answered")


def test_a_platform_that_is_away_for_a_while_at_any_question_starts_each_attempt_once(tmp_path: Path) -> None:
    platform = Away([BROKEN, 0], times=1)
    assert ended_well(tmp_path, platform, max_restarts=1) == 2
    assert len(platform.began) == 2
    assert set(platform.asked) == {"status", "submit", "cancel"}


def test_a_platform_that_stays_away_is_waited_for_at_one_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks it waits, and no task around that waits once more."""
    patience = 3.0
    monkeypatch.setattr("tasks.training.asked", partial(asked, patience=patience))
    began = time.monotonic()
    with pytest.raises(PlatformUnreachable, match="no answer for") as failure:
        ended_well(tmp_path, Away([0], times=float("inf")), max_restarts=3)
    assert was_given_up(failure.value)
    assert patience < time.monotonic() - began < 3 * patience


# --- machines that are to blame ---------------------------------------------------------------------------------------


class Machines(StrictPlatform):
    """Gives node 0 the first machine that its job does not avoid; where that is broken, node 1 loses its peer."""

    def __init__(self, *machines: str, broken: Collection[str], spare: int | None = None) -> None:
        super().__init__(spare=spare)
        self._machines, self._broken = machines, broken
        self.taken: list[str] = []

    def submit(self, submission: Submission) -> JobId:
        job_id = super().submit(submission)
        self.taken.append(next(one for one in self._machines if one not in submission.body["exclude"]))
        self.place(job_id, {0: self.taken[-1], 1: "gke-sound"})
        if self.taken[-1] in self._broken:
            self.end(job_id, JobState.FAILED, {0: BROKEN, 1: EXIT_CODES[Fault.NETWORK]})
        else:
            self.end(job_id, JobState.SUCCEEDED, {0: 0, 1: 0})
        return job_id


def elsewhere(folder: Path, **restarts: Any) -> ScriptConfig:
    """A script on a platform of other machines than this one."""
    platform = {"kind": "runai", "api": "rest", "url": "https://my-company.run.ai", "project": "team-a"}
    given = {"root": str(folder), "script": "/train.py", "platform": platform, "restarts": restarts}
    return ScriptConfig.model_validate(given)


def test_a_machine_that_was_blamed_twice_is_avoided_and_the_run_ends_well_elsewhere(tmp_path: Path) -> None:
    platform, told = Machines("gke-a", "gke-b", broken={"gke-a"}), list[Event]()
    with Listener(told.append):
        assert ended_well(tmp_path, platform, max_restarts=3) == 3
    assert platform.taken == ["gke-a", "gke-a", "gke-b"]
    records = Index.of(str(tmp_path)).records("demo")
    assert [record.exclude_nodes for record in records] == [(), (), ("gke-a",)]
    notes = [one.what for one in told if isinstance(one, Note) and "is to blame" in one.what]
    assert notes == ["the machine gke-a is to blame for the ends of attempts 1, 2; the next attempt avoids it"]


def test_a_new_command_and_a_rendering_avoid_it_too(tmp_path: Path) -> None:
    platform = Machines("gke-a", "gke-b", broken={"gke-a"})
    with pytest.raises(JobFailed):
        ended_well(tmp_path, platform, max_restarts=1)
    claim = claim_on(ScriptConfig(root=str(tmp_path), script="/train.py"), tmp_path)
    assert [claim.job_as_rendered(number).exclude_nodes for number in (1, 2, 3)] == [(), (), ("gke-a",)]
    assert ended_well(tmp_path, platform, max_restarts=0) == 3
    assert claim.job_as_rendered(3).exclude_nodes == ("gke-a",)


def test_no_more_machines_are_avoided_than_leaves_enough_and_it_is_said_once(tmp_path: Path) -> None:
    platform, told = Machines("a", "b", "c", broken={"a", "b", "c"}, spare=1), list[Event]()
    with Listener(told.append), pytest.raises(JobFailed, match="node fault on node 0"):
        ended_well(tmp_path, platform, max_restarts=5, config=elsewhere(tmp_path))
    assert platform.taken == ["a", "a", "b", "b", "b", "b"]
    cannot = [one.what for one in told if isinstance(one, Note) and "cannot be avoided" in one.what]
    assert cannot == ["the machine b is to blame for the ends of attempts 3, 4, and cannot be avoided: add machines"]


def test_a_cluster_runs_the_third_attempt_on_other_machines_than_the_one_that_failed_twice(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Two machines fit the job of two nodes; a third comes while the second attempt runs."""
    config = script(cluster, tmp_path, cpus="150", restarts=0)
    claim = claim_on(config, tmp_path)
    used: list[set[str]] = []

    def fate() -> None:
        for attempt in (1, 2, 3):
            until(lambda n=attempt: sum(one["status"]["phase"] == "Running" for one in cluster.pods(f"demo-{n}-")) == 2)
            pods = {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in cluster.pods(f"demo-{attempt}-")}
            used.append({*pods})
            if attempt == 2:
                cluster.add_nodes(1)
            broken = pods.get("node-0")
            cluster.finish(broken or f"demo-{attempt}-", code=BROKEN if broken else 0)

    @flow(name="scene")
    def scene() -> int:
        return asyncio.run(run_job(claim, max_restarts=3, restarts=AT_ONCE)).attempt

    thread = threading.Thread(target=fate, daemon=True)
    thread.start()
    assert scene() == 3
    thread.join()
    assert used == [{"node-0", "node-1"}, {"node-0", "node-1"}, {"node-1", "node-2"}]


def test_nothing_is_said_of_machines_where_there_is_only_this_one(tmp_path: Path) -> None:
    platform, told = Machines("here", broken={"here"}, spare=0), list[Event]()
    with Listener(told.append), pytest.raises(JobFailed):
        ended_well(tmp_path, platform, max_restarts=3)
    assert not [one for one in told if isinstance(one, Note) and "is to blame" in one.what]


def test_no_machine_is_avoided_where_that_is_turned_off(tmp_path: Path) -> None:
    platform = Machines("a", "b", broken={"a"})
    with pytest.raises(JobFailed):
        ended_well(tmp_path, platform, max_restarts=3, config=elsewhere(tmp_path, exclude_after=0))
    assert {*platform.taken} == {"a"}


# --- two orchestrators at once ----------------------------------------------------------------------------------------


class Lasting(Fated):
    """Each attempt runs for a second before it ends."""

    poll_seconds = 0.05

    def submit(self, submission: Submission) -> JobId:
        known = self.status(submission.job_id).state is not JobState.ABSENT
        job_id = StrictPlatform.submit(self, submission)
        if known:
            return job_id
        self.began.append(job_id)
        self.start(job_id)
        code = next(self._codes) or 0
        end = partial(self.end, job_id, JobState.FAILED if code else JobState.SUCCEEDED, {0: code})
        threading.Timer(1.0, end).start()
        return job_id


def both(folder: Path, platform: StrictPlatform, *, max_restarts: int) -> list[Any]:
    """The ends of two orchestrators of one run: the number of the attempt that ended well, or an error."""
    claim = claim_on(ScriptConfig(root=str(folder), script="/train.py"), folder)
    claim = replace(claim, platform=platform, attempts=replace(claim.attempts, open=lambda section: platform))

    async def orchestrated() -> int:
        return (await run_job(claim, max_restarts=max_restarts, restarts=AT_ONCE)).attempt

    async def two() -> list[Any]:
        return await asyncio.gather(orchestrated(), orchestrated(), return_exceptions=True)

    @flow(name="scene")
    def scene() -> list[Any]:
        return asyncio.run(two())

    return scene()


def test_two_orchestrators_follow_one_job_to_its_good_end(tmp_path: Path) -> None:
    platform = Lasting([BROKEN, 0])
    assert both(tmp_path, platform, max_restarts=1) == [2, 2]
    assert len(platform.began) == 2


def test_two_orchestrators_have_one_count_of_restarts_and_stop_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = (["one"], ["another"])
    turns = iter(mine)
    monkeypatch.setattr("tasks.training.flow_runs", lambda: next(turns))
    platform, told = Lasting(repeat(BROKEN)), list[Event]()
    with Listener(told.append):
        ends = both(tmp_path, platform, max_restarts=2)
    assert [type(end) for end in ends] == [JobFailed, JobFailed]
    assert len(platform.began) == 3, "the first attempt and two restarts, not two of each"
    index = Index.of(str(tmp_path))
    counted = [one.attempt for flow_run in mine for one in index.verdicts("demo", flow_run[0])]
    assert sorted(counted) == [1, 2, 3], "each end is judged once"
    assert [one.what for one in told if isinstance(one, Note) and "no new attempt is left" in one.what]


# --- what nodes write -------------------------------------------------------------------------------------------------

HOSTILE = [
    '{"kind":"step"}', '{"kind":"step","step":' + "[" * 100_000, '{"kind":"step","step":1' + "0" * 5000 + "}",
    '{"kind":"step","step":1,"loss":{}}', '{"kind":"start","step":0,"steps":Infinity}', '{"step":"\\ud800"}',
    "[", "\x00",
]  # fmt: skip


def test_hostile_metrics_and_reports_are_counted_and_said_once_and_the_attempt_ends_as_it_did(tmp_path: Path) -> None:
    platform, config = StrictPlatform(), ScriptConfig(root=str(tmp_path), script="/train.py")
    claim = claim_on(config, tmp_path)
    claim = replace(claim, platform=platform, attempts=replace(claim.attempts, open=lambda section: platform))
    folder = tmp_path / "runs" / "demo" / "attempts" / "1"
    told: list[Event] = []
    rows: list[Mapping[str, Any]] = []

    def attempt(job_id: JobId) -> None:
        platform.start(job_id)
        platform.say(job_id, *(METRICS_MARK + line for line in HOSTILE))
        platform.say(job_id, marked({"kind": "step", "step": 1, "loss": 2.5, "step_seconds": 1.0}))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "node-0.json").write_text('{"node":' + "[" * 100_000)
        platform.end(job_id, JobState.FAILED, {0: BROKEN})

    record = claim.take()
    attempt(platform.submit(platform.render(claim.make_job(1))))

    @flow(name="scene")
    def scene() -> Verdict | None:
        with Listener(told.append):
            return asyncio.run(await_job(claim, record, rows.append))

    verdict = scene()
    assert verdict is not None
    assert (verdict.fault, verdict.node) == (Fault.NODE, 0)
    assert [row["step"] for row in rows] == [1]
    notes = [one.what for one in told if isinstance(one, Note)]
    assert len([note for note in notes if note.startswith("8 lines of metrics could not be read; the first: ")]) == 1
    assert len([note for note in notes if note.startswith("1 nodes' reports could not be read; the first: ")]) == 1
