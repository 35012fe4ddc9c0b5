"""What tests of Batch jobs share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from launcher.job import JobId, JobStatus
from launcher.platforms.batch.platform import BatchPlatform

IMAGE = f"europe-west4-docker.pkg.dev/project/litgpt/train@sha256:{64 * '0'}"


def until(holds: Callable[[], Any], *, seconds: float = 20) -> Any:
    """What `holds` gives when it gives something true."""
    give_up = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < give_up, "it does not come to that"
        time.sleep(0.02)
    return found


def end_of(platform: BatchPlatform, job_id: JobId) -> JobStatus:
    """The job's status when it is over."""
    status: JobStatus = until(lambda: (seen := platform.status(job_id)).state.final and seen)
    return status
