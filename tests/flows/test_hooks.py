from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled

from flows.hooks import cancel_jobs, taken
from flows.run_torchrun import run_torchrun
from flows.sweep_litgpt import sweep_litgpt
from flows.train_litgpt import train_litgpt
from launcher.attempts import Attempts, attempts_of
from launcher.config import RunConfig, ScriptConfig, SweepConfig
from launcher.platforms.supervisor import MARK
from launcher.sweeps import trials

pytestmark = [pytest.mark.prefect, pytest.mark.training]


def start(attempts: Attempts) -> None:
    """Without an orchestrator, as when that was killed."""
    attempts.platform.submit(attempts.platform.render(attempts.make_job(1)))
    assert attempts.live()


def cancel(flow: Any, parameters: dict[str, Any]) -> None:
    """As Prefect does: by keywords, in a process that knows the flow run alone."""
    state = Cancelled()
    cancel_jobs(flow=flow, flow_run=FlowRun(id=uuid4(), flow_id=uuid4(), parameters=parameters), state=state)


def left_below(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK, "").startswith(str(folder)):
                found.append(process)
    return found


def test_cancelling_a_training_ends_its_job_with_overrides_told_apart(
    tiny: Callable[..., RunConfig], tmp_path: Path
) -> None:
    meant = tiny({"train.learning_rate": 0.5})
    start(attempts_of(meant))
    cancel(train_litgpt, {**tiny().model_dump(mode="json"), "overrides": {"train.learning_rate": 0.5}})
    assert not left_below(tmp_path)
    assert [attempt.status.state for attempt in attempts_of(meant).all()] == ["cancelled"]


def test_cancelling_a_script_ends_its_job(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time; time.sleep(600)")
    config = ScriptConfig(script=str(script), root=str(tmp_path))
    start(attempts_of(config))
    cancel(run_torchrun, config.model_dump(mode="json"))
    assert not left_below(tmp_path)


def test_cancelling_a_sweep_ends_the_job_of_every_trial(tiny: Callable[..., RunConfig], tmp_path: Path) -> None:
    grid = {"train.learning_rate": [0.1, 0.2, 0.3]}
    sweep = SweepConfig.model_validate({**tiny().model_dump(), "sweep": {"grid": grid}})
    for trial in trials(sweep)[:2]:  # the third has not begun
        start(attempts_of(trial.config))
    cancel(sweep_litgpt, sweep.model_dump(mode="json"))
    assert not left_below(tmp_path)


def test_cancelling_what_has_no_job_any_more_is_no_error(tiny: Callable[..., RunConfig]) -> None:
    cancel(train_litgpt, tiny().model_dump(mode="json"))


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
