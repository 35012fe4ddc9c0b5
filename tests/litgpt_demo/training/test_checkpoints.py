"""Checkpoints: whole or not there, right or set aside, and no more kept than was asked for."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from bucket_faults import FOREVER, Fault, FaultyBucket
from hypothesis import given
from hypothesis import strategies as st
from states import keep, manifest_of, pair, publish_pair, same, step

from litgpt_demo.config import ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.checkpoints import (
    commit,
    committed,
    folder_of,
    open_checkpoint,
    reached_end,
    require_same,
    retained,
    retire,
    set_aside,
)
from litgpt_demo.training.reading import load_shards, load_weights

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run"))


@pytest.fixture
def place(root: str) -> Storage:
    """A run in a folder, and one in a bucket."""
    return open_storage(root)


def test_weights_and_optimizer_come_back_bit_for_bit_and_without_a_warning(place: Storage, tmp_path: Path) -> None:
    trained, other, alone = pair(1, steps=3), pair(2, steps=0), pair(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keep(place, trained, 3)
        folder = open_checkpoint(place, committed(place)[0], lambda: tmp_path / "fetched")
        assert load_shards(*other, folder, precision={}) == {}
        load_weights(folder, alone[0].state_dict())
    assert same(trained, other)
    assert all(map(torch.equal, trained[0].parameters(), alone[0].parameters()))
    for which in (trained, other):
        step(which, torch.Generator().manual_seed(9))
    assert same(trained, other)


def test_the_same_state_is_the_same_bytes(run: Storage, tmp_path: Path) -> None:
    other = open_storage(str(tmp_path / "another place"))
    assert keep(run, pair(1, steps=2), 2) == keep(other, pair(1, steps=2), 2)


@pytest.mark.parametrize("spoil", [b"", b'{"format": 1', b"[]", b"\xff"])
def test_a_damaged_manifest_is_none_and_is_told(run: Storage, spoil: bytes) -> None:
    keep(run, pair(1), 4)
    keep(run, pair(2), 8)
    run.write(f"{folder_of(8)}/manifest.json", spoil)
    told: dict[str, DataError] = {}
    assert [found.step for found in committed(run, damaged=told.__setitem__)] == [4]
    assert list(told) == [folder_of(8)]
    keep(run, pair(3), 6)  # and training goes on
    assert [found.step for found in committed(run)] == [6, 4]
    assert run.exists(f"{folder_of(8)}/__0_0.distcp")  # what is to be looked at is not thinned out


def test_what_is_set_aside_is_kept_with_the_reason_and_is_in_nobodys_way(place: Storage) -> None:
    files = keep(place, pair(1), 4).files
    first = open_storage(set_aside(place, folder_of(4), "a bit is wrong"))
    assert committed(place) == []
    assert place.within("checkpoints").list() == []
    assert first.read("why.txt") == b"a bit is wrong\n"
    assert {(one.path, one.crc32c) for one in first.inventory()} >= {(one.path, one.crc32c) for one in files}
    keep(place, pair(2), 4)
    assert set_aside(place, folder_of(4), "again") != first.address()


def test_a_folder_without_manifest_is_a_save_that_never_ended_and_goes_with_the_next(run: Storage) -> None:
    keep(run, pair(1), 4)
    publish_pair(run, pair(2), 8)
    assert [found.step for found in committed(run)] == [4]
    keep(run, pair(2), 9)
    assert not Path(run.root, folder_of(8)).exists()


SPEC = TrainingSpec(
    run="run", dataset="/datasets/ours-key", dataset_key="key", steps=10, world_size=1,
    model=ModelConfig(name="pythia-14m"), train=TrainConfig(),
)  # fmt: skip


def test_a_checkpoint_of_another_model_or_dataset_is_refused_by_name(run: Storage) -> None:
    other = {"model": ModelConfig(name="pythia-31m").model_dump(mode="json")}
    require_same(run, manifest_of(4, config={"model": SPEC.model.model_dump(mode="json")}), SPEC)
    require_same(run, manifest_of(4, format=1), SPEC)  # which did not say what it was of
    with pytest.raises(DataError, match=r"step-00000004 is of the model .*pythia-31m.*, this run trains .*pythia-14m"):
        require_same(run, manifest_of(4, config=other), SPEC)
    with pytest.raises(DataError, match=r"step-00000004 was trained on dataset theirs, this run is on key"):
        require_same(run, manifest_of(4, dataset_key="theirs"), SPEC)


def test_a_training_has_ended_after_its_last_step_or_when_its_time_is_up_and_not_before() -> None:
    timed = SPEC.model_copy(update={"train": TrainConfig.model_validate({"max_time": "1h"})})
    assert [reached_end(manifest_of(number), SPEC) for number in (9, 10)] == [False, True]
    assert [reached_end(manifest_of(4, seconds=seconds), timed) for seconds in (1800.0, 3600.0)] == [False, True]


LOSSES = st.dictionaries(
    st.integers(1, 10**6), st.none() | st.floats(0, 20) | st.sampled_from([1.0, 2.0]), min_size=1, max_size=12
)


@given(losses=LOSSES, last=st.integers(1, 5), best=st.integers(0, 5), every=st.none() | st.integers(1, 5))
def test_the_newest_best_and_eternal_are_kept_alone(
    losses: dict[int, float | None], last: int, best: int, every: int | None
) -> None:
    kept = retained([manifest_of(number, loss) for number, loss in losses.items()], last=last, best=best, every=every)
    scored = [loss for loss in losses.values() if loss is not None]
    eternal = {number for number in losses if every is not None and number % every == 0}
    assert kept <= set(losses)
    assert set(sorted(losses)[-last:]) | eternal <= kept
    if best:
        assert not scored or min(scored) in {losses[number] for number in kept}
    others = kept - set(sorted(losses)[-last:]) - eternal
    assert len(others) <= best
    assert all(losses[number] is not None for number in others)
    for number in others:  # no better one was thrown away
        assert all(loss is None or loss >= losses[number] for gone, loss in losses.items() if gone not in kept)


def test_a_removal_cut_short_leaves_nothing_that_looks_whole(bucket: Storage, proxy: FaultyBucket) -> None:
    bucket.write(f"{folder_of(4)}/__0_0.distcp", b"weights")
    commit(bucket, manifest_of(4))
    proxy.arm(Fault(on="delete", do="refuse", status=403, times=FOREVER, skip=1))
    commit(bucket, manifest_of(8))
    with pytest.raises(UserError):
        retire(bucket, last=1, best=0)
    assert bucket.exists(f"{folder_of(4)}/__0_0.distcp")
    assert [found.step for found in committed(bucket)] == [8]
