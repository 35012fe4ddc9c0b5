"""Flow runs whose state in Prefect is wrong.

Prefect reports them as cancelled while their jobs still run: a worker that died received no event, and ran no hook.
Prefect's server itself ends a flow run after five minutes of "Cancelling", but does not cancel the job. The next check
(a worker that starts, an automation, `train-litgpt cleanup`) cancels the job.

Or Prefect reports them as running, but their orchestrator died while the server was down: it received no crash, and its
automation for missing heartbeats has lost them. `train-litgpt serve` checks their leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
from prefect import flow, get_run_logger
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import TERMINAL_STATES, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Crashed

from flows.parameters import KINDS, platform_of, root_of
from flows.server import use_served
from launcher.errors import PlatformUnreachable
from launcher.job import JobId
from launcher.runs.attempts import Attempts, platform_opener
from launcher.runs.index import Index
from launcher.runs.lease import LEASE_TIMEOUT, Lease
from launcher.runs.listing import RunRow
from litgpt_demo.errors import TrainLitgptError, is_marked_no_retry

# The greatest age of a flow run that is checked. Jobs run for weeks; older ones are up to the platform's owner.
_LOOK_BACK = timedelta(days=14)
_PAGE = 200  # flow runs; Prefect's server returns no more at once

ORPHANED = "Its orchestrator is dead: it holds the run's lease and gives no sign of life"
"""The message of a crash that `mark_dead_flow_runs` finds; automation `resume-killed` matches its beginning."""


@dataclass(frozen=True, kw_only=True)
class OrphanedJobs:
    """The jobs of one cancelled flow run that still ran."""

    name: str
    cancelled: tuple[JobId, ...] = ()
    problem: TrainLitgptError | None = None
    """The reason why it is not known whether a job of the flow run still runs."""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name} is cancelled, but a job of it may still be running: {self.problem}"
        return f"{self.name} was cancelled, but its job was still running. Cancelled now: {', '.join(self.cancelled)}"


async def end_orphaned_jobs() -> list[OrphanedJobs]:
    """Cancel every live job whose flow runs are cancelled in Prefect; return the flow runs of these jobs."""
    orphaned = []
    async with get_client() as client:
        for flow_run in await _lately(client, StateType.CANCELLED):
            try:
                jobs = await _cancel_jobs_of(client, flow_run.parameters, str(flow_run.id))
            except TrainLitgptError as error:
                orphaned.append(OrphanedJobs(name=flow_run.name, problem=error))
            else:
                if jobs:
                    orphaned.append(OrphanedJobs(name=flow_run.name, cancelled=tuple(jobs)))
    return orphaned


# An automation starts this flow after the cancellation of a flow run.
@flow(name="cancel-orphaned-jobs", persist_result=False, retries=15, retry_delay_seconds=60)
async def cancel_orphaned_jobs() -> list[str]:
    """Cancel every job that still runs although its flow run is cancelled; returns a line for each."""
    flow_runs = await end_orphaned_jobs()
    unreachable = []
    for jobs in flow_runs:
        get_run_logger().warning(str(jobs))
        if isinstance(jobs.problem, PlatformUnreachable) and not is_marked_no_retry(jobs.problem):
            unreachable.append(str(jobs))
    if unreachable:  # a platform may answer a minute later, and nothing else may check these jobs
        raise PlatformUnreachable("; ".join(unreachable))
    return [str(jobs) for jobs in flow_runs]


async def all_flow_runs(client: PrefectClient, **wanted: Any) -> list[Any]:
    """Return the flow runs of our flows, newest first: all, or those with these fields of Prefect's filter."""
    found: list[Any] = []
    while True:
        page = await client.read_flow_runs(
            flow_filter=filters.FlowFilter(name=filters.FlowFilterName(any_=list(KINDS))),
            flow_run_filter=filters.FlowRunFilter(**wanted),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=_PAGE, offset=len(found),
        )  # fmt: skip
        found += page
        if len(page) < _PAGE:
            return found


