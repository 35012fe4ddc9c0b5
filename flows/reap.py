"""The jobs of cancelled flow runs, should any still run: an automation starts this where a flow run was cancelled."""

from __future__ import annotations

from prefect import flow, get_run_logger

from flows.reconciling import reap_jobs
from launcher.errors import PlatformUnreachable


@flow(name="reap", persist_result=False, retries=15, retry_delay_seconds=60)
async def reap() -> list[str]:
    """Cancel every job that goes on though its flow run is cancelled; returns what was found, in words.

    Raises:
        PlatformUnreachable: a platform does not answer; the next try is a minute later, for nobody else may look.
    """
    found = await reap_jobs()
    for reaped in found:
        get_run_logger().warning(str(reaped))
    if silent := [reaped for reaped in found if reaped.silent]:
        raise PlatformUnreachable("; ".join(map(str, silent)))
    return [str(reaped) for reaped in found]
