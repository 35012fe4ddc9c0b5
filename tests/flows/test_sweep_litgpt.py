"""A sweep of trainings that do not train; a whole one is in tests/real/pipelines."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import get_client
from waiting import until

from flows import sweep_litgpt as module
from flows.sweep_litgpt import sweep_litgpt
from flows.train_litgpt import _planned
from launcher.config import RunConfig, SweepConfig, read_yaml
from launcher.errors import ConfigProblem, JobCancelled, JobFailed, LauncherError
from launcher.runs.index import Index
from launcher.runs.run import plan_run

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

    def run(grid: dict[str, list[Any]], train: Callable[..., Any] = train, **sweep: Any) -> list[dict[str, Any]]:
        monkeypatch.setattr(module, "train_litgpt", SimpleNamespace(with_options=lambda **_: train))
        whole = tiny({"data.corpus.paths": [str(own)]}).model_dump()
        config = SweepConfig.model_validate({**whole, "sweep": {"grid": grid, "max_parallel": 2} | sweep})
        return asyncio.run(sweep_litgpt(**dict(config)))

    return run


def test_trials_share_the_dataset_and_a_failing_one_does_not_end_the_others_and_the_best_runs_as_it_is(
    swept: Swept, trained: list[RunConfig], tmp_path: Path
) -> None:
    table = swept({"train.learning_rate": [0.03, DIVERGES, 0.01]})
    assert [row["validation loss"] for row in table] == ["0.0100", "0.0300", ""]
    assert "user error" in table[2]["ended"]
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
    with pytest.raises(LauncherError, match=r"none of 1 trials has a model.*user error"):
        swept({"train.learning_rate": [DIVERGES]})


def test_an_error_that_is_ours_ends_its_trial_and_not_the_sweep(swept: Swept) -> None:
    async def train(**groups: Any) -> Any:
        if (seed := RunConfig(**groups).train.seed) == 2:
            raise ZeroDivisionError("not foreseen")
        return SimpleNamespace(validation_loss=float(seed))

    table = swept({"train.seed": [1, 2, 3]}, train)
    assert [(row["train.seed"], row["ended"]) for row in table] == [
        ("1", ""), ("3", ""), ("2", "ZeroDivisionError: not foreseen"),
    ]  # fmt: skip


def test_a_trial_that_falls_behind_is_cancelled_and_its_row_says_where(swept: Swept, tmp_path: Path) -> None:
    """Each trial tells its seed as the validation loss, and ends when its run is asked to."""

    async def train(**groups: Any) -> Any:
        config = RunConfig(**groups)
        run = plan_run(config).name
        module.ON_ROW.get()({"kind": "evaluation", "step": 4, "validation_loss": float(config.train.seed)})
        if config.train.seed > 1:
            await asyncio.to_thread(until, lambda: Index.of(str(tmp_path)).cancellations(run))
            raise JobCancelled(f"{run} was cancelled")
        return SimpleNamespace(validation_loss=1.0)

    table = swept({"train.seed": [1, 2, 9]}, train, prune="asha", max_parallel=1)
    assert [(row["train.seed"], row["validation loss"]) for row in table] == [("1", "1.0000"), ("2", ""), ("9", "")]
    assert [row["ended"] for row in table[1:]] == [
        f"pruned at step 4, with validation loss {seed:.4f}" for seed in (2, 9)
    ]
    assert len([*tmp_path.glob("sweeps/*/pruned/*")]) == 2


def test_a_search_draws_its_trials_and_leaves_out_those_whose_settings_do_not_fit(swept: Swept) -> None:
    space = {
        "train.learning_rate": {"kind": "log-uniform", "low": 1e-3, "high": 1e-1},
        "model.config.n_embd": {"kind": "choice", "values": [32, 33]},  # 33 does not split over two heads
    }
    table = swept({}, space=space, sampler="tpe", trials=6)
    assert {row["model.config.n_embd"] for row in table} == {"32"}
    losses = [float(row["validation loss"]) for row in table]
    assert losses == sorted(losses)
    assert 0 < len(losses) <= 6
