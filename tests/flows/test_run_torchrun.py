"""A user's script as a flow; scripts that really run are in tests/real/pipelines."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from job_handles import handle_of
from strict_platform import StrictPlatform

from flows.run_torchrun import run_torchrun
from launcher.config import CodeSettings, ScriptConfig
from launcher.errors import ConfigProblem
from launcher.events import SCRIPT_STEPS, Event, FlowRunStarted, Listener, Note, Step, StepDone
from launcher.job import JobId, JobState, Submission
from launcher.platforms.local.settings import LocalPlatformConfig

pytestmark = pytest.mark.prefect


@pytest.fixture(autouse=True)
def _ends_well(platform: StrictPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job does, at once."""
    submit = platform.submit

    def ends_well(submission: Submission) -> JobId:
        platform.end(job_id := submit(submission), JobState.SUCCEEDED)
        return job_id

    monkeypatch.setattr(platform, "submit", ends_well)


def ran(root: Path, script: str, **arguments: Any) -> Path:
    """The folder with the job's logs."""
    entry = LocalPlatformConfig(kind="local", nodes=1, processes_per_node=1)
    return Path(asyncio.run(run_torchrun(script=script, name="tiny", root=str(root), platform=entry, **arguments)))


def test_each_call_is_a_new_attempt_and_ships_changed_code_once(tmp_path: Path) -> None:
    (own := tmp_path / "mine").mkdir()
    (own / "train.py").write_text("print('as it was')")
    shown, root, code = list[Event](), tmp_path / "root", CodeSettings(folder=str(own))
    with Listener(shown.append):
        first, second = (ran(root, "train.py", code=code) for _ in range(2))
        (own / "train.py").write_text("print('edited')")
        edited = ran(root, "train.py", code=code)
    assert (first.parent, first.name, second.name) == (second.parent, "1", "2")
    assert edited.parent != first.parent
    shipped = [entry.what for entry in shown if isinstance(entry, Note) and entry.what.startswith("code: ")]
    assert [note.endswith("(exists already)") for note in shipped] == [False, True, False]
    assert len([*(root / "code").iterdir()]) == 2
    assert {entry.step for entry in shown if isinstance(entry, StepDone)} == {Step.IMAGE, Step.CREDENTIALS, Step.SCRIPT}
    assert {entry.steps for entry in shown if isinstance(entry, FlowRunStarted)} == {SCRIPT_STEPS}
    assert not [entry for entry in shown if isinstance(entry, Note) and entry.what.startswith("logs: ")], (
        "the command says it"
    )


def test_missing_script_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigProblem, match=r"script\.missing"):
        ran(tmp_path, str(tmp_path / "no.py"))
    assert not [*tmp_path.iterdir()]


def test_run_and_index_are_closed_to_other_users(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    run = ran(tmp_path / "root", str(tmp_path / "train.py")).parents[1]
    assert [folder.stat().st_mode & 0o077 for folder in (run, tmp_path / "root" / "index")] == [0, 0]


def test_live_job_is_followed_without_its_script_and_access(
    tmp_path: Path, platform: StrictPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script := tmp_path / "train.py").touch()
    entry = LocalPlatformConfig(kind="local", nodes=1, processes_per_node=1)
    handle = handle_of(ScriptConfig(script=str(script), name="tiny", root=str(tmp_path / "root"), platform=entry))
    job_id = StrictPlatform.submit(platform, platform.render(handle.job_of(handle.reattach_or_create())))
    script.unlink()
    platform.followed[job_id] = JobState.SUCCEEDED
    monkeypatch.setattr(platform, "check_access", partial(pytest.fail, "access is no matter of a job that runs"))
    monkeypatch.setattr(StrictPlatform, "poll_seconds", 0.01)
    assert ran(tmp_path / "root", str(script)).name == "1"
