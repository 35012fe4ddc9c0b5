"""The orchestrator is killed, and the same command is typed again: one job, one view of its log over both."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from waiting import until

from launcher.config import RunConfig, ScriptConfig, validated
from launcher.job import JobState
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.runs.attempts import Attempts, claim_of
from launcher.runs.run import plan_run
from litgpt_demo.export import export, exported
from litgpt_demo.metrics import METRICS_MARK
from litgpt_demo.runs import REPORT

pytestmark = [pytest.mark.training, pytest.mark.long, pytest.mark.timeout(600)]

NUMBERS = itertools.count(1)  # ports follow from names
LINES = 500  # fifty seconds: the next orchestrator comes while it runs, or it would start the script anew
TICK = f"""
import sys, time
for number in range({LINES}):
    row = f'{{{{"kind":"step","step":{{number}}}}}}'
    sys.stdout.write(f"line {{number}}\\n{METRICS_MARK}{{row}}\\n")
    sys.stdout.flush()
    time.sleep(0.1)
"""


class Orchestrator:
    """The real command, in a session of its own, its output in a file."""

    def __init__(self, config: Path, home: Path, jobs: Path, output: Path) -> None:
        self._output = output
        env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        command = [sys.executable, "-m", "cli.main", "run", str(config), "--output"]
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env=env | {"PREFECT_HOME": str(home), "TRAIN_LITGPT_HOME": str(jobs)},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self._output.read_text(errors="replace")

    def kill(self) -> None:
        """Kill it as a power cut would: its server and its helpers with it, its job not."""
        family = [self.process, *psutil.Process(self.process.pid).children(recursive=True)]
        for one in family:
            try:
                of_job = JOB_TAG in psutil.Process(one.pid).environ()
            except psutil.Error:
                continue
            if not of_job:
                os.kill(one.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> str:
        assert self.process.wait(timeout=240) == 0, self.text[-3000:]
        return self.text


@pytest.fixture
def run(tmp_path: Path, prefect_home: Callable[[], Path]) -> Iterator[Callable[..., Orchestrator]]:
    made = list[Orchestrator]()

    def start(config: RunConfig | ScriptConfig) -> Orchestrator:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        output = tmp_path / f"orchestrator-{len(made)}.txt"
        made.append(Orchestrator(path, prefect_home(), tmp_path / "jobs", output))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.kill()


@pytest.fixture
def ticking(tmp_path: Path) -> Iterator[ScriptConfig]:
    """A script that prints a line and a row of metrics every tenth of a second."""
    (tmp_path / "tick.py").write_text(TICK)
    settings = {
        "name": f"tick-{os.getpid()}-{next(NUMBERS)}",
        "root": str(tmp_path / "out"),
        "script": str(tmp_path / "tick.py"),
    }
    config = validated(ScriptConfig, settings, where="ticking")
    yield config
    claim_of(config).attempts.cancel()


def attempts_of(config: RunConfig | ScriptConfig) -> Attempts:
    return claim_of(config).attempts


def shown(*orchestrators: Orchestrator) -> Counter[str]:
    """How often each of the script's lines was shown, over all views."""
    return Counter(found for one in orchestrators for found in re.findall(r"line \d+", one.text))


WHEN: dict[str, Callable[[ScriptConfig, Orchestrator], object]] = {
    "while it loads": lambda config, one: time.sleep(1.0) or True,  # type: ignore[func-returns-value]
    "when the attempt is claimed": lambda config, one: attempts_of(config).records(),
    "when the job is there": lambda config, one: attempts_of(config).live(),
    "while it tails": lambda config, one: "line 40" in one.text,
}


@pytest.mark.parametrize("when", WHEN)
def test_a_killed_orchestrator_leaves_one_job_and_the_next_goes_on_with_its_log(
    when: str, ticking: ScriptConfig, run: Callable[[ScriptConfig], Orchestrator]
) -> None:
    one = run(ticking)
    until(lambda: WHEN[when](ticking, one))
    one.kill()
    other = run(ticking)
    other.end()
    [attempt] = attempts_of(ticking).all()
    assert attempt.status.state is JobState.SUCCEEDED
    told = shown(one, other)
    assert set(told) == {f"line {number}" for number in range(LINES)}, "no gap"
    assert {line: count for line, count in told.items() if count > 1} == {}, "no repeat"


def test_of_two_orchestrators_at_once_one_prepares_starts_and_collects(
    tiny: Callable[..., RunConfig], run: Callable[[RunConfig], Orchestrator]
) -> None:
    """The other finds the dataset, follows the job, and finds the model: none of it is made or written twice."""
    config = tiny({"name": f"both-{os.getpid()}"})
    two = [run(config), run(config)]
    texts = [one.end() for one in two]
    assert [record.attempt for record in attempts_of(config).records()] == [1]
    done = [line for text in texts for line in text.splitlines() if "✓ 5/5 checkpoints" in line]
    assert sorted("(found done)" in line for line in done) == [False, True], done
    storage = plan_run(config).storage
    assert export(storage) == exported(storage), "every byte of it is what its manifest says"


def test_an_orchestrator_killed_while_it_collects_leaves_the_rest_to_the_next(
    tiny: Callable[..., RunConfig], run: Callable[[RunConfig], Orchestrator]
) -> None:
    config = tiny({"name": f"collected-{os.getpid()}"})
    one = run(config)
    until(lambda: attempts_of(config).records())
    until(lambda: attempts_of(config).all()[-1].status.state is JobState.SUCCEEDED)
    one.kill()
    text = run(config).end()
    storage = plan_run(config).storage
    assert storage.exists(REPORT)
    assert [record.attempt for record in attempts_of(config).records()] == [1]
    assert "✓ 4/5" in text
    assert "found done" in text
