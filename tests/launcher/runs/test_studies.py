from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bucket_emulator import bucket_emulator

from launcher.config import SweepConfig, validated
from launcher.errors import ConfigProblem, NotInstalled
from launcher.runs.outcomes import Outcome
from launcher.runs.studies import Study, first_trials, importance
from launcher.runs.study_journal import Journal
from launcher.runs.sweeps import trials
from launcher.runs.trials import Trial, sweep_name
from litgpt_demo.storage import open_storage

SPACE = {
    "train.learning_rate": {"log_uniform": [1e-4, 1e-2]},
    "train.weight_decay": {"uniform": [0, 0.1]},
    "train.seed": {"integer": [2, 9], "step": 3},
    "data.tokenizer": {"choice": [{"kind": "train", "vocab_size": 300}, {"kind": "hub"}]},
}
BASE = {"train": {"global_batch": 16, "micro_batch": 4, "max_steps": 200, "evaluate_every": 10}}
GRID: dict[str, Any] = {
    "space": {}, "sampler": None, "trials": None, "grid": {"train.seed": [1, 2], "train.weight_decay": [0.0, 0.1]}
}  # fmt: skip

Make = Callable[..., SweepConfig]


@pytest.fixture
def sweep(tmp_path: Path) -> Make:
    """Makes a sweep that draws from the space, with other settings of its own."""

    def make(**settings: Any) -> SweepConfig:
        given = {"space": SPACE, "sampler": "random", "trials": 6, **settings}
        return validated(SweepConfig, {**BASE, "root": str(tmp_path), "sweep": given}, where="test")

    return make


def ended(trial: Trial, loss: float | None, **more: Any) -> Outcome:
    return Outcome(trial=trial, run=f"gpt-{trial.number}", validation_loss=loss, tokens_per_second=1.0, **more)


def drawn(study: Study) -> list[Trial]:
    return list(iter(study.next, None))


# --- drawing ----------------------------------------------------------------------------------------------------------


def test_every_value_is_from_its_range_and_the_same_seed_draws_the_same(sweep: Make) -> None:
    first = trials(sweep(trials=40))
    for trial in first:
        rate, decay, seed, tokenizer = trial.changes.values()
        assert 1e-4 <= rate <= 1e-2
        assert 0 <= decay <= 0.1
        assert seed in {2, 5, 8}
        assert tokenizer in SPACE["data.tokenizer"]["choice"]  # type: ignore[operator]
        assert trial.config.train.learning_rate == rate
    assert {trial.changes["train.seed"] for trial in first} == {2, 5, 8}
    assert [trial.changes for trial in trials(sweep(trials=40))] == [trial.changes for trial in first]
    assert [trial.changes for trial in trials(sweep(trials=40, seed=1))] != [trial.changes for trial in first]


def test_what_is_shown_beforehand_is_what_the_study_draws(sweep: Make) -> None:
    for config in (sweep(sampler="random"), sweep(sampler="tpe", trials=12)):
        shown = trials(config)
        assert [trial.changes for trial in drawn(Study(config))][: len(shown)] == [trial.changes for trial in shown]


@pytest.mark.long
def test_tpe_draws_near_the_best(sweep: Make) -> None:
    config = sweep(space={"train.learning_rate": SPACE["train.learning_rate"]}, sampler="tpe", trials=30)
    study, distances = Study(config), list[float]()
    while (trial := study.next()) is not None:
        distances.append(abs(math.log10(trial.config.train.learning_rate) + 3))
        study.tell(ended(trial, distances[-1]))
    assert sum(distances[-10:]) < 0.8 * sum(distances[:10])


def test_a_trial_that_makes_no_training_is_drawn_with_its_problem(sweep: Make) -> None:
    config = sweep(space={"train.micro_batch": {"integer": [2, 4]}, "train.seed": {"integer": [0, 99]}}, trials=20)
    problems = [trial.problem for trial in first_trials(config)]
    assert any("does not split" in problem for problem in problems)
    assert not all(problems)


