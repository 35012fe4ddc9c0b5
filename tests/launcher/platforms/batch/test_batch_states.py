"""The meaning of Batch's events of a task."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from google.cloud.batch_v1 import types

from launcher.platforms.batch.states import ended

JOB = types.Job(task_groups=[types.TaskGroup(task_count=1)])


def task(*events: tuple[str, int | None]) -> types.Task:
    """A task with these events: the state that it went into, and the exit code that is told with it."""
    told = [
        types.StatusEvent(task_state=state, task_execution=code and types.TaskExecution(exit_code=code))
        for state, code in events
    ]
    status = types.TaskStatus(state=events[-1][0], status_events=told)
    return types.Task(name="projects/p/locations/l/jobs/j/taskGroups/group0/tasks/0", status=status)


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([("RUNNING", None), ("FAILED", 40)], 40),
        ([("RUNNING", None), ("FAILED", 50001), ("PENDING", None), ("RUNNING", None), ("FAILED", 43)], 43),
        ([("RUNNING", None), ("FAILED", 50001), ("PENDING", None), ("FAILED", None)], None),
        ([("RUNNING", None), ("PENDING", 50001), ("FAILED", None)], None),
        ([("RUNNING", None), ("FAILED", 50001), ("PENDING", None), ("RUNNING", None), ("FAILED", None)], None),
    ],
)
def test_a_task_that_fails_has_the_code_of_its_last_life_alone(
    events: Sequence[tuple[str, int | None]], code: int | None
) -> None:
    """One that was preempted and did not come back for want of machines is no preemption, which is restarted free."""
    (one,) = ended(JOB, [task(*events)])
    assert one.code == code
    assert one.lost is (code == 50001)
