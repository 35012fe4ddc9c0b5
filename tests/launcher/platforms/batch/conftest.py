"""A cloud for the tests of its platform, and jobs for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from batch import Cloud, running_batch
from batch_jobs import IMAGE

from launcher.job import Job
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.settings import BatchPlatformConfig


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """Containers are said to run until they are told to stop."""
    with running_batch(tmp_path / "cloud", shared=[tmp_path]) as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        made.options.recorded[IMAGE] = {}
        made.options.boot = 0.01
        yield made


@pytest.fixture
def configured() -> Callable[..., BatchPlatformConfig]:
    """Settings of two CPU machines, with changes."""

    def make(**changes: Any) -> BatchPlatformConfig:
        cpus = {} if "machine" in changes else {"machine": "n2-standard-8", "gpus": 0}
        asked = {"kind": "batch", "project": "my-project", "location": "us-central1", "nodes": 2, **cpus, **changes}
        return BatchPlatformConfig.model_validate(asked)

    return make


@pytest.fixture
def platform_of(configured: Callable[..., BatchPlatformConfig]) -> Callable[..., BatchPlatform]:
    """A platform with those settings that does not wait for peers and log lines."""

    def make(**changes: Any) -> BatchPlatform:
        return BatchPlatform(configured(**changes), grace=0.5, settle=0, patience=20)

    return make


@pytest.fixture
def job() -> Callable[..., Job]:
    def make(**changes: Any) -> Job:
        asked = {
            "name": "owt-0123456789", "attempt": 1, "nodes": 2, "processes": 1,
            "program": ("-m", "litgpt_demo", "train", "--run", "gs://bucket/runs/owt-0123456789"),
            "directory": "gs://bucket/runs/owt-0123456789/attempts/1", "image": IMAGE,
        }  # fmt: skip
        return Job(**{**asked, **changes})

    return make
