"""A training that is asked to leave, or whose time is up, saves the step it is in; the next attempt goes on from it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from states import training_of
from training_runs import NewRun, rows, train

from litgpt_demo.errors import Preempted
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import CheckpointManifest, committed, folder_of, reached_end
from litgpt_demo.training.loop import fit, grace_warning


def newest(run: Path) -> CheckpointManifest:
    return committed(open_storage(str(run)))[0]


def shards(run: Path, step: int) -> list[bytes]:
    """The weights and the optimizer's state, byte for byte."""
    return [path.read_bytes() for path in sorted((run / folder_of(step)).glob("*.distcp"))]


def leave_in(step: int, run: Path) -> None:
    """Train until the machine is taken away in the middle of `step`, the steps counting from 1."""
    training, passes = training_of(run), 0

    def sigterm(*_: object) -> None:
        nonlocal passes
        passes += training.model.training
        if passes == 4 * (step - 1) + 2:  # the second of the step's four micro-batches
            os.kill(os.getpid(), signal.SIGTERM)

    training.model.register_forward_pre_hook(sigterm)
    with pytest.raises(Preempted, match=r"asked to leave; step \d+ is saved"):
        fit(training)


def test_a_training_asked_to_leave_saves_and_goes_on_as_if_it_had_not_left(new_run: NewRun, finished: Path) -> None:
    run, saved = new_run("run"), 8
    leave_in(8, run)
    assert newest(run).step == saved
    assert [(row["step"], row["why"]) for row in rows(run, "leave")] == [(saved, "preempted")]
    assert rows(run, "end") == []
    train(run)
    assert [row["step"] for row in rows(run, "start")] == [0, saved]
    assert shards(run, 12) == shards(finished, 12)


def test_a_training_whose_time_is_up_has_ended_well_and_goes_on_when_it_is_given_more(new_run: NewRun) -> None:
    settings = {"max_steps": 100_000, "evaluate_every": 100_000, "checkpoint_every": 100_000}
    run = new_run("run", max_time="0.1s", **settings)
    train(run)
    first, spec = newest(run), read_spec(open_storage(str(run)))
    assert reached_end(first, spec)
    assert first.seconds >= 0.1
    assert 0 < first.step < spec.steps
    assert first.validation_loss == rows(run, "evaluation")[-1]["validation_loss"]
    assert [(row["step"], row["why"]) for row in rows(run, "leave")] == [(first.step, "max_time")]
    assert [row["step"] for row in rows(run, "end")] == [first.step]

    train(run)
    assert newest(run) == first

    new_run("run", max_time=first.seconds + 0.1, **settings)
    assert not reached_end(first, read_spec(open_storage(str(run))))
    train(run)
    assert newest(run).step > first.step
    assert newest(run).seconds >= first.seconds + 0.1


def test_a_save_that_takes_longer_than_the_platform_waits_is_warned_of_with_a_grace_that_fits() -> None:
    assert grace_warning(29.0, {"LITGPT_GRACE": "30"}) is None
    assert grace_warning(29.0, {}) is None  # started by hand: nobody waits for so long
    warned = grace_warning(45.2, {"LITGPT_GRACE": "30"})
    assert warned is not None
    assert "platform.grace to 91" in warned
