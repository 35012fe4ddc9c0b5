"""The dataset step and its flow: once for each dataset, in spite of what passes, and not again for what does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.config import DaskWorkers, RunConfig, ThreadWorkers, Workers
from launcher.errors import ConfigProblem
from launcher.events import Event, Listener, StepDone, StepProgress
from litgpt_demo.data.dataset import DatasetManifest, finished_dataset
from litgpt_demo.errors import DataError
from tasks import dataset

pytestmark = pytest.mark.prefect

Prepare = Callable[..., bool]
ONE = ThreadWorkers(kind="threads", count=1)


@pytest.fixture
def prepare(tiny: Callable[..., RunConfig]) -> Prepare:
    """Runs the flow; returns whether it found the dataset done."""
    from flows.prepare_dataset import prepare_dataset

    def prepared(workers: Workers = ONE, **changes: Any) -> bool:
        config, events = tiny(changes), list[Event]()
        with Listener(events.append):
            asyncio.run(prepare_dataset(root=config.root, data=config.data, workers=workers))
        [done] = [event for event in events if isinstance(event, StepDone)]
        return done.reused

    return prepared


@pytest.fixture
def failing_first(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], list[None]]:
    """Lets the first look for the finished dataset fail; returns a list that grows with every look."""

    def make(error: Exception) -> list[None]:
        looks: list[None] = []

        def look(*given: Any) -> DatasetManifest | None:
            looks.append(None)
            if len(looks) == 1:
                raise error
            return finished_dataset(*given)

        monkeypatch.setattr(dataset, "finished_dataset", look)
        monkeypatch.setattr(dataset.prepare_dataset, "retry_delay_seconds", [0.1, 0.1, 0.1])
        return looks

    return make


def test_a_dataset_is_prepared_once_though_its_storage_was_away_for_a_moment_and_is_found_then_without_workers(
    prepare: Prepare, failing_first: Callable[[Exception], list[None]]
) -> None:
    looks = failing_first(ConnectionError("reset by peer"))
    assert not prepare()
    assert len(looks) == 2
    assert prepare(DaskWorkers(kind="dask", scheduler="tcp://127.0.0.1:9"))


def test_damaged_data_ends_the_step_at_once(prepare: Prepare, failing_first: Callable[[Exception], list[None]]) -> None:
    looks = failing_first(DataError("train.bin is damaged"))
    with pytest.raises(DataError, match=r"train\.bin is damaged"):
        prepare()
    assert len(looks) == 1


@pytest.fixture
def nowhere(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not list(tmp_path.glob("**/manifest.json"))


def test_workers_that_are_not_there_and_an_empty_corpus_are_refused_and_leave_no_dataset(
    prepare: Prepare, nowhere: Path
) -> None:
    with pytest.raises(ConfigProblem, match=r"127\.0\.0\.1:9"):
        prepare(DaskWorkers(kind="dask", scheduler="tcp://127.0.0.1:9"))
    (nowhere / "empty.txt").touch()
    with pytest.raises(DataError, match=r"data\."):
        prepare(**{"data.corpus.paths": [str(nowhere / "empty.txt")]})


def test_a_cancelled_preparation_ends_and_goes_on_with_what_is_left_when_it_is_run_again(
    prepare: Prepare, tiny: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.prepare_dataset import prepare_dataset

    stopped, stop = threading.Event(), dataset.Fanout.stop

    def stop_and_tell(fanout: dataset.Fanout) -> None:
        stop(fanout)
        stopped.set()

    monkeypatch.setattr(dataset.Fanout, "stop", stop_and_tell)

    async def cancelled_early() -> None:
        loop, surveying = asyncio.get_running_loop(), asyncio.Event()

        def receive(event: Event) -> None:
            if isinstance(event, StepProgress) and event.what.startswith("survey"):
                loop.call_soon_threadsafe(surveying.set)
                stopped.wait()

        with Listener(receive):
            flow = asyncio.ensure_future(prepare_dataset(root=tiny().root, data=tiny().data, workers=ONE))
            await surveying.wait()
            flow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flow

    asyncio.run(cancelled_early())
    assert not [*tmp_path.glob("datasets/*/manifest.json")]
    assert [*tmp_path.glob("datasets/*/shards/*.survey.json")]
    assert not prepare()
