"""Jobs that go on though Prefect calls their flow runs cancelled."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from job_handles import handle_of, running_job
from prefect.client.orchestration import get_client
from prefect.states import Cancelled, Running, State
from strict_platform import StrictPlatform
from waiting import until

from flows.reconciling import (
    OrphanedJobs,
    cancel_orphaned_jobs,
    end_orphaned_jobs,
    flag_state_conflicts,
    is_abandoned,
    mark_dead_flow_runs,
)
from flows.train_litgpt import train_litgpt
from launcher.config import RunConfig
from launcher.errors import PlatformUnreachable
from launcher.job import JobId, JobStatus
from launcher.runs.index import Index
from launcher.runs.lease import Lease
from launcher.runs.listing import run_rows

Tiny = Callable[..., RunConfig]


def flow_run_of(config: RunConfig, state: State[Any]) -> UUID:
    """A flow run of a training with this config, named after its root, in a state that no engine gave it."""
    with get_client(sync_client=True) as client:
        parameters = {name: getattr(config, name) for name in RunConfig.model_fields}
        made = client.create_flow_run(train_litgpt, parameters=parameters, name=config.root)
        client.set_flow_run_state(made.id, state, force=True)
        return made.id


@pytest.mark.prefect
def test_flow_run_of_a_dead_orchestrator_is_marked_crashed(
    tiny_under: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lives continues."""
    monkeypatch.setattr("launcher.runs.lease.HEARTBEAT_INTERVAL", 0.05)

    async def crashed() -> list[str]:
        async with get_client() as client:
            return await mark_dead_flow_runs(client, wait=partial(asyncio.to_thread, beaten))

    def beaten() -> None:
        (beat,) = (tmp_path / "lives").rglob("1.beat")
        before = beat.read_text()
        until(lambda: beat.read_text() != before)

    flow_runs = []
    with ExitStack() as leases, get_client(sync_client=True) as client:
        for name in ("dies", "lives", "over"):
            config = tiny_under(tmp_path / name)
            flow_runs.append(flow_run := flow_run_of(config, Running()))
            handle = replace(handle_of(config), flow_runs=[str(flow_run)])
            handle.reattach_or_create()
            lease = leases.enter_context(Lease(handle.attempts.index, handle.attempts.run, flow_run=str(flow_run)))
            assert lease.take()
            lease._stop.set() if name == "dies" else lease.release() if name == "over" else None
        assert [name for name in asyncio.run(crashed()) if name.startswith(str(tmp_path))] == [str(tmp_path / "dies")]
        ends = [client.read_flow_run(flow_run).state_type for flow_run in flow_runs]
    assert [end and end.value for end in ends] == ["CRASHED", "RUNNING", "RUNNING"]


def orphaned(root: Path) -> list[OrphanedJobs]:
    """What was found of this test's flow runs; the server has those of other tests."""
    return [entry for entry in asyncio.run(end_orphaned_jobs()) if entry.name.startswith(str(root))]


@pytest.mark.prefect
def test_running_job_of_a_cancelled_flow_run_is_cancelled(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported first."""
    from prefect.settings import get_current_settings

    handle = running_job(tiny(), flow_run_of(tiny(), Cancelled()))
    monkeypatch.setenv("PREFECT_API_URL", str(get_current_settings().api.url))
    [row] = flag_state_conflicts(run_rows(Index.of(tiny().root)))
    assert row.state == "running"
    assert row.note.endswith(f"Prefect calls it cancelled; to cancel it: train-litgpt cancel {handle.attempts.run}")
    assert [found.cancelled for found in orphaned(tmp_path)] == [(handle.make_job(1).directory,)]
    assert handle.attempts.live() is None
    assert orphaned(tmp_path) == []


@pytest.mark.prefect
def test_automations_flow_retries_a_platform_that_is_away(
    tiny: Tiny, platform: StrictPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else may look: the automation starts the flow once for each cancelled flow run."""
    handle, requests, status = running_job(tiny(), flow_run_of(tiny(), Cancelled())), list[str](), platform.status

    def away(job_id: JobId) -> JobStatus:
        requests.append(job_id)
        if len(requests) == 1:
            raise PlatformUnreachable("connection timed out")
        return status(job_id)

    monkeypatch.setattr(platform, "status", away)
    shown = asyncio.run(cancel_orphaned_jobs.with_options(retry_delay_seconds=0.01)())
    assert any("was cancelled, but its job was still running. Cancelled now: strict/" in line for line in shown)
    assert handle.attempts.live() is None


@pytest.mark.prefect
def test_unreadable_root_does_not_hide_other_roots(
    tiny: Tiny, tiny_under: Tiny, platform: StrictPlatform, tmp_path: Path
) -> None:
    broken = tiny_under(tmp_path / "broken")
    record = replace(handle_of(broken), flow_runs=[str(flow_run_of(broken, Cancelled()))]).reattach_or_create()
    (tmp_path / "broken" / "index" / record.run / "1.json").write_text("{")
    handle = running_job(tiny(), flow_run_of(tiny(), Cancelled()))
    found = orphaned(tmp_path)
    assert any("1.json is not" in str(entry.problem) for entry in found)
    assert handle.attempts.live() is None


@pytest.mark.parametrize(
    ("states", "abandoned"),
    [
        (["CRASHED", "CANCELLED"], True), (["CANCELLED", "RUNNING"], False), (["COMPLETED"], False), ([], False),
        (["CANCELLED", ""], False),  # that of a command line with a server of its own
    ],
)  # fmt: skip
def test_only_a_cancelled_job_without_followers_is_abandoned(states: list[str], abandoned: bool) -> None:
    known = {str(number): state for number, state in enumerate(states) if state}
    assert is_abandoned([str(number) for number in range(len(states))], known) is abandoned
