"""How the next trial of a sweep is found, and which is ended early."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from launcher.config import Draw, SweepSettings
from launcher.runs.search import Search

SPACE = {
    "train.learning_rate": {"kind": "log-uniform", "low": 1e-4, "high": 1e-2},
    "train.weight_decay": {"kind": "uniform", "low": 0.0, "high": 0.3},
    "model.config.n_layer": {"kind": "integer", "low": 1, "high": 3},
    "train.betas": {"kind": "choice", "values": [[0.9, 0.95], [0.9, 0.99]]},
}


def searched(
    sweep: SweepSettings, before: Sequence[Draw] = (), *, usable: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> list[Draw]:
    """The trials of a sweep that continues from those before; the smaller the learning rate, the better a trial."""
    search = Search(sweep)
    for draw in before:
        search.tell(search.enqueue_existing(draw), [draw.changes["train.learning_rate"]])
    while (number := search.ask()) is not None:
        if usable(search.changes[number]):
            search.tell(number, [search.changes[number]["train.learning_rate"]])
        else:
            search.reject(number)
    return [Draw(number=number, changes=dict(changes)) for number, changes in sorted(search.changes.items())]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_search_draws_from_its_space_and_no_trial_twice(sampler: str) -> None:
    sweep = SweepSettings.model_validate({"space": SPACE, "sampler": sampler, "trials": 16, "seed": 7})
    drawn = [draw.changes for draw in searched(sweep)]
    assert len(drawn) == 16
    assert all(drawn.count(changes) == 1 for changes in drawn)
    for changes in drawn:
        assert 1e-4 <= changes["train.learning_rate"] <= 1e-2
        assert changes["model.config.n_layer"] in {1, 2, 3}
        assert changes["train.betas"] in SPACE["train.betas"]["values"]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
@given(st.integers(0, 1000), st.integers(0, 5))
@settings(max_examples=4)
def test_search_killed_after_any_trial_draws_as_undisturbed(sampler: str, seed: int, refused: int) -> None:
    """Half of the draws cannot be used, and some repeat what was drawn before."""
    space = {name: SPACE[name] for name in ("model.config.n_layer", "train.betas")} | {
        "train.learning_rate": {"kind": "choice", "values": [*range(6)]}
    }
    sweep = SweepSettings.model_validate({"space": space, "sampler": sampler, "trials": 8, "seed": seed})

    def usable(changes: Mapping[str, Any]) -> bool:
        return (changes["train.learning_rate"] - refused) % 6 < 3

    undisturbed = searched(sweep, usable=usable)
    assert len(undisturbed) == 8
    for killed in range(9):
        assert searched(sweep, undisturbed[:killed], usable=usable) == undisturbed


def test_a_random_search_makes_a_draw_again_that_left_no_trial() -> None:
    """Of trials side by side an early one may be killed before it is written down, and a later one not."""
    sweep = SweepSettings.model_validate({"space": SPACE, "sampler": "random", "trials": 6})
    undisturbed = searched(sweep)
    for lost in range(6):
        assert searched(sweep, undisturbed[:lost] + undisturbed[lost + 1 :]) == undisturbed


@given(st.lists(st.integers(0, 5), unique=True, min_size=1), st.integers(0, 20))
@settings(max_examples=10)
def test_grid_is_completed_from_any_existing_trials(rates: list[int], killed: int) -> None:
    sweep = SweepSettings.model_validate({"grid": {"train.learning_rate": rates, "train.seed": [1, 2]}})
    undisturbed = searched(sweep)
    combinations = [{"train.learning_rate": rate, "train.seed": seed} for rate in rates for seed in (1, 2)]
    assert [draw.changes for draw in undisturbed] == combinations
    assert searched(sweep, undisturbed[:killed]) == undisturbed
    turned = SweepSettings(grid=dict(reversed(sweep.grid.items())))
    found = [draw.changes for draw in searched(turned, undisturbed[:killed])]
    assert len(found) == len(combinations), "the order of the settings is another one now"
    assert all(changes in found for changes in combinations)


def test_a_space_in_which_nothing_new_is_left_ends_the_sweep() -> None:
    few = {"train.learning_rate": {"kind": "choice", "values": [1, 2, 3]}}
    found = searched(SweepSettings.model_validate({"space": few, "sampler": "random", "trials": 50}))
    assert sorted(draw.changes["train.learning_rate"] for draw in found) == [1, 2, 3]


@pytest.mark.parametrize("prune", ["median", "asha"])
def test_trial_that_falls_behind_is_hopeless(prune: str) -> None:
    """The best one never is."""
    search = Search(SweepSettings.model_validate({"grid": {"train.seed": [*range(9)]}, "prune": prune}))
    pruned = []
    for rank in (0, 1, 2, 3, 4, 5, 8, 7, 6):
        number = search.ask()
        hopeless = any(search.report(number, evaluation, 1.0 + rank) for evaluation in range(1, 10))
        search.tell(number, None if hopeless else [1.0 + rank], pruned=hopeless)
        pruned += [rank] if hopeless else []
    assert 0 not in pruned
    assert 8 in pruned


def test_evaluation_read_twice_causes_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    search = Search(SweepSettings.model_validate({"grid": {"train.seed": [1]}, "prune": "asha"}))
    number = search.ask()
    assert number is not None
    for _ in range(2):
        search.report(number, 1, 2.0)
    assert [str(warning.message) for warning in recwarn] == []


def test_pareto_front_has_the_unbeaten_trials() -> None:
    arguments = {
        "grid": {"train.seed": [1, 2, 3]},
        "sampler": "grid",
        "objectives": ["validation_loss", "tokens_per_second"],
    }
    search = Search(SweepSettings.model_validate({**arguments, "prune": None}))
    search.tell(search.enqueue_existing(Draw(number=2, changes={"train.seed": 3})), [3.5, -90.0])
    for values in ([3.0, -100.0], [2.0, -50.0]):
        number = search.ask()
        search.tell(number, values)
    assert search.pareto_front == {0, 1}, "the sweep began with its last trial"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"space": SPACE}, "sweep.space needs a sampler that draws"),
        ({"space": SPACE, "sampler": "tpe"}, "set sweep.trials"),
        ({"grid": {"a": [1]}, "trials": 3}, "sweep.trials=3 needs a sampler"),
        ({"space": {"a": {"kind": "uniform", "low": 2, "high": 1}}, "sampler": "tpe", "trials": 1}, "below high=1"),
        ({"space": {"a": {"kind": "uniform", "low": math.nan, "high": 1}}, "sampler": "tpe", "trials": 1}, "below"),
        ({"space": {"a": {"kind": "log-uniform", "low": 0, "high": 1}}, "sampler": "tpe", "trials": 1}, "above 0"),
        ({"grid": {"a": [1]}, "space": {"a": SPACE["train.betas"]}, "sampler": "tpe", "trials": 1}, "keep one"),
        ({"grid": {"a": [1]}, "prune": "asha", "objectives": ["cost"]}, "compares only validation losses"),
    ],
)
def test_impossible_search_is_refused_with_the_setting_to_change(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        SweepSettings.model_validate(arguments)
