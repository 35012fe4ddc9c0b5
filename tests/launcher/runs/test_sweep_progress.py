"""A sweep while it goes on: what its process writes down, and the summary that `status` makes of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from launcher.config import RunConfig, SweepConfig, validated
from launcher.runs.outcomes import Outcome, TrialEnd
from launcher.runs.sweep_progress import (
    SWEEP_PAGE,
    progress_of_trials,
    read_endings,
    read_progress,
    summary_of,
    write_progress,
)
from launcher.runs.trials import Trial
from litgpt_demo.storage import Storage, open_storage

SWEEP = validated(SweepConfig, {"sweep": {"grid": {"train.seed": [0, 1, 2]}, "budget": {"gpu_hours": 4}}}, where="test")


def outcome(number: int, loss: float | None, ended: TrialEnd | None = None) -> Outcome:
    trial = Trial(number=number, changes={"train.seed": number}, config=RunConfig())
    why = "" if ended in {None, "done"} else "because"
    return Outcome(
        trial=trial, run=f"gpt-{number}", validation_loss=loss, tokens_per_second=None, ended=ended, error=why
    )


MIXED = [
    outcome(0, 2.5),
    outcome(1, 2.0, "pruned"),
    outcome(2, 2.25),
    outcome(3, None, "failed"),
    outcome(4, 1.0, "stopped"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def written(folder: Storage, outcomes: list[Outcome], trials: int = 12) -> None:
    write_progress(folder, progress_of_trials(SWEEP, outcomes, trials=trials, gpu_hours=1.25, dollars=None))


def test_what_has_ended_is_found_by_its_run_while_the_sweep_goes_on(folder: Storage, tmp_path: Path) -> None:
    assert read_endings(folder) == {}
    written(folder, MIXED[:2])
    assert read_endings(folder) == {"gpt-0": "done", "gpt-1": "pruned"}
    (tmp_path / "progress.json").write_text("half")
    assert read_endings(folder) == {}
    assert summary_of("gpt-0123", folder, []) is None


def test_the_summary_counts_trials_by_what_has_become_of_them_and_names_the_best(folder: Storage) -> None:
    written(folder, MIXED)
    made = summary_of("gpt-0123", folder, ["gpt-5", "gpt-6"])
    assert made is not None
    assert made.lines(now=made.written) == [
        "gpt-0123: 12 trials: 2 done, 1 pruned, 1 failed, 1 stopped, 2 running, 5 waiting",
        "best so far: trial 2 (seed=2), validation loss 2.2500, run gpt-2",
        "taken: 1.25 of 4 GPU hours",
    ]
    told = json.loads(json.dumps(made.as_json()))
    assert (told["best"]["trial"], told["waiting"], told["budget"]["gpu_hours"], told["page"]) == (2, 5, 4, None)


def test_a_stopped_trial_that_runs_again_is_counted_once(folder: Storage) -> None:
    written(folder, MIXED, trials=5)
    made = summary_of("gpt-0123", folder, ["gpt-4"])
    assert made is not None
    assert (made.stopped, made.running, made.waiting) == (0, 1, 0)


def test_the_summary_says_where_the_report_is_and_that_nobody_goes_on_with_the_sweep(folder: Storage) -> None:
    written(folder, [])
    folder.write(SWEEP_PAGE, b"<html>")
    made = summary_of("gpt-0123", folder, [])
    assert made is not None
    lines = made.lines(now=made.written + 600)
    assert lines[1] == "best so far: none has come to its end"
    assert lines[3:] == [
        f"report: {folder.browse_url(SWEEP_PAGE) or folder.address(SWEEP_PAGE)}",
        "nobody has written this for 10 min: is its process gone?",
    ]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_trial_that_diverged_is_not_the_best(folder: Storage, loss: float) -> None:
    written(folder, [outcome(0, loss)])
    progress = read_progress(folder)
    assert progress is not None
    assert (progress.best, progress.ended[0].figure) == (None, None)
