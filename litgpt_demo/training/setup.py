"""A rank before the first step: its processes and devices, and all that it holds."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from inspect import signature
from itertools import pairwise
from pathlib import Path
from time import monotonic
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

from litgpt_demo.config import TrainConfig, TrainingSpec
from litgpt_demo.heartbeat import Heartbeat
from litgpt_demo.models.model import decay_groups, initialise, litgpt_config
from litgpt_demo.storage import Storage
from litgpt_demo.training.blocks import prepare_blocks
from litgpt_demo.training.feed import Data, Feed
from litgpt_demo.training.loss import LossGPT
from litgpt_demo.training.ranks import Ranks


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


class Clock:
    """The seconds that a run has been trained for: those up to the checkpoint an attempt went on from, and its own.

    What a crash cost is left out: it was trained again.
    """

    def __init__(self) -> None:
        self.go_on_from(0.0)

    def go_on_from(self, seconds: float) -> None:
        """The training stands where it stood after `seconds`."""
        self.before, self._begun = seconds, monotonic()

    @property
    def seconds(self) -> float:
        """Trained until now."""
        return self.before + monotonic() - self._begun

    def at_least(self, seconds: float) -> None:
        """Another rank's clock, a moment ahead of this one, says that it is so late."""
        self.before += max(0.0, seconds - self.seconds)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything one rank holds."""

    spec: TrainingSpec
    data: Data
    feed: Feed
    fabric: Fabric
    model: Any
    """Fabric's wrapper of the (possibly DDP or FSDP) model: what is called. Its `module` is a GPT."""
    optimizer: Any
    run: Storage
    scratch: Path
    clock: Clock = field(default_factory=Clock)
    heart: Heartbeat = field(default_factory=lambda: Heartbeat(allow=0, environ={}))
    """Tells the node that this rank lives; nobody, unless it is given."""

    @cached_property
    def ranks(self) -> Ranks:
        """All ranks, for what the thread that trains has to settle with them. The first to ask waits for the others."""
        return Ranks.of(self.fabric)

    @property
    def scaler(self) -> Any:
        """Return the scaler of train.precision=16-mixed, which leaves out an update that it overflowed in."""
        return getattr(self.fabric.strategy.precision, "scaler", None)


def set_up(spec: TrainingSpec, data: Data, fabric: Fabric, run: Storage, scratch: Path) -> Training:
    """Model and optimizer with their initial values, distributed as the strategy says."""
    train, config = spec.train, litgpt_config(spec.model, vocab_size=data.manifest.vocab_size)
    # A model that is to be sharded may fit no device whole: it gets memory once it is, and values then.
    sharded = isinstance(fabric.strategy, ModelParallelStrategy)
    with fabric.init_module(empty_init=sharded):
        model = LossGPT(config)
    model.max_seq_length = spec.model.sequence_length
    if not sharded:
        initialise(model, seed=train.seed)
    prepare_blocks(model, train, fabric.device)
    wrapped = fabric.setup_module(model)
    if sharded:
        initialise(model, seed=train.seed)
    scaled = getattr(fabric.strategy.precision, "scaler", None) is not None
    adamw = torch.optim.AdamW(
        decay_groups(wrapped, train.weight_decay),
        lr=train.learning_rate,
        betas=train.betas,
        # A fused one would take the scale off the gradients by itself, after they should have been clipped.
        fused=None if scaled else fabric.device.type in {"cuda", "cpu"},
    )
    return Training(
        spec=spec,
        data=data,
        feed=Feed(spec, data.train, fabric.device, rank=fabric.global_rank),
        fabric=fabric,
        model=wrapped,
        optimizer=fabric.setup_optimizers(adamw),
        run=run,
        scratch=scratch,
    )