async def _lately(client: PrefectClient, state: StateType) -> list[Any]:
    since = filters.FlowRunFilterExpectedStartTime(after_=datetime.now(UTC) - _LOOK_BACK)
    in_state = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=[state]))
    return await all_flow_runs(client, state=in_state, expected_start_time=since)


async def _cancel_jobs_of(client: PrefectClient, parameters: Mapping[str, Any], flow_run: str) -> list[JobId]:
    cancelled: list[JobId] = []
    index, opener = Index.of(root_of(parameters)), platform_opener(platform_of(parameters))
    own = await asyncio.to_thread(index.attempts_of_flow_run, flow_run)
    if not own:
        return cancelled
    flow_runs = await asyncio.to_thread(index.flow_runs_of_attempts)
    for run, attempt in own.items():
        attempts = Attempts(index=index, run=run, open_platform=opener)
        live = await asyncio.to_thread(attempts.live)
        orchestrators = flow_runs[run, attempt]
        if live is None or live.number != attempt:
            continue
        if is_abandoned(orchestrators, await _states(client, orchestrators)):
            cancelled += await asyncio.to_thread(attempts.cancel)
    return cancelled


def is_abandoned(flow_runs: Sequence[str], states: Mapping[str, str]) -> bool:
    """Return whether a job's flow runs were cancelled, and all have ended. A flow run that the server does not know
    may still orchestrate the job."""
    known = [states.get(flow_run, "UNKNOWN") for flow_run in flow_runs]
    return "CANCELLED" in known and all(state in TERMINAL_STATES for state in known)


async def mark_dead_flow_runs(
    client: PrefectClient, *, wait: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(2 * LEASE_TIMEOUT)
) -> list[str]:
    """Set flow runs to crashed that Prefect calls running although they hold the lease of a run without a heartbeat;
    return their names."""
    running = {str(flow_run.id): flow_run for flow_run in await _lately(client, StateType.RUNNING)}
    before = await asyncio.to_thread(lambda: {number: _beats(number, flow_run) for number, flow_run in running.items()})
    if not any(before.values()):
        return []
    await wait()
    dead = []
    for number, flow_run in running.items():
        is_silent = before[number] and before[number] == await asyncio.to_thread(_beats, number, flow_run)
        if is_silent and (await client.read_flow_run(flow_run.id)).state_type is StateType.RUNNING:
            await client.set_flow_run_state(flow_run.id, Crashed(message=ORPHANED))
            dead.append(flow_run.name)
    return dead


def _beats(number: str, flow_run: Any) -> dict[str, tuple[int, int | None]]:
    with suppress(TrainLitgptError, KeyError):
        index = Index.of(root_of(flow_run.parameters))
        held = {run: Lease(index, run).beat_of(number) for run in index.attempts_of_flow_run(number)}
        return {run: beat for run, beat in held.items() if beat is not None}
    return {}


def flag_state_conflicts(rows: Sequence[RunRow]) -> list[RunRow]:
    """Return the rows, with a note if a job is live although Prefect's server, if it answers, has it cancelled."""
    flow_runs = [flow_run for row in rows if row.is_live for flow_run in row.flow_runs]

    async def read_states() -> dict[str, str]:
        async with get_client(httpx_settings={"timeout": 5.0}) as client:
            return await _states(client, flow_runs)

    use_served()
    try:
        states = asyncio.run(read_states())
    except httpx.HTTPError:
        return list(rows)
    flagged = []
    for row in rows:
        if row.is_live and not row.note and is_abandoned(row.flow_runs, states):
            note = f"it still runs, but Prefect calls it cancelled; to cancel it: train-litgpt cancel {row.run}"
            row = replace(row, note=note)
        flagged.append(row)
    return flagged


async def _states(client: PrefectClient, flow_runs: Sequence[str]) -> dict[str, str]:
    found = await all_flow_runs(client, id=filters.FlowRunFilterId(any_=[UUID(flow_run) for flow_run in flow_runs]))
    return {str(flow_run.id): flow_run.state.type.value for flow_run in found if flow_run.state is not None}
