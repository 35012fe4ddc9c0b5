"""A busy cluster: the queue is full of other people's jobs, and one question still serves all of ours."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median

import pytest
from services.slurm_cluster import STRANGER, SlurmCluster
from waiting import until

from launcher.job import Job, JobState
from launcher.platforms.slurm.platform import SlurmPlatform
from launcher.platforms.slurm.settings import SlurmPlatformConfig

pytestmark = pytest.mark.services

OTHERS, OURS = 500, 8
LOOK = 1.0
"""Seconds that a look at the queue may take on a busy machine of two cores."""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each time that squeue was started."""
    real, counted = shutil.which("squeue"), tmp_path / "asked"
    counted.touch()
    folder = tmp_path / "counting"
    folder.mkdir()
    (folder / "squeue").write_text(f'#!/bin/sh\necho "$*" >> {counted}\nexec {real} "$@"\n')
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return counted


def test_among_500_queued_jobs_of_others_one_short_question_serves_all_of_ours(
    tmp_path: Path, slurm_without_accounting: SlurmCluster, asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = slurm_without_accounting
    many = f"for i in $(seq {OTHERS}); do sbatch --hold --chdir=/tmp --output=/dev/null --wrap=true; done"
    assert slurm.run("sh", "-c", many, user=STRANGER).count("Submitted") == OTHERS
    settings = {"kind": "slurm", "nodes": 1, "cpus": 1, "environment": {"kind": "venv", "path": sys.prefix}}
    platforms = [SlurmPlatform(SlurmPlatformConfig.model_validate(settings)) for _ in range(OURS)]
    ids = [
        platform.submit(platform.render(Job(
            name=f"ours-{number}", attempt=1, nodes=1, processes=1, program=("-c", "import time; time.sleep(300)"),
            directory=str(tmp_path / "runs" / f"ours-{number}"),
        )))
        for number, platform in enumerate(platforms)
    ]  # fmt: skip
    until(lambda: all(one.status(job).state is JobState.RUNNING for one, job in zip(platforms, ids, strict=True)))
    took, before = [], 0
    for _ in range(5):
        time.sleep(SlurmPlatform.poll_seconds / 2)  # as old as an answer may be that jobs share
        before, began = len(asked.read_text().splitlines()), time.monotonic()
        states = {one.status(job).state for one, job in zip(platforms, ids, strict=True)}
        took.append(time.monotonic() - began)
        assert states == {JobState.RUNNING}
        assert len(asked.read_text().splitlines()) - before == 1
    with capsys.disabled():
        print(f"\n{OURS} jobs among {OTHERS} of others: a look took {median(took):.3f} s, at most {max(took):.3f} s")
    assert median(took) < LOOK
