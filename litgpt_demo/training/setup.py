"""A rank before the first step: its processes and devices, its data, its model and its optimizer."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from inspect import signature
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeAlias, cast

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
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from litgpt_demo import timeouts
from litgpt_demo.config import TrainConfig, TrainingSpec
from litgpt_demo.data.batches import SampleIds, open_samples, rank_slice, sample_ids_for_step
from litgpt_demo.data.dataset import DatasetManifest, TokenDataset, open_dataset
from litgpt_demo.data.tokens import bytes_of_tokens
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.heartbeat import Heartbeat
from litgpt_demo.models.model import LossGPT, initialise, litgpt_config
from litgpt_demo.node.environment import require_executable_cache
from litgpt_demo.optimizers import optimizer_of
from litgpt_demo.storage import Storage
from litgpt_demo.training.averaging import WeightAverage
from litgpt_demo.training.chain import Chain
from litgpt_demo.training.digests import batch_sum
from litgpt_demo.training.ranks import Ranks, thread_of


def open_fabric(train: TrainConfig) -> Fabric:
    """Return Fabric over the ranks that torchrun started; this process is one of them."""
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # else every rank greets in every log
    processes, nodes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    world_size = processes * nodes
    # The node detects a hang, with the stacks of all ranks (litgpt_demo.heartbeat), before torch gives up.
    timeout = timedelta(seconds=max(timeouts.LEAST_COLLECTIVE, 2 * train.hang_timeout))
    strategy: str | DDPStrategy | ModelParallelStrategy = "auto"
    if train.strategy in {"fsdp", "hybrid"} and world_size > 1:
        shard, degree = partial(_apply_fsdp, train=train), train.shard_degree(nodes, processes)
        replicas = world_size // degree
        strategy = ModelParallelStrategy(
            shard, data_parallel_size=replicas, tensor_parallel_size=degree, timeout=timeout
        )
    elif world_size > 1:
        # Buffers are rotary tables, which never change: they are not sent before each pass. torch 2.11 has
        # broadcast_buffers for it; 2.13 has forward_sync_buffers too, and calls the old name deprecated.
        new = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        buffers: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
        # Gradients are views of the buckets, which are reduced during the backward pass. A static graph needs no search
        # for unused weights, but cannot leave the reduction out of some passes, as accumulation does.
        static = train.gradient_accumulation_steps(world_size) == 1
        strategy = DDPStrategy(gradient_as_bucket_view=True, timeout=timeout, static_graph=static, **buffers)
    kind, precision = "cpu", train.precision
    if torch.cuda.is_available():
        kind = "cuda"
        prepare_cuda(train)
    fabric = Fabric(accelerator=kind, devices=processes, num_nodes=nodes, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


def prepare_cuda(train: TrainConfig) -> None:
    """Choose the kernels of this process' GPU, before its first one runs."""
    # Products of float32 numbers in TF32, as `litgpt pretrain` has them: 10 bits of mantissa, and 8 times as fast on an
    # A100 (https://docs.pytorch.org/docs/stable/notes/cuda.html).
    torch.set_float32_matmul_precision("high")
    if train.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = (
            ":4096:8"  # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        )
        torch.use_deterministic_algorithms(True)
        # Flash attention and the plain formula can add in a fixed order; the gradients of these two cannot.
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)


def compiled_part(train: TrainConfig, device: torch.device) -> str:
    """Return the part of the model to compile: `train.compile`, or what its `auto` is on this device."""
    if train.compile != "auto":
        return train.compile
    if device.type != "cuda":
        return "none"
    # Triton compiles a launcher for each of its kernels by a C compiler, and executes it.
    has_compiler = any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang", "cc"))))
    try:
        require_executable_cache(os.environ)
    except UserError:
        has_compiler = False
    return "blocks" if has_compiler else "none"


def _apply_fsdp(model: nn.Module, mesh: DeviceMesh, *, train: TrainConfig) -> nn.Module:
    # FSDP2: unlike FSDP1 it runs on CPUs, and weights keep their shapes, by which decay_groups finds the matrices.
    # Fabric calls the mesh dimensions data_parallel and tensor_parallel. They are used as replicate and shard: over all
    # ranks (fsdp), or within a node (hybrid).
    data = mesh if mesh.size(0) > 1 else mesh["tensor_parallel"]
    # Weights are gathered in the precision in which autocast would multiply; gradients are summed in float32. Inputs
    # are not cast, because the residual stream and the rotary cosines are float32.
    # On a CPU autocast leaves norms in the inputs' type, so weights must be float32 too ("mixed dtype (CPU)").
    param_dtype = None
    if train.precision == "bf16-mixed" and mesh.device_type != "cpu":
        param_dtype = torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
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
    manifest: DatasetManifest
    train: TokenDataset
    validation: TokenDataset
    tokenizer: Path
    """Its tokenizer.json."""

    @cached_property
    def bytes_of_tokens(self) -> Tensor:
        """The bytes of text of each id."""
        return torch.from_numpy(bytes_of_tokens(self.tokenizer))


