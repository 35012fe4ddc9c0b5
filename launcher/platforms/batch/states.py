"""The states of Batch's jobs and tasks as states of a job.

One failed task is the end of the job. Batch lets the other tasks run, but they cannot continue without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.job import JobState, JobStatus
from launcher.platforms.batch.settings import LONGEST
from litgpt_demo.errors import BATCH_CODES, EXIT_CODES, FailureClass

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

OVER = {"SUCCEEDED", "FAILED", "UNEXECUTED"}
"""The states of a task that has ended."""
_TOO_LONG = 50005  # of a task, or one of its runnables, that has run longer than it may


def state_of(job: Job) -> JobState:
    return STATES.get(job.status.state.name, JobState.UNKNOWN)


class EndedTask(NamedTuple):
    """A task that has ended, in the last of its lives."""

    node: int
    failed: bool
    code: int | None
    """None if Batch reports no code: the task was not started, or not started again."""
    at: float  # seconds since the epoch
    message: str


def ended(job: Job, tasks: Sequence[Task]) -> list[EndedTask]:
    found = [_ended(job, task) for task in tasks if task.status.state.name in OVER]
    return sorted(found, key=lambda task: task.at)


def _ended(job: Job, task: Task) -> EndedTask:
    state, events = task.status.state.name, task.status.status_events
    node, at = int(task.name.rpartition("/")[2]), 0.0
    if events:
        at = _seconds(events[-1])
    code: int | None = 0 if state == "SUCCEEDED" else None
    # An event has an exit code only if a life has failed
    # (https://cloud.google.com/batch/docs/reference/rest/v1/StatusEvent). The code of a task that succeeded is the one
    # of an earlier life, after which Batch restarted the task in place.
    if state == "FAILED":
        for event in reversed(events):
            if event.task_state.name in {"PENDING", "ASSIGNED", "RUNNING"}:  # the begin of the last life
                break
            if event.task_execution:
                code = event.task_execution.exit_code
                break
    why = BATCH_CODES[code][1] if code in BATCH_CODES else ""
    if code == _TOO_LONG and _waited_in_vain(job, events):
        why = f"Batch's {_TOO_LONG}: its peers did not start within platform.startup_timeout"
        code = EXIT_CODES[FailureClass.NETWORK]
    message = f"node {node} ended with {code}"
    if code is None:
        message = f"node {node} failed without an exit code"
    if why:
        message = f"{message} ({why})"
    return EndedTask(node, state == "FAILED", code, at, message)


def _waited_in_vain(job: Job, events: Sequence[StatusEvent]) -> bool:
    """Return whether a task ended at a barrier. Batch has one code for both timeouts
    (https://cloud.google.com/batch/docs/set-timeouts)."""
    spec = job.task_groups[0].task_spec
    if not any("barrier" in part and part.timeout and not part.ignore_exit_status for part in spec.runnables):
        return False
    begun = [_seconds(event) for event in events if event.task_state.name == "RUNNING"]
    limit: Any = spec.max_run_duration
    return not begun or _seconds(events[-1]) - begun[-1] < (limit.total_seconds() if limit else LONGEST) - 1


def status_of(job: Job, tasks: Sequence[Task], *, now: float, grace_period: float, settle: float) -> JobStatus:
    """Return the job's state at `now`, in seconds since the epoch; BatchPlatform explains the other two."""
    native, done, events = job.status.state.name, ended(job, tasks), job.status.status_events
    state, details = state_of(job), [native]
    if state is JobState.PENDING and events and events[-1].type_ != "STATUS_CHANGED":
        details.append(events[-1].description)  # why it waits: no quota, or no such machine at the moment
    failed = [task for task in done if task.failed]
    cancelled = _time_of(job, "CANCELLATION_IN_PROGRESS", "CANCELLED")
    was_cancelled = bool(failed) and cancelled is not None and cancelled < failed[0].at
    if failed and not was_cancelled and state is not JobState.SUCCEEDED:
        details.append(", ".join(task.message for task in failed))
        deadline = failed[0].at
        all_done = len(done) == sum(group.task_count for group in job.task_groups)
        lost_its_vm = failed[0].code in BATCH_CODES  # then no report comes from it
        if state is JobState.RUNNING and not all_done and not lost_its_vm:
            deadline += grace_period
        state = JobState.FAILED if now >= deadline else JobState.RUNNING
    end = None
    if state.is_final:
        end = _time_of(job, "SUCCEEDED", "FAILED", "CANCELLED")
        if end is None:
            end = max((task.at for task in done), default=0.0)
        if state is not JobState.CANCELLED and now < end + settle:
            state = JobState.RUNNING
            details.append("its last lines are on their way")
    lives = [sum(event.task_state.name == "RUNNING" for event in task.status.status_events) for task in tasks]
    # Machines are allocated when the job runs, not when it is scheduled. A task's image is pulled after that, and
    # Batch does not report when (google.cloud.batch_v1.types.JobStatus.State).
    runs = _time_of(job, "RUNNING")
    return JobStatus(
        state=state,
        native="; ".join(details),
        exit_codes={task.node: task.code for task in done if task.code is not None},
        scheduled=runs,
        started=runs,
        ended=end,
        restarts=sum(max(0, count - 1) for count in lives),  # by Batch, of tasks in place
        has_running_nodes=state is JobState.FAILED and native == "RUNNING",
    )


def _time_of(job: Job, *states: str) -> float | None:
    # Events say "Job state is set from QUEUED to SCHEDULED for job …".
    named = re.compile(rf" to ({'|'.join(states)})( |$)")
    return next((_seconds(event) for event in job.status.status_events if named.search(event.description)), None)


def _seconds(event: StatusEvent) -> float:
    return float(event.event_time.timestamp())
