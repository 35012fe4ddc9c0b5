"""Settings and jobs that tests of Run:ai share."""

from typing import Any

from golden_files import training_job

from launcher.job import Job
from launcher.platforms.base import Platform
from launcher.platforms.runai.settings import RunaiPlatformConfig


def settings_of(**changes: Any) -> RunaiPlatformConfig:
    """Two pods in a project, or with these changes."""
    return RunaiPlatformConfig.model_validate({"kind": "runai", "project": "team-a", "nodes": 2, **changes})


def job_of(**changes: Any) -> Job:
    """A training of two nodes, or with these changes."""
    return training_job("/scratch", **{"image": "registry.example/litgpt@sha256:" + 64 * "0", **changes})


def found(platform: Platform, job: Job) -> dict[str, str]:
    """What stands in the way of a job, by its code."""
    findings = platform.check(platform.render(job))
    return {finding.code: str(finding) for finding in findings if finding.severity in {"error", "unknown"}}
