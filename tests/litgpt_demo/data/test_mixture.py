"""Mixtures: each batch holds its share of each source, and follows from the mixture's key, the seed and the step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import corpus_in, large_vocabulary
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from litgpt_demo.data.batches import MixedWindows, Reader, Windows, by_source, in_turn, open_split, share_of
from litgpt_demo.data.dataset import (
    DatasetManifest,
    PlannedDataset,
    Stage,
    finished_dataset,
    millionths,
    open_dataset,
    plan_dataset,
    sources_of,
    stage,
)
from litgpt_demo.data.mixture import PERIOD, Shares, drawn, tokens_of_sources
from litgpt_demo.data.preparation import prepare
from litgpt_demo.data.settings import DataConfig
from litgpt_demo.data.verification import verify_dataset
from litgpt_demo.errors import UserError
from litgpt_demo.storage import open_storage

_WEIGHTS = st.lists(
    st.one_of(st.floats(0, 1), st.floats(0.0001, 0.01), st.sampled_from([0.0, 1.0])), min_size=1, max_size=9
)


def shares(weights: list[float]) -> Shares:
    assume(sum(weights) > 0)
    try:
        return Shares(millionths(weights))
    except UserError:  # a weight of less than a millionth
        assume(False)
        raise


@settings(max_examples=60)
@given(weights=_WEIGHTS, begin=st.integers(0, 10**12))
def test_any_thousand_samples_in_a_row_hold_each_share_to_one_sample(weights: list[float], begin: int) -> None:
    mixed = shares(weights)
    seen = mixed.sources_at(begin, 4 * PERIOD)
    for source, share in enumerate(mixed.millionths):
        before = np.concatenate([[0], np.cumsum(seen == source)])
        windows = before[PERIOD:] - before[:-PERIOD]
        assert np.abs(windows - share / PERIOD).max() < 1
        assert share or not windows.any()


@settings(max_examples=30)
@given(weights=_WEIGHTS, first=st.integers(0, 10**12), more=st.integers(0, 3000))
def test_samples_are_counted_without_being_listed(weights: list[float], first: int, more: int) -> None:
    mixed = shares(weights)
    listed = np.bincount(mixed.sources_at(first, more), minlength=len(weights))
    assert (mixed.counts(first + more) - mixed.counts(first)).tolist() == listed.tolist()
    assert mixed.counts(10**6).tolist() == list(mixed.millionths)  # the rounding evens out


@given(weights=_WEIGHTS)
def test_weights_become_millionths_that_sum_to_a_million(weights: list[float]) -> None:
    parts = shares(weights).millionths
    assert sum(parts) == 10**6
    assert all(abs(part - weight / sum(weights) * 1e6) < 1 for part, weight in zip(parts, weights, strict=True))


def test_a_weight_that_nothing_is_left_of_is_refused() -> None:
    with pytest.raises(UserError, match="less than one sample of a million; give 0 to leave the source out"):
        millionths([1, 1e-9])


# --- batches ----------------------------------------------------------------------------------------------------------

LENGTHS = (40, 7, 23)


def windows(stages: list[Stage]) -> MixedWindows:
    """Three sources of windows of one token, which tell their source and place."""
    sources = {
        f"source{number}": Windows(files=[np.arange(1000 * number, 1000 * number + length + 1, dtype="<u2")], length=1)
        for number, length in enumerate(LENGTHS)
    }
    return MixedWindows(sources=sources, keys=list(sources), stages=stages)


def stages_for(steps: int, first: list[float], second: list[float]) -> list[Stage]:
    return [Stage(until_share=0.5, millionths=millionths(first)), Stage(millionths=millionths(second))]


def batches(mixed: MixedWindows, steps: int, *, global_batch: int, seed: int = 3) -> list[Any]:
    return [
        mixed.batch_numbers(step=step, steps=steps, global_batch=global_batch, mixture_key="k", seed=seed)
        for step in range(steps)
    ]


@settings(max_examples=30)
@given(global_batch=st.integers(1, 40), steps=st.integers(2, 30))
def test_each_source_is_read_in_permutations_of_its_own_across_batches_and_stages(
    global_batch: int, steps: int
) -> None:
    mixed = windows(stages_for(steps, [5, 1, 2], [1, 1, 8]))
    tokens = np.concatenate(
        [mixed.read(numbers)[0][:, 0] for numbers in batches(mixed, steps, global_batch=global_batch)]
    )
    taken = drawn(mixed.stages, step=steps, steps=steps, global_batch=global_batch).tolist()
    assert sum(taken) == len(tokens)
    for source, length in enumerate(LENGTHS):
        own = [int(token) % 1000 for token in tokens if token // 1000 == source]
        assert len(own) == taken[source]
        for begin in range(0, len(own) - length + 1, length):
            assert sorted(own[begin : begin + length]) == list(range(length))


@settings(max_examples=20)
@given(step=st.integers(0, 29), seed=st.integers(0, 2**32))
def test_a_step_needs_no_other_step_and_is_the_same_on_1_2_and_4_ranks(step: int, seed: int) -> None:
    numbers = [
        windows(stages_for(30, [3, 1, 0], [0, 1, 1])).batch_numbers(
            step=step, steps=30, global_batch=8, mixture_key="k", seed=seed
        )
        for _ in range(2)
    ]
    assert numbers[0].tolist() == numbers[1].tolist()
    for count in (1, 2, 4):
        parts = [share_of(numbers[0], Reader(number=number, count=count)) for number in range(count)]
        assert np.concatenate(parts).tolist() == numbers[0].tolist()


def test_a_stage_draws_from_its_own_sources_alone_and_goes_on_where_the_one_before_stopped() -> None:
    mixed = windows([Stage(until_step=4, millionths=(500_000, 500_000, 0)), Stage(millionths=(0, 0, 1_000_000))])
    sources = [set(mixed.which(numbers).tolist()) for numbers in batches(mixed, 6, global_batch=8)]
    assert sources == [{0, 1}] * 4 + [{2}] * 2


def test_another_seed_or_mixture_gives_another_order() -> None:
    mixed = windows([Stage(millionths=(400_000, 300_000, 300_000))])
    one, other = (batches(mixed, 1, global_batch=40, seed=seed)[0].tolist() for seed in (1, 2))
    renamed = mixed.batch_numbers(step=0, steps=1, global_batch=40, mixture_key="other", seed=1).tolist()
    assert one not in (other, renamed)


def test_validation_samples_come_from_each_source_in_turn() -> None:
    assert in_turn([3, 1, 2]).tolist() == [0, 3, 4, 1, 5, 2]
    whole = MixedWindows(sources=windows([]).sources, keys=["a", "b", "c"], stages=[], order=in_turn(LENGTHS))
    assert {name: len(numbers) for name, numbers in by_source(whole, 24).items()} == {
        "source0": 9, "source1": 7, "source2": 8,
    }  # fmt: skip
    assert whole.read(np.arange(4, dtype=np.uint64))[0][:, 0].tolist() == [0, 1000, 2000, 1]


# --- the dataset ------------------------------------------------------------------------------------------------------


def mixture_in(folder: Path, **fields: Any) -> DataConfig:
    """A mixture of two folders of texts, whose tokenizer exists."""
    tokenizer = large_vocabulary(folder / "tokenizer", 300)
    sources = [
        {"corpus": {"kind": "files", "paths": [str(corpus_in(folder / name))], "separator": separator}, **more}
        for name, separator, more in (("web", "\n---\n", {"weight": 3}), ("code", "Document ", {"name": "programs"}))
    ]
    return DataConfig.model_validate(
        {"tokenizer": {"kind": "file", "path": str(tokenizer)}, "validation_fraction": 0.2, "mixture": sources} | fields
    )


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlannedDataset, DatasetManifest, Path]:
    """A mixture that is prepared, and its root; read only."""
    folder = tmp_path_factory.mktemp("mixture")
    planned = plan_dataset(mixture_in(folder))
    return planned, prepare(planned, open_storage(str(folder / "root"))), folder / "root"


def test_preparing_a_mixture_prepares_each_of_its_datasets_as_it_is_alone(
    mixed: tuple[PlannedDataset, DatasetManifest, Path],
) -> None:
    planned, manifest, root = mixed
    assert list(sources_of(manifest)) == ["web", "programs"]
    for name, data in planned.data.sources.items():
        alone = plan_dataset(data)
        assert sources_of(manifest)[name] == finished_dataset(open_storage(str(root)), alone)
    assert manifest.validation.tokens == sum(one.validation.tokens for one in sources_of(manifest).values())
    assert verify_dataset(str(root / planned.path)).problems == ()
    assert finished_dataset(open_storage(str(root)), planned) == manifest
    assert not list((root / planned.path).glob("*.bin"))


def test_a_damaged_source_is_named_when_its_mixture_is_verified(
    mixed: tuple[PlannedDataset, DatasetManifest, Path], tmp_path: Path
) -> None:
    planned, manifest, root = mixed
    copied = tmp_path / "root"
    shutil.copytree(root, copied)
    path = copied / "datasets" / manifest.parts[1].folder / "val.bin"
    path.write_bytes(path.read_bytes()[:-2])
    assert any("val.bin has size" in problem for problem in verify_dataset(str(copied / planned.path)).problems)


def test_a_staged_mixture_is_read_like_the_one_that_was_prepared(
    mixed: tuple[PlannedDataset, DatasetManifest, Path], tmp_path: Path
) -> None:
    planned, manifest, root = mixed
    staged = stage(str(root / planned.path), tmp_path)
    there, here = (
        open_split(folder, open_dataset(str(folder)), "train", length=16) for folder in (root / planned.path, staged)
    )
    every = np.arange(len(there), dtype=np.uint64)
    assert np.array_equal(there.read(every)[0], here.read(every)[0])
    assert len(there) > len(manifest.parts)


def test_weights_and_stages_decide_the_mixtures_key_and_not_its_datasets(tmp_path: Path) -> None:
    plain, annealed = (
        plan_dataset(mixture_in(tmp_path, **fields))
        for fields in ({}, {"stages": [{"until_share": 0.9}, {"weights": {"programs": 1}}]})
    )
    assert plain.key != annealed.key
    assert {name: part.key for name, part in plain.parts.items()} == {
        name: part.key for name, part in annealed.parts.items()
    }


def test_the_tokens_of_each_source_follow_from_the_step(mixed: tuple[PlannedDataset, DatasetManifest, Path]) -> None:
    counted = tokens_of_sources(mixed[1], step=10, steps=20, global_batch=40, length=16)
    assert counted == {"web": 300 * 16, "programs": 100 * 16}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stages": [{"until_step": 5}, {"weights": {"cod": 1}}]}, "names cod, which is no source"),
        ({"stages": [{"until_step": 5}]}, "is the last stage and goes on to the end"),
        ({"stages": [{}, {}]}, "needs an end: give either until_step or until_share"),
        ({"stages": [{"until_step": 5, "until_share": 0.5}, {}]}, "needs an end: give either"),
        ({"stages": [{"until_step": 5}, {"until_step": 5}, {}]}, "each stage has to end after the one before"),
        ({"stages": [{"weights": {"web": 0}}]}, "weights of 0 alone"),
        ({"tokenizer": {"kind": "train"}}, "share one tokenizer, which has to exist before"),
        ({"corpus": {"kind": "files", "paths": ["x"]}}, "are both given; leave data.corpus out"),
        (
            {"mixture": [{"corpus": {"kind": "stdlib"}}, {"corpus": {"kind": "stdlib"}}]},
            "several sources called stdlib",
        ),
        ({"mixture": [], "stages": [{}]}, "there is none; give data.mixture"),
    ],
)
def test_a_mixture_that_cannot_be_mixed_is_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        mixture_in(tmp_path, **fields)


def test_the_same_dataset_twice_is_refused(tmp_path: Path) -> None:
    data = mixture_in(tmp_path)
    twice = [
        source.model_dump() | {"name": name} for source, name in ((data.mixture[0], "one"), (data.mixture[0], "two"))
    ]
    with pytest.raises(UserError, match="one and two are the same dataset"):
        plan_dataset(DataConfig.model_validate(data.model_dump() | {"mixture": twice}))
