"""Several ranks resume from a bucket: each node fetches a checkpoint into a folder that its ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import pytest
from states import same, training_of

from litgpt_demo.errors import UserError
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training import resuming
from litgpt_demo.training.ranks import Ranks
from litgpt_demo.training.setup import Training


class Meeting:
    """Where the ranks of one training meet, which are threads of this process."""

    def __init__(self, world: int) -> None:
        self.results: list[Any] = [None] * world
        self.barrier = Barrier(world)
        self.first_has_read, self.first_is_through = Event(), Event()


@dataclass(frozen=True, kw_only=True)
class RanksInThreads(Ranks):
    meeting: Meeting

    def deal(self, action: Callable[[], Any], whole: Callable[[list[Any]], Sequence[Any]]) -> Any:
        results, wait = self.meeting.results, self.meeting.barrier.wait
        results[self.number] = action()
        if self.number == 0 and self.meeting.first_has_read.is_set():
            self.meeting.first_is_through.set()
        wait()
        if self.number == 0:
            results[:] = whole(list(results))
        wait()
        mine = results[self.number]
        wait()
        return mine


@pytest.mark.parametrize(("nodes", "processes"), [(2, 1), (1, 2), (2, 2)])
def test_no_rank_removes_what_another_still_reads(
    finished_copy: Path, bucket: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: int, processes: int
) -> None:
    for path in filter(Path.is_file, finished_copy.rglob("*")):
        bucket.upload(path, str(path.relative_to(finished_copy)))
    meeting, trainings = Meeting(nodes * processes), []
    for number in range(nodes * processes):
        own = training_of(finished_copy, bucket)
        fabric = SimpleNamespace(local_rank=number % processes, strategy=own.fabric.strategy)
        trainings.append(replace(own, fabric=fabric, scratch=tmp_path / f"rank-{number}"))
        ranks = RanksInThreads(number=number, world=nodes * processes, meeting=meeting)
        trainings[-1].__dict__["ranks"] = ranks
    load_shards, folders = resuming.load_shards, set()

    def load(model: Any, optimizer: Any, folder: Path, **options: Any) -> Any:
        """Rank 0 reads first; the others begin to read when it has nothing more to do but to wait for them."""
        first = model is trainings[0].model.module
        if not first:
            meeting.first_is_through.wait()
        folders.add(folder)
        saved = load_shards(model, optimizer, folder, **options)
        if first:
            meeting.first_has_read.set()
        return saved

    def resume(training: Training) -> int:
        try:
            return resuming.resume(training, tell=pytest.fail)
        except Exception:
            meeting.barrier.abort()
            raise
        finally:
            if training is trainings[0]:  # whoever does not wait for the others is through as well
                meeting.first_is_through.set()

    monkeypatch.setattr(resuming, "load_shards", load)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    with ThreadPoolExecutor(nodes * processes) as pool:
        assert set(pool.map(resume, trainings)) == {12}
    assert len(folders) == nodes
    pairs = [(training.model.module, training.optimizer.optimizer) for training in trainings]
    assert all(same(pairs[0], other) for other in pairs[1:])
    assert list(tmp_path.glob("resume*")) == []


def test_a_bucket_without_the_package_that_it_needs_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("litgpt_demo.storage.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"gs://kept/logs needs google-cloud-storage, which is not installed here"):
        open_storage("gs://kept/logs")