def open_data(spec: TrainingSpec, folder: Path) -> Data:
    manifest = open_dataset(str(folder))
    if manifest.content_hash != spec.dataset_hash:
        what = f"{folder} is the dataset {manifest.content_hash}, but this run was made for {spec.dataset_hash}"
        raise DataError(what, fix="stage that one")
    opened = partial(open_samples, spec, folder, manifest)
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    return Data(manifest=manifest, train=opened("train"), validation=opened("validation"), tokenizer=tokenizer)


class Batch(NamedTuple):
    """This rank's share of a step's batch."""

    micro_batches: list[Samples]
    """On the device."""
    seconds_waited: float
    """Seconds that were spent waiting for it."""
    digest: int
    """`digests.batch_sum` of its samples."""


class BatchLoader:
    """Returns this rank's share of each step's batch. A thread reads the next one from the disk meanwhile."""

    def __init__(self, spec: TrainingSpec, windows: TokenDataset, device: torch.device, *, rank: int) -> None:
        self._spec, self._windows, self._device, self._rank = spec, windows, device, rank
        self._reader = thread_of(device, "feed")
        self._prefetched: tuple[int, Future[tuple[Samples, int]]] | None = None

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def get(self, step: int) -> Batch:
        began = monotonic()
        if self._prefetched is not None and self._prefetched[0] == step:
            samples = self._prefetched[1]
        else:
            samples = self._reader.submit(self._read, step)
        self._prefetched = None
        (inputs, targets), digest = samples.result()
        if step + 1 < self._spec.steps:
            self._prefetched = step + 1, self._reader.submit(self._read, step + 1)
        data_wait = monotonic() - began
        size = self._spec.train.micro_batch
        pairs = zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
        micro_batches = [to_device(pair, self._device) for pair in pairs]
        return Batch(micro_batches, seconds_waited=data_wait, digest=digest)

    def _read(self, step: int) -> tuple[Samples, int]:
        numbers = sample_ids_for_step(self._spec, self._windows, step)
        numbers = rank_slice(numbers, rank=self._rank, world_size=self._spec.world_size)
        samples = read_samples(self._windows, numbers, self._device)
        return samples, batch_sum(*samples)


def read_samples(windows: TokenDataset, numbers: SampleIds, device: torch.device) -> Samples:
    """Return samples in memory from which `device` copies without waiting: pinned, if it is a GPU."""
    inputs, targets = (torch.from_numpy(part.copy()) for part in windows.read(numbers))
    if device.type == "cuda":
        return inputs.pin_memory(), targets.pin_memory()
    return inputs, targets


def to_device(samples: Samples, device: torch.device) -> Samples:
    inputs, targets = samples
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


# Operators that cost arithmetic; recomputing the rest costs only memory traffic.
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_NAMES = ("mm", "addmm", "bmm", "_scaled_mm", *(f"_scaled_dot_product_{kind}" for kind in _ATTENTION))
_KEPT = {torch.ops.higher_order.flex_attention, *(getattr(torch.ops.aten, name).default for name in _NAMES)}


