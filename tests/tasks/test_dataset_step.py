"""The dataset step and its flow: once for each dataset, in spite of what passes, and not again for what does not."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.config import DaskWorkers, RunConfig, ThreadWorkers, Workers
from launcher.events import Event, Listener, StepDone, StepProgress
from litgpt_demo.data.dataset import DatasetManifest, finished_dataset
from tasks import dataset
from tasks.dataset import MapExecutor

pytestmark = pytest.mark.prefect

ONE = ThreadWorkers(kind="threads", count=1)


@pytest.fixture
def prepare(tiny: Callable[..., RunConfig]) -> Callable[..., Awaitable[bool]]:
    """The flow; it returns whether it found the dataset done."""
    from flows.train_litgpt import prepare_dataset

    async def prepared(workers: Workers = ONE) -> bool:
        config, events = tiny(), list[Event]()
        with Listener(events.append):
            await prepare_dataset(root=config.root, data=config.data, dataset_workers=workers)
        [done] = [event for event in events if isinstance(event, StepDone)]
        return done.reused

    return prepared


def test_dataset_is_prepared_once_when_storage_was_away(
    prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is found without workers."""
    looks: list[None] = []

    def look(*arguments: Any) -> DatasetManifest | None:
        looks.append(None)
        if len(looks) == 1:
            raise ConnectionError("reset by peer")
        return finished_dataset(*arguments)

    monkeypatch.setattr(dataset, "finished_dataset", look)
    monkeypatch.setattr(dataset.prepare_dataset, "retry_delay_seconds", [0, 0, 0])
    assert not asyncio.run(prepare())
    assert len(looks) == 2
    assert asyncio.run(prepare(DaskWorkers(kind="dask", scheduler="tcp://127.0.0.1:9")))


def test_cancelled_preparation_continues_in_the_next_run(
    prepare: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, stop = threading.Event(), MapExecutor.stop
    monkeypatch.setattr(MapExecutor, "stop", lambda executor: (stop(executor), stopped.set()))

    async def cancelled_early() -> None:
        loop, surveying = asyncio.get_running_loop(), asyncio.Event()

        def receive(event: Event) -> None:
            if isinstance(event, StepProgress) and event.what.startswith("survey"):
                loop.call_soon_threadsafe(surveying.set)
                stopped.wait()

        with Listener(receive):
            flow = asyncio.ensure_future(prepare())
            await surveying.wait()
            flow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flow

    asyncio.run(cancelled_early())
    assert not [*tmp_path.glob("datasets/*/manifest.json")]
    assert [*tmp_path.glob("datasets/*/shards/*.survey.json")]
    assert not asyncio.run(prepare())
