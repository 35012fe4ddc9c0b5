"""Attempts of a run by the index: no live job is doubled, called dead or taken for another root's; all end."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from typing import Any
from unittest.mock import Mock, call

import pytest
from job_handles import begin, handle_of, handle_on
from strict_platform import StrictPlatform

from launcher.config import LaunchSettings, ScriptConfig, validated
from launcher.errors import JobCancelled, PlatformRefused, PlatformUnreachable, RunIsLive
from launcher.events import Listener, Note
from launcher.job import JobId, JobState, JobStatus
from launcher.platforms.local.platform import SUBMISSION, LocalPlatform
from launcher.platforms.local.settings import LocalPlatformConfig
from launcher.runs.attempts import Attempts, CancelWatch, JobHandle, cancel_all, resolve_name_conflicts
from launcher.runs.index import DamagedRecords
from launcher.runs.listing import run_rows
from litgpt_demo.errors import DataError
from litgpt_demo.storage import open_storage
from litgpt_demo.storage.local import LocalStorage

RUN = "gpt-0123456789"


@pytest.fixture
def platform() -> StrictPlatform:
    return StrictPlatform()


@pytest.fixture
def handle_named(platform: StrictPlatform, tmp_path: Path) -> Callable[..., JobHandle]:
    """Makes handles of scripts: `handle_named("gpt-0123456789")`."""
    return partial(handle_on, platform, tmp_path)


@pytest.fixture
def handle(handle_named: Callable[..., JobHandle]) -> JobHandle:
    return handle_named(RUN)


def live_job(handle: JobHandle) -> JobId | None:
    return live.record.job_id if (live := handle.attempts.live()) else None


def test_live_attempt_is_reattached_to_and_not_started_twice(handle: JobHandle, platform: StrictPlatform) -> None:
    job_id = begin(handle)
    assert begin(handle) == job_id, "as it waits"
    platform.start(job_id)
    assert begin(handle) == job_id
    assert platform.live() == [job_id] == [live_job(handle)]
    assert handle.attempts.next() == 1


def test_next_attempt_has_next_number_and_is_queried_alone(
    handle: JobHandle, platform: StrictPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [JobState.FAILED, JobState.CANCELLED, JobState.SUCCEEDED] * 4
    for end in ends:
        platform.end(begin(handle), end)
    newest = begin(handle)
    seen = [(attempt.number, attempt.status.state) for attempt in handle.attempts.all()]
    assert seen == [*enumerate(ends, start=1), (13, JobState.PENDING)]
    assert live_job(handle) == newest, "the last attempt is the one that can live, not the first"
    monkeypatch.setattr(platform, "status", status := Mock(wraps=platform.status))
    assert [row.state for row in run_rows(handle.attempts.index, [RUN], open=handle.attempts.open_platform)] == [
        "pending"
    ]
    assert status.mock_calls == [call(newest)]


def test_number_of_a_forgotten_attempt_is_not_reused(handle: JobHandle, platform: StrictPlatform) -> None:
    platform.remove(begin(handle))
    assert handle.attempts.live() is None
    assert handle.reattach_or_create().attempt == 2
    platform.remove(begin(handle))
    open_storage(handle.make_job(2).directory).remove("submission.json")
    assert handle.reattach_or_create(ended=2).attempt == 3, "the caller knows that it ended, though it left nothing"


def test_live_run_on_another_platform_is_not_started_twice(handle: JobHandle, platform: StrictPlatform) -> None:
    job_id = begin(handle)
    gke = {"kind": "gke", "cluster": "c", "location": "l", "project": "p", "machine": "a3-highgpu-8g", "nodes": 2}
    moved = replace(handle, config=validated(ScriptConfig, {"script": "train.py", "platform": gke}, where="test"))
    message = r"already running \(strict/.* on local, queued, .*, but this config's platform is gke; .*--replace"
    with pytest.raises(RunIsLive, match=message):
        moved.reattach_or_create()
    launch = moved.config.launch.model_copy(update={"if_running": "cancel"})
    assert replace(moved, config=moved.config.model_copy(update={"launch": launch})).reattach_or_create().attempt == 2
    assert job_id not in platform.live()


def test_unreachable_platform_never_means_that_nothing_runs(handle: JobHandle, platform: StrictPlatform) -> None:
    begin(handle)
    platform.silence(True)
    for verb in (
        handle.attempts.cancel,
        handle.attempts.live,
        handle.attempts.all,
        handle.reattach_or_create,
        lambda: settle(handle),
    ):
        with pytest.raises(PlatformUnreachable):
            verb()


def test_local_job_of_another_host_is_unknown_until_it_ends(tmp_path: Path) -> None:
    handle = handle_of(ScriptConfig(root=str(tmp_path), script="pi.py"))
    elsewhere = {"machine": "0123456789ab", "host": "other-laptop", "attempt": 2}
    record = handle.reattach_or_create().model_copy(update=elsewhere | {"directory": handle.make_job(2).directory})
    handle.attempts.index.create(record)
    with pytest.raises(PlatformUnreachable, match="was started on other-laptop, and only that machine can query it"):
        handle.attempts.live()
    handle.attempts.index.record_end(record, JobStatus(state=JobState.FAILED, native="node 1 ended with 43"))
    assert handle.attempts.live() is None
    handle.attempts.cleanup_last_attempt()
    assert handle.reattach_or_create().attempt == 3


def test_cancel_ends_and_returns_the_live_jobs(handle: JobHandle, platform: StrictPlatform) -> None:
    assert handle.attempts.cancel() == []
    job_id = begin(handle)
    assert handle.attempts.cancel() == [job_id]
    assert platform.live() == []
    platform.remove(job_id)
    assert handle.attempts.cancel() == []
    assert [attempt.status.state for attempt in handle.attempts.all()] == [JobState.CANCELLED], "its end is recorded"


def test_cancellation_is_retried_until_the_platform_answers(
    handle: JobHandle, platform: StrictPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, silences = begin(handle), iter([True, False])
    monkeypatch.setattr("launcher.runs.attempts.time.sleep", lambda seconds: platform.silence(next(silences)))
    platform.silence(True)
    assert handle.attempts.cancel(patience=3600) == [job_id]
    assert platform.live() == []
    assert len(handle.attempts.index.cancellations(handle.attempts.run)) == 1, "it was asked for once"


def test_refused_cancellation_leaves_no_request(
    handle: JobHandle, platform: StrictPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm refuses to cancel another user's job: that user's run goes on, also after a preemption."""
    begin(handle)
    watch = CancelWatch(handle.attempts.index, handle.names)
    monkeypatch.setattr(platform, "cancel", Mock(side_effect=PlatformRefused("it is another user's job")))
    with pytest.raises(PlatformRefused):
        handle.attempts.cancel()
    watch.check()


