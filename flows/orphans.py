"""Flow runs whose orchestrator died with its worker: our server finds them by itself, and starts each again once.

Prefect's automations hear events, and one that is lost while Redis is being restarted is never heard of again. Here
an orchestrator writes its sign of life into its flow run, by the same requests that change its state, and each API
server looks at the flow runs in the database. A row is locked while it is judged, so that two servers start it once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI
    from prefect.client.schemas.objects import FlowRun

SIGN = "train-litgpt.orchestrator"
"""The label of a flow run that names its orchestrator's machine and process."""

RESUMED = "resume-on-crash"
"""The tag of a flow run that is started again after a crash; deployments give it."""

SIGN_SECONDS = 20.0
SILENCE = timedelta(seconds=90)
"""The silence that counts as death. With the looks it leaves a worker 20 s of two minutes to take the flow run."""

_LOOK = timedelta(seconds=10)
_BEATS = timedelta(seconds=75)
"""Two signs of life of a worker (PREFECT_WORKER_HEARTBEAT_SECONDS), and some time for them to come."""
_REPORTED = timedelta(seconds=5)
"""The age of a crash that is acted on: a worker reports a killed process twice, seconds apart."""
_LOOK_BACK = timedelta(hours=1)
"""The greatest age of a crash that is acted on; what crashed while nobody looked is for people to judge."""
_NEVER = datetime(1970, 1, 1, tzinfo=UTC)
_LOGGER = logging.getLogger("prefect.server.orphans")  # Prefect shows what is below `prefect`


# --- in the orchestrator ----------------------------------------------------------------------------------------------


def give_signs(flow_run: FlowRun) -> None:
    """Show from now on that this process orchestrates a flow run, until that has ended."""
    Thread(target=copy_context().run, args=(_give_signs, flow_run), name="signs of life", daemon=True).start()


def _give_signs(flow_run: FlowRun) -> None:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    sign: dict[str, bool | int | float | str] = {SIGN: f"{socket.gethostname()}:{os.getpid()}"}
    while flow_run.state is None or not flow_run.state.is_final():
        # Prefect's own retries would wait for minutes when the server is there again.
        # Whatever fails here, another sign follows: silence would be taken for this process's death.
        with (
            suppress(Exception),
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True, httpx_settings={"timeout": SIGN_SECONDS / 2}) as client,
        ):
            client.update_flow_run_labels(flow_run.id, sign)
        time.sleep(SIGN_SECONDS)


# --- in the server ----------------------------------------------------------------------------------------------------


def watched(app: FastAPI) -> FastAPI:
    """Return Prefect's server, which looks for orphans from now on as long as it runs."""
    serve = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with serve(app) as state:
            looking = asyncio.create_task(_watch())
            try:
                yield state
            finally:
                looking.cancel()

    app.router.lifespan_context = lifespan
    return app


async def _watch() -> NoReturn:
    since = looked = _NEVER
    while True:
        try:
            now = datetime.now(UTC)
            since, looked = heard_since(since, looked=looked, now=now, heard=await _last_beat()), now
            silent_before = now - SILENCE if now - since >= SILENCE else _NEVER
            for name in await revive(silent_before=silent_before, crashed_before=now - _REPORTED):
                _LOGGER.warning("The orchestrator of flow run %s is gone; its state says what was done about it", name)
        except Exception as error:  # of the database, which may be away: the next look is soon
            _LOGGER.warning("Nobody looked for orphans just now: %r", error)
        await asyncio.sleep(_LOOK.total_seconds())


def heard_since(since: datetime, *, looked: datetime, now: datetime, heard: datetime) -> datetime:
    """Return the moment since which living orchestrators could make themselves heard, and somebody looked.

    Where workers cannot reach the server neither can flow runs, whose silence then says nothing: a proxy was away, a
    certificate had expired, the database or all of this machine slept.

    Args:
        since: what the look before has returned.
        looked: the time of that look.
        heard: the last sign of life of any worker.
    """
    return since if now - looked <= 3 * _LOOK and now - heard <= _BEATS else now


async def _last_beat() -> datetime:
    import sqlalchemy as sa
    from prefect.server.database import provide_database_interface

    db = provide_database_interface()
    async with db.session_context() as session:
        return await session.scalar(sa.select(sa.func.max(db.Worker.last_heartbeat_time))) or _NEVER


async def revive(*, silent_before: datetime, crashed_before: datetime) -> list[str]:
    """Start every orphan again; return their names.

    One without the tag `resume-on-crash`, as a command's own flow run, has crashed and no more.

    Args:
        silent_before: who gave no sign of life since then is dead.
        crashed_before: a crash that was reported before is acted on.
    """
    import sqlalchemy as sa
    from prefect.server.database import provide_database_interface
    from prefect.server.schemas.states import StateType

    db = provide_database_interface()
    run = db.FlowRun
    silent = run.state_type.in_([StateType.PENDING, StateType.RUNNING]) & (run.updated < silent_before)
    crashed = (run.state_type == StateType.CRASHED) & run.state_timestamp.between(
        crashed_before - _LOOK_BACK, crashed_before
    )
    async with db.session_context() as session:
        found = (await session.execute(sa.select(run.id, run.tags, run.labels).where(silent | crashed))).all()
    ours = [one.id for one in found if RESUMED in one.tags or SIGN in (one.labels or {})]
    names: list[str] = []
    for one in ours:
        try:
            names += await _revive(one, silent | crashed)
        except Exception as error:  # of Redis, or of this one alone: the next look is soon
            _LOGGER.warning("Flow run %s is an orphan and could not be started again just now: %r", one, error)
    return names


async def _revive(flow_run: UUID, orphaned: Any) -> list[str]:
    """Start one again if it is still an orphan; return its name, or nothing if there was nothing to do."""
    import sqlalchemy as sa
    from prefect.server import models
    from prefect.server.database import provide_database_interface
    from prefect.server.orchestration.core_policy import CoreFlowPolicy
    from prefect.server.schemas.states import AwaitingRetry, Crashed, State, StateType

    db = provide_database_interface()
    async with db.session_context(begin_transaction=True, with_for_update=True) as session:
        wanted = sa.select(db.FlowRun).where(db.FlowRun.id == flow_run, orphaned).with_for_update(of=db.FlowRun)
        if (run := await session.scalar(wanted)) is None:
            return []
        states = list[State]()
        if run.state_type != StateType.CRASHED:
            states.append(Crashed(message=f"No sign of life from its orchestrator for {SILENCE.total_seconds():.0f} s"))
        if RESUMED in run.tags and run.deployment_id is not None:
            states.append(AwaitingRetry(message="Its orchestrator died"))
        for state in states:
            await models.flow_runs.set_flow_run_state(session, flow_run, state, flow_policy=CoreFlowPolicy)
        return [str(run.name)] if states else []
