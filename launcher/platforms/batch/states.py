"""The states of Batch's jobs and tasks, in our words.

One task that has failed is the end of all: Batch would leave its peers alone, and they cannot go on without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from launcher.job import JobState, JobStatus
from litgpt_demo.errors import BATCH_CODES, EXIT_CODES, Fault

if TYPE_CHECKING:
    from google.cloud.batch_v1.types import Job, StatusEvent, Task

STATES: Mapping[str, JobState] = {
    "QUEUED": JobState.PENDING,  # also where there is no quota for it
    "SCHEDULED": JobState.PENDING,  # VMs are made
    "RUNNING": JobState.RUNNING,
    "SUCCEEDED": JobState.SUCCEEDED,
    "FAILED": JobState.FAILED,
    "CANCELLATION_IN_PROGRESS": JobState.RUNNING,  # containers still end
    "CANCELLED": JobState.CANCELLED,
    "DELETION_IN_PROGRESS": JobState.RUNNING,  # ABSENT when it is done
}

_ENDED = {"SUCCEEDED", "FAILED", "UNEXECUTED"}

_TOO_LONG = 50005
"""The exit code of a task, or one of its runnables, that has run longer than it may."""
_LONGEST = timedelta(days=14)
"""The time after which Batch ends a task that has no limit of its own."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A task that has ended, in the last of its lives."""

    node: int
    state: str
    code: int | None
    """None where Batch tells none: of those that were not begun, or not begun again."""
    at: float
    """Seconds since the epoch."""
    why: str

    @property
    def failed(self) -> bool:
        return self.state == "FAILED"

    @property
    def lost(self) -> bool:
        """The VM was, so that there is nothing more to come from it."""
        return self.code in BATCH_CODES

    def __str__(self) -> str:
        how = "failed without an exit code" if self.code is None else f"ended with {self.code}"
        return f"node {self.node} {how}" + (f" ({self.why})" if self.why else "")


def ended(job: Job, tasks: Sequence[Task]) -> list[Ended]:
    """Those of a job's tasks that have ended, the first first."""
    found = [_ended(job, task) for task in tasks if task.status.state.name in _ENDED]
    return sorted(found, key=lambda one: one.at)


def _ended(job: Job, task: Task) -> Ended:
    code = _code(task)
    why = BATCH_CODES[code][1] if code in BATCH_CODES else ""
    if code == _TOO_LONG and _waited_in_vain(job, task):
        code, why = EXIT_CODES[Fault.NETWORK], f"Batch's {_TOO_LONG}: its peers were not there within platform.gather"
    events = task.status.status_events
    return Ended(
        node=node_of(task.name),
        state=task.status.state.name,
        code=code,
        at=_seconds(events[-1]) if events else 0.0,
        why=why,
    )


def _code(task: Task) -> int | None:
    """Return the exit code of a task's last life.

    An event has one only where a life has failed (https://cloud.google.com/batch/docs/reference/rest/v1/StatusEvent):
    of a task that ended well it is the code of an earlier life, after which Batch restarted it in place.
    """
    state, events = task.status.state.name, task.status.status_events
    if state != "FAILED":
        return 0 if state == "SUCCEEDED" else None
    # A life begins with one of these, and what stands before it is of an earlier one.
    last = takewhile(lambda event: event.task_state.name not in {"PENDING", "ASSIGNED", "RUNNING"}, reversed(events))
    return next((event.task_execution.exit_code for event in last if event.task_execution), None)


def _waited_in_vain(job: Job, task: Task) -> bool:
    """Return whether a task that ran too long did so at a barrier: Batch has one code for both timeouts.

    https://cloud.google.com/batch/docs/set-timeouts
    """
    spec = job.task_groups[0].task_spec
    if not any("barrier" in one and one.timeout and not one.ignore_exit_status for one in spec.runnables):
        return False
    events = task.status.status_events
    begun = [_seconds(event) for event in events if event.task_state.name == "RUNNING"]
    limit: Any = spec.max_run_duration or _LONGEST
    return not begun or _seconds(events[-1]) - begun[-1] < limit.total_seconds() - 1


def restarts_of(tasks: Sequence[Task]) -> int:
    """Return how often Batch has restarted tasks in place."""
    lives = (sum(event.task_state.name == "RUNNING" for event in task.status.status_events) for task in tasks)
    return sum(max(0, count - 1) for count in lives)


def node_of(name: str) -> int:
    """The number at the end of a task's name: …/taskGroups/group0/tasks/3."""
    return int(name.rpartition("/")[2])


def status_of(job: Job, tasks: Sequence[Task], *, now: float, grace: float, settle: float) -> JobStatus:
    """The job's state.

    Args:
        now: seconds since the epoch.
        grace: seconds that the peers of a node that failed have to end by themselves, and to say what they saw.
        settle: seconds that the last log lines may take to come.
    """
    native, done = job.status.state.name, ended(job, tasks)
    state = STATES.get(native, JobState.UNKNOWN)
    words = [native, *_note(job, native)]
    failed = [one for one in done if one.failed]
    cancelled = _time_of(job, "CANCELLATION_IN_PROGRESS", "CANCELLED")
    first = failed[0] if failed else None
    if first is not None and cancelled is not None and cancelled < first.at:
        first = None  # ended because it was told to
    if first is not None and state is not JobState.SUCCEEDED:
        words.append(", ".join(str(one) for one in failed))
        everybody = len(done) == sum(group.task_count for group in job.task_groups)
        waits = grace if state is JobState.RUNNING and not everybody and not first.lost else 0.0
        state = JobState.FAILED if now >= first.at + waits else JobState.RUNNING
    end = _end(job, done) if state in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED} else None
    if end is not None and state is not JobState.CANCELLED and now < end + settle:
        state = JobState.RUNNING
        words.append("its last lines are on their way")
    return JobStatus(
        state=state,
        native="; ".join(words),
        exit_codes={one.node: one.code for one in done if one.code is not None},
        # Machines are allocated when it runs, and not yet when it is scheduled; a task's image is pulled after that,
        # and nothing tells when (google.cloud.batch_v1.types.JobStatus.State).
        scheduled=_time_of(job, "RUNNING"),
        started=_time_of(job, "RUNNING"),
        ended=end,
        restarts=restarts_of(tasks),
        lingers=state is JobState.FAILED and native == "RUNNING",  # Batch leaves the peers of a lost node alone
    )


def _note(job: Job, native: str) -> list[str]:
    """Return the reason why a job waits, which Batch reports in an event: no quota, or no such machine just now."""
    if STATES.get(native) is not JobState.PENDING or not job.status.status_events:
        return []
    last = job.status.status_events[-1]
    return [] if last.type_ == "STATUS_CHANGED" else [last.description]


def _time_of(job: Job, *states: str) -> float | None:
    """When the job went into one of the states. Events say "Job state is set from QUEUED to SCHEDULED for job …"."""
    for event in job.status.status_events:
        if any(f" to {state} " in f"{event.description} " for state in states):
            return _seconds(event)
    return None


def _end(job: Job, done: Sequence[Ended]) -> float:
    last = done[-1].at if done else 0.0
    return _time_of(job, "SUCCEEDED", "FAILED", "CANCELLED") or last


def _seconds(event: StatusEvent) -> float:
    moment: Any = event.event_time
    return float(moment.timestamp()) if moment else 0.0
