from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from strict_platform import StrictPlatform
from typer.testing import CliRunner

from cli.main import app
from launcher.config import ScriptConfig
from launcher.job import JobId, JobState, JobStatus
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.runs.attempts import Claim, claim_of
from launcher.runs.index import Index
from launcher.runs.leftovers import Leftover, Untold, leftovers, remove_leftover


def claim_in(folder: Path, platform: StrictPlatform, name: str = "demo") -> Claim:
    claim = claim_of(ScriptConfig(root=str(folder), name=name, script="/train.py"))
    return replace(claim, platform=platform, attempts=replace(claim.attempts, open=lambda section: platform))


def ended(claim: Claim, platform: StrictPlatform, state: JobState = JobState.FAILED) -> JobId:
    """An attempt that ended, and left something."""
    record = claim.take()
    job_id = platform.submit(platform.render(claim.make_job(record.attempt)))
    platform.end(job_id, state)
    platform.litter(job_id)
    claim.attempts.index.end(record, platform.status(job_id))
    return job_id


def test_what_every_attempt_of_a_dead_run_left_is_listed_and_removed(tmp_path: Path) -> None:
    platform = StrictPlatform()
    claim, index = claim_in(tmp_path, platform), Index.of(str(tmp_path))
    jobs = [ended(claim, platform), ended(claim, platform, JobState.CANCELLED)]
    found = [one for one in leftovers(index, open=lambda _: platform) if isinstance(one, Leftover)]
    assert [one.job_id for one in found] == jobs
    assert str(found[1]) == f"{claim.attempts.run}, attempt 2, on local: job {jobs[1]} (ended: cancelled)"
    assert all(remove_leftover(index, one, open=lambda _: platform) for one in found)
    assert leftovers(index, open=lambda _: platform) == []


@pytest.mark.parametrize("lives", [JobState.PENDING, JobState.RUNNING])
def test_nothing_of_a_run_that_lives_is_touched(tmp_path: Path, lives: JobState) -> None:
    """Not even what its attempts before have left: the next attempt sweeps that."""
    platform = StrictPlatform()
    claim, index = claim_in(tmp_path, platform), Index.of(str(tmp_path))
    ended(claim, platform)
    job_id = platform.submit(platform.render(claim.make_job(claim.take().attempt)))
    if lives is JobState.RUNNING:
        platform.start(job_id)
    assert leftovers(index, open=lambda _: platform) == []


def test_a_run_that_came_to_life_after_it_was_shown_is_left_alone(tmp_path: Path) -> None:
    platform = StrictPlatform()
    claim, index = claim_in(tmp_path, platform), Index.of(str(tmp_path))
    dead = ended(claim, platform)
    [found] = leftovers(index, open=lambda _: platform)
    platform.submit(platform.render(claim.make_job(claim.take().attempt)))
    assert isinstance(found, Leftover)
    assert not remove_leftover(index, found, open=lambda _: platform)
    assert platform.left(dead)


def test_a_platform_that_does_not_answer_leaves_its_run_untold_and_the_others_told(tmp_path: Path) -> None:
    silent, answers = StrictPlatform(), StrictPlatform()
    one, other = claim_in(tmp_path, silent, "one"), claim_in(tmp_path, answers, "other")
    silent.submit(silent.render(one.make_job(one.take().attempt)))
    ended(other, answers)
    silent.silence(True)

    found = [
        *leftovers_of(tmp_path, silent, one.attempts.run),
        *leftovers_of(tmp_path, answers, other.attempts.run),
    ]
    assert [type(each) for each in found] == [Untold, Leftover]
    assert "connection timed out" in str(found[0])


def leftovers_of(root: Path, platform: StrictPlatform, run: str) -> list[Leftover | Untold]:
    """Those of one run, whose platform this is."""
    found = leftovers(Index.of(str(root)), open=lambda _: platform)
    return [one for one in found if one.run == run]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process of a job on this machine that has ended, as a killed supervisor leaves it; and the job's run."""
    claim = claim_of(ScriptConfig(root=str(tmp_path), name="demo", script="/train.py"))
    record = claim.take()
    claim.attempts.index.end(record, JobStatus(state=JobState.FAILED, native="supervisor lost"))
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, env={**os.environ, JOB_TAG: record.job_id}) as process:
        yield process, record.run
        process.kill()


def test_reap_shows_what_is_left_and_removes_it_after_a_yes(
    orphan: tuple[subprocess.Popen[bytes], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.server.server_address", lambda: None)  # the tests' own server knows other tests' runs
    process, run = orphan
    root = ["--root", str(tmp_path)]
    shown = CliRunner().invoke(app, ["reap", "--dry-run", *root])
    assert shown.exit_code == 0, shown.output
    assert f"{run}, attempt 1, on local: process {process.pid}" in shown.output
    unasked = CliRunner().invoke(app, ["reap", *root])
    assert "nothing was removed; --yes removes it" in unasked.output
    assert psutil.pid_exists(process.pid)
    assert process.poll() is None
    removed = CliRunner().invoke(app, ["reap", "--yes", *root])
    assert removed.exit_code == 0, removed.output
    assert "nothing of it is left" in removed.output
    assert process.wait(10) != 0
    again = CliRunner().invoke(app, ["reap", "--yes", *root])
    assert "nothing is left of the dead runs" in again.output
