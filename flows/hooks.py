"""Hooks that run when a flow run is cancelled, and guards that keep a resumed one from running forever, or twice."""

from __future__ import annotations

import fcntl
import os
from typing import Any

from prefect import get_run_logger
from prefect.context import FlowRunContext
from prefect.exceptions import Abort
from prefect.logging.loggers import flow_run_logger
from prefect.runtime import flow_run as this_flow_run

from launcher.errors import ConfigProblem
from launcher.events import FlowRunStarted, report
from launcher.runs.attempts import Attempts, cancel_each, opening_beside
from launcher.runs.index import Index, platform_of, root_of
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.storage.private import make_temporary

# Automation `resume-crashed` brings a crashed orchestrator back; one that crashes this often has another problem.
MAX_RESUMES = 20


def deployed() -> bool:
    """Return True if this flow run is a deployment's. Prefect's `runtime.deployment` would ask the API each time."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None


def begin() -> None:
    """Begin a flow: check that it is the only orchestrator of its flow run, and not one of too many."""
    # A worker reports a killed engine twice, seconds apart. The second report can hit the resumed run, which is then
    # resumed once more while its engine is well.
    if deployed() and not taken(this_flow_run.id):
        get_run_logger().info("another process orchestrates this flow run already; this one stands down")
        raise Abort  # on which Prefect ends this process and leaves the run's state alone
    count = this_flow_run.run_count or 0
    if count > MAX_RESUMES:
        raise ConfigProblem(
            f"this flow run has been started {count} times, its orchestrator keeps crashing; read its logs, then "
            "start a new one: a training that is under way is adopted"
        )
    report(FlowRunStarted(id=str(this_flow_run.id)))


def taken(flow_run: str) -> bool:
    """Take a flow run for this process and until its end, unless another process of this machine has it."""
    lock = os.open(make_temporary("flow-runs") / f"{flow_run}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    return True


def cancel_jobs(flow: Any, flow_run: Any, state: Any) -> None:
    """Cancel every live job that a cancelled flow run started or took up, and prove that nothing of them is left.

    Prefect calls this with these very keyword names, in a new process that shares nothing with the flow: the jobs
    are found by the flow run's id, in the index of the root that its parameters name. A later attempt at the same run
    that is another flow run's is left alone.
    """
    logger, parameters = flow_run_logger(flow_run, flow), flow_run.parameters
    index, beside = Index.of(root_of(parameters)), opening_beside(platform_of(parameters))
    mine: list[Attempts] = []
    unread: list[TrainLitgptError] = []
    for run, attempt in index.followed_by(str(flow_run.id)).items():
        attempts = Attempts(index=index, run=run, open=beside)
        try:
            if attempts.records()[-1].attempt == attempt:
                mine.append(attempts)
        except TrainLitgptError as error:
            unread.append(error)
    cancelled, problems = cancel_each(mine, tell=logger.warning)
    if problems := problems + unread:  # all others are cancelled by now
        raise type(problems[0])("; ".join(map(str, problems)), fault=problems[0].fault) from problems[0]
    for job_id in cancelled:
        logger.info("cancelled %s; nothing of it is left", job_id)
    if not cancelled:
        logger.info("there was no live job to cancel")
