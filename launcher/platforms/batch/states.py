"""The states of Batch's jobs and tasks, in our words.

One task that has failed is the end of all: Batch would leave its peers alone, and they cannot go on without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
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


class Ended(NamedTuple):
    """A task that has ended, in the last of its lives."""

    node: int
    failed: bool
    code: int | None
    """None where Batch tells none: of those that were not begun, or not begun again."""
    at: float  # seconds since the epoch
    told: str


def ended(job: Job, tasks: Sequence[Task]) -> list[Ended]:
    """Return the ended tasks of a job, earliest first.

    An event has an exit code only where a life has failed
    (https://cloud.google.com/batch/docs/reference/rest/v1/StatusEvent): of a task that ended well it is the code of an
    earlier life, after which Batch restarted it in place.
    """
    begins = {"PENDING", "ASSIGNED", "RUNNING"}  # a life; what stands before it is of an earlier one
    found = []
    for task in tasks:
        state, events = task.status.state.name, task.status.status_events
        if state not in OVER:
            continue
        code: int | None = 0 if state == "SUCCEEDED" else None
        if state == "FAILED":
            last = takewhile(lambda event: event.task_state.name not in begins, reversed(events))
            code = next((event.task_execution.exit_code for event in last if event.task_execution), None)
        why = BATCH_CODES[code][1] if code in BATCH_CODES else ""
        if code == _TOO_LONG and _waited_in_vain(job, events):
            why = f"Batch's {_TOO_LONG}: its peers were not there within platform.gather"
            code = EXIT_CODES[FailureClass.NETWORK]
        at, node = _seconds(events[-1]) if events else 0.0, int(task.name.rpartition("/")[2])
        how = "failed without an exit code" if code is None else f"ended with {code}"
        told = f"node {node} {how}" + (f" ({why})" if why else "")
        found.append(Ended(node, state == "FAILED", code, at, told))
    return sorted(found, key=lambda one: one.at)


def _waited_in_vain(job: Job, events: Sequence[StatusEvent]) -> bool:
    """Whether it was at a barrier: Batch has one code for both timeouts
    (https://cloud.google.com/batch/docs/set-timeouts)."""
    spec = job.task_groups[0].task_spec
    if not any("barrier" in one and one.timeout and not one.ignore_exit_status for one in spec.runnables):
        return False
    begun = [_seconds(event) for event in events if event.task_state.name == "RUNNING"]
    limit: Any = spec.max_run_duration
    return not begun or _seconds(events[-1]) - begun[-1] < (limit.total_seconds() if limit else LONGEST) - 1


def status_of(job: Job, tasks: Sequence[Task], *, now: float, grace: float, settle: float) -> JobStatus:
    """The job's state at `now`, in seconds since the epoch; BatchPlatform says what `grace` and `settle` are."""
    native, done, events = job.status.state.name, ended(job, tasks), job.status.status_events
    state, words = state_of(job), [native]
    if state is JobState.PENDING and events and events[-1].type_ != "STATUS_CHANGED":
        words.append(events[-1].description)  # why it waits: no quota, or no such machine just now
    failed = [one for one in done if one.failed]
    cancelled = _time_of(job, "CANCELLATION_IN_PROGRESS", "CANCELLED")
    told_to = bool(failed) and cancelled is not None and cancelled < failed[0].at
    if failed and not told_to and state is not JobState.SUCCEEDED:
        words.append(", ".join(one.told for one in failed))
        everybody = len(done) == sum(group.task_count for group in job.task_groups)
        lost = failed[0].code in BATCH_CODES  # its VM was: nothing more comes from it
        waits = grace if state is JobState.RUNNING and not everybody and not lost else 0.0
        state = JobState.FAILED if now >= failed[0].at + waits else JobState.RUNNING
    end = None
    if state.is_final:
        end = _time_of(job, "SUCCEEDED", "FAILED", "CANCELLED") or (done[-1].at if done else 0.0)
        if state is not JobState.CANCELLED and now < end + settle:
            state = JobState.RUNNING
            words.append("its last lines are on their way")
    lives = [sum(event.task_state.name == "RUNNING" for event in task.status.status_events) for task in tasks]
    # Machines are allocated when it runs, and not yet when it is scheduled; a task's image is pulled after that, and
    # nothing tells when (google.cloud.batch_v1.types.JobStatus.State).
    runs = _time_of(job, "RUNNING")
    return JobStatus(
        state=state,
        native="; ".join(words),
        exit_codes={one.node: one.code for one in done if one.code is not None},
        scheduled=runs,
        started=runs,
        ended=end,
        restarts=sum(max(0, count - 1) for count in lives),  # by Batch, of tasks in place
        # Batch does not end the peers of a lost node.
        has_running_nodes=state is JobState.FAILED and native == "RUNNING",
    )


def _time_of(job: Job, *states: str) -> float | None:
    # Events say "Job state is set from QUEUED to SCHEDULED for job …".
    named = re.compile(rf" to ({'|'.join(states)})( |$)")
    return next((_seconds(event) for event in job.status.status_events if named.search(event.description)), None)


def _seconds(event: StatusEvent) -> float:
    return float(event.event_time.timestamp())
