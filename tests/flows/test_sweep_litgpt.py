"""A sweep of trainings that do not train; a whole one is in tests/real/pipelines."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import get_client

from flows import train_litgpt as module
from flows.train_litgpt import _planned, sweep_litgpt
from launcher.config import RunConfig, SweepConfig, read_yaml
from launcher.errors import ConfigProblem, JobFailed, LauncherError

pytestmark = pytest.mark.prefect

DIVERGES = 9.0
Swept = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def trained() -> list[RunConfig]:
    """The trials that began."""
    return []


@pytest.fixture
def swept(
    trained: list[RunConfig], tiny: Callable[..., RunConfig], corpus: Path, tmp_path: Path, monkeypatch: Any
) -> Swept:
    """Runs the flow for a grid; a trial's validation loss is its learning rate. The corpus is gone when one begins."""
    own = Path(shutil.copy(corpus, tmp_path / "corpus.txt"))

    async def train(**groups: Any) -> Any:
        own.unlink(missing_ok=True)
        trained.append(config := RunConfig(**groups))
        assert (await asyncio.to_thread(_planned, config, None)).config == config
        if (rate := config.train.learning_rate) >= DIVERGES:
            raise JobFailed("user error on node 0: the loss is not finite")
        return SimpleNamespace(validation_loss=rate)

    def run(grid: dict[str, list[Any]], train: Callable[..., Any] = train) -> list[dict[str, Any]]:
        monkeypatch.setattr(module, "train_litgpt", SimpleNamespace(with_options=lambda **_: train))
        whole = tiny({"data.corpus.paths": [str(own)]}).model_dump()
        config = SweepConfig.model_validate({**whole, "sweep": {"grid": grid, "max_parallel": 2}})
        return asyncio.run(sweep_litgpt(**dict(config)))

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
    there = RunConfig.model_validate(read_yaml(written))
    assert there == best.model_copy(update={"start": there.start})
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


def test_an_error_that_is_no_failure_of_a_trial_ends_the_others_before_their_sweep(
    swept: Swept, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended, run_sweep = asyncio.Event(), list[str](), sweep_litgpt.fn

    async def train(**groups: Any) -> Any:
        if RunConfig(**groups).train.seed == 2:
            await begun.wait()
            raise ZeroDivisionError
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("trial")

    @wraps(run_sweep)
    async def watched(**groups: Any) -> Any:
        try:
            await run_sweep(**groups)
        finally:
            ended.append("sweep")

    monkeypatch.setattr(sweep_litgpt, "fn", watched)
    with pytest.raises(ZeroDivisionError):
        swept({"train.seed": [1, 2]}, train)
    assert ended == ["trial", "sweep"]
