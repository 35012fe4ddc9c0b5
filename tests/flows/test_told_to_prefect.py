"""The events and assets that a training leaves in Prefect's server, and that a run which is found done leaves none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from stored_events import stored_events

from launcher.config import RunConfig
from launcher.runs.run import plan_run
from litgpt_demo.config import ModelConfig
from tasks.assets import asset_key, checkpoint_key, dataset_key, model_key

pytestmark = [pytest.mark.prefect, pytest.mark.training, pytest.mark.long, pytest.mark.timeout(600)]

MADE = "prefect.asset.materialization.succeeded"


def test_a_run_tells_of_its_start_its_checkpoints_and_its_end_and_one_that_is_done_of_nothing(
    trained: Any, run_again: Callable[[RunConfig], Any]
) -> None:
    run = plan_run(trained.config)
    run_again(trained.config)
    told = stored_events("train-litgpt.", f"train-litgpt.run.{run.name}")
    assert [one.event for one in told] == [
        "train-litgpt.run.started", *["train-litgpt.checkpoint.committed"] * 2, "train-litgpt.run.finished",
    ]  # fmt: skip
    started, first, last, finished = (one.payload for one in told)
    assert (started["step"], started["steps"], started["platform"], started["processes"]) == (0, 8, "local", 1)
    assert (first["step"], last["step"]) == (4, 8)
    assert first["validation_loss"] != last["validation_loss"]
    assert finished["validation_loss"] == trained.final.validation_loss
    assert (finished["tokens"], finished["usd"]) == (trained.final.tokens, None)
    assert run.storage.exists(finished["report"].removeprefix(f"{run.storage.address()}/"))
    roles = {one.role for event in told for one in event.related}
    assert {"flow-run", "flow"} <= roles


def test_a_model_is_an_asset_that_was_made_from_its_checkpoints_and_its_dataset(trained: Any) -> None:
    run = plan_run(trained.config)
    made = stored_events(MADE, dataset_key(run), checkpoint_key(run), model_key(run))
    assert [(one.resource.id, {other.id for other in one.related if other.role == "asset"}) for one in made] == [
        (dataset_key(run), set()),
        (checkpoint_key(run), {dataset_key(run)}),
        (model_key(run), {dataset_key(run), checkpoint_key(run)}),
    ]
    assert made[-1].payload["validation_loss"] == trained.final.validation_loss
    assert made[-1].resource.name == run.name


@pytest.mark.drill  # for its length
def test_a_model_that_began_with_anothers_weights_was_made_from_that_model(
    trained: Any, run_again: Callable[[RunConfig], Any]
) -> None:
    before = plan_run(trained.config)
    length = trained.config.model.sequence_length
    model = ModelConfig.model_validate({"from": before.storage.address(), "sequence_length": length})
    config = trained.config.model_copy(update={"name": "descendant", "model": model})
    run_again(config)
    [made] = stored_events(MADE, model_key(plan_run(config)))
    assert asset_key(before.storage.address("final")) in {one.id for one in made.related}
