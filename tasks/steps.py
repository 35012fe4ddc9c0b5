"""The options that every step shares as a Prefect task: its events, its retries, and no caching.

Prefect's own caching stays off: whether a step is done is decided by the manifest at the step's key, which holds across
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
from prefect.utilities.annotations import opaque

from launcher import events
from launcher.errors import JobFailed
from launcher.events import Event, MetricsKnown, MetricsRow, Note, Output, StepDone, StepProgress, StepStarted, report
from litgpt_demo.documents import Unreadable
from litgpt_demo.errors import FailureClass, TrainLitgptError, fault_of_exception, is_marked_no_retry, mark_no_retry

P = ParamSpec("P")
T = TypeVar("T")

# Classes of failures that may be gone a minute later. The same inputs will raise all others again, and trying them anew
# only delays the message.
#
# Whatever is waited for is waited for at one level. A single request is repeated for some seconds by its client. What
# takes minutes has one owner, whose error is retried nowhere (litgpt_demo.errors.mark_no_retry):
#
#   a bucket that does not answer      litgpt_demo.storage, 10 minutes
#   a platform that does not answer    launcher.runs.waiting, 15 minutes, from the first question about a job to its end
#   a builder that does not answer     launcher.images, 10 minutes
#   a worker's share of a dataset      the worker (tasks.dataset)
#   a job that has ended badly         the restarts of its run (launcher.runs.restarts)
#   an orchestrator that has died      the automation `resume-crashed`, or the same command
#   anything else of a step            the step's task (step_task)
TRANSIENT = {
    FailureClass.UNKNOWN,
    FailureClass.NODE,
    FailureClass.NETWORK,
    FailureClass.PREEMPTED,
    FailureClass.HANG,
    FailureClass.UNREACHABLE,
    FailureClass.SERVER,
}


def may_pass(error: object) -> bool:
    """Decide by the class that a verdict would name. A job that failed has had its attempts."""
    if not isinstance(error, Exception) or is_marked_no_retry(error):
        return False
    return fault_of_exception(error) in TRANSIENT and not isinstance(error, JobFailed | TypeError | ValueError)


def worth_retrying(task: Any, task_run: TaskRun, state: State[Any]) -> bool:
    """Return whether a task's error may be gone when it is tried again."""
    return may_pass(state.data)


@contextmanager
def own_tries() -> Iterator[None]:
    """Call a task within another one's: what it raises has had its tries, and the outer task has none for it."""
    try:
        yield
    except Exception as error:
        mark_no_retry(error)
        raise


def as_it_is(value: T) -> T:
    """Hand a task a large argument as it is: Prefect would look for futures in each of its thousands of parts."""
    return cast(T, opaque(value))


# Seconds before each further try: what a bucket or an API server usually needs to come back.
DELAYS = [2.0, 15.0, 60.0]
_JITTER = 0.3  # the part of a delay that chance adds or takes away: the trials of a sweep do not come back together


def step_task(name: str, *, run_name: str = "", again: bool = True) -> Callable[[Callable[P, T]], Task[P, T]]:
    """Make a task of a function, with what all of ours share; one that is not tried `again` starts or follows a job."""
    delays = DELAYS if again else []
    return task(
        name=name, task_run_name=run_name or name, cache_policy=NO_CACHE, persist_result=False,
        retries=len(delays), retry_delay_seconds=delays, retry_jitter_factor=_JITTER, retry_condition_fn=worth_retrying,
    )  # fmt: skip


def without_traceback(record: logging.LogRecord) -> bool:
    """A known error is a message for a person, told once. Prefect would log forty lines of our code with it, for task
    and flow, and write each of its ends of lines as \\n, there and again with the state."""
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
        return  # too many for Prefect's log; they arrive there batched (tasks.training) and as artifacts
    try:
        logger = get_run_logger()
    except MissingContextError:  # a task function called plainly, as tests do
        return
    match event:
        case StepStarted(what=what) if what:  # else the task run itself says so
            logger.info("%s: %s", event.step, what)
        case StepDone():
            logger.info("%s: %s%s", event.step, event.what, " (found done)" if event.reused else "")
        case Note():
            whose = f"{trial}: " if (trial := events.TRIAL.get()) else ""
            logger.log(logging.getLevelNamesMapping()[event.severity.upper()], "%s%s", whose, event.what)


def reach(milestone: str, run: str, root: str, **facts: Any) -> None:
    """Tell Prefect that a run reached a milestone, as an event `train-litgpt.<milestone>` (docs/notices.md)."""
    if FlowRunContext.get() is not None:  # else there is no server, and Prefect would start one
        resource = {"prefect.resource.id": f"train-litgpt.run.{run}", "prefect.resource.name": run}
        place = {"prefect.resource.id": f"train-litgpt.root.{root}", "prefect.resource.role": "root"}
        emit_event(f"train-litgpt.{milestone}", resource=resource, related=[place], payload=facts)


def report_unreadable(bad: Unreadable) -> None:
    """Emit one warning with how much could not be read, if anything could not."""
    if bad.count:
        emit(Note(what=str(bad), severity="warning"))
