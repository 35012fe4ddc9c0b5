"""What dead runs left on a platform: listed, and removed; nothing of a run that lives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from strict_platform import StrictPlatform
from typer.testing import CliRunner

from launcher.config import ScriptConfig
from launcher.job import JobId, JobState, JobStatus
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.runs.attempts import claim_of
from launcher.runs.index import Index
from launcher.runs.leftovers import Leftover, Untold, leftovers, remove_leftover


class Runs:
    """Runs below a folder, on a strict platform."""

    def __init__(self, folder: Path) -> None:
        self.platform, self.index = StrictPlatform(), Index.of(str(folder))
        claim = claim_of(ScriptConfig(root=str(folder), name="demo", script="/train.py"))
        attempts = replace(claim.attempts, open=self.open)
        self.claim = replace(claim, platform=self.platform, attempts=attempts)

    def open(self, section: Mapping[str, Any]) -> StrictPlatform:
        return self.platform

    def begun(self) -> JobId:
        return self.platform.submit(self.platform.render(self.claim.make_job(self.claim.take().attempt)))

    def ended(self, state: JobState = JobState.FAILED) -> JobId:
        """An attempt that ended, and left something."""
        job_id = self.begun()
        self.platform.end(job_id, state)
        self.platform.litter(job_id)
        return job_id

    def left(self) -> list[Leftover | Untold]:
        return leftovers(self.index, open=self.open)

    def remove(self, one: Leftover | Untold) -> bool:
        assert isinstance(one, Leftover)
        return remove_leftover(self.index, one, open=self.open)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_what_every_attempt_of_a_dead_run_left_is_listed_and_removed(runs: Runs) -> None:
    jobs = [runs.ended(), runs.ended(JobState.CANCELLED)]
    found = runs.left()
    assert [one.job_id for one in found if isinstance(one, Leftover)] == jobs
    assert str(found[1]) == f"{runs.claim.attempts.run}, attempt 2, on local: job {jobs[1]} (ended: cancelled)"
    assert all(runs.remove(one) for one in found)
    assert runs.left() == []


def test_nothing_of_a_run_that_lives_is_touched_though_it_came_to_life_after_it_was_shown(runs: Runs) -> None:
    """Not even what its attempts before have left: the next attempt sweeps that."""
    dead = runs.ended()
    [shown] = runs.left()
    job_id = runs.begun()
    assert not runs.remove(shown)
    assert runs.left() == []
    runs.platform.start(job_id)
    assert runs.left() == []
    assert runs.platform.left(dead)
    runs.platform.silence(True)
    assert [type(one) for one in runs.left()] == [Untold]


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process of a job on this machine that has ended, as a killed supervisor leaves it; and the job's run."""
    claim = claim_of(ScriptConfig(root=str(tmp_path), name="demo", script="/train.py"))
    record = claim.take()
    claim.attempts.index.end(record, JobStatus(state=JobState.FAILED, native="supervisor lost"))
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    environment = {**os.environ, JOB_TAG: record.job_id}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as process:
        yield process, record.run
        process.kill()


def test_reap_shows_what_is_left_and_removes_it_after_a_yes(
    orphan: tuple[subprocess.Popen[bytes], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cli.main import app

    def reap(*options: str) -> str:
        with patch.dict(os.environ):  # a command sets it for its own process
            done = CliRunner().invoke(app, ["reap", *options, "--root", str(tmp_path)])
        return done.output

    monkeypatch.setattr("flows.server.server_address", lambda: None)  # the tests' own server knows other tests' runs
    process, run = orphan
    assert f"{run}, attempt 1, on local: process {process.pid}" in reap("--dry-run")
    assert "nothing was removed; --yes removes it" in reap()
    assert process.poll() is None
    assert "nothing of it is left" in reap("--yes")
    assert process.wait() != 0
    assert "nothing is left of the dead runs" in reap("--yes")
