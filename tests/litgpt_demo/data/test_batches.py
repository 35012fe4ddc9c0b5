"""The order of samples: every sample once an epoch, in an order that knows nothing of nodes."""

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from litgpt_demo.config import TrainConfig, TrainingSpec
from litgpt_demo.data.batches import (
    SampleIds,
    feistel_permutation,
    global_positions,
    rank_slice,
    sample_ids_at,
    sample_ids_for_step,
)
from litgpt_demo.data.dataset import TokenDataset


def batch(step: int, size: int, *, samples: int, content_hash: str = "k", seed: int = 1) -> SampleIds:
    dataset = TokenDataset(files=[np.empty(samples + 1, dtype=np.uint16)], length=1, content_hash=content_hash)
    spec = TrainingSpec.model_construct(train=TrainConfig(global_batch=size, micro_batch=1), steps=step + 1)
    return sample_ids_at(dataset, global_positions(spec, step), seed=seed)


@given(size=st.integers(1, 2**62), seed=st.text(max_size=8), data=st.data())
def test_a_part_of_a_huge_permutation_stays_inside_and_apart(size: int, seed: str, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), unique=True, min_size=1, max_size=50))
    seen = feistel_permutation(np.array(places, dtype=np.uint64), size, seed).tolist()
    assert len(set(seen)) == len(places)
    assert max(seen) < size
    assert feistel_permutation(np.array(places[:1], dtype=np.uint64), size, seed).tolist() == seen[:1]


def test_order_of_samples_is_pinned_by_dataset_seed_and_epoch() -> None:
    """Each has an order of its own, which is the same in every version of this program."""
    # Written down: a run that resumes after an upgrade must go on in the same order.
    order = [9, 6, 5, 7, 3, 2, 1, 8, 0, 4]
    assert feistel_permutation(np.arange(10, dtype=np.uint64), 10, "key/1337/0").tolist() == order
    orders = {
        tuple(batch(step, 500, samples=500, content_hash=content_hash, seed=seed).tolist())
        for content_hash, seed, step in (("hash", 1, 0), ("other", 1, 0), ("hash", 2, 0), ("hash", 1, 1))
    }
    assert len(orders) == 4


@given(samples=st.integers(1, 60), global_batch=st.integers(1, 80), seed=st.integers(0, 3))
def test_epoch_has_each_sample_exactly_once(samples: int, global_batch: int, seed: int) -> None:
    steps = -(-3 * samples // global_batch)
    batches = [batch(step, global_batch, samples=samples, seed=seed) for step in range(steps)]
    seen = np.concatenate(batches).tolist()
    for epoch in range(3):
        assert sorted(seen[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@given(batches=st.integers(1, 20), global_batch=st.integers(1, 8))
def test_first_steps_of_a_run_are_its_first_epoch(batches: int, global_batch: int) -> None:
    """The first step has the first samples in their order: none is left out, whatever step a resume begins with."""
    train = TrainConfig(global_batch=global_batch, micro_batch=1, seed=3)
    spec = TrainingSpec.model_construct(train=train, steps=batches)
    dataset = TokenDataset(files=[np.empty(batches * global_batch + 1, dtype=np.uint16)], length=1, content_hash="k")
    seen = np.concatenate([sample_ids_for_step(spec, dataset, step) for step in range(batches)]).tolist()
    assert seen == feistel_permutation(np.arange(len(dataset), dtype=np.uint64), len(dataset), "k/3/0").tolist()


@given(world_size=st.integers(1, 16), micro=st.integers(1, 4), passes=st.integers(1, 4), step=st.integers(0, 10**9))
def test_rank_slices_make_up_the_global_batch(world_size: int, micro: int, passes: int, step: int) -> None:
    sample_ids = batch(step, world_size * micro * passes, samples=1000)
    shares = [rank_slice(sample_ids, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert {len(share) for share in shares} == {micro * passes}
    assert np.concatenate(shares).tolist() == sample_ids.tolist()


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=4, unique=True).map(sorted),
    percents=st.lists(st.integers(1, 99), min_size=3, max_size=3, unique=True).map(sorted),
    in_steps=st.booleans(),
    steps=st.integers(100, 400),
)
def test_growing_batches_see_the_samples_of_a_constant_one(
    sizes: list[int], percents: list[int], in_steps: bool, steps: int
) -> None:
    """Each step takes its stage's number of samples, where the step before ended."""
    starts = [0, *(percent * steps // 100 if in_steps else percent / 100 for percent in percents)][: len(sizes)]
    stages = [{"batch": size, "after": start} for size, start in zip(sizes, starts, strict=True)]
    train = TrainConfig.model_validate({"global_batch": stages, "micro_batch": 1})
    assert "train.global_batch" not in train.step_problems(steps, "")
    spec = TrainingSpec.model_construct(train=train, steps=steps)
    positions = [global_positions(spec, step) for step in range(steps)]
    assert np.concatenate(positions).tolist() == list(range(spec.samples_after(steps)))
    begins = [round(start * steps) if start < 1 else start for start in starts]
    for size, begin, end in zip(sizes, begins, [*begins[1:], steps], strict=True):
        assert {len(samples) for samples in positions[begin:end]} == {size}


@settings(max_examples=50)
@given(
    length=st.integers(1, 20),
    extra=st.integers(1, 200),
    cuts=st.lists(st.integers(0, 200), max_size=5),
    dtype=st.sampled_from([np.uint16, np.uint32]),
)
def test_samples_cover_the_files_without_overlap(
    length: int, extra: int, cuts: list[int], dtype: type[np.uint16 | np.uint32]
) -> None:
    tokens: Any = np.arange(length + extra, dtype=dtype) + (0 if dtype is np.uint16 else 70_000)
    edges = [0, *sorted(cuts), len(tokens)]
    dataset = TokenDataset(files=[tokens[start:end] for start, end in pairwise(edges)], length=length)
    inputs, targets = dataset.read(np.arange(len(dataset), dtype=np.uint64))
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.ravel().tolist() == tokens[: len(dataset) * length].tolist()
    assert targets.ravel().tolist() == tokens[1 : len(dataset) * length + 1].tolist()
    assert len(tokens) - 1 - len(dataset) * length < length  # no sample is left unused