def test_jobs_are_cancelled_in_parallel_and_remains_are_logged(tmp_path: Path) -> None:
    class Slow(StrictPlatform):
        """Jobs go when both were asked to, and their owner was informed of both."""

        def cancel(self, job_id: JobId) -> None:
            cancelling.wait()
            heard.wait()
            super().cancel(job_id)

    def log(what: str) -> None:
        notes.add(what)
        if len([note for note in notes if f"these resources remain: job strict/{RUN}" in note]) == 2:
            heard.set()

    cancelling, heard, notes, platform, silent = Barrier(2), Event(), set[str](), Slow(), StrictPlatform()
    handles = [handle_on(platform, tmp_path, f"{RUN}-{name}") for name in "ab"]
    for handle in (*handles, cannot := handle_on(silent, tmp_path, "c-0123456789")):
        begin(handle)
    silent.silence(True)
    runs = [handle.attempts for handle in (cannot, *handles)]
    cancelled, problems = cancel_all(runs, log=log, patience=0, report_after=0)
    assert [type(problem) for problem in problems] == [PlatformUnreachable]
    assert cancelled == [handle.attempts.run for handle in handles], "the others go"


def test_cancel_request_is_detected_without_a_live_job(
    handle_named: Callable[..., JobHandle],
) -> None:
    trial = handle_named(RUN, launch=LaunchSettings(sweep="gpt-aaaaaaaaaa"))
    index = trial.attempts.index
    for name in (RUN, RUN, "gpt-aaaaaaaaaa"):
        watch = CancelWatch(index, trial.names)
        watch.check()
        index.request_cancel(name)
        with pytest.raises(JobCancelled, match=f"{name} was cancelled"):
            watch.check()


def test_a_replaced_job_ends_every_orchestrator_but_its_own(handle: JobHandle, platform: StrictPlatform) -> None:
    begin(handle)
    attempts = handle.attempts
    attempts.index.request_cancel(RUN)  # of an earlier command
    own, follower = CancelWatch(attempts.index, [RUN]), CancelWatch(attempts.index, [RUN])
    own.replace_live(attempts)
    assert platform.live() == []
    own.check()
    with pytest.raises(JobCancelled):
        follower.check()


