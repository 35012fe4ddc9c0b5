from __future__ import annotations

import contextlib
import fcntl
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psutil
import pytest
from another_user import as_nobody, needs_another_user, shared_temporary
from orphaned_job import running_job
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled

from flows.hooks import cancel_jobs, taken
from flows.run_torchrun import run_torchrun
from flows.sweep_litgpt import sweep_litgpt
from flows.train_litgpt import train_litgpt
from launcher.config import RunConfig, ScriptConfig, SweepConfig
from launcher.errors import PlatformUnreachable
from launcher.job import JobId
from launcher.platforms.local.platform import LocalPlatform
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.runs.attempts import Claim
from launcher.runs.sweeps import trials
from litgpt_demo.errors import DataError

pytestmark = [pytest.mark.prefect, pytest.mark.training]


def cancel(flow: Any, parameters: dict[str, Any], flow_run: UUID) -> None:
    """As Prefect does: by keywords, in a process that knows the flow run alone."""
    state = Cancelled()
    cancel_jobs(flow=flow, flow_run=FlowRun(id=flow_run, flow_id=uuid4(), parameters=parameters), state=state)


def left_below(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(JOB_TAG, "").startswith(str(folder)):
                found.append(process)
    return found


def states(claim: Claim) -> list[str]:
    return [attempt.status.state.value for attempt in claim.attempts.all()]


def test_cancelling_a_training_ends_its_job_though_its_corpus_has_changed(
    tiny: Callable[..., RunConfig], tmp_path: Path, corpus: Path
) -> None:
    text, flow_run = tmp_path / "text.txt", uuid4()
    text.write_text(corpus.read_text())
    config = tiny({"data.corpus.paths": [str(text)]})
    claim = running_job(config, flow_run)
    text.unlink()
    cancel(train_litgpt, config.model_dump(mode="json"), flow_run)
    assert not left_below(tmp_path)
    assert states(claim) == ["cancelled"]


def test_cancelling_a_flow_run_that_took_up_anothers_job_ends_the_job(
    tiny: Callable[..., RunConfig], tmp_path: Path
) -> None:
    first, second = uuid4(), uuid4()
    claim = running_job(tiny(), first)
    replace(claim, flow_runs=[str(second)]).take()
    cancel(train_litgpt, tiny().model_dump(mode="json"), second)
    assert not left_below(tmp_path)
    assert states(claim) == ["cancelled"]


def test_cancelling_a_flow_run_leaves_alone_what_a_later_one_started(tiny: Callable[..., RunConfig]) -> None:
    first, second = uuid4(), uuid4()
    claim = running_job(tiny(), first)
    claim.attempts.cancel()
    running_job(tiny(), second)
    cancel(train_litgpt, tiny().model_dump(mode="json"), first)
    assert states(claim) == ["cancelled", "running"]
    claim.attempts.cancel()


def test_cancelling_a_script_ends_its_job(tmp_path: Path) -> None:
    script, flow_run = tmp_path / "sleep.py", uuid4()
    script.write_text("import time; time.sleep(600)")
    config = ScriptConfig(script=str(script), root=str(tmp_path))
    running_job(config, flow_run)
    cancel(run_torchrun, config.model_dump(mode="json"), flow_run)
    assert not left_below(tmp_path)


def test_cancelling_a_sweep_ends_the_job_of_every_trial(tiny: Callable[..., RunConfig], tmp_path: Path) -> None:
    grid, flow_run = {"train.learning_rate": [0.1, 0.2, 0.3]}, uuid4()
    sweep = SweepConfig.model_validate({**tiny().model_dump(), "sweep": {"grid": grid}})
    for trial in trials(sweep)[:2]:  # the third has not begun
        running_job(trial.config, uuid4(), flow_run)
    cancel(sweep_litgpt, sweep.model_dump(mode="json"), flow_run)
    assert not left_below(tmp_path)


def test_a_platform_that_is_away_for_a_moment_does_not_keep_a_cancelled_job_alive(
    tiny: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, asked = running_job(tiny(), flow_run := uuid4()), list[str]()
    cancel_here = LocalPlatform.cancel

    def away(platform: LocalPlatform, job_id: JobId) -> None:
        asked.append(job_id)
        if len(asked) == 1:
            raise PlatformUnreachable("connection timed out")
        cancel_here(platform, job_id)

    monkeypatch.setattr(LocalPlatform, "cancel", away)
    cancel(train_litgpt, tiny().model_dump(mode="json"), flow_run)
    assert len(asked) == 2
    assert not left_below(tmp_path)
    assert states(claim) == ["cancelled"]


def test_a_trial_whose_record_nobody_can_read_is_named_and_the_others_are_cancelled(
    tiny: Callable[..., RunConfig], tmp_path: Path
) -> None:
    grid, flow_run = {"train.learning_rate": [0.1, 0.2, 0.3]}, uuid4()
    sweep = SweepConfig.model_validate({**tiny().model_dump(), "sweep": {"grid": grid}})
    started = [running_job(trial.config, flow_run) for trial in trials(sweep)[:2]]
    damaged = min(started, key=lambda claim: claim.attempts.run)
    (record,) = damaged.attempts.records()
    place = Path(sweep.root) / "index" / record.run / "1.json"
    whole = place.read_bytes()
    place.write_bytes(whole[:9])
    with pytest.raises(DataError, match=re.escape(str(place))):
        cancel(sweep_litgpt, sweep.model_dump(mode="json"), flow_run)
    place.write_bytes(whole)
    assert sorted(states(claim)[0] for claim in started) == ["cancelled", "running"]
    damaged.attempts.cancel()


def test_cancelling_what_has_no_job_any_more_is_no_error(tiny: Callable[..., RunConfig]) -> None:
    cancel(train_litgpt, tiny().model_dump(mode="json"), uuid4())


def test_a_flow_run_has_one_orchestrator_at_a_time() -> None:
    flow_run = str(uuid4())
    hold = f"from flows.hooks import taken; assert taken({flow_run!r}); print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert not taken(flow_run)
        assert taken(str(uuid4()))
        other.kill()
    assert taken(flow_run)


@needs_another_user
def test_another_user_cannot_have_a_flow_run_lock_a_file_of_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_temporary(monkeypatch) as shared:
        (victim := shared / "victim").touch(mode=0o600)
        assert as_nobody('ln -s "$1" "$2"', victim, shared / "train-litgpt-5f7a.lock")
        assert taken("5f7a")
        with victim.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
