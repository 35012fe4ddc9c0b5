"""What happens when a flow run is cancelled, and what keeps a crashing one from being resumed for ever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect.logging.loggers import flow_run_logger
from prefect.runtime import flow_run as this_flow_run
from pydantic import BaseModel

from launcher.attempts import attempts_of
from launcher.config import RunConfig, ScriptConfig, SweepConfig, overridden, validated
from launcher.errors import ConfigProblem
from launcher.sweeps import trials

# Automation `resume-crashed` brings a crashed orchestrator back; one that crashes this often has another problem.
MAX_RESUMES = 20


def refuse_endless_resumes() -> None:
    """Stop a flow run that has been started too often.

    Raises:
        ConfigProblem: more than MAX_RESUMES starts.
    """
    count = this_flow_run.run_count or 0
    if count > MAX_RESUMES:
        raise ConfigProblem(
            f"this flow run has been started {count} times, its orchestrator keeps crashing; read its logs, then "
            "start a new one: a training that is under way is adopted"
        )


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
    if "script" in document:
        return [validated(ScriptConfig, document, where="the parameters")]
    if "sweep" in document:
        return [trial.config for trial in trials(validated(SweepConfig, document, where="the parameters"))]
    return [validated(RunConfig, document, where="the parameters")]


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value
