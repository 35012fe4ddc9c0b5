"""What is tried again, at one level: by a step's task, by its run's restarts, or by whoever waited for it."""

import logging
import pickle
import pkgutil
from importlib import import_module
from typing import Any

import pytest
from prefect import Flow, Task
from prefect.states import Failed

import flows
import tasks
from launcher.errors import ConfigProblem, JobCancelled, JobFailed, PlatformRefused, PlatformUnreachable
from litgpt_demo.errors import DataError, DiskFull, FailureClass, NetworkError, mark_no_retry
from tasks.steps import worth_retrying


def retried(error: Exception) -> bool:
    nothing: Any = None
    return worth_retrying(nothing, nothing, Failed(data=error))


@pytest.mark.parametrize("kind", [PlatformUnreachable, NetworkError, ConnectionError, OSError])
def test_step_retries_transient_errors_without_an_owner(kind: type[Exception]) -> None:
    error = kind("busy")
    assert retried(error)
    mark_no_retry(error)
    assert not retried(pickle.loads(pickle.dumps(error))), "as it comes from a worker's process"


def test_step_does_not_retry_final_errors() -> None:
    for kind in (ConfigProblem, JobCancelled, PlatformRefused, DataError, DiskFull, ValueError, FileNotFoundError):
        assert not retried(kind("as before")), kind
    assert not any(retried(JobFailed("the job's last attempt", fault=fault)) for fault in FailureClass)


def test_prefect_log_has_a_known_error_once_with_its_line_ends() -> None:
    logger, error = logging.getLogger("prefect.flow_runs"), ConfigProblem("train:\n  no such setting")
    raised = ("Encountered exception during execution: %r", (error,), (ConfigProblem, error, None))
    ended = (f"Finished in state Failed({str(error)!r})", (), None)
    told = [logger.makeRecord(logger.name, logging.ERROR, "", 0, *one) for one in (raised, ended)]
    assert all(map(logger.filter, told))
    messages = ["Encountered exception during execution: train:\n  no such setting", "Finished in state Failed"]
    assert [(one.getMessage(), one.exc_info) for one in told] == [(message, None) for message in messages]


def test_prefect_retries_no_task_that_starts_a_job() -> None:
    packages = [(package, found.name) for package in (tasks, flows) for found in pkgutil.iter_modules(package.__path__)]
    made = [one for package, name in packages for one in vars(import_module(f"{package.__name__}.{name}")).values()]
    steps = [one for one in made if isinstance(one, Task)]
    not_again = {"train", "submit-job", "await-job", "evaluate", "evaluate-checkpoint"}
    assert not_again == {one.name for one in steps if not one.retries}
    assert {one.retry_condition_fn for one in steps} == {worth_retrying}
    assert all(one.retry_jitter_factor for one in steps if one.retries), "a sweep's trials would come back together"
    assert {one.name for one in made if isinstance(one, Flow) and one.retries} == {"reap"}
