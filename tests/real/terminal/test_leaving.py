"""A user at a terminal, without a Prefect server, presses Ctrl-C, closes the window or shuts down."""

import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from job_handles import handle_of
from terminal import Terminal, terminal
from waiting import until

from launcher.config import ScriptConfig
from launcher.runs.lease import Lease

PROGRAM = str(Path(sys.executable).with_name("train-litgpt"))


Open = Callable[..., AbstractContextManager[Terminal]]


@pytest.fixture
def opened(tmp_path: Path, prefect_home: Callable[[], Path]) -> Open:
    """Opens a terminal with this command, whose user has nothing of Prefect's yet."""
    bin = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"
    own = {"PREFECT_HOME": str(prefect_home()), "TRAIN_LITGPT_HOME": str(tmp_path / "jobs"), "PATH": bin}
    return partial(terminal, env={**os.environ, **own}, cwd=tmp_path)


def test_ctrl_c_while_the_command_line_loads_just_ends(opened: Open) -> None:
    with opened(PROGRAM, "plan", "nothing.yaml") as shown:
        status = Path(f"/proc/{shown.process.pid}/status")
        caught = re.compile(r"SigCgt:\s+(\w+)")
        until(lambda: int(caught.findall(status.read_text())[0], 16) & 1 << signal.SIGTERM - 1)
        shown.press_ctrl_c()
        assert shown.end() == 128 + signal.SIGINT
    assert shown.text == "^C\ninterrupted\n"


def test_printed_command_reattaches_to_the_job(opened: Open, ticking: ScriptConfig) -> None:
    """A second Ctrl-C cancels the job."""
    attempts = handle_of(ticking).attempts
    with opened(PROGRAM, "run", "run.yaml") as shown:
        shown.read_until("submitted")
        shown.press_ctrl_c()
        assert shown.end() == 128 + signal.SIGINT
    assert "press Ctrl-C" not in shown.text, "it holds no longer"
    [reattach] = re.findall(r"^  reattach +(.*)$", shown.text, re.MULTILINE)
    with opened("sh", "-c", f"exec {reattach}") as shown:
        shown.read_until("reattached")
        shown.press_ctrl_c()
        shown.read_until("press Ctrl-C once more now to cancel it")
        shown.press_ctrl_c()
        assert shown.end() == 128 + signal.SIGINT
    assert f"cancelled {attempts.run}; no resources remain" in shown.text
    assert "Traceback" not in shown.text
    assert attempts.live() is None
    with Lease(attempts.index, attempts.run) as lease:
        assert lease.take(), "the cancelling command has let go of it"


@pytest.mark.parametrize("how", ["the machine shuts down", "the window is closed"])
def test_other_ways_to_end_it_leave_the_job_too(opened: Open, tmp_path: Path, ticking: ScriptConfig, how: str) -> None:
    (folder := tmp_path / "bin").mkdir()
    (folder / "systemctl").write_text('#!/bin/sh\n[ "$1" = is-system-running ] && echo stopping; exit 1\n')
    (folder / "systemctl").chmod(0o755)
    with opened(PROGRAM, "run", "run.yaml") as shown:
        shown.read_until("line 0")
        if how == "the machine shuts down":
            shown.process.terminate()
            assert shown.end() == 128 + signal.SIGTERM
            assert f"the job continues as {handle_of(ticking).attempts.run} on local" in shown.text
        else:
            shown.close()
            assert shown.end() == 128 + signal.SIGHUP
    assert handle_of(ticking).attempts.live() is not None
