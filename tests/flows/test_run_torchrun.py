from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flows.run_torchrun import run_torchrun
from launcher.errors import ConfigProblem, JobFailed
from launcher.platforms.local.settings import LocalPlatformConfig

pytestmark = [pytest.mark.prefect, pytest.mark.training, pytest.mark.timeout(300)]

CHECKOUT = Path(__file__).parents[2]
TWO = LocalPlatformConfig(kind="local", nodes=1, processes=2)


def ran(script: Path | str, root: Path, *args: str) -> Path:
    """The folder with the job's logs."""
    coroutine = run_torchrun(script=str(script), name="tiny", root=str(root), args=args, platform=TWO)
    return Path(asyncio.run(coroutine))


def test_a_users_script_runs_on_every_rank_and_each_call_is_a_new_attempt(tmp_path: Path) -> None:
    first = ran(CHECKOUT / "examples" / "pi.py", tmp_path, "--steps", "1003")
    assert "3.14159" in (first / "node-0.log").read_text()
    second = ran(CHECKOUT / "examples" / "pi.py", tmp_path, "--steps", "1003")
    assert (first.name, second.name) == ("1", "2")
    assert first.parent == second.parent


def test_a_script_that_fails_ends_the_run_as_its_own_error(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise RuntimeError('the weights are on fire')")
    with pytest.raises(JobFailed, match="the weights are on fire"):
        ran(script, tmp_path)


def test_a_script_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigProblem, match=r"script\.missing"):
        ran(tmp_path / "no.py", tmp_path)
    assert not list(tmp_path.iterdir())
