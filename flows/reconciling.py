"""Flow runs that Prefect calls cancelled while their jobs go on: a worker that died heard nothing, and ran no hook.

Prefect's server ends a flow run that has been "Cancelling" for five minutes by itself; nobody has then told the job's
platform. Whoever looks next (a worker that starts, an automation, `train-litgpt reap`) cancels the job.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from launcher.errors import ConfigProblem, LauncherError
from launcher.job import JobId
from launcher.listing import RunRow
from litgpt_demo.faults import LitgptDemoError

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

LOOK_BACK = timedelta(days=14)
"""How old a cancellation may be. Jobs run for weeks; what nobody has missed by then is for the platform's owner."""


@dataclass(frozen=True, kw_only=True)
class Reaped:
    """What was found of one cancelled flow run."""

    name: str
    cancelled: tuple[JobId, ...] = ()
    problem: str = ""
    """Why it could not be known whether a job of it runs."""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name} is cancelled, and whether a job of it runs cannot be known: {self.problem}"
        return f"{self.name} was cancelled and its job went on; cancelled now: {', '.join(self.cancelled)}"


async def reap_jobs(client: PrefectClient) -> list[Reaped]:
    """Cancel every job whose flow run Prefect calls cancelled; return those flow runs of which there was one.

    A problem with one flow run does not keep the others from being looked at.
    """
    from flows.hooks import cancelled_jobs

    found = []
    for flow_run in await _cancelled(client):
        try:
            jobs = await asyncio.to_thread(cancelled_jobs, flow_run.parameters, str(flow_run.id), live_only=True)
        except (LauncherError, LitgptDemoError) as error:
            found.append(Reaped(name=flow_run.name, problem=str(error)))
            continue
        if jobs:
            found.append(Reaped(name=flow_run.name, cancelled=tuple(jobs)))
    return found


def reap_here() -> list[Reaped]:
    """Do the same on the server of PREFECT_API_URL.

    Raises:
        ConfigProblem: there is none, or it does not answer.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    address = get_current_settings().api.url
    if not address:
        raise ConfigProblem("there is no Prefect server to ask: run `make serve` and set PREFECT_API_URL as it says")

    async def reap() -> list[Reaped]:
        async with get_client() as client:
            return await reap_jobs(client)

    try:
        return asyncio.run(reap())
    except httpx.TransportError as error:
        raise ConfigProblem(
            f"PREFECT_API_URL={address} does not answer ({error}); run `make serve`, or mend the address"
        ) from error


async def _cancelled(client: PrefectClient) -> list[Any]:
    """Every flow run of ours that was cancelled lately, the newest first."""
    from prefect.client.schemas.filters import (
        FlowFilter,
        FlowFilterName,
        FlowRunFilter,
        FlowRunFilterExpectedStartTime,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.client.schemas.sorting import FlowRunSort

    from flows.submission import KINDS

    page, found, size = 0, [], 200
    while True:
        some = await client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=list(KINDS))),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CANCELLED])),
                expected_start_time=FlowRunFilterExpectedStartTime(after_=datetime.now(UTC) - LOOK_BACK),
            ),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            limit=size,
            offset=page * size,
        )
        found += some
        if len(some) < size:
            return found
        page += 1


def contradicted(rows: Sequence[RunRow]) -> list[RunRow]:
    """Return the rows with a note where a job lives though Prefect calls its flow run cancelled.

    Prefect is asked only if a job lives and PREFECT_API_URL says where the server is. One that is away is passed over.
    """
    asked = [flow_run for row in rows if row.live for flow_run in row.flow_runs]
    if not asked or not os.environ.get("PREFECT_API_URL"):
        return list(rows)
    states = asyncio.run(_states(asked))
    return [_compared(row, states) for row in rows]


def _compared(row: RunRow, states: dict[str, str]) -> RunRow:
    known = [states[flow_run] for flow_run in row.flow_runs if flow_run in states]
    if not row.live or row.note or not known or any(state != "CANCELLED" for state in known):
        return row
    return replace(row, note=f"it goes on, though Prefect calls it cancelled: train-litgpt cancel {row.run}")


async def _states(flow_runs: Sequence[str]) -> dict[str, str]:
    """The state type of each flow run that the server knows; {} where it does not answer."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    ids: list[Any] = list(flow_runs)
    try:
        async with get_client(httpx_settings={"timeout": 5.0}) as client:
            found = await client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids)))
    except httpx.HTTPError:
        return {}
    return {str(flow_run.id): flow_run.state.type.value for flow_run in found if flow_run.state is not None}
