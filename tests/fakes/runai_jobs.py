"""Tests of Run:ai jobs name workloads as the platform does, by these functions."""

from __future__ import annotations

from launcher.job import Job
from launcher.platforms.runai.render import workload_name


def named(job: Job) -> str:
    """The name of a job's workload."""
    return workload_name(job.attempt_name, job.directory)
