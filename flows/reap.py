"""The jobs of cancelled flow runs, should any still run: an automation starts this where a flow run was cancelled."""

from __future__ import annotations

from prefect import flow, get_run_logger

from flows.reconciling import reap_jobs
from launcher.errors import PlatformUnreachable
from litgpt_demo.errors import was_given_up


@flow(name="reap", persist_result=False, retries=15, retry_delay_seconds=60)
async def reap() -> list[str]:
    """Cancel every job that goes on though its flow run is cancelled; returns what was found, in words."""
    found = await reap_jobs()
    for reaped in found:
        get_run_logger().warning(str(reaped))
    silent = [one for one in found if isinstance(one.problem, PlatformUnreachable) and not was_given_up(one.problem)]
    if silent:  # a platform may answer a minute later, and nobody else may look
        raise PlatformUnreachable("; ".join(map(str, silent)))
    return [str(reaped) for reaped in found]
