"""Steps as mapped tasks: how many, what they are called, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from distributed import CancelledError as DaskCancelled
from distributed import KilledWorker
from prefect import flow
from prefect.runtime import task_run

from launcher.config import ThreadWorkers, Workers
from launcher.errors import JobCancelled, LauncherError
from litgpt_demo.errors import DataError, Fault
from tasks import workers as module
from tasks.workers import MOST_TASKS, Fanout

pytestmark = pytest.mark.prefect

ONE, TWO = (ThreadWorkers(kind="threads", count=count) for count in (1, 2))


def carried_out(workers: Workers, work: Callable[[Fanout], Any]) -> Any:
    """What the work returns, done in a flow run."""

    def with_fanout() -> Any:
        with Fanout(workers) as fanout:
            return work(fanout)

    @flow(name="fan-out")
    async def fan_out() -> Any:
        return await asyncio.to_thread(with_fanout)

    return asyncio.run(fan_out())


def named(number: int) -> tuple[int, str]:
    return number, str(task_run.name)


def test_many_items_share_few_tasks_that_are_named_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TASKS", 20)
    many, more = carried_out(TWO, lambda fanout: [[*fanout(named, range(40))], [*fanout(named, range(3))]])
    assert sorted(number for number, _ in many) == list(range(40))
    assert sorted(more) == [(0, "named 41 of 43"), (1, "named 42 of 43"), (2, "named 43 of 43")]
    names = {name for _, name in many}
    assert (len(names), {"named 1-2 of 40", "named 39-40 of 40"} <= names) == (20, True)


def noted(folder: Path, number: int) -> int:
    if number == 2:
        raise DataError(f"item {number} is damaged")
    (folder / str(number)).touch()
    return number


def test_an_error_keeps_its_class_and_words_and_what_has_not_begun_never_does(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^item 2 is damaged$"):
        carried_out(ONE, lambda fanout: [*fanout(partial(noted, tmp_path), range(MOST_TASKS * 2))])
    assert not (tmp_path / "3").exists(), "it is in the task of the one that is damaged"


@pytest.mark.parametrize(
    ("kind", "lost", "fault"),
    [
        ("threads", BrokenProcessPool("a process was killed"), Fault.NODE),
        ("dask", KilledWorker("survey", Mock(), 3), Fault.NODE),
        ("dask", DaskCancelled("the scheduler has gone"), Fault.NETWORK),
    ],
)
def test_a_worker_that_is_lost_is_no_mistake_of_the_users(kind: str, lost: Exception, fault: Fault) -> None:
    fanout = Fanout(ONE)
    fanout._kind = kind
    with pytest.raises(LauncherError, match=r"a worker was lost.*run again") as told:
        fanout._result(Mock(result=Mock(side_effect=lost)))
    assert told.value.fault is fault


def test_what_is_stopped_ends_with_the_item_in_hand(tmp_path: Path) -> None:
    def work(fanout: Fanout) -> Any:
        def slow(number: int) -> int:
            fanout.stop()
            return noted(tmp_path, number)

        return [*fanout(slow, range(1000))]

    with pytest.raises(JobCancelled, match="goes on"):
        carried_out(ONE, work)
    assert [*tmp_path.iterdir()] == [tmp_path / "0"]


def test_a_phase_that_is_called_off_is_over_before_the_next_begins(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()

    def work(fanout: Fanout) -> tuple[int, int, list[int]]:
        begun = fanout(partial(noted, tmp_path), range(2))
        next(begun)
        begun.close()
        after = len([*tmp_path.iterdir()])
        again = sorted(fanout(partial(noted, tmp_path / "again"), range(2)))
        return after, len([*tmp_path.iterdir()]), again

    after, later, again = carried_out(TWO, work)
    assert (after, again) == (later, [0, 1])
