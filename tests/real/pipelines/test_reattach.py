"""The orchestrator is killed, and the same command reattaches: one job, and one log over both."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from job_handles import handle_of
from waiting import until

from launcher.config import ScriptConfig
from launcher.job import JobState


def test_next_orchestrator_continues_the_log_of_a_killed_one(
    tmp_path: Path, prefect_home: Callable[[], Path], ticking: ScriptConfig
) -> None:
    """There is one job."""
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    command = [sys.executable, "-m", "cli", "run", str(tmp_path / "run.yaml"), "--output"]
    env = {**os.environ, "PREFECT_HOME": str(prefect_home()), "TRAIN_LITGPT_HOME": str(tmp_path / "jobs")}
    with first.open("wb") as file, subprocess.Popen(command, env=env, stdout=file, start_new_session=True) as process:
        until(lambda: "line 40" in first.read_text())
        process.kill()
    with second.open("wb") as file, subprocess.Popen(command, env=env, stdout=file, start_new_session=True) as process:
        until(lambda: "line" in second.read_text())
        (tmp_path / "enough").touch()
        assert process.wait() == 0
    [attempt] = handle_of(ticking).attempts.all()
    assert attempt.status.state is JobState.SUCCEEDED
    lines_seen = Counter(re.findall(r"line (\d+)", first.read_text() + second.read_text()))
    [lines] = re.findall(r"of (\d+) lines", second.read_text())
    assert lines_seen == Counter(str(number) for number in range(int(lines))), "neither a gap nor a repeat"
