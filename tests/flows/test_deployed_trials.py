"""A sweep asks its deployment to run trials, and ends them; tests/deployments has the same on a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import State, StateType
from prefect.runtime import flow_run
from prefect.states import Completed, Scheduled

from flows.deployed_trials import cancel_flow_runs, error_of, require_deployment, run_deployed
from flows.train_litgpt import train_litgpt
from launcher.config import RunConfig, SweepConfig, validated
from launcher.errors import ConfigProblem, JobCancelled, LauncherError, PlatformUnreachable
from launcher.runs.run import plan_run

pytestmark = pytest.mark.prefect


def sweep(root: str, deployment: str) -> SweepConfig:
    document = {"root": root, "sweep": {"grid": {"train.seed": [1, 2]}, "deployment": deployment}}
    return validated(SweepConfig, document, where="test")


def ended(kind: StateType, message: str) -> State[Any]:
    return State(type=kind, message=message)


def raised(error: str) -> State[Any]:
    """The state of a flow that this error has left, in Prefect's words."""
    return ended(StateType.FAILED, f"Flow run encountered an exception: {error}")


@pytest.fixture
def deployed(prefect_api: None) -> Iterator[str]:
    """A deployment that no worker serves."""
    made = train_litgpt.to_deployment("trials")
    made.storage, made.entrypoint = None, "flows.train_litgpt.train_litgpt"
    deployment = made.apply()
    yield "train-litgpt/trials"
    with get_client(sync_client=True) as client:
        client.delete_deployment(deployment)


@pytest.mark.parametrize(
    ("state", "kind", "text"),
    [
        (raised("PlatformUnreachable: no answer"), PlatformUnreachable, "^no answer"),
        (raised("ConfigProblem: a=1: no"), ConfigProblem, "^a=1: no"),
        (raised("KeyError: 'x'"), LauncherError, "^KeyError: 'x'"),
        (ended(StateType.CANCELLED, "its sweep ends"), JobCancelled, "its sweep ends"),
        (ended(StateType.CRASHED, "SIGKILL"), PlatformUnreachable, "crashed 3 times.*SIGKILL"),
    ],
    ids=["not its fault", "refused", "of others", "cancelled", "crashed"],
)
def test_a_trial_ends_with_the_error_that_its_flow_run_raised(
    state: State[Any], kind: type[Exception], text: str
) -> None:
    error = error_of(state)
    assert type(error) is kind
    with pytest.raises(kind, match=text):
        raise error


def test_a_trial_that_came_to_its_good_end_has_no_error() -> None:
    assert error_of(Completed()) is None


def test_a_sweep_on_a_deployment_that_is_not_there_is_refused_before_it_begins(prefect_api: None) -> None:
    with pytest.raises(ConfigProblem, match=r"sweep\.deployment=train-litgpt/nowhere is not on Prefect's server"):
        asyncio.run(require_deployment(sweep("/shared", "train-litgpt/nowhere")))


def test_a_root_that_would_be_the_workers_own_folder_is_refused(deployed: str) -> None:
    asyncio.run(require_deployment(sweep("/shared", deployed)))
    with pytest.raises(ConfigProblem, match="root=output would count from the worker's folder"):
        asyncio.run(require_deployment(sweep("output", deployed)))


def test_a_flow_run_that_failed_while_its_sweep_was_dead_is_its_trials_end(
    deployed: str, tiny: Callable[..., RunConfig]
) -> None:
    tag = f"s-{uuid4()}"
    begin = partial(run_deployed, deployed, plan_run(tiny()), sweep=tag, name="trial", on_row=lambda row: None)

    async def fails_meanwhile(number: int, error: str) -> str:
        wanted = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[f"{tag}-{number}-0"]))
        dies = asyncio.create_task(begin(number=number, stop=lambda: False))
        async with get_client() as client:
            while not (found := await client.read_flow_runs(flow_run_filter=wanted)):
                assert not dies.done()
                await asyncio.sleep(0.1)
            dies.cancel()
            await asyncio.wait([dies])
            await client.set_flow_run_state(found[0].id, raised(error), force=True)
        return str(found[0].id)

    @flow
    async def a_sweep() -> None:
        mine, failed = str(flow_run.id), await fails_meanwhile(0, "ConfigProblem: a=1: no")
        known, error = await begin(number=0, stop=lambda: False, resumed=mine)
        assert (known, type(error)) == (failed, ConfigProblem)
        away = await fails_meanwhile(1, "PlatformUnreachable: no answer")
        # A person starts it again; another flow run began what failed; it was not to blame.
        for number, resumed in ((0, None), (0, str(uuid4())), (1, mine)):
            afresh, error = await begin(number=number, stop=lambda: True, resumed=resumed)
            assert afresh not in (failed, away)
            assert isinstance(error, JobCancelled)

    asyncio.run(a_sweep())


def test_cancelling_a_sweep_ends_the_trials_that_no_worker_has_taken_and_no_others(prefect_api: None) -> None:
    @flow
    def nothing() -> None: ...

    with get_client(sync_client=True) as client:
        mine, also, other = (
            client.create_flow_run(nothing, state=Scheduled(), tags=[tag]).id for tag in ("a-1", "a-1", "b-1")
        )
        assert set(asyncio.run(cancel_flow_runs("a-1"))) == {mine, also}
        states = [client.read_flow_run(UUID(str(one))).state_type for one in (mine, also, other)]
        assert states == [StateType.CANCELLED, StateType.CANCELLED, StateType.SCHEDULED]
        assert asyncio.run(cancel_flow_runs("a-1")) == []
        client.delete_flow_run(other)
