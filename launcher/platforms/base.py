"""The interface of a platform, which runs multi-node jobs. Waiting, tailing and retrying are written once above it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

from launcher.job import Job, JobId, JobStatus, LogPage, Submission
from litgpt_demo.errors import Finding


class Platform(Protocol):
    """Five verbs over jobs; `check`, which says beforehand what can be known to go wrong, and `left`, what remains."""

    name: ClassVar[str]
    is_remote_service: ClassVar[bool]
    """Every machine that reaches the platform can ask for its jobs, not only the one that submitted them."""
    poll_seconds: ClassVar[float]
    """Seconds between two looks at a job that is followed."""

    def render(self, job: Job) -> Submission:
        """Exactly what will be sent, `job_id` included. Pure: no clock, no network, no disk."""

    def check(self, submission: Submission) -> Iterator[Finding]:
        """Yield what blocks this submission, as far as can be seen without submitting it."""

    def check_access(self) -> str:
        """Prove that the platform answers and lets us use it; what was found, in words.

        Raises:
            LoginProblem: credentials or permissions are missing; all are named.
            ConfigProblem, PlatformRefused: what the config names is not there.
            PlatformUnreachable: no answer.
        """

    def max_excluded_nodes(self, job: Job) -> tuple[int | None, str]:
        """Return how many machines this job can be told to avoid (`Job.exclude_nodes`), None where no limit is known;
        and a user's way to be rid of a bad machine where that does not do."""

    def submit(self, submission: Submission) -> JobId:
        """Start the job, or adopt it: a job with the same id that is there already is never started twice.

        Raises:
            PlatformRefused: the platform said no; nothing was left behind.
            PlatformUnreachable: no answer; submitting again is safe.
        """

    def owns_job_id(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
        """Return whether this is the id that the attempt of that name, kept in that folder, has here.

        Ids come back from the run index, which nodes may write: a forged one leads to another job, or another folder.
        """

    def status(self, job_id: JobId) -> JobStatus:
        """Return the state of the job; ABSENT for one that never was or has been removed.

        Raises:
            PlatformUnreachable: no answer; the job may well be running.
        """

    def logs(self, job_id: JobId, position: str = "") -> LogPage:
        """The lines of all nodes after `position`, without waiting for more. Whole lines only, none twice, none lost.

        Raises:
            PlatformUnreachable: no answer; ask again with the same position.
        """

    def cancel(self, job_id: JobId) -> None:
        """Stop the job and return when nothing of it is left, proved by listing. Already gone is success.

        Raises:
            PlatformUnreachable: no answer, or something would not go; cancelling again is safe.
        """

    def remaining_resources(self, job_id: JobId) -> tuple[str, ...]:
        """List what there is of a job, in words: what `cancel` would remove. () where it is proved gone.

        Raises:
            PlatformUnreachable, PlatformRefused: it cannot be listed.
        """
