"""Elastic nodes, with real ones on this machine: one is killed, the others go on, and it joins again."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import until

from launcher.job import Job, JobId, JobState
from launcher.platforms.local.platform import LocalPlatform
from launcher.platforms.local.supervisor import JOB_TAG
from litgpt_demo.errors import Preempted
from litgpt_demo.heartbeat import NODE_DIRECTORY
from litgpt_demo.node.environment import GENERATION, REGROUP
from litgpt_demo.runs import read_metrics
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import committed

pytestmark = [pytest.mark.training, pytest.mark.timeout(420)]

STEPS = 40
BATCHES: dict[str, Any] = {
    "global_batch": 12, "micro_batch": 2, "max_steps": STEPS, "checkpoint_every": 4, "evaluate_every": 8,
}  # fmt: skip

# The training, which goes no further than the step in a file.
PACED = """
import sys, time
from pathlib import Path
from litgpt_demo.training import loop
train_step = loop.train_step
def paced(training, step):
    while int(Path(sys.argv[2]).read_text()) <= step:
        time.sleep(0.05)
    time.sleep(0.02)
    return train_step(training, step)
loop.train_step = paced
loop.main(["--run", sys.argv[1]])
"""


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[LocalPlatform]:
    """A platform whose jobs are gone when the test is over, however it ended."""
    yield LocalPlatform(grace=20)
    for process in psutil.process_iter():
        try:
            if process.environ().get(JOB_TAG, "").startswith(str(tmp_path)):
                process.kill()
        except psutil.Error:
            continue


class Training:
    """A training on elastic nodes of this machine."""

    def __init__(self, platform: LocalPlatform, run: Path, tmp_path: Path, *, least: int) -> None:
        self.run, self._limit = run, tmp_path / "limit"
        self.platform, self.attempt, script = platform, run / "attempts" / "1", tmp_path / "paced.py"
        script.write_text(PACED)
        self.go_to(10)
        job = Job(
            name=f"elastic-{tmp_path.name}".replace("_", "-")[:40],
            attempt=1,
            nodes=3,
            node_counts=tuple(range(least, 4)),
            processes=1,
            program=(str(script), str(run), str(self._limit)),
            directory=str(self.attempt),
        )
        self.job_id: JobId = platform.submit(platform.render(job))

    def go_to(self, step: int) -> None:
        """Let it train so far, and no further."""
        self._limit.with_suffix(".new").write_text(str(step))
        self._limit.with_suffix(".new").replace(self._limit)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_metrics(open_storage(str(self.run))) if row["kind"] == kind]

    def wait_for(self, step: int, seconds: float = 120.0) -> None:
        """Wait until that step is trained; it is told of while the next one runs."""
        until(lambda: bool(rows := self.rows("step")) and rows[-1]["step"] >= step - 1, seconds=seconds)

    def signal(self, node: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a node's agent a signal; returns when. The ranks of one that is killed are ended by the supervisor."""
        [agent] = [
            process
            for process in psutil.process_iter(["cmdline"])
            if {"--node-rank", "--elastic"} <= set(line := process.info["cmdline"] or [])
            and line[line.index("--node-rank") + 1] == str(node)
            and str(self.attempt) in line
        ]
        os.kill(agent.pid, number)
        return time.monotonic()

    def life(self, node: int) -> str:
        return str(json.loads((self.attempt / "members" / f"node-{node}.json").read_text())["life"])

    def log(self, node: int) -> str:
        return (self.attempt / f"node-{node}.log").read_text()

    def state(self) -> JobState:
        return self.platform.status(self.job_id).state

    def report(self, node: int) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.attempt / f"node-{node}.json").read_text())
        return told


def last_losses(run: Path) -> dict[int, float]:
    """The loss of each step, as the last life that trained it tells."""
    return {row["step"]: row["loss"] for row in read_metrics(open_storage(str(run))) if row["kind"] == "step"}


def undisturbed(new_run: Any) -> Path:
    """The same training on one process, without interruption."""
    from litgpt_demo.training.loop import main

    run: Path = new_run("undisturbed", world_size=1, **BATCHES)
    main(["--run", str(run)])
    return run


