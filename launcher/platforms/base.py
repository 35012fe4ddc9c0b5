"""The interface of a platform, which runs multi-node jobs. The code above it waits, follows and retries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

from launcher.job import Job, JobId, JobStatus, LogPage, Submission
from litgpt_demo.errors import Finding


class Platform(Protocol):
    """Jobs on one platform: rendering, checks, submission, state, logs, cancellation."""

    @property
    def name(self) -> str:
        """The `kind` of its settings."""

    is_remote_service: ClassVar[bool]
    """True if every machine that reaches the platform can query its jobs, and not only the submitting one."""
    poll_seconds: ClassVar[float]
    """Seconds between two queries for a job that is followed."""

    def render(self, job: Job) -> Submission:
        """Return exactly what will be sent, `job_id` included. Pure: no clock, no network, no disk."""

    def check(self, submission: Submission) -> Iterator[Finding]:
        """Yield the problems of this submission that show without submitting it."""

    def check_access(self) -> str:
        """Prove that the platform answers and that we may use it; return a sentence about it. Raises LoginProblem with
        all missing permissions, and ConfigProblem or PlatformRefused for what does not exist."""

    def max_excluded_nodes(self, job: Job) -> tuple[int | None, str]:
        """Return how many machines this job can exclude (`Job.exclude_nodes`), None if there is no known limit, and the
        advice for the user if that is not enough."""

    def submit(self, submission: Submission) -> JobId:
        """Start the job, or reattach to the existing job with this id, which is never started twice. After
        PlatformRefused it has no resources. After PlatformUnreachable, submitting again is safe."""

    def owns_job_id(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
        """Return whether this id belongs to the attempt of that name in that folder. Nodes may write to the run index,
        which stores ids: a forged one leads to another job, or another folder."""

    def status(self, job_id: JobId) -> JobStatus:
        """Return the state of the job; ABSENT if it never existed or was removed. After PlatformUnreachable it may be
        running."""

    def logs(self, job_id: JobId, position: str = "") -> LogPage:
        """Return the lines of all nodes after `position`, without waiting for more. No line is lost or repeated."""

    def cancel(self, job_id: JobId) -> None:
        """Stop the job, and return when a listing proves that no resources remain. A job that is gone is not an error.
        After PlatformUnreachable, cancelling again is safe."""

    def remaining_resources(self, job_id: JobId) -> tuple[str, ...]:
        """Return the descriptions of what `cancel` would remove; empty if the job is proved to be gone."""
