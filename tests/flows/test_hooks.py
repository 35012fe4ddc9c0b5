"""What becomes of the jobs of a flow run that Prefect cancels."""

import asyncio
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from job_handles import running_job
from prefect import flow, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.flow_engine import run_flow_async
from prefect.states import Cancelled, Pending, Running, Scheduled
from strict_platform import StrictPlatform

from flows.parameters import MAX_RESUMES, acquire_process_lock, begin, cancel_jobs
from flows.sweep_litgpt import sweep_litgpt
from flows.train_litgpt import train_litgpt
from launcher.config import RunConfig, SweepConfig
from launcher.errors import ConfigProblem
from launcher.events import TRAINING_STEPS
from launcher.job import JobState
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.runs.attempts import JobHandle
from launcher.runs.sweeps import trials
from litgpt_demo.errors import DataError
from litgpt_demo.node.agent import processes_with_env

pytestmark = pytest.mark.prefect

Tiny = Callable[..., RunConfig]


def cancel(flow: Any, parameters: dict[str, Any], flow_run: UUID) -> None:
    """As Prefect does: by keywords, in a process that knows the flow run alone."""
    state: State[Any] = Cancelled()
    cancel_jobs(flow=flow, flow_run=FlowRun(id=flow_run, flow_id=uuid4(), parameters=parameters), state=state)


def states(handle: JobHandle) -> list[JobState]:
    return [entry.status.state for entry in handle.attempts.all()]


def test_cancelled_training_ends_its_job_when_the_corpus_changed(tiny: Tiny, tmp_path: Path, corpus: Path) -> None:
    text, flow_run = Path(shutil.copy(corpus, tmp_path)), uuid4()
    config = tiny({"data.corpus.paths": [str(text)]})
    handle = running_job(config, flow_run)
    text.unlink()
    [record] = handle.attempts.records()
    assert [*processes_with_env(JOB_TAG, record.job_id)]
    cancel(train_litgpt, config.model_dump(mode="json"), flow_run)
    assert not [*processes_with_env(JOB_TAG, record.job_id)]
    assert states(handle) == ["cancelled"]


def test_cancelled_flow_run_ends_the_job_it_reattached_to(tiny: Tiny, platform: StrictPlatform) -> None:
    """A job that a later flow run started continues."""
    first, second, third = uuid4(), uuid4(), uuid4()
    handle = running_job(tiny(), first)
    replace(handle, flow_runs=[str(second)]).reattach_or_create()
    cancel(train_litgpt, tiny().model_dump(mode="json"), second)
    assert states(handle) == ["cancelled"]
    running_job(tiny(), third)
    for flow_run in (first, second, uuid4()):
        cancel(train_litgpt, tiny().model_dump(mode="json"), flow_run)
    assert states(handle) == ["cancelled", "pending"]


def test_cancelled_sweep_ends_the_jobs_of_readable_trials(tiny: Tiny, platform: StrictPlatform) -> None:
    grid, flow_run = {"train.learning_rate": [0.1, 0.2, 0.3]}, uuid4()
    sweep = SweepConfig.model_validate({**tiny().model_dump(), "sweep": {"grid": grid}})
    started = [running_job(trial.config, uuid4(), flow_run) for trial in trials(sweep)[:2]]  # the third has not begun
    place = Path(sweep.root) / "index" / min(handle.attempts.run for handle in started) / "1.json"
    complete = place.read_bytes()
    place.write_bytes(complete[:9])
    with pytest.raises(DataError, match=re.escape(str(place))):
        cancel(sweep_litgpt, sweep.model_dump(mode="json"), flow_run)
    assert len(platform.live()) == 1
    place.write_bytes(complete)
    cancel(sweep_litgpt, sweep.model_dump(mode="json"), flow_run)
    assert platform.live() == []


def test_a_flow_run_has_one_orchestrator_at_a_time() -> None:
    assert acquire_process_lock(flow_run := str(uuid4()))
    assert not acquire_process_lock(flow_run)


def test_flow_run_that_keeps_crashing_is_refused() -> None:
    """Names of its states do not count as starts."""

    @flow
    async def again() -> None:
        begin(TRAINING_STEPS)

    def started(count: int) -> UUID:
        with get_client(sync_client=True) as client:
            flow_run = client.create_flow_run(again, state=Scheduled()).id
            for _ in range(count - 1):
                client.set_flow_run_state(flow_run, Pending(), force=True)
                for name in ("Running", "Training"):
                    client.set_flow_run_state(flow_run, Running(name=name), force=True)
            client.set_flow_run_state(flow_run, Pending(), force=True)
            asyncio.run(run_flow_async(again, flow_run=client.read_flow_run(flow_run)))
        return flow_run

    started(MAX_RESUMES)
    with pytest.raises(ConfigProblem, match=f"started {MAX_RESUMES + 1} times, and its orchestrator keeps crashing"):
        started(MAX_RESUMES + 1)