# --- going on ---------------------------------------------------------------------------------------------------------


def test_a_study_that_is_opened_again_goes_on_with_what_has_no_end_and_draws_nothing_twice(sweep: Make) -> None:
    config = sweep()
    study = Study(config)
    done, pruned, failed, open_, *_ = drawn(study)
    study.report(done.number, 10, 3.0)
    study.tell(ended(done, 2.5))
    study.tell(ended(pruned, 4.0, ended="pruned", error="pruned at step 10"))
    study.tell(ended(failed, math.nan, error="out of memory\n  what to do: …"))
    study.tell(ended(open_, None, ended="stopped", error="the platform did not answer"))
    again = Study(config)
    told = {one.trial.number: one for one in again.earlier()}
    assert {number: one.state for number, one in told.items()} == {0: "done", 1: "pruned", 2: "failed"}
    assert told[0].validation_loss == 2.5
    assert told[2].error.startswith("out of memory")
    left = drawn(again)
    assert [trial.number for trial in left] == [3, 4, 5]
    assert left[0].changes == open_.changes
    assert [trial.changes for trial in [done, pruned, failed, *left]] == [
        trial.changes for trial in first_trials(config)
    ]


def test_more_trials_go_on_with_the_same_sweep(sweep: Make) -> None:
    few, more = sweep(trials=3), sweep(trials=5, max_parallel=4, budget={"gpu_hours": 3})
    assert sweep_name(few) == sweep_name(more) != sweep_name(sweep(seed=1))
    assert len(drawn(Study(few))) == 3
    again = drawn(Study(more))  # three have no end yet
    assert [trial.number for trial in again] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("killed_after", [1, 4, 8])
def test_a_process_killed_between_any_two_writes_loses_and_doubles_nothing(sweep: Make, killed_after: int) -> None:
    config = sweep(trials=2)
    drawn(Study(config))
    folder = Path(config.root, "sweeps", sweep_name(config), "study")
    for path in sorted(folder.iterdir())[killed_after:]:
        path.unlink()
    assert [trial.changes for trial in drawn(Study(config))] == [trial.changes for trial in first_trials(config)]


@pytest.mark.parametrize("killed_after", [1, 3, 9])
def test_a_grid_that_is_pruned_is_in_order_wherever_it_was_killed(sweep: Make, killed_after: int) -> None:
    config = sweep(**GRID, pruning={"kind": "asha"})
    listed = trials(config)
    drawn(Study(config, listed))
    folder = Path(config.root, "sweeps", sweep_name(config), "study")
    for path in sorted(folder.iterdir())[killed_after:]:
        path.unlink()
    assert [trial.changes for trial in drawn(Study(config, listed))] == [trial.changes for trial in listed]


