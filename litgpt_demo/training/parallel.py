"""The distribution of the model over devices and processes."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from litgpt.model import GPT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from litgpt_demo.config import TrainConfig


def open_fabric(train: TrainConfig) -> Fabric:
    """Fabric over the ranks that torchrun started, this process being one of them."""
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # else every rank greets in every log
    processes, nodes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    world_size = processes * nodes
    # A hang is for the node to find, with the stacks of all ranks (litgpt_demo.heartbeat), before torch gives up.
    patience = timedelta(seconds=max(1800.0, 2 * train.hang_after))
    strategy: str | DDPStrategy | ModelParallelStrategy = "auto"
    if train.strategy == "fsdp" and world_size > 1:
        shard = partial(_sharded, train=train)
        strategy = ModelParallelStrategy(shard, data_parallel_size=world_size, tensor_parallel_size=1, timeout=patience)
    elif world_size > 1:
        # Buffers are rotary tables, which never change: they are not sent before each pass. torch 2.11 has
        # broadcast_buffers for it; 2.13 has forward_sync_buffers too, and calls the other one deprecated.
        new = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        buffers: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
        # Gradients live in the buckets that are reduced while the backward pass goes on. A static graph does without
        # looking for unused weights, but cannot leave the reduction out of some passes, as accumulation does.
        strategy = DDPStrategy(
            gradient_as_bucket_view=True,
            timeout=patience,
            static_graph=train.global_batch == world_size * train.micro_batch,
            **buffers,
        )
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = Fabric(
        accelerator=accelerator, devices=processes, num_nodes=nodes, strategy=strategy, precision=train.precision
    )
    fabric.launch()
    return fabric


def _sharded(model: nn.Module, mesh: DeviceMesh, *, train: TrainConfig) -> nn.Module:
    """FSDP2: each block's weights come together when it runs, and the next one's while it does. Unlike FSDP1 it runs on
    CPUs, and weights keep their shapes, by which decay_groups tells matrices from vectors."""
    data = mesh["data_parallel"]
    # Gathered in the precision in which autocast would multiply; gradients are summed in float32. Inputs are left as
    # they are, for the residual stream and the rotary cosines are float32's.
    gathered = torch.bfloat16 if train.precision == "bf16-mixed" else None
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = list(cast(GPT, model).transformer.h)
    for block in blocks:
        fully_shard(block, mesh=data, mp_policy=policy, reshard_after_forward=train.reshard_after_forward)
    # The embedding and the output projection are needed first in the backward pass, so they stay gathered for it.
    fully_shard(model, mesh=data, mp_policy=policy, reshard_after_forward=False)
    for earlier, later in pairwise(cast(list[FSDPModule], blocks)):
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])
    return model
