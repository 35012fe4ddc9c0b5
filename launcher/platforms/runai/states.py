"""Run:ai's words for where a workload is, in ours."""

from __future__ import annotations

from types import MappingProxyType

from launcher.job import JobState

# REST and CLI v2: phases of the API (docs.nvidia.com/run-ai, workloads). CLI v1: the STATUS column, which shows what a
# pod waits for as well (https://docs.run.ai/developer/researcher-rest-api/rest-list-jobs/).
STATES = MappingProxyType(
    {
        "Creating": JobState.PENDING,
        "Initializing": JobState.PENDING,
        "Resuming": JobState.PENDING,
        "Pending": JobState.PENDING,
        "ContainerCreating": JobState.PENDING,
        "ImagePullBackOff": JobState.PENDING,
        "ErrImagePull": JobState.PENDING,
        "Running": JobState.RUNNING,
        "Updating": JobState.RUNNING,
        # Some pods fail, and the operator has not ended the others yet.
        "Degraded": JobState.RUNNING,
        "Stopping": JobState.RUNNING,
        "Deleting": JobState.RUNNING,
        "Terminating": JobState.RUNNING,
        "Completed": JobState.SUCCEEDED,
        "Succeeded": JobState.SUCCEEDED,
        "Failed": JobState.FAILED,
        # By a user: it could be resumed there; here the next run of the same command is a new attempt.
        "Stopped": JobState.CANCELLED,
        "Deleted": JobState.ABSENT,
        "Unknown": JobState.UNKNOWN,
    }
)


def job_state(native: str) -> JobState:
    """A word that is not in the table is UNKNOWN, which stops nothing."""
    return STATES.get(native, JobState.UNKNOWN)
