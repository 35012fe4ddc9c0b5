from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client

from flows.sweep_litgpt import sweep_litgpt
from launcher.config import RunConfig, SweepConfig, load
from launcher.errors import ConfigProblem, LauncherError
from launcher.runs.run import plan_run
from launcher.runs.sweeps import trials

pytestmark = [pytest.mark.long, pytest.mark.prefect, pytest.mark.training, pytest.mark.timeout(600)]


def sweep_of(config: RunConfig, grid: dict[str, list[Any]]) -> SweepConfig:
    """The trials of a grid around a config."""
    return SweepConfig.model_validate({**config.model_dump(), "sweep": {"grid": grid, "max_parallel": 2}})


def swept(config: SweepConfig) -> list[dict[str, Any]]:
    """The flow in this process."""
    return asyncio.run(sweep_litgpt(**{name: getattr(config, name) for name in SweepConfig.model_fields}))


DIVERGES = 1e30  # a learning rate that no check can know to be too high


def test_trials_share_the_dataset_and_a_failing_one_does_not_end_the_others(trained: Any, trained_faster: Any) -> None:
    # Two of the three are trained by now and found done by their keys.
    table = swept(sweep_of(trained.config, {"train.learning_rate": [0.01, DIVERGES, 0.03]}))
    losses = [trained.final.validation_loss, trained_faster.final.validation_loss]
    assert [row["validation loss"] for row in table] == [f"{loss:.4f}" for loss in sorted(losses)] + [""]
    assert {row["run"] for row in table[:2]} == {plan_run(done.config).name for done in (trained, trained_faster)}
    assert (table[2]["train.learning_rate"], table[2]["validation loss"]) == (str(DIVERGES), "")
    assert table[2]["error"]
    assert len(list(Path(trained.config.root, "datasets").iterdir())) == 1


def test_a_sweep_with_a_trial_that_would_be_refused_does_not_begin(trained: Any) -> None:
    sweep = sweep_of(trained.config, {"train.seed": [91, 92], "model.config.padded_vocab_size": [320, 64]})
    with pytest.raises(
        ConfigProblem, match=r"trial model\.config\.padded_vocab_size=64|padded_vocab_size=64 and 1 more"
    ):
        swept(sweep)
    begun = {path.name for path in Path(trained.config.root, "runs").iterdir()}
    assert begun.isdisjoint(plan_run(trial.config).name for trial in trials(sweep))


def test_the_best_trials_config_runs_as_it_is(trained: Any, trained_faster: Any) -> None:
    swept(sweep_of(trained.config, {"train.learning_rate": [0.03, 0.01]}))
    best = min(trained, trained_faster, key=lambda done: done.final.validation_loss)
    written = max(Path(trained.config.root).glob("sweeps/*/best.yaml"), key=lambda path: path.stat().st_mtime)
    assert load(RunConfig, written) == best.config
    with get_client(sync_client=True) as client:
        shown = {str(one.key): one.data for one in client.read_artifacts()}
    assert f"learning_rate: {best.config.train.learning_rate}" in shown[f"best-{written.parent.name}"]


def test_a_sweep_in_which_nothing_succeeds_says_why(trained: Any) -> None:
    with pytest.raises(LauncherError, match=r"none of 1 trials succeeded.*user error"):
        swept(sweep_of(trained.config, {"train.learning_rate": [2 * DIVERGES]}))