def test_ranks_leave_for_a_node_that_waits_with_a_scheduled_checkpoint_and_lose_nothing(
    finished: Path, new_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from litgpt_demo.training.loop import main

    run = new_run("regrouped", world_size=3)
    monkeypatch.setenv(GENERATION, "1 1 1")
    monkeypatch.setenv(NODE_DIRECTORY, str(tmp_path))
    (tmp_path / REGROUP).touch()
    with pytest.raises(Preempted, match="a node joins; step 4 is saved"):
        main(["--run", str(run)])
    (tmp_path / REGROUP).unlink()
    monkeypatch.setenv(GENERATION, "2 1 1")
    assert main(["--run", str(run)]) == 0
    rows = [row for row in read_metrics(open_storage(str(run))) if row["kind"] in {"start", "leave", "evaluation"}]
    told = [(row["kind"], row["step"], row.get("why") or row.get("generation")) for row in rows]
    assert told == [
        ("start", 0, 1), ("evaluation", 4, None), ("leave", 4, "regroup"),
        ("start", 4, 2), ("evaluation", 8, None), ("evaluation", 12, None),
    ]  # fmt: skip
    there, alone = (committed(open_storage(str(folder)))[0] for folder in (run, finished))
    assert (there.step, there.validation_loss, there.world_size) == (12, alone.validation_loss, 1)


@pytest.mark.long
@pytest.mark.parametrize(("lost", "strategy"), [(0, "auto"), (2, "fsdp")])
def test_the_others_go_on_without_a_node_that_is_killed_and_it_joins_again(
    platform: LocalPlatform, new_run: Any, tmp_path: Path, lost: int, strategy: str
) -> None:
    run = new_run("elastic", world_size=3, strategy=strategy, **BATCHES)
    training = Training(platform, run, tmp_path, least=2)
    training.wait_for(10)
    life, left = training.life(lost), [node for node in range(3) if node != lost]
    killed = training.signal(lost)
    training.go_to(20)
    until(lambda: len(training.rows("start")) == 2, seconds=60)
    until(lambda: training.rows("step")[-1]["step"] > 10, seconds=60)
    print(f"{time.monotonic() - killed:.1f} s from kill -9 of node {lost} to the next new step", file=sys.stderr)
    training.wait_for(20)  # and there it waits, until the node is back
    until(lambda: training.life(lost) != life, seconds=60)
    time.sleep(2.5)  # two looks of the others
    training.go_to(STEPS)
    until(lambda: training.state().final, seconds=120)
    assert training.state() is JobState.SUCCEEDED
    starts = training.rows("start")
    assert [(row["generation"], row["nodes"], row["world_size"]) for row in starts] == [(1, 3, 3), (2, 2, 2), (3, 3, 3)]
    joined = starts[2]["step"]
    assert [row["step"] for row in starts] == [0, 8, joined]  # from the newest checkpoint
    assert joined % 4 == 0  # with a scheduled checkpoint, the next one after the node was back
    assert 12 <= joined <= 24
    assert not (training.run / ".scratch").exists()
    assert [row["step"] for row in training.rows("evaluation")] == [8, 16, 24, 32, 40]
    assert re.search(f"generation 2: 2 nodes \\({left[0]}, {left[1]}\\)", training.log(left[0]))
    alone = undisturbed(new_run)
    assert last_losses(training.run) == pytest.approx(last_losses(alone), rel=1e-5)
    newest = [committed(open_storage(str(run)))[0] for run in (training.run, alone)]
    assert newest[0].step == newest[1].step == STEPS
    assert newest[0].validation_loss == pytest.approx(newest[1].validation_loss, rel=1e-5)
    assert platform.left(training.job_id) == ()


@pytest.mark.long
def test_too_few_nodes_end_the_attempt_with_the_class_of_its_cause(
    platform: LocalPlatform, new_run: Any, tmp_path: Path
) -> None:
    from launcher.runs.diagnosis import diagnose
    from launcher.runs.evidence import node_reports
    from litgpt_demo.errors import Fault

    training = Training(platform, new_run("elastic", world_size=3, **BATCHES), tmp_path, least=2)
    training.wait_for(10)
    training.signal(1)
    training.signal(2)
    until(lambda: training.state().final, seconds=60)
    assert training.state() is JobState.FAILED
    assert "platform.nodes.min=2" in training.report(0)["message"]
    status = platform.status(training.job_id)
    verdict = diagnose(status, node_reports(open_storage(str(training.attempt))), (), logs="", nodes=3)
    assert (verdict.fault, verdict.node) == (Fault.NODE, 1)


@pytest.mark.long
def test_a_node_that_is_asked_to_leave_has_all_ranks_save_and_no_step_is_trained_twice(
    platform: LocalPlatform, new_run: Any, tmp_path: Path
) -> None:
    training = Training(platform, new_run("elastic", world_size=3, **BATCHES), tmp_path, least=2)
    training.wait_for(10)
    training.signal(1, signal.SIGTERM)
    time.sleep(1)
    training.go_to(STEPS)
    until(lambda: training.state().final, seconds=180)
    assert training.state() is JobState.SUCCEEDED
    assert training.rows("start")[1]["nodes"] == 2
    assert [row["step"] for row in training.rows("step")] == list(range(1, STEPS + 1))
