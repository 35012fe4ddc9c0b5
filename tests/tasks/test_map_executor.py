"""A preparation's steps on workers of each kind: what becomes of one that fails, and of those that are stopped."""

from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import pytest
from distributed import KilledWorker
from waiting import until

from launcher.config import DaskWorkers, ThreadWorkers, Workers
from launcher.errors import JobCancelled, LauncherError
from litgpt_demo.errors import DataError, FailureClass
from tasks import dataset as module
from tasks.dataset import MapExecutor

ONE, TWO = (ThreadWorkers(kind="threads", count=count) for count in (1, 2))


def noted(folder: Path, number: int) -> int:
    if number == 2:
        raise DataError(f"item {number} is damaged")
    (folder / str(number)).touch()
    return number


def test_error_keeps_its_class_with_its_message(tmp_path: Path) -> None:
    """Tasks that have not begun never do."""
    over = Event()  # both threads wait: one for the first item, whose turn it is, one behind the damaged item

    def step(number: int) -> None:
        if number not in {1, 2}:
            over.wait()
        noted(tmp_path, number)

    with MapExecutor(TWO) as executor:
        with pytest.raises(DataError, match=r"^item 2 is damaged$"):
            next(executor(step, range(256)))
        over.set()
    assert not (tmp_path / "255").exists()


def test_a_share_that_fails_once_is_tried_again_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELAYS", [0.0, 0.0])
    tried: list[int] = []

    def busy(number: int) -> int:
        tried.append(number)
        if tried.count(number) < 3:
            raise ConnectionError("reset by peer")
        return number

    with MapExecutor(TWO) as executor:
        assert sorted(executor(busy, range(3))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("workers", "lost", "fault"),
    [
        (ONE, BrokenProcessPool("a process was killed"), FailureClass.NODE),
        (DaskWorkers(kind="dask", scheduler="tcp://10.0.0.2:1"), KilledWorker("survey", Mock(), 3), FailureClass.NODE),
        (DaskWorkers(kind="dask", scheduler="tcp://10.0.0.2:1"), CancelledError("no scheduler"), FailureClass.NETWORK),
    ],
)
def test_a_worker_that_is_lost_is_no_mistake_of_the_users(
    workers: Workers, lost: Exception, fault: FailureClass
) -> None:
    with pytest.raises(LauncherError, match=r"a worker was lost.*run again") as shown:
        MapExecutor(workers)._result(Mock(result=Mock(side_effect=lost)))
    assert shown.value.fault is fault


def test_stopped_executor_ends_with_the_item_at_hand(tmp_path: Path) -> None:
    with MapExecutor(ONE) as executor:

        def slow(number: int) -> int:
            until(lambda: executor._futures)
            executor.stop()
            return noted(tmp_path, number)

        with pytest.raises(JobCancelled, match="run the same command again to continue"):
            list(executor(slow, [0, *range(3, 1000)]))
    assert [*tmp_path.iterdir()] == [tmp_path / "0"]


def test_cancelled_phase_ends_before_the_next_begins(tmp_path: Path) -> None:
    step: Callable[[int], int] = partial(noted, tmp_path)
    with MapExecutor(TWO) as executor:
        begun = executor(step, range(3, 1000))
        next(begun)
        begun.close()
        after = len([*tmp_path.iterdir()])
        assert sorted(executor(step, range(2))) == [0, 1]
    assert len([*tmp_path.iterdir()]) == after + 2
