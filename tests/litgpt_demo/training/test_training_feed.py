"""Batches come one step ahead, and are the ones of their step whatever was asked for before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.config import ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.data.batches import numbers_of, open_windows
from litgpt_demo.training.feed import Feed

LENGTH, STEPS = 4, 9


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "train.bin"
    np.arange(40 * LENGTH + 1, dtype="<u2").tofile(path)
    return path


def spec(*, world_size: int = 1, **train: Any) -> TrainingSpec:
    return TrainingSpec(
        run="fed",
        dataset="",
        dataset_key="k",
        model=ModelConfig(name=None, config={"n_layer": 1, "n_embd": 8, "n_head": 1}, sequence_length=LENGTH),
        train=TrainConfig(max_steps=STEPS, warmup_steps=0, **train),
        steps=STEPS,
        world_size=world_size,
    )


@contextmanager
def feeds(path: Path, *, world_size: int, **train: Any) -> Iterator[list[Feed]]:
    windows = open_windows([path], dtype="<u2", length=LENGTH)
    made = spec(world_size=world_size, **train)
    ranks = [Feed(made, windows, torch.device("cpu"), rank=rank) for rank in range(world_size)]
    yield ranks
    for rank in ranks:
        rank.close()


@given(asked=st.lists(st.integers(0, STEPS - 1), min_size=1, max_size=12))
def test_a_step_has_its_own_batch_whichever_steps_were_asked_for_before(tokens: Path, asked: list[int]) -> None:
    windows = open_windows([tokens], dtype="<u2", length=LENGTH)
    with feeds(tokens, world_size=1, global_batch=6, micro_batch=2) as [feed]:
        for step in asked:
            batches, _ = feed.take(step)
            assert [inputs.shape for inputs, _ in batches] == [(2, LENGTH)] * 3
            inputs, targets = windows.read(numbers_of(spec(global_batch=6, micro_batch=2), windows, step))
            assert torch.cat([one for one, _ in batches]).tolist() == inputs.tolist()
            assert torch.cat([one for _, one in batches]).tolist() == targets.tolist()


@pytest.mark.parametrize("world_size", [2, 6])
def test_the_ranks_share_the_batch_that_one_rank_sees(tokens: Path, world_size: int) -> None:
    settings = {"global_batch": 6, "micro_batch": 1}
    with feeds(tokens, world_size=1, **settings) as [alone], feeds(tokens, world_size=world_size, **settings) as ranks:
        for step in (0, 4, STEPS - 1):
            shares = [inputs for feed in ranks for inputs, _ in feed.take(step)[0]]
            assert torch.cat(shares).tolist() == torch.cat([inputs for inputs, _ in alone.take(step)[0]]).tolist()
