"""How the model is spread over devices and processes."""

from __future__ import annotations

import logging
import os

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from litgpt.model import Block
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from litgpt_demo.config import TrainConfig


def open_fabric(train: TrainConfig) -> Fabric:
    """Fabric over the ranks that torchrun started, this process being one of them."""
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # else every rank greets in every log
    processes, nodes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    alone = processes * nodes == 1
    strategy: str | DDPStrategy | ModelParallelStrategy = "auto"
    if train.strategy == "fsdp" and not alone:
        strategy = ModelParallelStrategy(_sharded, data_parallel_size=processes * nodes, tensor_parallel_size=1)
    elif not alone:
        strategy = DDPStrategy(gradient_as_bucket_view=True, forward_sync_buffers=False)
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = Fabric(
        accelerator=accelerator, devices=processes, num_nodes=nodes, strategy=strategy, precision=train.precision
    )
    fabric.launch()
    return fabric


def _sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2: each block's weights come together when it runs. Unlike FSDP1 it runs on CPUs, and weights keep their
    shapes, by which decay_groups tells matrices from vectors."""
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model
