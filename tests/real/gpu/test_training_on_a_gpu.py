"""Training on a real GPU: the same numbers as on a CPU but for rounding, whatever is done to make it faster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from states import loss_and_gradients, model_with_loss
from training_runs import NewRun, rows, train

from litgpt_demo.config import TrainConfig
from litgpt_demo.training.blocks import prepare_blocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


def test_a_run_ends_on_the_gpu_near_where_it_ends_on_a_cpu(new_run: NewRun, finished: Path) -> None:
    run = new_run("run")
    train(run)
    mine, theirs = ([row["loss"] for row in rows(folder, "step")] for folder in (run, finished))
    assert mine == pytest.approx(theirs, rel=1e-2)
    assert torch.cuda.max_memory_allocated() > 0


def test_float8_multiplies_on_gpus_that_can() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply in float8")
    plain, eighth = model_with_loss(128, "cuda"), model_with_loss(128, "cuda")
    train = TrainConfig(float8=True, compile="blocks", precision="bf16-mixed")
    prepare_blocks(eighth, train, torch.device("cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        assert loss_and_gradients(eighth)[0] == pytest.approx(loss_and_gradients(plain)[0], rel=0.05)
