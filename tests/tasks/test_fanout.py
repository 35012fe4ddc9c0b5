"""Steps as mapped tasks: how many, what they are called, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.runtime import task_run

from launcher.config import ProcessWorkers, ThreadWorkers, Workers
from launcher.errors import JobCancelled, LauncherError
from litgpt_demo.errors import DataError
from tasks.workers import MOST_TASKS, Fanout

pytestmark = pytest.mark.prefect

THREADS = ThreadWorkers(kind="threads", count=2)


def carried_out(workers: Workers, step: Callable[..., Any], *calls: range) -> list[list[Any]]:
    """The results of each call, all in one flow run."""

    @flow(name="fan-out")
    async def fan_out() -> list[list[Any]]:
        def work() -> list[list[Any]]:
            with Fanout(workers) as fanout:
                return [list(fanout(step, call)) for call in calls]

        return await asyncio.to_thread(work)

    return asyncio.run(fan_out())


def square(note: str, number: int) -> int:
    return number * number


def named(note: str, number: int) -> tuple[int, str]:
    return number, str(task_run.name)


def test_many_items_share_few_tasks_that_are_named_after_them() -> None:
    many, more = carried_out(THREADS, partial(named, "x"), range(300), range(3))
    assert sorted(number for number, _ in many) == list(range(300))
    assert sorted(more) == [(0, "named 301 of 303"), (1, "named 302 of 303"), (2, "named 303 of 303")]
    names = {name for _, name in many}
    assert len(names) == 100 <= MOST_TASKS
    assert {"named 1-3 of 300", "named 298-300 of 300"} <= names


@pytest.mark.long
def test_nothing_to_do_starts_nothing() -> None:
    assert carried_out(THREADS, partial(square, "x"), range(0)) == [[]]


def damaged(folder: Path, number: int) -> int:
    if number == 2:
        raise DataError(f"item {number} is damaged")
    time.sleep(0.05)
    (folder / str(number)).touch()
    return number


def test_an_error_keeps_its_class_and_words_and_what_has_not_begun_never_does(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^item 2 is damaged$"):
        carried_out(THREADS, partial(damaged, tmp_path), range(1000))
    assert len(list(tmp_path.iterdir())) < 100


def passing(folder: Path, number: int) -> int:
    try:
        (folder / str(number)).touch(exist_ok=False)
    except FileExistsError:
        return number
    raise ConnectionError("reset by peer")


def test_what_may_pass_is_tried_again(tmp_path: Path) -> None:
    start = time.monotonic()
    assert carried_out(THREADS, partial(passing, tmp_path), range(1)) == [[0]]
    assert time.monotonic() - start > 1.5  # the first wait of RETRIED


def killed(note: str, number: int) -> int:
    os._exit(9)


def test_a_process_that_dies_is_named_with_what_to_do() -> None:
    with pytest.raises(LauncherError, match=r"workers\.kind=processes: a worker was lost.*fewer workers"):
        carried_out(ProcessWorkers(kind="processes", count=1), partial(killed, "x"), range(1))


def test_what_is_stopped_ends_with_the_item_in_hand(tmp_path: Path) -> None:
    def slow(note: str, number: int) -> int:
        fanout[0].stop()
        (tmp_path / str(number)).touch()
        return number

    fanout: list[Fanout] = []

    @flow(name="stopped")
    async def stopped() -> None:
        def work() -> None:
            with Fanout(ThreadWorkers(kind="threads", count=1)) as made:
                fanout.append(made)
                list(made(partial(slow, "x"), range(1000)))

        await asyncio.to_thread(work)

    with pytest.raises(JobCancelled, match="goes on"):
        asyncio.run(stopped())
    assert len(list(tmp_path.iterdir())) == 1


def noted(folder: Path, number: int) -> int:
    time.sleep(0.1)
    (folder / str(number)).touch()
    return number


def test_a_phase_that_is_called_off_is_over_before_the_next_begins(tmp_path: Path) -> None:
    @flow(name="fan-out-again")
    async def fan_out() -> tuple[int, int, list[int]]:
        def work() -> tuple[int, int, list[int]]:
            with Fanout(THREADS) as fanout:
                begun = fanout(partial(noted, tmp_path), range(40))
                next(begun)
                begun.close()
                after = len(list(tmp_path.iterdir()))
                again = sorted(fanout(partial(square, "x"), range(3)))
                return after, len(list(tmp_path.iterdir())), again

        return await asyncio.to_thread(work)

    after, later, again = asyncio.run(fan_out())
    assert again == [0, 1, 4]
    assert after == later < 40
