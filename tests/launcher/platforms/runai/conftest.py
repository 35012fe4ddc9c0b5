"""A cluster for the tests of its platform, whose pods are only said to run, a job for it, and the two ways to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import runai
from runai_jobs import job_of, settings_of

from launcher.job import Job
from launcher.platforms.runai.platform import RunaiPlatform
from launcher.platforms.runai.rest import Rest


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[runai.Cluster]:
    """Of two projects, one of which is called almost as the other."""
    claims, projects = {"scratch": str(tmp_path)}, ["team-a", "team-a-2"]
    with runai.running(tmp_path / "runai", claims=claims, projects=projects, pods=False) as made:
        yield made


@pytest.fixture
def waiting(tmp_path: Path) -> Job:
    return job_of(processes=1, directory=str(tmp_path / "attempts/1"), stage=())


@pytest.fixture
def by_program(
    cluster: runai.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., RunaiPlatform]]:
    """Makes the platform by some variant of the program."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    with ExitStack() as programs:

        def make(variant: str = "v2", **changes: Any) -> RunaiPlatform:
            program = programs.enter_context(runai.program(tmp_path, cluster, variant))
            config = settings_of(cli=program.name, claims=[{"name": "scratch", "path": str(tmp_path)}], **changes)
            return RunaiPlatform(config, pauses=(0, 0, 0), give_up=3600)

        yield make


@pytest.fixture
def api(cluster: runai.Cluster) -> Iterator[runai.Api]:
    with runai.serving(cluster) as made:
        yield made


@pytest.fixture
def by_rest(api: runai.Api, tmp_path: Path) -> Callable[..., RunaiPlatform]:
    """Makes the platform by the API."""

    def make(*, secret: str | None = None, **changes: Any) -> RunaiPlatform:
        claims = [{"name": "scratch", "path": str(tmp_path)}]
        config = settings_of(**{"url": api.url, "api": "rest", "claims": claims, **changes})
        return RunaiPlatform(config, Rest(config, api.credentials(secret), pause=0), pauses=(0, 0, 0))

    return make
