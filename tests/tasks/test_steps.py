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
    records = [logger.makeRecord(logger.name, logging.ERROR, "", 0, *record) for record in (raised, ended)]
    assert all(map(logger.filter, records))
    messages = ["Encountered exception during execution: train:\n  no such setting", "Finished in state Failed"]
    assert [(record.getMessage(), record.exc_info) for record in records] == [(message, None) for message in messages]


def test_prefect_retries_no_task_that_starts_a_job() -> None:
    packages = [(package, found.name) for package in (tasks, flows) for found in pkgutil.iter_modules(package.__path__)]
    made = [value for package, name in packages for value in vars(import_module(f"{package.__name__}.{name}")).values()]
    steps = [value for value in made if isinstance(value, Task)]
    not_again = {"train", "submit-job", "await-job", "evaluate", "evaluate-checkpoint"}
    assert not_again == {value.name for value in steps if not value.retries}
    assert {value.retry_condition_fn for value in steps} == {worth_retrying}
    assert all(value.retry_jitter_factor for value in steps if value.retries), (
        "a sweep's trials would come back together"
    )
    assert {value.name for value in made if isinstance(value, Flow) and value.retries} == {"cancel-orphaned-jobs"}
