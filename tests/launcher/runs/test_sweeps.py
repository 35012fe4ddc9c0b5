"""What a sweep and its trials are called, and what they take from the config."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from launcher.config import RunConfig, SweepConfig, overridden, validated
from launcher.errors import ConfigProblem
from launcher.runs.run import plan_run
from launcher.runs.sweeps import sweep_name, trial_of, trials

RATES = {"train.learning_rate": {"kind": "log-uniform", "low": 1e-4, "high": 1e-2}}
DRAWN = {"space": RATES, "sampler": "tpe", "trials": 6}


@pytest.fixture
def swept(tiny: Callable[..., RunConfig]) -> Callable[..., SweepConfig]:
    """Makes configs of sweeps: `swept({"sweep.trials": 9})`."""

    def make(changes: Mapping[str, Any] | None = None) -> SweepConfig:
        document = {**tiny().model_dump(mode="json", exclude={"start"}), "sweep": DRAWN}
        return validated(SweepConfig, overridden(document, changes or {}), where="sweep")

    return make


@pytest.mark.parametrize(
    "changes",
    [
        {"sweep.trials": 60}, {"sweep.max_parallel": 4}, {"sweep.max_gpu_hours": 1}, {"root": "elsewhere"},
        {"platform.processes": 1, "platform.grace": 9, "platform.usd_per_hour": 2}, {"train.checkpoint_every": 2},
        {"train.max_time": "8h"}, {"platform.usd_per_hour": 2, "start.max_usd": 1}, {"workers.count": 3},
    ],
)  # fmt: skip
def test_a_sweep_keeps_its_name_where_what_it_finds_stays_the_same(swept: Any, changes: dict[str, Any]) -> None:
    assert sweep_name(swept(changes)) == sweep_name(swept())


@pytest.mark.parametrize(
    "changes",
    [
        {"sweep.space": {"train.learning_rate": {"kind": "uniform", "low": 1e-4, "high": 1e-2}}}, {"sweep.seed": 1},
        {"sweep.sampler": "random"}, {"sweep.prune": "asha"}, {"sweep.objectives": ["tokens_per_second"]},
        {"train.weight_decay": 0.2}, {"train.max_steps": 9}, {"model.config.n_layer": 2}, {"name": "other"},
        {"data.validation_fraction": 0.1},
    ],
)  # fmt: skip
def test_a_sweep_has_another_name_where_it_would_find_something_else(swept: Any, changes: dict[str, Any]) -> None:
    assert sweep_name(swept(changes)) != sweep_name(swept())


def test_a_trial_has_the_money_of_the_config_and_is_told_by_four_digits_and_the_run_that_its_settings_mean(
    swept: Any, tiny: Callable[..., RunConfig]
) -> None:
    rich = {"platform.usd_per_hour": 2, "start.max_usd": 1}
    trial = trial_of(swept(rich), {"train.learning_rate": 0.0012345678, "model.config.n_layer": 2})
    assert (trial.config.start.max_usd, trial.config.start.sweep) == (1, sweep_name(swept()))
    assert trial.config.start.trial == "learning_rate=0.001235, n_layer=2"
    alone = tiny({"train.learning_rate": 0.0012345678, "model.config.n_layer": 2})
    assert plan_run(trial.config).name == plan_run(alone).name


@pytest.mark.parametrize("what", [{"sweep.max_usd": 5}, {"sweep.objectives": ["validation_loss", "cost"]}])
def test_a_cost_that_cannot_be_known_is_refused_with_the_setting_that_tells_it(swept: Any, what: Any) -> None:
    with pytest.raises(ConfigProblem, match=r"local has no list price that is known here; give platform\.usd_per_hour"):
        swept(what)
    assert trials(swept({**what, "platform.usd_per_hour": 2}))
