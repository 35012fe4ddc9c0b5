"""Somebody at a terminal, without a server of Prefect's, presses Ctrl-C, closes the window or shuts down."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from terminal import Terminal
from waiting import until

from launcher.config import ScriptConfig, validated
from launcher.runs.attempts import claim_of

PROGRAM = str(Path(sys.executable).with_name("train-litgpt"))
TICK = "import time\nwhile True:\n    print('tick', flush=True)\n    time.sleep(0.1)\n"


@pytest.fixture
def env(tmp_path: Path, prefect_home: Callable[[], Path]) -> dict[str, str]:
    return {**os.environ, "PREFECT_HOME": str(prefect_home()), "TRAIN_LITGPT_HOME": str(tmp_path / "jobs")}


@pytest.fixture
def ticking(tmp_path: Path) -> Iterator[ScriptConfig]:
    """The config, in `run.yaml`, of a program that goes on for ever."""
    (tmp_path / "tick.py").write_text(TICK)
    given = {"name": "ticking", "root": str(tmp_path / "out"), "script": str(tmp_path / "tick.py")}
    config = validated(ScriptConfig, given, where="test")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    yield config
    claim_of(config).attempts.cancel()


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_ctrl_c_while_the_command_line_loads_just_ends(verb: str, env: dict[str, str], tmp_path: Path) -> None:
    with Terminal([PROGRAM, verb, "nothing.yaml"], env=env, cwd=tmp_path) as terminal:
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
        terminal.read_until(r"rank0\]: *tick")
        if how == "the machine shuts down":
            terminal.process.terminate()
            assert terminal.end() == 128 + signal.SIGTERM
            assert f"the job goes on as {claim_of(ticking).attempts.run} on local" in terminal.text
        else:
            terminal.close()
            assert terminal.end() == 128 + signal.SIGHUP
    assert claim_of(ticking).attempts.live() is not None
