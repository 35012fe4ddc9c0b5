from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.config import RunConfig, StartSettings, SweepConfig, load, validated
from launcher.errors import ConfigProblem
from launcher.runs.sweeps import Outcome, Trial, best_yaml, ranking, trials

BASE = {"train": {"global_batch": 16, "micro_batch": 4, "max_steps": 200}}


def sweep(grid: dict[str, list[Any]], **settings: Any) -> SweepConfig:
    return validated(SweepConfig, {**BASE, **settings, "sweep": {"grid": grid}}, where="test")


def outcome(name: str, loss: float | None, error: str = "", speed: float | None = 100.0) -> Outcome:
    trial = Trial(changes={"train.seed": name}, config=RunConfig(name=name))
    return Outcome(trial=trial, run=f"{name}-key", validation_loss=loss, tokens_per_second=speed, error=error)


# --- trials -----------------------------------------------------------------------------------------------------------


def test_trials_are_all_combinations_in_the_order_they_are_written() -> None:
    made = trials(sweep({"train.learning_rate": [1e-3, 3e-4], "model.sequence_length": [128, 256]}))
    assert [tuple(trial.changes.values()) for trial in made] == [(1e-3, 128), (1e-3, 256), (3e-4, 128), (3e-4, 256)]
    assert [(trial.config.train.learning_rate, trial.config.model.sequence_length) for trial in made] == [
        (1e-3, 128),
        (1e-3, 256),
        (3e-4, 128),
        (3e-4, 256),
    ]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_there_are_as_many_trials_as_combinations_and_no_two_alike(sizes: list[int]) -> None:
    settings = ("train.seed", "data.split_seed", "train.evaluate_every")
    made = trials(
        sweep({name: list(range(1, size + 1)) for name, size in zip(settings, sizes, strict=False)})
    )  # fmt: skip
    assert len(made) == math.prod(sizes)
    assert len({tuple(trial.changes.items()) for trial in made}) == len(made)


def test_a_trial_is_a_plain_run_and_keeps_what_the_grid_does_not_name() -> None:
    (trial,) = trials(sweep({"train.seed": [7]}, name="mine", root="gs://bucket/x"))
    assert type(trial.config) is RunConfig
    assert (trial.config.name, trial.config.root, trial.config.train.max_steps) == ("mine", "gs://bucket/x", 200)


def test_without_a_grid_the_run_itself_is_the_only_trial() -> None:
    (trial,) = trials(sweep({}))
    assert trial.changes == {}


def test_a_grid_may_go_over_whole_sections() -> None:
    made = trials(sweep({"data.tokenizer": [{"kind": "train", "vocab_size": 300}, {"kind": "hub"}]}))
    assert [trial.config.data.tokenizer.kind for trial in made] == ["train", "hub"]


def test_a_trial_that_cannot_be_is_refused_by_name_before_any_runs() -> None:
    with pytest.raises(ConfigProblem) as caught:
        trials(sweep({"train.seed": [1, 2], "train.micro_batch": [4, 5]}))
    assert "trial train.seed=1, train.micro_batch=5 cannot be used" in str(caught.value)
    assert "global_batch=16 does not split" in str(caught.value)


def test_a_setting_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigProblem, match=r"train\.lr: there is no such setting"):
        trials(sweep({"train.lr": [1e-3]}))


@pytest.mark.parametrize(
    "grid",
    [
        {"train.seed": [1, 1]},
        {"train.learning_rate": [1e-3, "1e-3"]},
        {"platform.nodes": [1, 2]},
        {"train.checkpoint_every": [10, 20]},
        {"root": ["here", "there"]},
    ],
    ids=str,
)
def test_trials_that_would_train_the_same_model_twice_are_refused(grid: dict[str, list[Any]]) -> None:
    with pytest.raises(ConfigProblem, match="two of its trials are the same training"):
        trials(sweep(grid))


# --- ranking ----------------------------------------------------------------------------------------------------------


def test_the_best_trial_comes_first_and_what_has_no_loss_last() -> None:
    table = ranking(
        [
            outcome("failed", None, error="out of memory on node 1\n  what to do: …", speed=None),
            outcome("diverged", math.nan),
            outcome("good", 2.5),
            outcome("best", 2.25, speed=12345.6),
        ]
    )
    assert [row["train.seed"] for row in table[:2]] == ["best", "good"]
    assert {row["train.seed"] for row in table[2:]} == {"failed", "diverged"}
    assert table[0] == {
        "train.seed": "best",
        "validation loss": "2.2500",
        "tokens/s": "12,346",
        "run": "best-key",
        "error": "",
    }
    (failed,) = (row for row in table if row["train.seed"] == "failed")
    assert (failed["validation loss"], failed["tokens/s"], failed["error"]) == ("", "", "out of memory on node 1")


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


def test_the_best_config_can_be_run(tmp_path: Path) -> None:
    made = trials(sweep({"train.learning_rate": [1e-5, 3e-4]}, name="mine"))
    outcomes = [
        Outcome(trial=trial, run=f"run-{number}", validation_loss=loss, tokens_per_second=1.0)
        for number, (trial, loss) in enumerate(zip(made, [2.0, 3.0], strict=True))
    ]
    text = best_yaml(outcomes)
    assert text is not None
    assert text.startswith("# validation loss 2.0000, run run-0\n")
    path = tmp_path / "best.yaml"
    path.write_text(text)
    # As a run of its own, not as a trial of that sweep.
    assert load(RunConfig, path) == made[0].config.model_copy(update={"start": StartSettings()})


def test_where_every_trial_failed_there_is_no_best() -> None:
    assert best_yaml([outcome("a", None), outcome("b", math.nan)]) is None
    assert best_yaml([]) is None