def test_two_writers_of_a_journal_lose_nothing(tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    one, other = Journal(folder), Journal(folder)
    for number in range(3):
        one.append_logs([{"from": "one", "number": number}])
        other.append_logs([{"from": "other", "number": number}])
    assert [log["from"] for log in Journal(folder).read_logs(0)] == ["one", "other"] * 3
    assert [log["number"] for log in one.read_logs(4)] == [2, 2]


@pytest.mark.long
def test_a_study_lies_in_a_bucket_too(sweep: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket_emulator("mine") as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        config = sweep().model_copy(update={"root": "gs://mine/swept"})
        study = Study(config)
        trial = study.next()
        assert trial is not None
        study.tell(ended(trial, 1.5))
        assert [one.validation_loss for one in Study(config).earlier()] == [1.5]


@pytest.mark.long
def test_a_database_keeps_the_study_and_its_address_is_never_told(
    sweep: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sweep(database="SWEEP_DATABASE")
    with pytest.raises(ConfigProblem, match="SWEEP_DATABASE names an environment variable that is not set"):
        Study(config)
    monkeypatch.setenv("SWEEP_DATABASE", f"sqlite:///{tmp_path}/study.db")
    study = Study(config)
    trial = study.next()
    assert trial is not None
    study.tell(ended(trial, 1.5))
    assert [one.validation_loss for one in Study(config).earlier()] == [1.5]
    assert not (tmp_path / "sweeps").exists()
    monkeypatch.setenv("SWEEP_DATABASE", "postgresql+psycopg://user:hunter2@nowhere.invalid/x")
    with pytest.raises(ConfigProblem) as caught:
        Study(config)
    assert "hunter2" not in str(caught.value)


# --- pruning ----------------------------------------------------------------------------------------------------------


def run_all(config: SweepConfig, losses: list[float], steps: list[int]) -> list[int | None]:
    """Return the step at which each trial was pruned; trial n has the loss n at every step."""
    study, found = Study(config), list[int | None]()
    for loss in losses:
        trial = study.next()
        assert trial is not None
        end = next((step for step in steps if study.report(trial.number, step, loss)), None)
        study.tell(ended(trial, loss, ended="done" if end is None else "pruned"))
        found.append(end)
    return found


@pytest.mark.parametrize(
    ("pruning", "ends"),
    [
        ({"kind": "asha"}, [None, 10, None, 10, 10, 10]),
        ({"kind": "median", "startup_trials": 2}, [None, None, None, 10, 10, 10]),
        (None, [None] * 6),
    ],
    ids=str,
)
def test_trials_that_are_behind_end_early(sweep: Make, pruning: Any, ends: list[int | None]) -> None:
    assert run_all(sweep(pruning=pruning), [3.0, 4.0, 2.0, 5.0, math.nan, 3.5], [10, 20, 30, 60, 100]) == ends


@pytest.mark.long
def test_hyperband_ends_some_of_many(sweep: Make) -> None:
    ends = run_all(sweep(pruning={"kind": "hyperband"}, trials=15), [float(n) for n in range(15)], [10, 30, 90, 150])
    assert None in ends
    assert any(ends)


def test_a_step_that_was_reported_before_the_process_was_killed_is_judged_once(sweep: Make) -> None:
    config = sweep(pruning={"kind": "asha"})
    study = Study(config)
    good, bad, *_ = drawn(study)
    assert study.report(good.number, 10, 2.0) == study.report(good.number, 20, 1.9) == ""
    assert "not among the best 1/3" in study.report(bad.number, 10, 3.0)
    again = Study(config)
    drawn(again)
    assert again.report(good.number, 30, 1.8) == ""
    assert again.report(good.number, 10, 2.0) == again.report(good.number, 20, 1.9) == ""
    assert "not among the best 1/3" in again.report(bad.number, 30, 2.9), "it is judged again at the next rung"


# --- what else is asked of it -----------------------------------------------------------------------------------------


def test_without_optuna_a_grid_goes_on_and_all_else_says_what_to_install(
    sweep: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else there(name))
    assert len(trials(sweep(space={}, sampler=None, trials=None, grid={"train.seed": [1, 2]}))) == 2
    for config in (
        sweep(),
        sweep(space={}, sampler=None, trials=None, grid={"train.seed": [1]}, pruning={"kind": "asha"}),
    ):
        with pytest.raises(NotInstalled, match=r'pip install "train-litgpt\[sweep\]"'):
            trials(config)


def test_the_setting_that_decides_is_the_most_important(sweep: Make) -> None:
    config = sweep(trials=30)
    done = [ended(trial, abs(math.log10(trial.config.train.learning_rate) + 3)) for trial in first_trials(config)]
    found = importance(done, config.sweep.dimensions, "validation_loss")
    assert next(iter(found)) == "train.learning_rate"
    assert math.isclose(sum(found.values()), 1.0)
    assert importance(done[:3], config.sweep.dimensions, "validation_loss") == {}
