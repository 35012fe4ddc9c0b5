"""The orchestrator is killed, and the same command is typed again: one job, one view of its log over both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import yaml
from waiting import until

from launcher.config import ScriptConfig, validated
from launcher.job import JobState
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.runs.attempts import claim_of
from litgpt_demo.metrics import METRICS_MARK

TICK = f"""
import os, time
number = 0
while not os.path.exists("FOLDER/enough"):
    print(f'line {{number}}\\n{METRICS_MARK}{{{{"kind":"step","step":{{number}}}}}}', flush=True)
    number += 1
    time.sleep(0.1)
print(f"of {{number}} lines", flush=True)
"""


@contextmanager
def orchestrator(folder: Path, home: Path, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own; killed in the end as by a power cut, its server with it, its job not."""
    command = [sys.executable, "-m", "cli", "run", str(folder / "config.yaml"), "--output"]
    env = {**os.environ, "PREFECT_HOME": str(home), "TRAIN_LITGPT_HOME": str(folder / "jobs")}
    with (
        output.open("wb") as file,
        subprocess.Popen(command, env=env, stdout=file, stderr=file, start_new_session=True) as process,
    ):
        try:
            yield process
        finally:
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for one in family:
                if JOB_TAG not in one.environ():
                    one.kill()
            process.kill()


def test_a_killed_orchestrator_leaves_one_job_and_the_next_goes_on_with_its_log(
    tmp_path: Path, prefect_home: Callable[[], Path]
) -> None:
    (tmp_path / "tick.py").write_text(TICK.replace("FOLDER", str(tmp_path)))
    given = {"name": "ticking", "root": str(tmp_path / "out"), "script": str(tmp_path / "tick.py")}
    config = validated(ScriptConfig, given, where="ticking")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    home, first, second = prefect_home(), tmp_path / "first.txt", tmp_path / "second.txt"
    try:
        with orchestrator(tmp_path, home, first):
            until(lambda: "line 40" in first.read_text())
        with orchestrator(tmp_path, home, second) as process:
            until(lambda: "line" in second.read_text())
            (tmp_path / "enough").touch()
            assert process.wait() == 0, second.read_text()
        [attempt] = claim_of(config).attempts.all()
    finally:
        claim_of(config).attempts.cancel()
    assert attempt.status.state is JobState.SUCCEEDED
    told = Counter(re.findall(r"line (\d+)", first.read_text() + second.read_text()))
    [lines] = re.findall(r"of (\d+) lines", second.read_text())
    assert told == Counter(str(number) for number in range(int(lines))), "neither a gap nor a repeat"