def _selective_policy(context: Any, operator: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def apply_float8_ac_compile(model: LossGPT, train: TrainConfig, device: torch.device) -> None:
    """Apply float8, activation checkpointing and torch.compile to the blocks, in the order in which they compose."""
    part = compiled_part(train, device)
    model.by_flex = device.type == "cuda" and part != "none"
    if part != "none":
        require_executable_cache(os.environ)
    if train.float8:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
            has = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
            what = f"train.float8=true needs a GPU that multiplies in float8 (H100, L4 or newer), but this is {has}"
            raise UserError(what, fix="leave train.float8 out")
        if part == "none":
            what = "train.float8=true needs train.compile=blocks, but this machine has no C compiler"
            raise UserError(what, fix="install gcc, or leave train.float8 out")
        multiply_in_float8(model)
    if train.activation_checkpointing != "none":
        contexts = partial(create_selective_checkpoint_contexts, _selective_policy)
        wrap: Any = wrapping.checkpoint_wrapper
        if train.activation_checkpointing == "selective":
            wrap = partial(wrapping.checkpoint_wrapper, context_fn=contexts)
        wrapping.apply_activation_checkpointing(model, wrap, check_fn=lambda module: isinstance(module, Block))
    if part == "blocks":
        # Only the forward: hooks, such as FSDP's, stay outside. One compilation serves all blocks that are alike.
        for block in model.transformer.h:
            block.forward = torch.compile(block.forward)
    elif part == "model":
        model.body = torch.compile(model.body)  # type: ignore[method-assign]


def multiply_in_float8(model: LossGPT, *, emulate: bool = False) -> None:
    """Compute the blocks' products in float8, but not the output projection; `emulate` does it anywhere, slowly."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def convertible(module: nn.Module, name: str) -> bool:
        # Float8 products need all sides in multiples of 16, but an expert sees any number of rows. A rounded router
        # chooses other experts.
        if not isinstance(module, nn.Linear) or not {"gate", "experts"}.isdisjoint(name.split(".")):
            return False
        return module.in_features % 16 == 0 and module.out_features % 16 == 0

    float8 = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(model.transformer, module_filter_fn=convertible, config=float8)


@dataclass
class TrainingTimer:
    """The seconds that a run has been trained for, without steps that a crash lost: those are trained again."""

    previous: float = 0.0
    started: float = field(default_factory=monotonic)

    @property
    def seconds(self) -> float:
        return self.previous + monotonic() - self.started


@dataclass(frozen=True, kw_only=True)
class Training:
    spec: TrainingSpec
    data: Data
    feed: BatchLoader
    fabric: Fabric
    model: Any
    """Fabric's wrapper of the (possibly DDP or FSDP) model: what is called. Its `module` is a GPT."""
    optimizer: Any
    run: Storage
    scratch: Path
    timer: TrainingTimer = field(default_factory=TrainingTimer)
    chain: Chain = field(default_factory=Chain)
    """The digests of its batches and checkpoints."""
    average: WeightAverage | None = None
    """The moving average of the weights, with train.weight_average."""
    heart: Heartbeat = field(default_factory=lambda: Heartbeat(max_silence=0, environ={}))
    """Writes this rank's heartbeats for its node; none unless it is set."""

    @cached_property
    def ranks(self) -> Ranks:
        """All ranks, for the collective calls of the thread that trains. The first reader waits for the others."""
        return Ranks.of(self.fabric)

    @property
    def average_tensors(self) -> Mapping[str, Tensor] | None:
        """The averaged weights by name, if there are."""
        return None if self.average is None else self.average.tensors

    @property
    def scaler(self) -> Any:
        """The scaler of train.precision=16-mixed, which leaves out an update with an overflow; else None."""
        return getattr(self.fabric.strategy.precision, "scaler", None)


def set_up(spec: TrainingSpec, data: Data, fabric: Fabric, run: Storage, scratch: Path) -> Training:
    """Return the model and optimizer with their initial values, distributed as the strategy says."""
    train, config = spec.train, litgpt_config(spec.model, vocab_size=data.manifest.vocab_size)
    # A sharded model may not fit one device, so it is created on the meta device. It gets storage and values after
    # sharding.
    sharded = isinstance(fabric.strategy, ModelParallelStrategy)
    with fabric.init_module(empty_init=sharded):
        model = LossGPT(config, z_loss=train.z_loss, end_of_text=train.attention_end(data.manifest.end_of_text))
    model.max_seq_length = spec.model.sequence_length
    if not sharded:
        initialise(model, seed=train.seed)
    apply_float8_ac_compile(model, train, fabric.device)
    wrapped = fabric.setup_module(model)
    if sharded:
        initialise(model, seed=train.seed)
    # Fabric casts the rotary tables with the weights, except in a sharded model. Far positions need them in float32.
    model.reset_parameters()
    scaled = getattr(fabric.strategy.precision, "scaler", None) is not None
    optimizer = optimizer_of(train).build(wrapped, train, scaled)  # each step sets its learning rate
    return Training(
        spec=spec,
        data=data,
        feed=BatchLoader(spec, data.train, fabric.device, rank=fabric.global_rank),
        fabric=fabric,
        model=wrapped,
        optimizer=fabric.setup_optimizers(optimizer),
        average=WeightAverage(wrapped.module, train.weight_average) if train.weight_average else None,
        run=run,
        scratch=scratch,
    )
