"""The dataset step: one task, which is tried again where what went wrong may pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from launcher.config import ThreadWorkers
from launcher.events import Event, Listener, StepDone
from litgpt_demo.config import DataConfig
from litgpt_demo.data.dataset import DatasetManifest, finished_dataset, plan_dataset
from litgpt_demo.errors import DataError
from tasks import dataset

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(300)]


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(f"document {number} says little" for number in range(400)))
    return DataConfig.model_validate(
        {
            "corpus": {"kind": "files", "paths": [str(text)], "separator": "\n\n"},
            "tokenizer": {"kind": "train", "vocab_size": 280, "sample_bytes": 10_000},
            "validation_fraction": 0.1,
        }
    )


def failing_first(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[None]:
    """Let the first look for the finished dataset fail; returns a list that grows with every look."""
    looks: list[None] = []

    def look(*given: Any) -> DatasetManifest | None:
        looks.append(None)
        if len(looks) == 1:
            raise error
        return finished_dataset(*given)

    monkeypatch.setattr(dataset, "finished_dataset", look)
    monkeypatch.setattr(dataset.prepare_dataset, "retry_delay_seconds", [0.1, 0.1, 0.1])
    return looks


@pytest.fixture
def prepare(data: DataConfig, tmp_path: Path) -> Callable[[], list[StepDone]]:
    """Runs the step in a flow; returns how it ended."""

    @flow(name="scene")
    async def scene() -> DatasetManifest:
        workers = ThreadWorkers(kind="threads", count=2)
        return await dataset.prepare_dataset(plan_dataset(data), root=str(tmp_path / "root"), workers=workers)

    def prepared() -> list[StepDone]:
        events: list[Event] = []
        with Listener(events.append):
            asyncio.run(scene())
        return [event for event in events if isinstance(event, StepDone)]

    return prepared


def test_a_storage_that_is_away_for_a_moment_does_not_end_the_step(
    prepare: Callable[[], list[StepDone]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = failing_first(monkeypatch, ConnectionError("reset by peer"))
    [done] = prepare()
    assert (len(looks), done.reused) == (2, False)
    [again] = prepare()
    assert again.reused


def test_damaged_data_ends_the_step_at_once(
    prepare: Callable[[], list[StepDone]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = failing_first(monkeypatch, DataError("train.bin is damaged"))
    with pytest.raises(DataError, match=r"train\.bin is damaged"):
        prepare()
    assert len(looks) == 1
