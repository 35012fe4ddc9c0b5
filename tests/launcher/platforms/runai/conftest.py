"""A cluster for the tests of its platform, whose pods are only said to run, and a job for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import runai
from runai_jobs import job_of

from launcher.job import Job


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[runai.Cluster]:
    """Of two projects, one of which is called almost as the other."""
    claims, projects = {"scratch": str(tmp_path)}, ["team-a", "team-a-2"]
    with runai.running(tmp_path / "runai", claims=claims, projects=projects, pods=False) as made:
        yield made


@pytest.fixture
def waiting(tmp_path: Path) -> Job:
    return job_of(processes=1, directory=str(tmp_path / "attempts/1"), stage=())