def test_a_jobs_name_never_comes_back(platform: StrictPlatform, tmp_path: Path) -> None:
    """Two roots have live jobs of one run, and one of the roots is deleted."""
    jobs = [begin(handle_on(platform, tmp_path / folder, RUN)) for folder in ("first", "second")]
    assert sorted(platform.live()) == sorted({*jobs})
    platform.end(jobs[0], JobState.FAILED)
    shutil.rmtree(tmp_path / "first")
    assert begin(handle_on(platform, tmp_path / "first", RUN)) not in jobs


def settle(handle: JobHandle, if_running: str = "refuse", sweep: str | None = None) -> DamagedRecords:
    """As the pipeline does before it starts anything, for another run id of the same name."""
    launch = {"launch": LaunchSettings.model_validate({"if_running": if_running, "sweep": sweep})}
    return resolve_name_conflicts(
        handle.config.model_copy(update=launch), run="gpt-9999999999", open_platform=handle.attempts.open_platform
    )


def test_live_job_of_the_same_name_refuses_a_new_run(handle: JobHandle, platform: StrictPlatform) -> None:
    job_id = begin(handle)
    message = r"gpt-0123456789 is already running.*means gpt-9999999999.*--replace.*--allow-duplicate"
    with pytest.raises(RunIsLive, match=message):
        settle(handle)
    settle(handle, "keep")
    assert platform.live() == [job_id]
    notes = list[object]()
    with Listener(notes.append):
        settle(handle, "cancel")
    assert platform.live() == []
    assert [isinstance(note, Note) and job_id in note.what for note in notes] == [True]
    settle(handle)


def test_ended_jobs_and_trials_of_one_sweep_are_no_conflict(
    handle_named: Callable[..., JobHandle], platform: StrictPlatform
) -> None:
    begin(handle_named("gpt-large-0123456789"))
    platform.end(begin(handle_named("gpt-5555555555")), JobState.FAILED)
    settle(handle_named(RUN))
    begin(trial := handle_named(RUN, launch=LaunchSettings(sweep="gpt-aaaaaaaaaa")))
    settle(trial, sweep="gpt-aaaaaaaaaa")
    with pytest.raises(RunIsLive):
        settle(trial, sweep="gpt-bbbbbbbbbb")


SWEEP = "gpt-aaaaaaaaaa"


@pytest.fixture
def siblings(handle_named: Callable[..., JobHandle], platform: StrictPlatform) -> Callable[..., None]:
    """Makes trials of a sweep, with so many attempts each: `siblings(20, attempts=1)`. The last one of each ends."""

    def make(count: int, *, attempts: int, ended: bool = True) -> None:
        for number in range(count):
            handle = handle_named(f"gpt-{number:010x}", launch=LaunchSettings(sweep=SWEEP))
            for attempt in range(1, attempts + 1):
                job_id = begin(handle)
                if ended or attempt < attempts:
                    platform.end(job_id, JobState.FAILED)
                    handle.attempts.index.record_end(handle.attempts.records()[-1], platform.status(job_id))

    return make


@pytest.mark.parametrize(("attempts", "ended", "requests"), [(1, True, 1), (3, True, 1), (3, False, 21)])
def test_a_trial_begins_after_one_read_of_each_live_sibling(
    siblings: Callable[..., None], handle_named: Callable[..., JobHandle], monkeypatch: pytest.MonkeyPatch,
    attempts: int, ended: bool, requests: int,
) -> None:  # fmt: skip
    """One list of the index, and a read of each of the 20 siblings that has not ended."""
    siblings(20, attempts=attempts, ended=ended)
    trial, made = handle_named(RUN, launch=LaunchSettings(sweep=SWEEP)), list[str]()
    for verb in ("list", "read"):
        real = getattr(LocalStorage, verb)
        monkeypatch.setattr(LocalStorage, verb, counted(real, made))
    settle(trial, sweep=SWEEP)
    assert len(made) == requests


