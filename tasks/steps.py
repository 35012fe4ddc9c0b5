"""The options that every step shares as a Prefect task: its events, its retries, and no caching.

Prefect's own caching stays off. The manifest of a step's output decides whether the step is done. It holds across
machines, servers and Prefect versions, and cannot be stale.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.exceptions import MissingContextError
from prefect.utilities.annotations import opaque as prefect_opaque

from launcher import events
from launcher.errors import JobFailed
from launcher.events import Event, MetricsKnown, MetricsRow, Note, Output, StepDone, StepProgress, StepStarted, report
from litgpt_demo.documents import Unreadable
from litgpt_demo.errors import FailureClass, TrainLitgptError, fault_of_exception, is_marked_no_retry, mark_no_retry

P = ParamSpec("P")
T = TypeVar("T")

# Failure classes that may be gone a minute later. The same inputs raise all others again, so that a retry only delays
# the message.
#
# Each wait has one owner. A client repeats a single request for some seconds. A wait of minutes ends with an error that
# nothing else retries (litgpt_demo.errors.mark_no_retry):
#
#   a bucket that does not answer      litgpt_demo.storage, 10 minutes
#   a platform that does not answer    launcher.runs.waiting, 15 minutes
#   a builder that does not answer     launcher.images, 10 minutes
#   a worker's share of a dataset      the worker (tasks.dataset)
#   a job that has ended badly         the restarts of its run (launcher.runs.restarts)
#   an orchestrator that has died      the automation `resume-crashed`, or the same command
#   any other error of a step          the step's task (step_task)
TRANSIENT = {
    FailureClass.UNKNOWN,
    FailureClass.NODE,
    FailureClass.NETWORK,
    FailureClass.PREEMPTED,
    FailureClass.HANG,
    FailureClass.UNREACHABLE,
    FailureClass.SERVER,
}


def is_transient(error: object) -> bool:
    """Return whether a retry may help, by the error's class. A job that failed has had its attempts."""
    if not isinstance(error, Exception) or is_marked_no_retry(error):
        return False
    return fault_of_exception(error) in TRANSIENT and not isinstance(error, JobFailed | TypeError | ValueError)


def worth_retrying(task: Any, task_run: TaskRun, state: State[Any]) -> bool:
    """Return whether a task's error may be gone when it is tried again."""
    return is_transient(state.data)


@contextmanager
def no_outer_retry() -> Iterator[None]:
    """Mark errors raised inside as final, because the inner task has retried them: the outer task must not."""
    try:
        yield
    except Exception as error:
        mark_no_retry(error)
        raise


def opaque(value: T) -> T:
    """Wrap a large argument of a task, so that Prefect does not search it for futures."""
    return cast(T, prefect_opaque(value))


# Seconds before each retry: the time that a bucket or an API server usually needs to recover.
DELAYS = [2.0, 15.0, 60.0]
_JITTER = 0.3  # the random share of a delay, so that the trials of a sweep do not retry together


def step_task(name: str, *, run_name: str = "", retry: bool = True) -> Callable[[Callable[P, T]], Task[P, T]]:
    """Return a decorator that makes a step's task. Use `retry=False` for tasks that start or follow a job."""
    delays = DELAYS if retry else []
    return task(
        name=name, task_run_name=run_name or name, cache_policy=NO_CACHE, persist_result=False,
        retries=len(delays), retry_delay_seconds=delays, retry_jitter_factor=_JITTER, retry_condition_fn=worth_retrying,
    )  # fmt: skip


def without_traceback(record: logging.LogRecord) -> bool:
    """Shorten Prefect's record of a known error to its message, of which Prefect would log the traceback four times."""
    if record.exc_info and isinstance(record.exc_info[1], TrainLitgptError):
        record.exc_info, record.msg = None, record.msg.replace("%r", "%s")
    elif str(record.msg).startswith("Finished in state Failed"):
        record.msg = "Finished in state Failed"
    return True


for name in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(name).addFilter(without_traceback)


def emit(event: Event) -> None:
    """Hand an event to the listeners of this process, and log it in the Prefect run."""
    report(event)
    if isinstance(event, MetricsRow | MetricsKnown | Output | StepProgress):
        return  # too many for Prefect's log, which gets them in batches (tasks.training) and as artifacts
    try:
        logger = get_run_logger()
    except MissingContextError:  # a test has called the function of a task
        return
    match event:
        case StepStarted(what=what) if what:  # otherwise Prefect's own record is enough
            logger.info("%s: %s", event.step, what)
        case StepDone():
            suffix = " (already done)" if event.reused else ""
            logger.info("%s: %s%s", event.step, event.what, suffix)
        case Note():
            message = event.what
            trial = events.TRIAL.get()
            if trial:
                message = f"{trial}: {message}"
            logger.log(logging.getLevelNamesMapping()[event.severity.upper()], "%s", message)


def emit_milestone(milestone: str, run: str, root: str, **facts: Any) -> None:
    """Emit Prefect's event `train-litgpt.<milestone>` of a run (docs/reference/prefect.md)."""
    if FlowRunContext.get() is None:  # there is no server, and Prefect would start one
        return
    resource = {"prefect.resource.id": f"train-litgpt.run.{run}", "prefect.resource.name": run}
    related = {"prefect.resource.id": f"train-litgpt.root.{root}", "prefect.resource.role": "root"}
    emit_event(f"train-litgpt.{milestone}", resource=resource, related=[related], payload=facts)


def warn(message: str) -> None:
    emit(Note(what=message, severity="warning"))


def report_unreadable(bad: Unreadable) -> None:
    """Emit one warning with how much could not be read, if anything could not."""
    if bad.count:
        warn(str(bad))
