"""What tests of Batch jobs share."""

from __future__ import annotations

from waiting import until

from launcher.job import JobId, JobStatus
from launcher.platforms.batch.platform import BatchPlatform

IMAGE = f"europe-west4-docker.pkg.dev/project/litgpt/train@sha256:{64 * '0'}"


def end_of(platform: BatchPlatform, job_id: JobId) -> JobStatus:
    """The job's status when it is over."""
    status: JobStatus = until(lambda: (seen := platform.status(job_id)).state.final and seen)
    return status
