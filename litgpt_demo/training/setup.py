"""A rank before the first step: its processes and devices, its data, its model, and all else that it holds."""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from inspect import signature
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias, cast

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from litgpt.model import GPT, Block
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from litgpt_demo import timeouts
from litgpt_demo.config import TrainConfig, TrainingSpec
from litgpt_demo.data.batches import SampleIds, open_samples, rank_slice, sample_ids_for_step
from litgpt_demo.data.dataset import DatasetManifest, TokenDataset, open_dataset
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.heartbeat import Heartbeat
from litgpt_demo.models.model import LossGPT, initialise, litgpt_config
from litgpt_demo.node.environment import require_executable_cache
from litgpt_demo.optimizers import optimizer_of
from litgpt_demo.storage import Storage
from litgpt_demo.training.ranks import Ranks, thread_of


def open_fabric(train: TrainConfig) -> Fabric:
    """Fabric over the ranks that torchrun started, this process being one of them."""
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # else every rank greets in every log
    processes, nodes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    world_size = processes * nodes
    # A hang is for the node to find, with the stacks of all ranks (litgpt_demo.heartbeat), before torch gives up.
    timeout = timedelta(seconds=max(timeouts.LEAST_COLLECTIVE, 2 * train.hang_after))
    strategy: str | DDPStrategy | ModelParallelStrategy = "auto"
    if train.strategy in {"fsdp", "hybrid"} and world_size > 1:
        shard, ways = partial(_sharded, train=train), train.shard_degree(nodes, processes)
        copies = world_size // ways
        strategy = ModelParallelStrategy(shard, data_parallel_size=copies, tensor_parallel_size=ways, timeout=timeout)
    elif world_size > 1:
        # Buffers are rotary tables, which never change: they are not sent before each pass. torch 2.11 has
        # broadcast_buffers for it; 2.13 has forward_sync_buffers too, and calls the other one deprecated.
        new = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        buffers: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
        # Gradients live in the buckets that are reduced while the backward pass goes on. A static graph does without
        # looking for unused weights, but cannot leave the reduction out of some passes, as accumulation does.
        static = train.global_batch == world_size * train.micro_batch
        strategy = DDPStrategy(gradient_as_bucket_view=True, timeout=timeout, static_graph=static, **buffers)
    kind, precision = "cuda" if torch.cuda.is_available() else "cpu", train.precision
    fabric = Fabric(accelerator=kind, devices=processes, num_nodes=nodes, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


def _sharded(model: nn.Module, mesh: DeviceMesh, *, train: TrainConfig) -> nn.Module:
    """FSDP2: each block's weights come together when it runs, and the next one's while it does. Unlike FSDP1 it runs on
    CPUs, and weights keep their shapes, by which decay_groups tells matrices from vectors."""
    # Fabric's names for the two dimensions are of another use: here the first has copies, and the second the shares of
    # one, which are of all ranks (fsdp) or of a node's (hybrid).
    data = mesh if mesh.size(0) > 1 else mesh["tensor_parallel"]
    # Gathered in the precision in which autocast would multiply; gradients are summed in float32. Inputs are left as
    # they are, for the residual stream and the rotary cosines are float32's.
    # On a CPU autocast leaves norms in the inputs' type, so weights have to be float32's too ("mixed dtype (CPU)").
    gathered = torch.bfloat16 if train.precision == "bf16-mixed" and mesh.device_type != "cpu" else None
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


Samples: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets, each of shape (samples, length)."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The two splits of a dataset, as samples."""

    manifest: DatasetManifest
    train: TokenDataset
    validation: TokenDataset


def open_data(spec: TrainingSpec, folder: Path) -> Data:
    """Open the two splits, memory-mapped."""
    manifest = open_dataset(str(folder))
    if manifest.key != spec.dataset_key:
        what = f"{folder} is the dataset {manifest.key}, this run was made for {spec.dataset_key}"
        raise DataError(what, fix="stage that one")
    opened = partial(open_samples, spec, folder, manifest)
    return Data(manifest=manifest, train=opened("train"), validation=opened("validation"))


class Feed:
    """This rank's share of each step's batch. While a step is computed, a thread reads the next one's from the disk."""

    def __init__(self, spec: TrainingSpec, windows: TokenDataset, device: torch.device, *, rank: int) -> None:
        self._spec, self._windows, self._device, self._rank = spec, windows, device, rank
        self._reader = thread_of(device, "feed")
        self._ahead: tuple[int, Future[Samples]] | None = None

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def take(self, step: int) -> tuple[list[Samples], float]:
        """The micro-batches of a step on the device, and the seconds that were spent waiting for them."""
        began = monotonic()
        ahead, self._ahead = self._ahead, None
        read = ahead[1] if ahead is not None and ahead[0] == step else self._reader.submit(self._read, step)
        inputs, targets = read.result()
        if step + 1 < self._spec.steps:
            self._ahead = step + 1, self._reader.submit(self._read, step + 1)
        waited = monotonic() - began
        size = self._spec.train.micro_batch
        pairs = zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
        return [to_device(pair, self._device) for pair in pairs], waited

    def _read(self, step: int) -> Samples:
        numbers = sample_ids_for_step(self._spec, self._windows, step)
        mine = rank_slice(numbers, rank=self._rank, world_size=self._spec.world_size)
        return read_samples(self._windows, mine, self._device)


def read_samples(windows: TokenDataset, numbers: SampleIds, device: torch.device) -> Samples:
    """Samples in memory from which `device` copies without waiting: pinned, if it is a GPU."""
    inputs, targets = (torch.from_numpy(part.copy()) for part in windows.read(numbers))
    return (inputs.pin_memory(), targets.pin_memory()) if device.type == "cuda" else (inputs, targets)


def to_device(samples: Samples, device: torch.device) -> Samples:
    inputs, targets = samples
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


# What costs arithmetic; recomputing the rest costs memory traffic alone.
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_NAMES = ("mm", "addmm", "bmm", "_scaled_mm", *(f"_scaled_dot_product_{kind}" for kind in _ATTENTION))
_KEPT = [getattr(torch.ops.aten, name).default for name in _NAMES]


def prepare_blocks(model: LossGPT, train: TrainConfig, device: torch.device) -> None:
    """Blocks in float8, recomputed, compiled, as the settings ask, in the order in which each sees what it has to."""
    if train.compile != "none":
        require_executable_cache(os.environ)
    if train.float8:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
            has = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
            what = f"train.float8=true needs a GPU that multiplies in float8 (H100, L4 or newer); this is {has}"
            raise UserError(what, fix="leave it off")
        multiply_in_float8(model)
    if train.activation_checkpointing != "none":
        contexts = partial(create_selective_checkpoint_contexts, _KEPT)
        selective = train.activation_checkpointing == "selective"
        wrap = partial(wrapping.checkpoint_wrapper, context_fn=contexts) if selective else wrapping.checkpoint_wrapper
        wrapping.apply_activation_checkpointing(model, wrap, check_fn=lambda one: isinstance(one, Block))
    if train.compile == "blocks":
        # The forward alone: hooks, FSDP's among them, stay outside. One compilation serves all blocks that are alike.
        for block in model.transformer.h:
            block.forward = torch.compile(block.forward)
    elif train.compile == "model":
        model.body = torch.compile(model.body)  # type: ignore[method-assign]


def multiply_in_float8(model: LossGPT, *, emulate: bool = False) -> None:
    """The blocks' products in float8, each tensor scaled by its largest value; the output projection stays as it is.

    Weights keep their names and precision. To `emulate` rounds as float8 does and multiplies in a wider type, which
    runs anywhere, slowly.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def convertible(module: nn.Module, name: str) -> bool:
        # Float8 products want all sides in multiples of 16: an expert sees any number of rows. A rounded router chooses
        # other experts.
        if not isinstance(module, nn.Linear) or not {"gate", "experts"}.isdisjoint(name.split(".")):
            return False
        return module.in_features % 16 == 0 and module.out_features % 16 == 0

    float8 = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(model.transformer, module_filter_fn=convertible, config=float8)


@dataclass
class Clock:
    """The seconds that a run has been trained for: those up to the checkpoint an attempt went on from, and its own.

    What a crash cost is left out: it was trained again.
    """

    before: float = 0.0
    begun: float = field(default_factory=monotonic)

    @property
    def seconds(self) -> float:
        return self.before + monotonic() - self.begun


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
        """The scaler of train.precision=16-mixed, which leaves out an update that it overflowed in; else None."""
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
    # Fabric casts the rotary tables with the weights, but no sharded model's. Far positions need them in float32.
    model.reset_parameters()
    scaled = getattr(fabric.strategy.precision, "scaler", None) is not None
    optimizer = optimizer_of(train).build(wrapped, train, scaled)  # each step sets its learning rate
    return Training(
        spec=spec,
        data=data,
        feed=Feed(spec, data.train, fabric.device, rank=fabric.global_rank),
        fabric=fabric,
        model=wrapped,
        optimizer=fabric.setup_optimizers(optimizer),
        run=run,
        scratch=scratch,
    )
