"""What the steps have in common: what is tried again, and how a task function behaves outside a run."""

from __future__ import annotations

import pickle
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from prefect import Flow, Task, flow, task
from prefect.states import Failed

import flows
import tasks
from deployments.bootstrap import automations
from launcher.errors import (
    ConfigProblem,
    ImageProblem,
    JobCancelled,
    JobFailed,
    LoginProblem,
    PlatformRefused,
    PlatformUnreachable,
)
from launcher.events import Listener, Note
from launcher.runs.diagnosis import ACTIONS, Action
from litgpt_demo.errors import (
    DataError,
    DiskFull,
    Fault,
    NetworkError,
    TrainLitgptError,
    UserError,
    fault_of_exception,
    give_up,
)
from tasks.steps import RETRIED, emit, own_tries, worth_retrying


def retried(error: Exception) -> bool:
    nothing: Any = None
    return worth_retrying(nothing, nothing, Failed(data=error))


@pytest.mark.parametrize(
    "kind",
    [
        ConfigProblem, ImageProblem, JobCancelled, LoginProblem, PlatformRefused, DataError, DiskFull, UserError,
        ValueError, FileNotFoundError, PermissionError, ImportError, KeyError, MemoryError,
    ],
)  # fmt: skip
def test_what_the_same_inputs_would_raise_again_is_not_tried_again(kind: type[Exception]) -> None:
    assert not retried(kind("as before"))


@pytest.mark.parametrize("kind", [PlatformUnreachable, NetworkError, ConnectionError, TimeoutError, OSError])
def test_what_may_pass_is_tried_again(kind: type[Exception]) -> None:
    assert retried(kind("busy"))


@pytest.mark.parametrize("kind", [PlatformUnreachable, NetworkError, ConnectionError])
def test_what_was_waited_for_where_it_was_raised_is_not_tried_again(kind: type[Exception]) -> None:
    give_up(error := kind("busy"))
    assert not retried(error)
    assert not retried(pickle.loads(pickle.dumps(error))), "as it comes from a worker's process"


# --- one level for each class of failures -----------------------------------------------------------------------------


def every(kind: type[TrainLitgptError]) -> Iterator[type[TrainLitgptError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from every(one)


def made_by_prefect(package: Any, kind: type[Any]) -> dict[str, Any]:
    """The tasks or flows of a package's modules, by their names."""
    modules = [import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)]
    return {one.name: one for module in modules for one in vars(module).values() if isinstance(one, kind)}


# The tasks that Prefect tries again. A task that starts jobs, or waits for one, is none of them: a silent platform is
# waited for by it (launcher.runs.waiting), and a job that ended badly is started again by its run.
TRIED_AGAIN = {
    "prepare-dataset", "build-image", "get-credentials", "collect-checkpoints", "publish-benchmark", "publish-dataset",
    "publish-report", "shards", "ship-code",
}  # fmt: skip


def test_prefect_tries_again_only_steps_that_start_no_job() -> None:
    found = made_by_prefect(tasks, Task)
    assert {name for name, task in found.items() if task.retries} == TRIED_AGAIN
    assert {task.retry_condition_fn for task in found.values()} == {worth_retrying}


def test_no_flow_is_tried_again_but_the_one_that_cancels_for_others() -> None:
    found = made_by_prefect(flows, Flow)
    assert {name for name, flow in found.items() if flow.retries} == {"reap"}


@pytest.mark.prefect
@pytest.mark.parametrize(("error", "tries"), [(NetworkError, 4), (ConnectionError, 4), (UserError, 1)])
def test_a_task_within_a_task_has_its_tries_once(error: type[Exception], tries: int) -> None:
    """A worker's share of a dataset is tried four times, and not four times four."""
    at_once = RETRIED | {"retry_delay_seconds": [0, 0, 0]}
    tried: list[None] = []

    @task(**at_once)
    def inner() -> None:
        tried.append(None)
        raise error("busy")

    @task(**at_once)
    def outer() -> None:
        with own_tries():
            inner()

    @flow(name="scene")
    def scene() -> None:
        outer()

    with pytest.raises(error):
        scene()
    assert len(tried) == tries


@pytest.mark.parametrize("kind", sorted(set(every(TrainLitgptError)), key=lambda kind: kind.__name__))
def test_no_class_of_errors_is_tried_again_at_two_levels(kind: type[TrainLitgptError]) -> None:
    """An error of a step is a matter of Prefect's tries, a class of a job's end one of the run's restarts."""
    error = kind.__new__(kind, "as before")  # some want more to be made
    by_user = fault_of_exception(error) in {Fault.USER, Fault.DATA}
    assert not (by_user and retried(error))
    assert not (by_user and ACTIONS.get(error.fault) is not Action.STOP)
    ended = JobFailed("the job's last attempt", fault=error.fault)  # what the restarts leave is the end
    assert not retried(ended)


def test_a_flow_run_that_failed_is_not_brought_back_by_the_automation_for_crashed_ones() -> None:
    [resume] = [one for one in automations(silence=None) if one["name"] == "resume-crashed"]
    assert resume["trigger"]["expect"] == ["prefect.flow-run.Crashed"]


def test_an_event_reaches_a_listener_outside_of_any_run() -> None:
    heard: list[object] = []
    with Listener(heard.append):
        emit(Note(what="hello"))
    assert heard == [Note(what="hello")]
