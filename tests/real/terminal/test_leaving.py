"""Somebody at a terminal, without a server of Prefect's, presses Ctrl-C, closes the window or shuts down."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from terminal import Terminal
from waiting import until

from launcher.config import ScriptConfig
from launcher.runs.attempts import claim_of

PROGRAM = str(Path(sys.executable).with_name("train-litgpt"))


@pytest.fixture
def env(tmp_path: Path, prefect_home: Callable[[], Path]) -> dict[str, str]:
    return {**os.environ, "PREFECT_HOME": str(prefect_home()), "TRAIN_LITGPT_HOME": str(tmp_path / "jobs")}


def test_ctrl_c_while_the_command_line_loads_just_ends(env: dict[str, str], tmp_path: Path) -> None:
    with Terminal([PROGRAM, "plan", "nothing.yaml"], env=env, cwd=tmp_path) as terminal:
        status = Path(f"/proc/{terminal.process.pid}/status")
        caught = re.compile(r"SigCgt:\s+(\w+)")
        until(lambda: int(caught.findall(status.read_text())[0], 16) & 1 << signal.SIGTERM - 1)
        terminal.press_ctrl_c()
        assert terminal.end() == 128 + signal.SIGINT
    assert terminal.text == "^C\ninterrupted\n"


def test_the_printed_command_takes_the_job_up_and_a_second_ctrl_c_cancels_it(
    env: dict[str, str], tmp_path: Path, ticking: ScriptConfig
) -> None:
    attempts = claim_of(ticking).attempts
    with Terminal([PROGRAM, "run", "run.yaml"], env=env, cwd=tmp_path) as terminal:
        terminal.read_until("submitted")
        terminal.press_ctrl_c()
        assert terminal.end() == 128 + signal.SIGINT
    [take_up] = re.findall(r"^  take up +(.*)$", terminal.text, re.MULTILINE)
    with Terminal(["sh", "-c", f"exec {take_up}"], env=env, cwd=tmp_path) as terminal:
        terminal.read_until("adopted")
        terminal.press_ctrl_c()
        terminal.read_until("press Ctrl-C once more now to cancel it")
        terminal.press_ctrl_c()
        assert terminal.end() == 128 + signal.SIGINT
    assert f"cancelled {attempts.run}; nothing of it is left" in terminal.text
    assert "Traceback" not in terminal.text
    assert attempts.live() is None


@pytest.mark.parametrize("how", ["the machine shuts down", "the window is closed"])
def test_other_ways_to_end_it_leave_the_job_too(
    env: dict[str, str], tmp_path: Path, ticking: ScriptConfig, how: str
) -> None:
    (folder := tmp_path / "bin").mkdir()
    (folder / "systemctl").write_text('#!/bin/sh\n[ "$1" = is-system-running ] && echo stopping; exit 1\n')
    (folder / "systemctl").chmod(0o755)
    env["PATH"] = f"{folder}{os.pathsep}{env['PATH']}"
    with Terminal([PROGRAM, "run", "run.yaml"], env=env, cwd=tmp_path) as terminal:
        terminal.read_until("line 0")
        if how == "the machine shuts down":
            terminal.process.terminate()
            assert terminal.end() == 128 + signal.SIGTERM
            assert f"the job goes on as {claim_of(ticking).attempts.run} on local" in terminal.text
        else:
            terminal.close()
            assert terminal.end() == 128 + signal.SIGHUP
    assert claim_of(ticking).attempts.live() is not None
