"""The trials of a sweep as runs of a deployment, in its work pool: begun once, watched from here, and cancelled."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterIdempotencyKey,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State, StateType
from prefect.deployments import arun_deployment
from prefect.exceptions import ObjectNotFound
from prefect.logging.loggers import flow_run_logger
from prefect.states import Cancelling

from flows.hooks import cancel_jobs
from flows.parameters import config_from
from flows.submission import queue_of, require_same_paths
from launcher import errors
from launcher.config import SweepConfig
from launcher.errors import ConfigProblem, JobCancelled, LauncherError
from launcher.events import Note
from launcher.runs.run import Run
from launcher.runs.trials import sweep_name
from litgpt_demo.errors import Fault, TrainLitgptError
from litgpt_demo.export import exported
from litgpt_demo.metrics import Row
from litgpt_demo.runs import read_metrics
from tasks.steps import emit

_LOOK = 2.0  # seconds between two looks at a trial's metrics and state
_REVIVED = 60.0
"""Seconds in which our server starts a crashed flow run again (flows/orphans.py); another one never does."""
BLAMELESS = frozenset({Fault.UNREACHABLE, Fault.SERVER})
"""The faults of which a trial is not to blame: it goes on when the sweep is started again."""
_CRASHES = 3  # flow runs of one trial that may crash; the trial is stopped then, and goes on when the sweep does
_LIVE = [state for state in StateType if state not in TERMINAL_STATES]
_RAISED = "Flow run encountered an exception: "  # Prefect's words before the class and the text of an error


async def require_deployment(config: SweepConfig) -> None:
    """See that the deployment that is to run the trials is there, and warn where nobody takes its runs.

    Raises:
        ConfigProblem: there is no such deployment, or a path of the config would mean another folder there.
    """
    if (name := config.sweep.deployment) is None:
        return
    async with get_client() as client:
        try:
            deployment = await client.read_deployment_by_name(name)
        except ObjectNotFound as error:
            raise ConfigProblem(
                f"sweep.deployment={name} is not on Prefect's server; `make serve` makes the shipped ones"
            ) from error
        require_same_paths(config, deployment, Path.cwd())
        waits = await queue_of(client, name, deployment, config.model_dump(mode="json"))
    if waits.why:
        emit(Note(what=f"the trials wait: {waits.why}", severity="warning"))


async def run_deployed(
    deployment: str,
    run: Run,
    *,
    sweep: str,
    number: int,
    name: str,
    on_row: Callable[[Row], None],
    stop: Callable[[], bool],
    resumed: str | None = None,
) -> tuple[str, TrainLitgptError | None]:
    """Run a trial as a run of its deployment; return the id of the flow run, and the error that it ended with.

    One that was begun before, by whichever process, is taken up by its idempotency key, and one that has come to its
    good end is not run again.

    Args:
        sweep: the sweep's name, which its flow runs have as a tag.
        number: the trial's number.
        name: the flow run's name.
        on_row: called with each row of metrics as it comes.
        stop: returns whether the trial is to end, also one that no worker has taken yet.
        resumed: the sweep's flow run, if its orchestrator has died: a flow run that it began, and that failed since by
            its own fault, is the trial's end too.
    """
    crashes, seen = 0, 0
    async with get_client() as client:
        for again in itertools.count():
            key = f"{sweep}-{number}-{again}"
            flow_run = await _known(client, key)
            if flow_run is not None and not await _counts(client, flow_run, run, resumed):
                continue
            if flow_run is None:
                begun = await arun_deployment(
                    deployment,
                    parameters={**run.config.model_dump(mode="json"), "overrides": {}},
                    flow_run_name=name,
                    idempotency_key=key,
                    tags=[sweep],
                    timeout=0,
                )
                flow_run = await client.read_flow_run(begun.id)
            state, seen = await _ended(client, flow_run.id, run, name=name, seen=seen, on_row=on_row, stop=stop)
            crashes += state.is_crashed()
            if not state.is_crashed() or crashes == _CRASHES or await asyncio.to_thread(stop):
                return str(flow_run.id), error_of(state)
    raise AssertionError  # counting has no end


async def _known(client: PrefectClient, key: str, *, of: str | None = None) -> FlowRun | None:
    """Return the flow run with this idempotency key, if this flow run began it where one is given."""
    wanted = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key]))
    if of is not None:
        wanted.parent_flow_run_id = FlowRunFilterParentFlowRunId(any_=[UUID(of)])
    return next(iter(await client.read_flow_runs(flow_run_filter=wanted)), None)


async def _counts(client: PrefectClient, flow_run: FlowRun, run: Run, resumed: str | None) -> bool:
    """Return whether a flow run of an earlier time lives, or has ended so that no other is needed."""
    state = flow_run.state
    if state is None or not state.is_final():
        return True
    if state.is_completed():
        return await asyncio.to_thread(exported, run.storage) is not None
    error = error_of(state)
    if resumed is None or not state.is_failed() or error is None or error.fault in BLAMELESS:
        return False
    return await _known(client, str(flow_run.idempotency_key), of=resumed) is not None


async def _ended(
    client: PrefectClient,
    flow_run: UUID,
    run: Run,
    *,
    name: str,
    seen: int,
    on_row: Callable[[Row], None],
    stop: Callable[[], bool],
) -> tuple[State[Any], int]:
    """Wait for the end of a flow run; return its last state, and how many rows have been handed on.

    A server that is away for a while ends nothing: the worker and the job go on as well.
    """
    state: State[Any] | None = None
    crashed_for, asked = 0.0, False
    while True:
        rows = await asyncio.to_thread(read_metrics, run.storage)
        for row in rows[seen:]:
            on_row(row)
        seen = max(seen, len(rows))
        with suppress(httpx.HTTPError):
            found = await client.read_flow_run(flow_run)
            if found.name != name:  # a flow names its run after its config when it begins
                await client.update_flow_run(flow_run, name=name)
            state = found.state
            if state is not None and not state.is_final() and not asked and await asyncio.to_thread(stop):
                await client.set_flow_run_state(flow_run, Cancelling(message="its sweep ends"))
                asked = True
        if state is not None and state.is_final():
            crashed_for += _LOOK
            if not state.is_crashed() or crashed_for > _REVIVED or await asyncio.to_thread(stop):
                return state, seen
        else:
            crashed_for = 0.0
        await asyncio.sleep(_LOOK)


def error_of(state: State[Any]) -> TrainLitgptError | None:
    """Return the error that a flow run ended with, None where it came to its good end.

    What it raised itself keeps its class, which decides whether the trial goes on with the next start of its sweep.
    """
    if state.is_completed():
        return None
    said = state.message or f"its flow run ended as {state.name}"
    if state.is_cancelled():
        return JobCancelled(said)
    if state.is_crashed():
        return errors.PlatformUnreachable(f"its flow run crashed {_CRASHES} times, the last one: {said}")
    name, _, text = said.removeprefix(_RAISED).partition(": ")
    kind = getattr(errors, name, None) if said.startswith(_RAISED) else None
    if isinstance(kind, type) and issubclass(kind, TrainLitgptError):
        return kind(text)
    return LauncherError(said.removeprefix(_RAISED))


# --- the end of a sweep whose process is gone -------------------------------------------------------------------------


async def cancel_sweep(flow: Any, flow_run: Any, state: Any) -> None:
    """Cancel what is left of a cancelled sweep: the flow runs of its deployment, then the jobs of its own trials.

    Prefect calls this in a new process, which knows of the sweep what its flow run was given.
    """
    config = config_from(SweepConfig, flow_run.parameters)
    if config.sweep.deployment is not None:
        ended = await cancel_flow_runs(sweep_name(config))
        flow_run_logger(flow_run, flow).info("asked %d flow runs of its trials to end", len(ended))
    await asyncio.to_thread(cancel_jobs, flow, flow_run, state)


async def cancel_flow_runs(sweep: str) -> Sequence[UUID]:
    """Ask Prefect to cancel the trials of a sweep that live or wait in a work pool; return their flow runs.

    A worker then ends the process of each, whose own hook cancels its job.
    """
    wanted = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[sweep]), state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_LIVE))
    )
    async with get_client() as client:
        found = [one.id for one in await client.read_flow_runs(flow_run_filter=wanted)]
        for one in found:
            await client.set_flow_run_state(one, Cancelling(message="its sweep was cancelled"))
    return found
