"""Jobs and settings that the tests of Run:ai share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from launcher.job import Job
from launcher.platforms.runai.settings import RunaiPlatformConfig


@pytest.fixture
def configured() -> Callable[..., RunaiPlatformConfig]:
    """Settings of two pods in a project, changed as asked."""

    def make(**changes: Any) -> RunaiPlatformConfig:
        return RunaiPlatformConfig.model_validate({"kind": "runai", "project": "team-a", "nodes": 2, **changes})

    return make


@pytest.fixture
def job() -> Callable[..., Job]:
    """A training of two nodes, changed as asked."""
    base = Job(
        name="owt-0123456789",
        attempt=1,
        nodes=2,
        processes=8,
        program=("-m", "litgpt_demo", "train", "--run", "/scratch/runs/owt-0123456789"),
        directory="/scratch/runs/owt-0123456789/attempts/1",
        image="registry.example/litgpt@sha256:" + 64 * "0",
        stage=("/scratch/datasets/owt-9876543210",),
        labels={"litgpt-demo.dev/flow-run-id": "none"},
    )
    return lambda **changes: replace(base, **changes)
