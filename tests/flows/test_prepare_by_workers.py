"""A dataset prepared by threads, processes and a Dask cluster of separate processes, on a real Prefect server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from waiting import free_port

from flows.prepare_dataset import prepare_dataset
from launcher.config import DaskWorkers, ProcessWorkers, ThreadWorkers, Workers
from launcher.errors import ConfigProblem
from launcher.events import Event, Listener, StepDone, StepProgress
from litgpt_demo.config import DataConfig
from litgpt_demo.data.dataset import DatasetManifest, plan_dataset
from litgpt_demo.data.preparation import in_threads, prepare
from litgpt_demo.errors import DataError
from litgpt_demo.storage import open_storage

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(300)]

THREADS = ThreadWorkers(kind="threads", count=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """9 MB of documents of all lengths, three shards, some of them twice."""
    chance, path = random.Random(11), tmp_path_factory.mktemp("text") / "words.jsonl"
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 7))) for _ in range(300)]
    with path.open("w") as file:
        for number in range(6000):
            text = " ".join(chance.choices(words, k=2 ** chance.randint(0, 9)))
            file.write(json.dumps({"text": text if number % 50 else "the same text", "pad": "x" * 1000}) + "\n")
    return DataConfig.model_validate(
        {
            "corpus": {"kind": "files", "paths": [str(path)]},
            "tokenizer": {"kind": "train", "vocab_size": 300, "sample_bytes": 100_000},
            "filters": {"min_characters": 4, "drop_duplicates": True},
            "validation_fraction": 0.01,
        }
    )


@pytest.fixture(scope="module")
def expected(data: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> DatasetManifest:
    """What a single worker makes of it, without Prefect."""
    return prepare(plan_dataset(data), open_storage(str(tmp_path_factory.mktemp("plain"))), each=in_threads(1))


@pytest.fixture(scope="module")
def dask() -> Iterator[DaskWorkers]:
    """A cluster of two processes."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        yield DaskWorkers(kind="dask", scheduler=cluster.scheduler_address)


def prepared(root: Path, data: DataConfig, workers: Workers) -> DatasetManifest:
    return asyncio.run(prepare_dataset(root=str(root), data=data, workers=workers))


def artifacts_of(manifest: DatasetManifest) -> dict[str, Any]:
    """Key, without the dataset's name, to the data of its newest artifact."""
    name = f"-{manifest.name}-{manifest.key}"
    with get_client(sync_client=True) as client:
        found = client.read_artifacts()
    return {str(one.key).removesuffix(name): one.data for one in found if str(one.key).endswith(name)}


def no_dataset_below(root: Path) -> bool:
    return not list(root.glob("datasets/*/manifest.json"))


# --- the same bytes ---------------------------------------------------------------------------------------------------


def test_threads_make_the_dataset_and_prefect_shows_how_it_went(
    data: DataConfig, expected: DatasetManifest, tmp_path: Path
) -> None:
    events: list[Event] = []
    with Listener(events.append):
        made = prepared(tmp_path, data, THREADS)
    assert made == expected
    steps = [event for event in events if isinstance(event, StepProgress)]
    assert steps[-1].fraction == 1.0
    assert any(step.what.startswith("survey: ") for step in steps)
    assert any(step.what.startswith("encode: ") and "B/s" in step.what and " left" in step.what for step in steps)

    shown = artifacts_of(made)
    assert shown["dataset"] == 100
    figures = {row["figure"]: row["value"] for row in json.loads(shown["dataset-figures"])}
    assert figures["Training: files"] == "train.bin"
    assert figures["Training: tokens"] == f"{made.train.tokens:,}"
    assert figures["Dropped: duplicate"] == f"{made.dropped['duplicate']:,} documents"
    assert figures["Speed"].endswith("B/s")
    assert "xychart-beta" in shown["dataset-lengths"]
    assert "bar [" in shown["dataset-lengths"]


@pytest.mark.long
def test_processes_make_the_same_bytes(data: DataConfig, expected: DatasetManifest, tmp_path: Path) -> None:
    assert prepared(tmp_path, data, ProcessWorkers(kind="processes", count=2)) == expected


@pytest.mark.long
def test_a_dask_cluster_makes_the_same_bytes(
    data: DataConfig, expected: DatasetManifest, dask: DaskWorkers, tmp_path: Path
) -> None:
    assert prepared(tmp_path, data, dask) == expected


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", ["threads", "dask"])
def test_a_bad_document_is_named_to_the_user(
    kind: str, data: DataConfig, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    workers = THREADS if kind == "threads" else request.getfixturevalue("dask")
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": 7}\n{"text": "good"}\n')
    corpus = {"kind": "files", "paths": [str(tmp_path / "bad.jsonl")]}
    tokenizer = {"kind": "file", "path": a_tokenizer(data)}
    changed = DataConfig.model_validate({"corpus": corpus, "tokenizer": tokenizer})
    with pytest.raises(DataError, match=r"bad\.jsonl.*line 2"):
        prepared(tmp_path, changed, workers)
    assert no_dataset_below(tmp_path)


def a_tokenizer(data: DataConfig) -> str:
    """Beside the text, made once: training on a corpus with a bad document would be what names it."""
    from tokenizers import Tokenizer, models

    path = Path(data.corpus.paths[0]).with_name("tokenizer.json")  # type: ignore[union-attr]
    Tokenizer(models.BPE({"<|endoftext|>": 0}, [])).save(str(path))
    return str(path)


@pytest.fixture
def nobody() -> str:
    """An address where nothing listens."""
    return f"tcp://127.0.0.1:{free_port()}"


def test_a_scheduler_that_does_not_answer_is_refused_in_seconds(data: DataConfig, nobody: str, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ConfigProblem, match=nobody):
        prepared(tmp_path, data, DaskWorkers(kind="dask", scheduler=nobody))
    assert time.monotonic() - start < 30
    assert no_dataset_below(tmp_path)


def test_a_dataset_that_is_there_needs_no_workers(data: DataConfig, nobody: str, tmp_path: Path) -> None:
    prepare(plan_dataset(data), open_storage(str(tmp_path)))
    events: list[Event] = []
    with Listener(events.append):
        prepared(tmp_path, data, DaskWorkers(kind="dask", scheduler=nobody))
    assert [event.reused for event in events if isinstance(event, StepDone)] == [True]


def test_a_cancelled_preparation_ends_and_goes_on_when_it_is_run_again(
    data: DataConfig, expected: DatasetManifest, tmp_path: Path
) -> None:
    async def cancelled_early() -> None:
        loop, running = asyncio.get_running_loop(), asyncio.Event()

        def receive(event: Event) -> None:
            if isinstance(event, StepProgress) and event.what.startswith("survey"):
                loop.call_soon_threadsafe(running.set)

        with Listener(receive):
            flow = asyncio.ensure_future(
                prepare_dataset(root=str(tmp_path), data=data, workers=ThreadWorkers(kind="threads", count=1))
            )
            await running.wait()
            flow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flow

    asyncio.run(cancelled_early())
    assert no_dataset_below(tmp_path)
    assert list(tmp_path.glob("datasets/*/shards/*.survey.json"))
    assert prepared(tmp_path, data, THREADS) == expected
