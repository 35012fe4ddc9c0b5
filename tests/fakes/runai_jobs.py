"""Settings and jobs that tests of Run:ai share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launcher.job import Job
from launcher.platforms.base import Platform
from launcher.platforms.runai.settings import RunaiPlatformConfig

_TRAINING = Job(
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


def settings_of(**changes: Any) -> RunaiPlatformConfig:
    """Two pods in a project, or with these changes."""
    return RunaiPlatformConfig.model_validate({"kind": "runai", "project": "team-a", "nodes": 2, **changes})


def job_of(**changes: Any) -> Job:
    """A training of two nodes, or with these changes."""
    return replace(_TRAINING, **changes)


def found(platform: Platform, job: Job) -> dict[str, str]:
    """What stands in the way of a job, by its code."""
    told = platform.check(platform.render(job))
    return {one.code: str(one) for one in told if one.severity in {"error", "unknown"}}
