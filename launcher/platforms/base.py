"""The interface of a platform, which runs multi-node jobs. Waiting, tailing and retrying are written once above it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from launcher.job import Job, JobId, JobStatus, LogPage, Submission
from litgpt_demo.findings import Finding


class Capability(StrEnum):
    """Features that a job may need and a platform may lack."""

    IMAGES = "images"
    """Nodes run a container image."""
    ANYWHERE = "anywhere"
    """Every machine that reaches the platform can ask for its jobs, not only the one that submitted them."""


class Avoidable(NamedTuple):
    """The machines that a job can be told to avoid."""

    most: int | None
    """The number of them; None where no limit is known."""
    fix: str
    """A user's way to be rid of a bad machine where that does not do."""


CONSOLE = "https://console.cloud.google.com"
"""The address of Google Cloud's console."""

BY_HAND = "LITGPT_COMMAND"
"""The variable with the command that an interactive node waits for, in a shell that has been opened there."""


def by_hand_finding(platform: str) -> Finding:
    """Return the finding on a job whose nodes only wait (`platform.interactive`)."""
    what = "platform.interactive: the nodes only wait, and hold their machines until the job is cancelled"
    fix = f'enter each of them by `train-litgpt shell RUN NODE`, and run there: eval "${BY_HAND}"'
    return Finding("warning", f"{platform}.interactive", what, fix)


class Entrance(NamedTuple):
    """The way into a running node: a program of this machine, whose terminal then is the node's."""

    words: tuple[str, ...]
    env: Mapping[str, str] = MappingProxyType({})
    """The variables that it has besides this process's own."""
    folder: str | None = None
    """The folder that it starts in; None is this process's."""


@runtime_checkable
class Enterable(Protocol):
    """A platform whose running nodes can be entered."""

    def entrance(self, job_id: JobId, node: int, *, terminal: bool) -> Entrance:
        """Return the way into a node of a job that runs.

        Args:
            terminal: a person types; else the commands come from a pipe.

        Raises:
            ConfigProblem: there is no such node, or it has none.
            PlatformUnreachable: no answer.
        """


@runtime_checkable
class HasPages(Protocol):
    """A platform that shows its jobs in a browser."""

    def pages(self, job_id: JobId) -> Mapping[str, str]:
        """Return the pages of a job that was submitted: what each one is to its address; {} where none is known.

        Raises:
            LauncherError: what the addresses are made of cannot be asked for.
        """


@runtime_checkable
class TakesArrays(Protocol):
    """A platform that takes several jobs as one."""

    def submit_together(self, submissions: Sequence[Submission], *, name: str, parallel: int) -> None:
        """Start the jobs, of which it runs so many at a time, or adopt those that are there.

        Args:
            name: what all of them together are called.

        Raises:
            PlatformRefused: the platform does not take them as one; nothing was left behind.
            PlatformUnreachable: no answer; submitting again is safe.
        """


class Blow(StrEnum):
    """The ways in which others hit a job on its platform."""

    CANCEL = "cancel"
    KILL = "kill"
    """The processes of all its nodes die at once, and its platform is as surprised as they are."""
    NOTICE = "notice"
    """It is told that its time is over, and may save."""


@runtime_checkable
class Hittable(Protocol):
    """A platform on which drills can hit a job by what every user may do there."""

    def hit(self, job_id: JobId, blow: Blow) -> None:
        """Hit the job as somebody else would, if it lives.

        Raises:
            PlatformUnreachable: no answer.
        """


class Platform(Protocol):
    """Five verbs over jobs; `check`, which says beforehand what can be known to go wrong, and `left`, what remains."""

    name: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]]
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

    def avoidable(self, job: Job) -> Avoidable:
        """Return how many machines this job can be told to avoid (`Job.exclude_nodes`), as far as that is known."""

    def submit(self, submission: Submission) -> JobId:
        """Start the job, or adopt it: a job with the same id that is there already is never started twice.

        Raises:
            PlatformRefused: the platform said no; nothing was left behind.
            PlatformUnreachable: no answer; submitting again is safe.
        """

    def gave(self, job_id: JobId, *, attempt_name: str, directory: str) -> bool:
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

    def left(self, job_id: JobId) -> tuple[str, ...]:
        """List what of a job holds machines or processes, or will, in words. () where it is proved that nothing does.

        What a platform keeps of a job that has ended, as its record or its logs, is not listed.

        Raises:
            PlatformUnreachable, PlatformRefused: it cannot be listed.
        """
