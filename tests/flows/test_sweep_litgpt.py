"""A sweep of trainings that do not train; a whole one is in tests/real/pipelines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import get_client

from flows import sweep_litgpt as module
from flows.sweep_litgpt import sweep_litgpt
from launcher.config import RunConfig, SweepConfig, load
from launcher.errors import ConfigProblem, JobFailed, LauncherError

pytestmark = pytest.mark.prefect

DIVERGES = 9.0
Swept = Callable[[dict[str, list[Any]]], list[dict[str, Any]]]


@pytest.fixture
def trained() -> list[RunConfig]:
    """The trials that began."""
    return []


@pytest.fixture
def swept(trained: list[RunConfig], tiny: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> Swept:
    """Runs the flow for a grid; a trial's validation loss is its learning rate."""

    async def train(**groups: Any) -> Any:
        trained.append(config := RunConfig(**groups))
        if (rate := config.train.learning_rate) >= DIVERGES:
            raise JobFailed("user error on node 0: the loss is not finite")
        return SimpleNamespace(validation_loss=rate)

    def run(grid: dict[str, list[Any]]) -> list[dict[str, Any]]:
        config = SweepConfig.model_validate({**tiny().model_dump(), "sweep": {"grid": grid, "max_parallel": 2}})
        return asyncio.run(sweep_litgpt(**dict(config)))

    monkeypatch.setattr(module, "train_litgpt", SimpleNamespace(with_options=lambda **_: train))
    return run


def test_trials_share_the_dataset_and_a_failing_one_does_not_end_the_others_and_the_best_runs_as_it_is(
    swept: Swept, trained: list[RunConfig], tmp_path: Path
) -> None:
    table = swept({"train.learning_rate": [0.03, DIVERGES, 0.01]})
    assert [row["validation loss"] for row in table] == ["0.0100", "0.0300", ""]
    assert "user error" in table[2]["error"]
    assert len([*(tmp_path / "datasets").iterdir()]) == 1
    [written] = tmp_path.glob("sweeps/*/best.yaml")
    [best] = [config for config in trained if config.train.learning_rate == 0.01]
    assert load(RunConfig, written) == best.model_copy(update={"start": load(RunConfig, written).start})
    with get_client(sync_client=True) as client:
        shown: dict[str, Any] = {str(one.key): one.data for one in client.read_artifacts()}
    assert "learning_rate: 0.01" in shown[f"best-{written.parent.name}"]


def test_a_sweep_with_a_trial_that_would_be_refused_does_not_begin(swept: Swept, trained: list[RunConfig]) -> None:
    with pytest.raises(ConfigProblem, match="padded_vocab_size=64"):
        swept({"train.seed": [91, 92], "model.config.padded_vocab_size": [320, 64]})
    assert trained == []


def test_a_sweep_in_which_nothing_succeeds_says_why(swept: Swept) -> None:
    with pytest.raises(LauncherError, match=r"none of 1 trials succeeded.*user error"):
        swept({"train.learning_rate": [DIVERGES]})
