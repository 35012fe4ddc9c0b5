"""Batches come one step ahead, and are the ones of their step whatever was asked for before."""

from __future__ import annotations

from contextlib import ExitStack
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


@given(asked=st.lists(st.integers(0, STEPS - 1), min_size=1, max_size=12), world_size=st.sampled_from([1, 3]))
def test_ranks_share_the_batch_of_any_step_in_any_order(tokens: Path, asked: list[int], world_size: int) -> None:
    windows = open_windows([tokens], dtype="<u2", length=LENGTH)
    made = spec(world_size=world_size, global_batch=6, micro_batch=2)
    with ExitStack() as closing:
        ranks = [Feed(made, windows, torch.device("cpu"), rank=rank) for rank in range(world_size)]
        for feed in ranks:
            closing.callback(feed.close)
        for step in asked:
            batches = [batch for feed in ranks for batch in feed.take(step)[0]]
            assert [inputs.shape for inputs, _ in batches] == [(2, LENGTH)] * 3
            inputs, targets = windows.read(numbers_of(made, windows, step))
            assert torch.cat([one for one, _ in batches]).tolist() == inputs.tolist()
            assert torch.cat([one for _, one in batches]).tolist() == targets.tolist()