def counted(verb: Callable[..., Any], made: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        made.append(verb.__name__)
        return verb(*args, **options)

    return call


def test_a_damaged_or_unreachable_sibling_stops_no_trial(
    siblings: Callable[..., None], handle_named: Callable[..., JobHandle], platform: StrictPlatform, tmp_path: Path
) -> None:
    siblings(3, attempts=1, ended=False)
    trial = handle_named(RUN, launch=LaunchSettings(sweep=SWEEP))
    platform.silence(True)
    assert settle(trial, sweep=SWEEP) == {}
    (tmp_path / "index/gpt-0000000001/1.json").write_text("{")
    assert [*settle(trial, sweep=SWEEP)] == ["gpt-0000000001"]
    platform.silence(False)
    platform.end(JobId(next(job for job in platform.live() if "0000000000" in job)), JobState.FAILED)
    platform.end(JobId(next(job for job in platform.live() if "0000000002" in job)), JobState.FAILED)
    with pytest.raises(DataError, match=r"gpt-0000000001/1\.json"):
        settle(trial)


def test_moved_root_still_finds_its_jobs(platform: StrictPlatform, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    job_id = begin(handle_on(platform, old, RUN))
    old.rename(new)
    moved = handle_on(platform, new, RUN)
    [found] = moved.attempts.all()
    assert (found.record.job_id, found.record.directory) == (job_id, f"{new}/runs/{RUN}/attempts/1")
    with pytest.raises(RunIsLive, match=f"it writes to {old}, from which this root was moved; .*--replace"):
        moved.reattach_or_create()
    assert moved.attempts.cancel() == [job_id]
    assert moved.reattach_or_create().attempt == 2


def test_local_job_is_found_in_its_moved_folder(tmp_path: Path) -> None:
    platform, (old, new) = LocalPlatform(LocalPlatformConfig(kind="local")), (tmp_path / "old", tmp_path / "new")
    directory = Path(handle_on(platform, old, RUN).reattach_or_create().directory)
    directory.mkdir(parents=True)
    (directory / SUBMISSION).write_text("{}")
    old.rename(new)
    [found] = handle_on(platform, new, RUN).attempts.all()
    assert found.status.native == "supervisor lost"
    assert handle_on(platform, new, RUN).reattach_or_create().attempt == 2


BATCH = {"kind": "batch", "project": "my-project", "location": "us-central1", "machine": "g2-standard-48"}
RUNAI = {"kind": "runai", "api": "cli", "cli_version": "v2", "project": "team-a"}
OTHER = "other-0123456789-1-0a1b2c"
RUNAI_JOB = f"runai://team-a/{OTHER}?nodes=1&kept="
JOBS = "projects/my-project/locations/us-central1/jobs"


@pytest.mark.parametrize(
    ("section", "own", "forged"),
    [
        ({"kind": "local"}, "{directory}", "/etc"),
        (
            {"kind": "kubernetes", "namespace": "team-a"},
            f"team-a/{OTHER}",
            f"team-b/{OTHER}",
        ),
        (BATCH, f"{JOBS}/{OTHER}", f"{JOBS}/gpt-0123456789-1-0a1b2c"),
        (RUNAI, RUNAI_JOB + "{directory}", RUNAI_JOB + "/etc"),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_a_forged_id_leads_no_verb_to_another_job_or_folder(
    handle: JobHandle, tmp_path: Path, section: dict[str, str], own: str, forged: str
) -> None:
    run, index = "other-0123456789", handle.attempts.index
    directory = f"{tmp_path}/runs/{run}/attempts/1"
    template = handle.reattach_or_create().model_copy(
        update={"run": run, "nonce": "0a1b2c", "platform": section, "directory": directory}
    )
    index.create(template.model_copy(update={"job_id": forged.format(directory=directory)}))
    attempts = Attempts(index=index, run=run)
    for verb in (attempts.all, attempts.last, attempts.cancel, lambda: attempts.platform_of(attempts.records()[0])):
        with pytest.raises(DataError, match=r"does not give to that attempt in .*remove that file"):
            verb()
    (row,) = run_rows(index, [run])
    assert (row.state, "does not give to that attempt" in row.note) == ("unknown", True)
    honest = template.model_copy(update={"job_id": own.format(directory=directory)})
    assert attempts.platform_of(honest).name == section["kind"]


def test_last_attempt_is_found_without_reading_those_before(handle: JobHandle, platform: StrictPlatform) -> None:
    """A follower looks twice a second, and a bucket takes 50 ms for each file."""
    for _ in range(3):
        platform.end(begin(handle), JobState.FAILED)
        handle.attempts.cleanup_last_attempt()
    index = handle.attempts.index
    for number in (1, 2):
        index.root.write(f"index/{handle.attempts.run}/{number}.json", b"damaged")
    last = handle.attempts.last()
    assert last is not None
    assert (last.number, last.status.state) == (3, JobState.FAILED)
