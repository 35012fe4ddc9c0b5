"""Training on a real GPU: the same numbers as on a CPU but for rounding, whatever is done to make it faster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from states import loss_and_gradients, model_with_loss, pair, stepped_by_hand, tensors
from training_runs import NewRun, rows, train

from litgpt_demo.config import TrainConfig
from litgpt_demo.training.blocks import prepare_blocks
from litgpt_demo.training.checkpoints import folder_of
from litgpt_demo.training.reading import load_shards
from litgpt_demo.training.saving import Saver

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


def test_a_run_ends_on_the_gpu_near_where_it_ends_on_a_cpu(new_run: NewRun, finished: Path) -> None:
    run = new_run("run")
    train(run)
    mine, theirs = ([row["loss"] for row in rows(folder, "step")] for folder in (run, finished))
    assert mine == pytest.approx(theirs, rel=1e-2)
    assert torch.cuda.max_memory_allocated() > 0


def test_what_is_saved_is_the_state_at_that_moment_while_the_gpu_goes_on(tmp_path: Path) -> None:
    trained, other = pair(1, width=768, device="cuda"), pair(2, steps=0, width=768, device="cuda")
    fabric = Fabric(accelerator="cuda", devices=1)
    wrapped = fabric.setup_module(trained[0])
    training = stepped_by_hand(tmp_path, fabric, wrapped, fabric.setup_optimizers(trained[1]))
    wrapped(torch.randint(0, 64, (2, 32), device="cuda")).square().mean().backward()
    before = [tensor.clone() for tensor in tensors(*trained)]
    with Saver(training, tell=print) as saver:
        saver.save(1, None)
        training.optimizer.step()
    load_shards(*other, Path(training.run.address(folder_of(1))), precision={})
    assert all(map(torch.equal, before, tensors(*other)))


def test_float8_multiplies_on_gpus_that_can() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply in float8")
    plain, eighth = model_with_loss(128, "cuda"), model_with_loss(128, "cuda")
    train = TrainConfig(float8=True, compile="blocks", precision="bf16-mixed")
    prepare_blocks(eighth, train, torch.device("cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        assert loss_and_gradients(eighth)[0] == pytest.approx(loss_and_gradients(plain)[0], rel=0.05)
