"""A training that is asked to leave, or whose time is up, saves the step it is in; the next attempt goes on from it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from nodes import report_of, start_node
from states import training_of
from waiting import free_port, until

from litgpt_demo.config import TrainConfig
from litgpt_demo.errors import Fault, Preempted
from litgpt_demo.heartbeat import read_beats
from litgpt_demo.metrics import rows_of
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import CheckpointManifest, committed, folder_of, reached_end
from litgpt_demo.training.loop import fit, heeding_sigterm, main

NewRun: TypeAlias = Callable[..., Path]


def rows(run: Path, *kinds: str) -> list[dict[str, Any]]:
    return [row for row in rows_of((run / "metrics.jsonl").read_text()) if row["kind"] in kinds]


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(run, "step")}


def newest(run: Path) -> CheckpointManifest:
    return committed(open_storage(str(run)))[0]


def shards(run: Path, step: int) -> list[bytes]:
    """The weights and the optimizer's state, byte for byte."""
    return [path.read_bytes() for path in sorted((run / folder_of(step)).glob("*.distcp"))]


# --- SIGTERM ----------------------------------------------------------------------------------------------------------


def test_sigterm_is_heard_inside_and_ends_the_process_as_ever_after() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with heeding_sigterm() as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked()
    assert signal.getsignal(signal.SIGTERM) is before


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


@pytest.mark.parametrize(("asked_in", "saved"), [(1, 2), (6, 7), (8, 8)])
def test_a_training_asked_to_leave_saves_and_its_next_attempt_is_the_uninterrupted_one(
    new_run: NewRun, finished: Path, asked_in: int, saved: int
) -> None:
    run = new_run("run")
    leave_in(asked_in, run)
    assert newest(run).step == saved
    assert [(row["step"], row["why"]) for row in rows(run, "leave")] == [(saved, "preempted")]
    assert rows(run, "end") == []
    assert main(["--run", str(run)]) == 0
    assert [row["step"] for row in rows(run, "start")] == [0, saved]
    assert losses(run) == losses(finished)
    assert shards(run, 12) == shards(finished, 12)


def test_a_training_asked_to_leave_in_its_last_step_has_ended_well(new_run: NewRun, finished: Path) -> None:
    run = new_run("run")
    training = training_of(run)

    def sigterm(*_: object) -> None:
        if training.optimizer.param_groups[0]["lr"] == rows(finished, "step")[-1]["learning_rate"]:
            os.kill(os.getpid(), signal.SIGTERM)

    training.model.register_forward_pre_hook(sigterm)
    fit(training)
    assert shards(run, 12) == shards(finished, 12)
    assert rows(run, "leave") == []


@pytest.mark.long
@pytest.mark.training
def test_two_nodes_of_which_one_is_taken_away_leave_together_and_go_on_bit_for_bit(
    new_run: NewRun, tmp_path: Path
) -> None:
    settings = {"world_size": 2, "max_steps": 120, "evaluate_every": 120, "checkpoint_every": 120}
    taken, through = new_run("taken", **settings), new_run("through", **settings)

    def attempt(run: Path, name: str) -> list[Any]:
        program, port = ("-m", "litgpt_demo", "train", "--run", str(run)), free_port()
        return [
            start_node(tmp_path / name, *program, processes=1, nodes=2, number=number, port=port, grace=30)
            for number in (0, 1)
        ]

    first = attempt(taken, "first")
    own = tmp_path / "first" / "node-1"
    until(lambda: any(beat.step >= 5 for beat in read_beats(own)))
    first[1].terminate()
    said = [node.communicate(timeout=60)[0] for node in first]
    assert [node.returncode for node in first] == [45, 45], said
    reports = [report_of(tmp_path / "first", number) for number in (0, 1)]
    assert [report["fault"] for report in reports] == [Fault.PREEMPTED] * 2
    assert [report["asked"] is not None for report in reports] == [False, True]
    saved = newest(taken).step
    assert 5 <= saved < 120
    second, other = attempt(taken, "second"), attempt(through, "other")
    for node in second + other:
        said = node.communicate(timeout=120)[0]
        assert node.returncode == 0, said
    assert [row["step"] for row in rows(taken, "start")] == [0, saved]
    assert losses(taken) == losses(through)
    assert shards(taken, 120) == shards(through, 120)
    assert len(shards(taken, 120)) == 2


# --- max_time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("8h", 28800), ("1.5h", 5400), ("90m", 5400), ("2d", 172800), ("PT8H", 28800), (30, 30), ("30", 30)],
)
def test_a_time_is_written_as_people_and_standards_do(written: str | int, seconds: int) -> None:
    asked = TrainConfig.model_validate({"max_time": written})
    assert asked.max_time == timedelta(seconds=seconds)
    assert TrainConfig.model_validate(asked.model_dump(mode="json")) == asked


@pytest.mark.parametrize("written", ["0s", "-PT1H", "soon"])
def test_no_time_is_none(written: str) -> None:
    with pytest.raises(ValueError, match="max_time"):
        TrainConfig.model_validate({"max_time": written})


def test_a_training_whose_time_is_up_has_ended_well_and_goes_on_when_it_is_given_more(new_run: NewRun) -> None:
    settings = {"max_steps": 100_000, "evaluate_every": 100_000, "checkpoint_every": 100_000}
    run = new_run("run", max_time="0.5s", **settings)
    assert main(["--run", str(run)]) == 0
    first, spec = newest(run), read_spec(open_storage(str(run)))
    assert reached_end(first, spec)
    assert 0.5 <= first.seconds < 5
    assert 0 < first.step < spec.steps
    assert first.validation_loss == rows(run, "evaluation")[-1]["validation_loss"]
    assert [(row["step"], row["why"]) for row in rows(run, "leave")] == [(first.step, "max_time")]
    assert [row["step"] for row in rows(run, "end")] == [first.step]

    assert main(["--run", str(run)]) == 0
    assert newest(run) == first

    new_run("run", max_time="1s", **settings)
    assert not reached_end(first, read_spec(open_storage(str(run))))
    assert main(["--run", str(run)]) == 0
    assert newest(run).step > first.step
    assert 1 <= newest(run).seconds < 5


def test_time_that_a_crash_cost_does_not_count(new_run: NewRun) -> None:
    run = new_run("run", max_time="1h")
    assert main(["--run", str(run)]) == 0
    last = newest(run)
    shutil.rmtree(run / folder_of(12))
    before = newest(run).seconds
    assert main(["--run", str(run)]) == 0
    assert before < newest(run).seconds < before + last.seconds + 5


# --- what a platform grants -------------------------------------------------------------------------------------------


def test_a_save_that_takes_longer_than_the_platform_waits_is_warned_of_with_a_grace_that_fits() -> None:
    from litgpt_demo.training.loop import grace_warning

    assert grace_warning(29.0, {"LITGPT_GRACE": "30"}) is None
    assert grace_warning(29.0, {}) is None  # started by hand: nobody waits for so long
    warned = grace_warning(45.2, {"LITGPT_GRACE": "30"})
    assert warned is not None
    assert warned.startswith("saving took 45 s, and the platform waits 30 s")
    assert "platform.grace to 91" in warned
