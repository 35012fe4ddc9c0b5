"""A pipeline in the foreground: what an interrupted user is told, and what SIGTERM does to the job.

Ctrl-C is pressed in tests/real/terminal.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from job_handles import handle_of

from cli.foreground import Tracker, cancel_commands, end_flow_runs, farewell
from launcher.config import ScriptConfig
from launcher.events import FlowRunStarted, JobChanged, JobPhase, Step, StepStarted
from launcher.job import JobId
from launcher.platforms.local.settings import LocalPlatformConfig

PROGRAM = str(Path(sys.executable).with_name("train-litgpt"))


def job(phase: JobPhase = "started", *, run: str = "tiny-1234", root: str = "output", **more: Any) -> JobChanged:
    job_id, workdir = JobId(f"/{run}/attempts/1"), LocalPlatformConfig(kind="local")
    return JobChanged(phase=phase, run=run, root=root, job_id=job_id, platform=workdir, **{"sweep": None} | more)


FLOW = FlowRunStarted(id="0")


def printed(*events: Any) -> str:
    tracker = Tracker()
    for event in events:
        tracker.receive(event)
    return "\n".join(farewell(tracker, again="train-litgpt run tiny.yaml"))


def test_running_job_is_named_with_its_commands() -> None:
    """The commands reattach to the job or cancel it."""
    another, training = (job(run="a-1"), job("ended", run="a-1")), StepStarted(step=Step.TRAINING)
    text = printed(FLOW, training, job("submitting"), job(), *another)
    assert "the job continues as tiny-1234 on local" in text
    assert "as a-1" not in text
    assert "reattach   train-litgpt run tiny.yaml" in text
    assert [line.split()[-2:] for line in text.splitlines() if "  cancel " in line] == [["cancel", "tiny-1234"]]


@pytest.mark.parametrize(
    ("events", "text_part"),
    [
        ((), "nothing was started"),
        ((FLOW, StepStarted(step=Step.DATASET)), "started ones continue"),
        ((FLOW, job(), job("ended"), StepStarted(step=Step.CHECKPOINTS)), "no job is running"),
        ((FLOW, job("submitting")), "was being submitted to platform local, and may run there"),
    ],
)
def test_farewell_without_a_job_names_none(events: tuple[Any, ...], text_part: str) -> None:
    text = printed(*events)
    assert text_part in text
    assert "the job goes on" not in text


def test_one_command_cancels_all_trials_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names a root that is not the default."""
    monkeypatch.setattr(sys, "argv", [PROGRAM])
    trials = [job(run=run, sweep="a-9", root="gs://b/my runs") for run in ("a-1", "a-2")]
    item, another = cancel_commands([*trials, job()])
    assert shlex.split(item)[1:] == ["cancel", "a-9", "--root", "gs://b/my runs"]
    assert shlex.split(another)[1:] == ["cancel", "tiny-1234"]


@pytest.mark.prefect
def test_flow_run_that_its_user_left_is_not_running_or_lost() -> None:
    from prefect import flow, get_client
    from prefect.states import Completed, Running

    @flow
    def left() -> None:
        return None

    with get_client(sync_client=True) as client:
        states: list[Any] = [Running(), Running(), Completed()]
        runs = [client.create_flow_run(left, state=state) for state in states]
        end_flow_runs([str(run.id) for run in runs], name="Interrupted")
        end_flow_runs([str(runs[1].id)], name="Cancelled")
        names = [client.read_flow_run(run.id).state_name for run in runs]
    assert names == ["Interrupted", "Cancelled", "Completed"]


@pytest.mark.prefect
def test_sigterm_cancels_the_job_and_proves_that_nothing_is_left(tmp_path: Path, ticking: ScriptConfig) -> None:
    """`kill`, `timeout`, a batch system and a supervisor mean it so, and some send it more than once."""
    from prefect.settings import PREFECT_API_URL

    attempts = handle_of(ticking).attempts
    env = {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value())}
    command, pipe = [PROGRAM, "run", str(tmp_path / "run.yaml")], subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        shown: Any = process.stdout
        try:
            assert any("submitted" in line for line in shown)
            process.terminate()
            assert any(f"terminated: {attempts.run} is cancelled" in line for line in shown)
            process.terminate()
            text, code = "".join(shown), process.wait()
        finally:
            process.kill()
    assert code == 128 + signal.SIGTERM
    assert f"cancelled {attempts.run}; no resources remain" in text
    assert "Traceback" not in text
    assert attempts.live() is None
