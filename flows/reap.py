"""The jobs of cancelled flow runs, should any still run: an automation starts this where a flow run was cancelled."""

from __future__ import annotations

from prefect import flow, get_client, get_run_logger

from flows.reconciling import reap_jobs


@flow(name="reap", persist_result=False)
async def reap() -> list[str]:
    """Cancel every job that goes on though its flow run is cancelled; returns what was found, in words."""
    async with get_client() as client:
        found = [str(reaped) for reaped in await reap_jobs(client)]
    for line in found:
        get_run_logger().warning(line)
    return found
