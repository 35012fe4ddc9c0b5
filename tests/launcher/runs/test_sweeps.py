"""The trials of a sweep, and which was the best."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.config import RunConfig, SweepConfig, validated
from launcher.errors import ConfigProblem
from launcher.runs.sweeps import Outcome, Trial, best_yaml, ranking, trials

BASE = {"train": {"global_batch": 16, "micro_batch": 4, "max_steps": 200}}


def sweep(grid: dict[str, list[Any]], **settings: Any) -> SweepConfig:
    return validated(SweepConfig, {**BASE, **settings, "sweep": {"grid": grid}}, where="test")


def outcome(name: str, loss: float | None) -> Outcome:
    trial = Trial(changes={"train.seed": name}, config=RunConfig(name=name))
    return Outcome(trial=trial, run=f"{name}-key", validation_loss=loss, tokens_per_second=100.0)


def test_trials_are_all_combinations_in_the_order_they_are_written() -> None:
    made = trials(sweep({"train.learning_rate": [1e-3, 3e-4], "model.sequence_length": [128, 256]}, name="mine"))
    wanted = [(1e-3, 128), (1e-3, 256), (3e-4, 128), (3e-4, 256)]
    assert [tuple(trial.changes.values()) for trial in made] == wanted
    configs = [trial.config for trial in made]
    assert [(config.train.learning_rate, config.model.sequence_length) for config in configs] == wanted
    assert {(type(config), config.name, config.train.max_steps) for config in configs} == {(RunConfig, "mine", 200)}
    assert [trial.changes for trial in trials(sweep({}))] == [{}]


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({"train.seed": [1], "train.micro_batch": [4, 5]}, "trial train.seed=1, train.micro_batch=5 cannot be used"),
        ({"train.lr": [1e-3]}, "train.lr: there is no such setting"),
        ({"train.learning_rate": [1e-3, "1e-3"]}, "two of its trials are the same training"),
        ({"train.checkpoint_every": [10, 20]}, "two of its trials are the same training"),
    ],
)
def test_a_grid_with_a_trial_that_cannot_be_or_is_another_is_refused(grid: dict[str, list[Any]], said: str) -> None:
    with pytest.raises(ConfigProblem) as caught:
        trials(sweep(grid))
    assert said in str(caught.value)


@given(st.lists(st.none() | st.floats(), max_size=8))
@example([None, math.inf])
def test_the_ranking_is_by_loss_and_best_yaml_is_its_first(losses: list[float | None]) -> None:
    outcomes = [outcome(f"t{number}", loss) for number, loss in enumerate(losses)]
    table = ranking(outcomes)
    real = sorted(loss for loss in losses if loss is not None and not math.isnan(loss))
    assert [row["validation loss"] for row in table[: len(real)]] == [f"{loss:.4f}" for loss in real]
    best = best_yaml(outcomes)
    if not real or real[0] == math.inf:
        assert best is None
    else:
        assert best is not None
        assert f"name: {table[0]['train.seed']}\n" in best
