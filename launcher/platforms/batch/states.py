"""The states of Batch's jobs and tasks, in our words.

One task that has failed is the end of all: Batch would leave its peers alone, and they cannot go on without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A task that has ended."""

    node: int
    state: str
    code: int | None
    """None where Batch tells none: of those that were never begun."""
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
        return f"node {self.node} ended with {self.code}" + (f" ({self.why})" if self.why else "")


def ended(tasks: Sequence[Task]) -> list[Ended]:
    """Those of a job's tasks that have ended, the first first."""
    found = [_ended(task) for task in tasks if task.status.state.name in _ENDED]
    return sorted(found, key=lambda one: one.at)


def _ended(task: Task) -> Ended:
    events = list(task.status.status_events)
    told = [event for event in events if event.task_execution or event.task_state.name == "FAILED"]
    last = told[-1] if told else None
    code = last.task_execution.exit_code if last is not None else None
    if code is None and task.status.state.name == "SUCCEEDED":
        code = 0
    return Ended(
        node=node_of(task.name),
        state=task.status.state.name,
        code=code,
        at=_seconds(events[-1]) if events else 0.0,
        why=BATCH_CODES[code][1] if code in BATCH_CODES else "",
    )


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
    native, done = job.status.state.name, ended(tasks)
    state = STATES.get(native, JobState.UNKNOWN)
    words = [native, *_note(job, native)]
    failed = [one for one in done if one.failed]
    cancelled = _time_of(job, "CANCELLATION_IN_PROGRESS", "CANCELLED")
    first = failed[0] if failed else None
    if first is not None and cancelled is not None and cancelled < first.at:
        first = None  # ended because it was told to
    if first is not None and state is not JobState.SUCCEEDED:
        words.append(", ".join(str(one) for one in failed))
        everybody = len(done) == _task_count(job)
        waits = grace if state is JobState.RUNNING and not everybody and not first.lost else 0.0
        state = JobState.FAILED if now >= first.at + waits else JobState.RUNNING
    end = _end(job, done) if state in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED} else None
    if end is not None and state is not JobState.CANCELLED and now < end + settle:
        state = JobState.RUNNING
        words.append("its last lines are on their way")
    return JobStatus(
        state=state,
        native="; ".join(words),
        exit_codes={one.node: code for one in done if (code := _code(one, job)) is not None},
        # Machines are allocated when it runs, and not yet when it is scheduled; a task's image is pulled after that,
        # and nothing tells when (google.cloud.batch_v1.types.JobStatus.State).
        scheduled=_time_of(job, "RUNNING"),
        started=_time_of(job, "RUNNING"),
        ended=end,
    )


def _code(one: Ended, job: Job) -> int | None:
    """50005 is also what a barrier's timeout ends with: then it was peers that did not come."""
    if one.code != 50005:
        return one.code
    begun, limit = _time_of(job, "RUNNING"), _limit(job)
    in_time = limit is None or begun is None or one.at - begun < limit - 1
    return EXIT_CODES[Fault.NETWORK] if in_time else one.code


def _limit(job: Job) -> float | None:
    """Seconds that the job may run."""
    given: Any = job.task_groups[0].task_spec.max_run_duration
    return float(given.total_seconds()) if given else None


def _note(job: Job, native: str) -> list[str]:
    """Return the reason why a job waits, which Batch reports in an event: no quota, or no such machine just now."""
    if STATES.get(native) is not JobState.PENDING or not job.status.status_events:
        return []
    last = job.status.status_events[-1]
    return [] if _sets_state(last) else [last.description]


def _sets_state(event: StatusEvent) -> bool:
    return event.type_ == "STATUS_CHANGED"


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


def _task_count(job: Job) -> int:
    return int(sum(group.task_count for group in job.task_groups))
