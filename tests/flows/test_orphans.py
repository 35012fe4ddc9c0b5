"""Orphans, as our server finds them in its database and starts them again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import flow, runtime
from prefect.client import orchestration
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelling, Completed, Crashed, Failed, Pending, Running, Scheduled
from waiting import until

from flows import orphans
from flows.hooks import begin
from flows.orphans import RESUMED, SIGN, heard_since, revive

NOW = datetime(2026, 11, 23, 3, tzinfo=UTC)
LOOKED, HEARD = NOW - timedelta(seconds=10), NOW - timedelta(seconds=30)
LONG_SINCE, NEVER = NOW - timedelta(hours=1), datetime(1970, 1, 1, tzinfo=UTC)
Make = Callable[..., UUID]


@pytest.mark.parametrize(
    ("looked", "heard", "since"),
    [
        pytest.param(LOOKED, HEARD, LONG_SINCE, id="as ever"),
        pytest.param(NOW - timedelta(minutes=5), HEARD, NOW, id="the server or its database slept"),
        pytest.param(LOOKED, NOW - timedelta(minutes=5), NOW, id="no worker reaches the server"),
        pytest.param(LOOKED, NEVER, NOW, id="there never was a worker"),
    ],
)
def test_silence_counts_only_while_somebody_could_be_heard(looked: datetime, heard: datetime, since: datetime) -> None:
    assert heard_since(LONG_SINCE, looked=looked, now=NOW, heard=heard) == since


@pytest.fixture(scope="module")
def deployment(prefect_api: None) -> UUID:
    async def create() -> UUID:
        async with get_client() as client:
            flow_id = await client.create_flow_from_name("orphans")
            return await client.create_deployment(flow_id, f"of {uuid4()}")

    return asyncio.run(create())


@pytest.fixture
def flow_run(deployment: UUID) -> Make:
    """Makes a flow run of a deployment, in a state."""

    def make(state: State[Any], *, tags: tuple[str, ...] = (RESUMED,)) -> UUID:
        async def create() -> UUID:
            async with get_client() as client:
                made = await client.create_flow_run_from_deployment(deployment, tags=tags)
                await client.set_flow_run_state(made.id, state, force=True)
                return made.id

        return asyncio.run(create())

    return make


def read(flow_run: UUID) -> FlowRun:
    async def with_client() -> FlowRun:
        async with get_client() as client:
            return await client.read_flow_run(flow_run)

    return asyncio.run(with_client())


def states_of(flow_run: UUID) -> list[str]:
    async def with_client() -> list[str]:
        async with get_client() as client:
            found = await client.read_flow_run_states(flow_run)
            return [state.name or "" for state in sorted(found, key=lambda state: state.timestamp)]

    return asyncio.run(with_client())


def look(*, after: timedelta, times: int = 1) -> list[str]:
    """Return what so many servers do that look at the same moment, some time from now."""

    async def at_once() -> list[list[str]]:
        then = datetime.now(UTC) + after
        return await asyncio.gather(*(revive(silent_before=then, crashed_before=then) for _ in range(times)))

    return [name for found in asyncio.run(at_once()) for name in found]


@pytest.mark.prefect
@pytest.mark.parametrize("state", [Pending(name="Submitting"), Running(), Crashed()], ids=lambda state: state.name)
def test_an_orphan_is_started_again_once_though_two_servers_find_it(flow_run: Make, state: State[Any]) -> None:
    orphan = flow_run(state)
    assert read(orphan).name not in look(after=timedelta(seconds=-30), times=2)  # it was heard of since
    found = look(after=timedelta(seconds=1), times=2)
    assert found.count(read(orphan).name) == 1
    assert states_of(orphan)[-2:] == ["Crashed", "AwaitingRetry"]
    assert states_of(orphan).count("AwaitingRetry") == 1
    assert read(orphan).name not in look(after=timedelta(seconds=1))


@pytest.mark.prefect
@pytest.mark.parametrize("state", [Failed(), Completed(), Cancelling(), Scheduled()], ids=lambda state: state.name)
def test_a_flow_run_that_has_ended_or_waits_is_left_alone(flow_run: Make, state: State[Any]) -> None:
    other = flow_run(state)
    before = states_of(other)
    look(after=timedelta(seconds=1))
    assert states_of(other) == before


@pytest.mark.prefect
def test_other_peoples_flow_runs_are_left_alone(flow_run: Make) -> None:
    theirs = flow_run(Running(), tags=("theirs",))
    look(after=timedelta(seconds=1))
    assert states_of(theirs)[-1] == "Running"


@pytest.mark.prefect
def test_a_crash_of_days_ago_is_left_to_people(flow_run: Make) -> None:
    old = flow_run(Crashed())
    look(after=timedelta(days=1))
    assert states_of(old)[-1] == "Crashed"


@pytest.mark.prefect
def test_a_flow_gives_signs_of_life_until_it_ends(prefect_api: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "SIGN_SECONDS", 0.2)
    failures = iter([KeyError("a variable that another thread removed meanwhile"), httpx.ConnectError("refused")])

    def failing_at_first(**settings: Any) -> Any:
        if threading.current_thread().name == "signs of life" and (error := next(failures, None)):
            raise error
        return get_client(**settings)

    @flow(persist_result=False)
    async def alive() -> UUID:
        monkeypatch.setattr(orchestration, "get_client", failing_at_first)
        begin()
        mine, heard = UUID(str(runtime.flow_run.id)), set[datetime | None]()
        while len(heard) < 3:
            found = await asyncio.to_thread(read, mine)
            heard |= {found.updated} if SIGN in found.labels else set()
        return mine

    ended = read(asyncio.run(alive()))
    assert next(failures, None) is None
    until(lambda: "signs of life" not in {thread.name for thread in threading.enumerate()})
    assert ended.state_name == "Completed"


@pytest.mark.prefect
def test_a_flow_run_of_a_command_whose_process_died_has_crashed_and_no_more(prefect_api: None) -> None:
    async def begun() -> UUID:
        async with get_client() as client:
            made = await client.create_flow_run(flow(lambda: None, name="of-a-command"), state=Running())
            await client.update_flow_run_labels(made.id, {SIGN: "host:1"})
            return made.id

    orphan = asyncio.run(begun())
    look(after=timedelta(seconds=1))
    assert states_of(orphan)[-1] == "Crashed"
    look(after=timedelta(seconds=1))
    assert states_of(orphan)[-1] == "Crashed"
