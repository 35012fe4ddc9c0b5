"""How the next trial of a sweep is found, and which is ended early."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from launcher.config import SweepSettings
from launcher.runs.search import Search

SPACE = {
    "train.learning_rate": {"kind": "log-uniform", "low": 1e-4, "high": 1e-2},
    "train.weight_decay": {"kind": "uniform", "low": 0.0, "high": 0.3},
    "model.config.n_layer": {"kind": "integer", "low": 1, "high": 3},
    "train.betas": {"kind": "choice", "values": [[0.9, 0.95], [0.9, 0.99]]},
}


def searched(sweep: SweepSettings, before: Sequence[Mapping[str, Any]] = ()) -> list[Mapping[str, Any]]:
    """The trials of a sweep that goes on from those before; the smaller the learning rate, the better a trial."""
    search = Search(sweep)
    for changes in before:
        search.tell(search.add(changes), [changes["train.learning_rate"]])
    while (number := search.ask()) is not None:
        search.tell(number, [search.changes[number]["train.learning_rate"]])
    return search.changes


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_sweep_that_goes_on_draws_what_it_would_have_drawn_undisturbed(sampler: str) -> None:
    sweep = SweepSettings.model_validate({"space": SPACE, "sampler": sampler, "trials": 16, "seed": 7})
    whole = searched(sweep)
    assert len(whole) == 16
    assert all(whole.count(changes) == 1 for changes in whole)
    for drawn in whole:
        assert 1e-4 <= drawn["train.learning_rate"] <= 1e-2
        assert drawn["model.config.n_layer"] in {1, 2, 3}
        assert drawn["train.betas"] in SPACE["train.betas"]["values"]
    for killed in (1, 12, 16):
        assert searched(sweep, whole[:killed]) == whole


@given(st.lists(st.integers(0, 5), unique=True, min_size=1), st.integers(0, 20))
@settings(max_examples=20)
def test_a_grid_is_taken_whole_whatever_of_it_is_there(rates: list[int], killed: int) -> None:
    sweep = SweepSettings.model_validate({"grid": {"train.learning_rate": rates, "train.seed": [1, 2]}})
    whole = searched(sweep)
    assert whole == [{"train.learning_rate": rate, "train.seed": seed} for rate in rates for seed in (1, 2)]
    assert searched(sweep, whole[:killed]) == whole


def test_a_space_in_which_nothing_new_is_left_ends_the_sweep() -> None:
    few = {"train.learning_rate": {"kind": "choice", "values": [1, 2, 3]}}
    found = searched(SweepSettings.model_validate({"space": few, "sampler": "random", "trials": 50}))
    assert sorted(changes["train.learning_rate"] for changes in found) == [1, 2, 3]


@pytest.mark.parametrize("prune", ["median", "asha"])
def test_a_trial_that_falls_behind_is_hopeless_and_the_best_one_never_is(prune: str) -> None:
    search = Search(SweepSettings.model_validate({"grid": {"train.seed": [*range(9)]}, "prune": prune}))
    pruned = []
    for rank in (0, 1, 2, 3, 4, 5, 8, 7, 6):
        number = search.ask()
        hopeless = any(search.is_hopeless(number, evaluation, 1.0 + rank) for evaluation in range(1, 10))
        search.tell(number, None if hopeless else [1.0 + rank], pruned=hopeless)
        pruned += [rank] if hopeless else []
    assert 0 not in pruned
    assert 8 in pruned


def test_of_several_objectives_the_trials_that_no_other_beats_are_the_front() -> None:
    given = {
        "grid": {"train.seed": [1, 2, 3]},
        "sampler": "grid",
        "objectives": ["validation_loss", "tokens_per_second"],
    }
    search = Search(SweepSettings.model_validate({**given, "prune": None}))
    for values in ([3.0, -100.0], [2.0, -50.0], [3.5, -90.0]):
        number = search.ask()
        search.tell(number, values)
    assert search.front == {0, 1}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"space": SPACE}, "sweep.space needs a sampler that draws"),
        ({"space": SPACE, "sampler": "tpe"}, "set sweep.trials"),
        ({"grid": {"a": [1]}, "trials": 3}, "sweep.trials=3 needs a sampler"),
        ({"space": {"a": {"kind": "uniform", "low": 2, "high": 1}}, "sampler": "tpe", "trials": 1}, "below high=1"),
        ({"space": {"a": {"kind": "log-uniform", "low": 0, "high": 1}}, "sampler": "tpe", "trials": 1}, "above 0"),
        ({"grid": {"a": [1]}, "space": {"a": SPACE["train.betas"]}, "sampler": "tpe", "trials": 1}, "keep one"),
        ({"grid": {"a": [1]}, "prune": "asha", "objectives": ["cost"]}, "validation loss alone"),
    ],
)
def test_a_search_that_cannot_be_is_refused_with_the_setting_to_change(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SweepSettings.model_validate(given)
