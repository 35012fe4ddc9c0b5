"""What happens when a flow run is cancelled, and what keeps a resumed one from running for ever, or twice."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.exceptions import Abort
from prefect.logging.loggers import flow_run_logger
from prefect.runtime import deployment
from prefect.runtime import flow_run as this_flow_run
from pydantic import BaseModel

from launcher.attempts import attempts_of
from launcher.benchmark import BenchmarkConfig
from launcher.config import RunConfig, ScriptConfig, SweepConfig, overridden, validated
from launcher.errors import ConfigProblem
from launcher.events import FlowRunStarted, tell
from launcher.sweeps import trials

# Automation `resume-crashed` brings a crashed orchestrator back; one that crashes this often has another problem.
MAX_RESUMES = 20


def begin() -> None:
    """What every flow does first: see that it is the only orchestrator of its flow run, and not one of too many.

    Raises:
        Abort: another one is at work on this machine. Prefect then ends this process and leaves the run's state alone.
        ConfigProblem: more than MAX_RESUMES starts.
    """
    # A worker reports a killed engine twice, seconds apart. The second report can hit the resumed run, which is then
    # resumed once more while its engine is well.
    if deployment.id and not taken(this_flow_run.id):
        get_run_logger().info("another process orchestrates this flow run already; this one stands down")
        raise Abort
    count = this_flow_run.run_count or 0
    if count > MAX_RESUMES:
        raise ConfigProblem(
            f"this flow run has been started {count} times, its orchestrator keeps crashing; read its logs, then "
            "start a new one: a training that is under way is adopted"
        )
    tell(FlowRunStarted(id=str(this_flow_run.id)))


def taken(flow_run: str) -> bool:
    """Take a flow run for this process and until its end, unless another process of this machine has it."""
    lock = os.open(Path(tempfile.gettempdir()) / f"train-litgpt-{flow_run}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    return True


def cancel_jobs(flow: Any, flow_run: Any, state: Any) -> None:
    """Cancel the jobs of a cancelled flow run, and prove that nothing of them is left.

    Prefect calls this with these very keyword names, in a new process that shares nothing with the flow: the jobs
    are found again from the parameters alone, because their names follow from them.
    """
    logger = flow_run_logger(flow_run, flow)
    cancelled = [job_id for config in configs_of(flow_run.parameters) for job_id in attempts_of(config).cancel()]
    for job_id in cancelled:
        logger.info("cancelled %s; nothing of it is left", job_id)
    if not cancelled:
        logger.info("there was no live job to cancel")


def configs_of(parameters: Mapping[str, Any]) -> list[RunConfig] | list[ScriptConfig]:
    """What a flow run was started with: the config of its job, or of every trial."""
    plain = {name: _plain(value) for name, value in parameters.items() if name != "overrides"}
    document = overridden(plain, parameters.get("overrides") or {})
    if "measure" in document:
        return validated(BenchmarkConfig, document, where="the parameters").jobs()
    if "script" in document:
        return [validated(ScriptConfig, document, where="the parameters")]
    if "sweep" in document:
        return [trial.config for trial in trials(validated(SweepConfig, document, where="the parameters"))]
    return [validated(RunConfig, document, where="the parameters")]


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value
