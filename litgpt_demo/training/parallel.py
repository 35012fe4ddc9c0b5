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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from litgpt_demo.config import TrainConfig
from litgpt_demo.errors import UserError
from litgpt_demo.models.layouts import RankLayout
from litgpt_demo.training.context import SamplePart
from litgpt_demo.training.loss import LossGPT
from litgpt_demo.training.tensor import divide_products


def open_fabric(train: TrainConfig) -> Fabric:
    """Fabric over the ranks that torchrun started, this process being one of them."""
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # else every rank greets in every log
    # It finds two sums of one number, a gradient's norm over a mesh, too many.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    processes, nodes = _processes_and_nodes()
    world_size = processes * nodes
    # A hang is for the node to find, with the stacks of all ranks (litgpt_demo.heartbeat), before torch gives up.
    patience = timedelta(seconds=max(1800.0, 2 * train.hang_after))
    strategy: str | DDPStrategy | ModelParallelStrategy = "auto"
    if train.sharding is not None and world_size > 1:
        shard = partial(_sharded, train=train, layout=layout_of(train))
        strategy = ModelParallelStrategy(shard, data_parallel_size=world_size, tensor_parallel_size=1, timeout=patience)
    elif world_size > 1:
        # Gradients live in the buckets that are reduced while the backward pass goes on. A static graph does without
        # looking for unused weights, but cannot leave the reduction out of some passes, as accumulation does.
        strategy = DDPStrategy(
            gradient_as_bucket_view=True,
            timeout=patience,
            static_graph=train.global_batch == world_size * train.micro_batch,
            **_leaving_buffers_alone(),
        )
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = Fabric(
        accelerator=accelerator, devices=processes, num_nodes=nodes, strategy=strategy, precision=train.precision
    )
    fabric.launch()
    return fabric


def _processes_and_nodes() -> tuple[int, int]:
    """Return the number of ranks on each node, and of nodes, as torchrun tells them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def layout_of(train: TrainConfig) -> RankLayout:
    """Return how the ranks that torchrun started divide the work.

    Raises:
        UserError: they cannot.
    """
    processes, nodes = _processes_and_nodes()
    try:
        return train.layout(processes * nodes, per_node=processes)
    except ValueError as error:
        raise UserError(str(error)) from error


def _leaving_buffers_alone() -> dict[str, Any]:
    """Return what keeps DDP from sending buffers before each pass: they are rotary tables, which never change.

    torch 2.11 has broadcast_buffers for it; 2.13 has forward_sync_buffers too, and calls the other one deprecated.
    """
    new = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if new else "broadcast_buffers": False}


def _sharded(model: nn.Module, lightnings: DeviceMesh, *, train: TrainConfig, layout: RankLayout) -> nn.Module:
    """Products and samples divided among neighbours, and FSDP2: each block's weights come together when it runs, and
    the next one's while it does. Unlike FSDP1 it runs on CPUs, and weights keep their shapes, by which decay_groups
    tells matrices from vectors.

    Lightning's own mesh has two dimensions, and copies of the state are a third.
    """
    gpt, policy = cast(LossGPT, model), _mixed_precision(train)
    kind, shape = lightnings.device_type, (layout.replicas, layout.shards, layout.tensor)
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("replicas", "shards", "tensor"))
    if layout.context > 1:
        parts = (layout.replicas * layout.shards // layout.context, layout.context, layout.tensor)
        named = init_device_mesh(kind, parts, mesh_dim_names=("readers", "context", "tensor"))
        gpt.divide_samples(SamplePart.of(named["context"]))
    if layout.tensor > 1:
        divide_products(gpt, mesh["tensor"])
        gpt.tensor_mesh = mesh["tensor"]
    data = mesh["shards"] if layout.replicas == 1 else mesh["replicas", "shards"]
    blocks = list(gpt.transformer.h)
    for block in blocks:
        fully_shard(block, mesh=data, mp_policy=policy, reshard_after_forward=train.reshard_after_forward)
    # The embedding and the output projection are needed first in the backward pass, so they stay gathered for it.
    fully_shard(gpt, mesh=data, mp_policy=policy, reshard_after_forward=False)
    for earlier, later in pairwise(cast(list[FSDPModule], blocks)):
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])
    return model


def _mixed_precision(train: TrainConfig) -> MixedPrecisionPolicy:
    """Weights are gathered in the precision in which autocast would multiply them; gradients are summed in float32.

    Inputs are left as they are, for the residual stream and the rotary cosines are float32's.
    """
    gathered = torch.bfloat16 if train.precision == "bf16-mixed" else None
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
