"""What dead runs left on a platform: listed, and removed; nothing of a run that lives."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from job_handles import begin, handle_of, handle_on
from strict_platform import StrictPlatform
from typer.testing import CliRunner

from launcher.config import ScriptConfig
from launcher.job import JobId, JobState, JobStatus
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.runs.listing import orphaned_resources, remove_orphaned_resource


class Runs:
    """Runs below a folder, on a strict platform."""

    def __init__(self, folder: Path) -> None:
        self.platform = StrictPlatform()
        self.handle = handle_on(self.platform, folder, "demo-0123456789")
        index, opening = self.handle.attempts.index, self.handle.attempts.open_platform
        self.orphaned: Callable[[], list[Any]] = partial(orphaned_resources, index, open=opening)
        self.remove: Callable[..., bool] = partial(remove_orphaned_resource, index, open=opening)

    def ended(self, state: JobState = JobState.FAILED) -> JobId:
        """An attempt that ended, and left something."""
        job_id = begin(self.handle)
        self.platform.end(job_id, state)
        self.platform.litter(job_id)
        return job_id


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_orphaned_resources_of_every_attempt_are_removed(runs: Runs) -> None:
    jobs = [runs.ended(), runs.ended(JobState.CANCELLED)]
    found = runs.orphaned()
    assert [entry.job_id for entry in found] == jobs
    assert found[1].what == f"{runs.handle.attempts.run}, attempt 2, on local: job {jobs[1]} (ended: cancelled)"
    assert all(runs.remove(entry) for entry in found)
    assert runs.orphaned() == []


def test_resources_of_a_run_that_restarted_stay(runs: Runs) -> None:
    """Not even what its attempts before have left: the next attempt sweeps that."""
    dead = runs.ended()
    [shown] = runs.orphaned()
    job_id = begin(runs.handle)
    assert not runs.remove(shown)
    assert runs.orphaned() == []
    runs.platform.start(job_id)
    assert runs.orphaned() == []
    assert runs.platform.remaining_resources(dead)
    runs.platform.silence(True)
    assert [entry.job_id for entry in runs.orphaned()] == [None]


def test_cleanup_shows_what_is_left_and_removes_it_after_a_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cli.main import app

    def cleanup(*options: str) -> str:
        with patch.dict(os.environ):  # a command sets it for its own process
            return CliRunner().invoke(app, ["cleanup", *options, "--root", str(tmp_path)]).output

    monkeypatch.setattr("flows.server.server_address", lambda: None)  # the tests' own server knows other tests' runs
    handle = handle_of(ScriptConfig(root=str(tmp_path), name="demo", script="/train.py"))
    record = handle.reattach_or_create()
    handle.attempts.index.record_end(record, JobStatus(state=JobState.FAILED, native="supervisor lost"))
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    orphan = subprocess.Popen(command, env={**os.environ, JOB_TAG: record.job_id}, stdin=subprocess.PIPE)
    with orphan:
        assert f"{record.run}, attempt 1, on local: process {orphan.pid}" in cleanup("--dry-run")
        assert "nothing was removed; remove all of it with --yes" in cleanup()
        assert orphan.poll() is None
        assert "no resources remain" in cleanup("--yes")
        assert orphan.wait() != 0
        assert "nothing is left of the dead runs" in cleanup("--yes")
