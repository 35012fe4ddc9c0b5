"""The ledger of real runs on this machine: its parts add up to the time that somebody else took."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Any

import pytest

from launcher.config import RunConfig
from launcher.errors import JobCancelled
from launcher.events import Event, JobChanged, Listener, MetricsRow
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.reports.goodput import Ledger, Part, ledger
from launcher.runs.attempts import Attempts
from launcher.runs.index import Index
from launcher.runs.run import Run, plan_run
from litgpt_demo.metrics import curve
from litgpt_demo.node.agent import tagged
from litgpt_demo.runs import read_metrics
from tasks.report import attempt_times

pytestmark = [pytest.mark.prefect, pytest.mark.training, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = {"train.max_steps": 60, "train.checkpoint_every": 20, "train.evaluate_every": 20, "train.log_every": 1}


@dataclass
class Observer:
    """Somebody who sees a run's jobs begin and end, by a clock of his own, and may do something at a step."""

    at_step: int = 0
    act: Callable[[], None] = lambda: None
    begun: float = 0.0
    ended: float = 0.0

    def __call__(self, event: Event) -> None:
        match event:
            case JobChanged(phase="submitting"):
                self.begun = self.begun or time.time()
            case JobChanged(phase="ended"):
                self.ended = time.time()
            case MetricsRow(row={"kind": "step", "step": int(step)}) if self.at_step and step >= self.at_step:
                self.at_step = 0
                self.act()


def ledger_of(run: Run) -> Ledger:
    return ledger(attempt_times(Index(run.root), run.name), read_metrics(run.storage))


def require_sum(made: Ledger, seen: Observer) -> None:
    assert made.wall == pytest.approx(seen.ended - seen.begun, rel=0.01, abs=1.0)
    assert sum(made.seconds.values()) == pytest.approx(made.wall)
    assert made.seconds.get(Part.UNKNOWN, 0.0) <= 0.01 * made.wall
    assert not made.seconds.get(Part.QUEUE), "nothing queues on this machine"


def kill_a_rank(run: Run) -> None:
    [record] = Index(run.root).records(run.name)[-1:]
    ranks = [one for one in tagged(JOB_TAG, record.job_id) if one.environ().get("LOCAL_RANK") == "0"]
    assert ranks
    os.kill(ranks[-1].pid, signal.SIGKILL)


def cancel_aside(run: Run) -> None:
    """Cancel the run in a thread, as another terminal would."""
    Thread(target=Attempts(index=Index(run.root), run=run.name).cancel).start()


def stepping(run: Run) -> float:
    """Seconds of all steps that count, by the training's own words."""
    return sum(curve(read_metrics(run.storage), "step", "step_seconds").values())


def test_the_ledger_of_an_undisturbed_run(tiny: Callable[..., RunConfig], run_again: Callable[..., Any]) -> None:
    config, seen = tiny(STEPS), Observer()
    with Listener(seen):
        run_again(config)
    run = plan_run(config)
    made = ledger_of(run)
    require_sum(made, seen)
    assert made.seconds[Part.TRAINING] == pytest.approx(stepping(run) - made.seconds[Part.COMPILE], rel=0.1, abs=0.5)
    assert {Part.LOST, Part.RESTART, Part.STOPPED}.isdisjoint(made.seconds)


def test_the_ledger_of_a_run_whose_rank_was_killed(
    tiny: Callable[..., RunConfig], run_again: Callable[..., Any]
) -> None:
    config = tiny(STEPS)
    run = plan_run(config)
    seen = Observer(at_step=33, act=lambda: kill_a_rank(run))
    with Listener(seen):
        run_again(config)
    made = ledger_of(run)
    require_sum(made, seen)
    assert made.seconds[Part.LOST] > 0
    assert made.seconds[Part.RESTART] > 1, "to judge, submit, start and load takes more than a second"
    assert Part.STOPPED not in made.seconds
    assert made.seconds[Part.TRAINING] == pytest.approx(stepping(run) - made.seconds[Part.COMPILE], rel=0.1, abs=0.5)


def test_the_ledger_of_a_run_that_was_cancelled_and_taken_up_again(
    tiny: Callable[..., RunConfig], run_again: Callable[..., Any]
) -> None:
    config = tiny(STEPS)
    run = plan_run(config)
    seen = Observer(at_step=25, act=lambda: cancel_aside(run))
    with Listener(seen):
        with pytest.raises(JobCancelled):
            run_again(config)
        run_again(config)
    made = ledger_of(run)
    require_sum(made, seen)
    assert made.seconds[Part.STOPPED] > 0
    assert made.seconds.get(Part.LOST, 0.0) == 0, "a job that is asked to leave saves first"
    assert made.seconds[Part.TRAINING] == pytest.approx(stepping(run) - made.seconds[Part.COMPILE], rel=0.1, abs=0.5)
