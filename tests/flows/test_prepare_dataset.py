from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.prepare_dataset import prepare_dataset
from launcher.config import RunConfig
from launcher.events import Event, Listener, StepDone, StepProgress
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.manifests import read_manifest
from litgpt_demo.storage import open_storage

pytestmark = pytest.mark.prefect


def test_a_dataset_is_prepared_once_and_then_found(tiny: Callable[..., RunConfig], tmp_path: Path) -> None:
    config, events = tiny(), list[Event]()
    with Listener(events.append):
        made = asyncio.run(prepare_dataset(root=config.root, data=config.data))
        found = asyncio.run(prepare_dataset(root=config.root, data=config.data))
    assert [event.reused for event in events if isinstance(event, StepDone)] == [False, True]
    assert any(isinstance(event, StepProgress) for event in events)
    [folder] = (tmp_path / "datasets").iterdir()
    assert made == found == read_manifest(open_storage(str(folder)), DatasetManifest)


def test_an_empty_corpus_is_refused_and_leaves_no_dataset(tiny: Callable[..., RunConfig], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    config = tiny({"data.corpus.paths": [str(tmp_path / "empty.txt")], "root": str(tmp_path / "root")})
    with pytest.raises(TrainLitgptError, match=r"data\."):
        asyncio.run(prepare_dataset(root=config.root, data=config.data))
    assert not list(tmp_path.glob("root/datasets/*/manifest.json"))
