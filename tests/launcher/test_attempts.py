from __future__ import annotations

from pathlib import Path

import pytest
from strict_platform import StrictPlatform

from launcher.attempts import Attempts, attempts_of
from launcher.config import RunConfig, ScriptConfig, validated
from launcher.errors import PlatformRefused
from launcher.job import Job, JobId, JobState
from launcher.platforms.base import Platform
from launcher.platforms.local import LocalPlatform
from launcher.runs import script_name


@pytest.fixture
def platform() -> StrictPlatform:
    return StrictPlatform()


@pytest.fixture
def attempts(platform: StrictPlatform, tmp_path: Path) -> Attempts:
    def make_job(attempt: int) -> Job:
        return Job(
            name="gpt-0123456789",
            attempt=attempt,
            nodes=2,
            processes=1,
            program=("train.py",),
            directory=f"{tmp_path}/runs/gpt-0123456789/attempts/{attempt}",
        )

    held: Platform = platform
    return Attempts(platform=held, make_job=make_job)


def begin(attempts: Attempts) -> JobId:
    """Start the next attempt as the pipeline does."""
    return attempts.platform.submit(attempts.platform.render(attempts.make_job(attempts.next())))


def test_the_first_attempt_of_a_new_run_is_number_1(attempts: Attempts) -> None:
    assert attempts.numbers() == []
    assert attempts.all() == []
    assert attempts.live() is None
    assert attempts.next() == 1


@pytest.mark.parametrize("started", [False, True])
def test_a_live_attempt_is_taken_up_and_not_doubled(
    attempts: Attempts, platform: StrictPlatform, started: bool
) -> None:
    job_id = begin(attempts)
    if started:
        platform.start(job_id)
    assert attempts.next() == 1
    assert begin(attempts) == job_id
    assert platform.live() == [job_id]
    live = attempts.live()
    assert live is not None
    assert (live.number, live.job_id) == (1, job_id)


@pytest.mark.parametrize("end", [JobState.FAILED, JobState.CANCELLED, JobState.SUCCEEDED])
def test_after_an_attempt_that_ended_comes_the_next(
    attempts: Attempts, platform: StrictPlatform, end: JobState
) -> None:
    platform.end(begin(attempts), end)
    assert attempts.live() is None
    assert attempts.next() == 2
    begin(attempts)
    assert [(attempt.number, attempt.status.state) for attempt in attempts.all()] == [(1, end), (2, JobState.PENDING)]


def test_attempts_are_counted_and_not_sorted_as_words(attempts: Attempts, platform: StrictPlatform) -> None:
    for _ in range(11):
        platform.end(begin(attempts), JobState.FAILED)
    assert attempts.numbers() == list(range(1, 12))
    assert attempts.next() == 12


def test_an_attempt_that_its_platform_has_forgotten_is_not_listed_and_its_number_not_used_again(
    attempts: Attempts, platform: StrictPlatform
) -> None:
    platform.remove(begin(attempts))
    assert attempts.all() == []
    assert attempts.live() is None
    assert attempts.next() == 2


def test_files_that_are_no_attempts_are_passed_over(attempts: Attempts) -> None:
    begin(attempts)
    attempts.run.write("attempts/notes.txt", b"")
    attempts.run.write("attempts/old/1/log", b"")
    assert attempts.numbers() == [1]


def test_a_second_attempt_beside_a_live_one_would_be_refused(attempts: Attempts) -> None:
    begin(attempts)
    with pytest.raises(PlatformRefused, match="two attempts would write over each other"):
        attempts.platform.submit(attempts.platform.render(attempts.make_job(2)))


def test_cancelling_stops_what_lives_and_says_what_it_was(attempts: Attempts, platform: StrictPlatform) -> None:
    job_id = begin(attempts)
    assert attempts.cancel() == [job_id]
    assert platform.live() == []
    assert attempts.cancel() == []


def test_cancelling_a_run_that_was_never_started_is_nothing(attempts: Attempts) -> None:
    assert attempts.cancel() == []


def test_sweeping_leaves_a_live_attempt_alone(attempts: Attempts, platform: StrictPlatform) -> None:
    job_id = begin(attempts)
    attempts.sweep()
    assert platform.live() == [job_id]


def test_sweeping_removes_what_an_attempt_left_though_it_ended(attempts: Attempts) -> None:
    swept: list[JobId] = []

    class LeavesThings(StrictPlatform):
        def cancel(self, job_id: JobId) -> None:
            super().cancel(job_id)
            swept.append(job_id)

    platform = LeavesThings()
    messy = Attempts(platform=platform, make_job=attempts.make_job)
    messy.sweep()
    assert swept == []
    first = begin(messy)
    platform.end(first, JobState.FAILED)
    messy.sweep()
    assert swept == [first]


def test_what_lies_on_disk_decides_and_nothing_is_remembered(attempts: Attempts, platform: StrictPlatform) -> None:
    begin(attempts)
    later = Attempts(platform=platform, make_job=attempts.make_job)
    assert later.next() == 1
    assert [attempt.job_id for attempt in later.all()] == [attempt.job_id for attempt in attempts.all()]


def test_a_config_leads_to_its_attempts(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one\n\ntwo\n")
    script = ScriptConfig(root=str(tmp_path), script="pi.py")
    training = validated(
        RunConfig,
        {"root": str(tmp_path), "data": {"corpus": {"kind": "files", "paths": [str(tmp_path / "text.txt")]}}},
        where="test",
    )
    of_script, of_training = attempts_of(script), attempts_of(training)
    assert isinstance(of_script.platform, LocalPlatform)
    assert of_script.run.address() == f"{tmp_path}/runs/{script_name(script)}"
    assert of_training.run.address().startswith(f"{tmp_path}/runs/gpt-")
    assert of_training.make_job(4).directory == f"{of_training.run.address()}/attempts/4"
