"""Tensor parallelism: neighbouring ranks divide each product of a block among them, and the vocabulary's.

The plan is Megatron's with sequence parallelism (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198) in torch's
DTensor: the products into attention and MLP are divided by outputs, those out of them by inputs; between, where norms
and residual stream are, each rank has a part of the sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import accumulate
from typing import Any, TypeAlias

from litgpt.config import Config
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

Rows: TypeAlias = list[tuple[int, int]]
"""Runs of a weight's rows, each its first row and their number."""

_WRAPPED = "_checkpoint_wrapped_module"
"""torch's name for a block within its wrapper that recomputes it."""


def divide_products(model: Any, mesh: DeviceMesh) -> None:
    """Give each rank of `mesh` its part of every weight of a LossGPT."""
    config = model.config
    for wrapped in model.transformer.h:
        block = getattr(wrapped, _WRAPPED, wrapped)
        parallelize_module(block, mesh, {name: style for name, style in _plan().items() if _has(block, name)})
        block.attn.config = own = copy(config)
        own.n_head, own.n_query_groups = config.n_head // mesh.size(), config.n_query_groups // mesh.size()
        block.attn.qkv.held_rows = rows_by_rank(config, mesh.size())
    vocabulary = {
        "transformer.wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "transformer.ln_f": SequenceParallel(use_local_output=True),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, vocabulary)


def _has(block: nn.Module, name: str) -> bool:
    """Return whether the block has the module, and it is one that does something."""
    *path, last = name.split(".")
    owner: Any = block.get_submodule(".".join(path))
    found = getattr(owner, last, None)
    return found is not None and not isinstance(found, nn.Identity)


def _plan() -> dict[str, ParallelStyle]:
    """Return how each module of a block is divided, of those that any of LitGPT's has."""
    by_outputs, norm = ColwiseParallel(), SequenceParallel(use_local_output=True)
    by_inputs = RowwiseParallel(output_layouts=Shard(1))
    each_head = SequenceParallel(sequence_dim=1, use_local_output=True)
    own = (None,) * 5  # of attention: rotary cosines and sines, mask, positions
    return {
        "norm_1": norm,
        "norm_2": norm,
        "post_attention_norm": norm,
        "post_mlp_norm": norm,
        "attn": PrepareModuleInput(input_layouts=(Shard(1), *own), desired_input_layouts=(Replicate(), *own)),
        "attn.qkv": by_outputs,
        "attn.norm_q": each_head,
        "attn.norm_k": each_head,
        "attn.proj": by_inputs,
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.fc": by_outputs,
        "mlp.fc_1": by_outputs,
        "mlp.fc_2": by_outputs,
        "mlp.proj": by_inputs,
    }


def gathered(part: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return what each rank of `mesh` has a part of along `dim`; a rank's gradient of it is a summand of the whole."""
    placed = DTensor.from_local(part.contiguous(), mesh, [Shard(dim)], run_check=False)
    return placed.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


# --- queries, keys and values -----------------------------------------------------------------------------------------


def rows_by_rank(config: Config, ranks: int) -> Rows:
    """Return the rows of LitGPT's projection onto queries, keys and values in the order in which ranks hold them.

    LitGPT has all heads' queries, then all keys, then all values. A rank has these of its own heads, so that equal
    parts of LitGPT's order would not do.
    """
    queries, keys = config.n_head * config.head_size, config.n_query_groups * config.head_size
    parts = [(0, queries), (queries, keys), (queries + keys, keys)]
    return [(first + rank * size // ranks, size // ranks) for rank in range(ranks) for first, size in parts]


def in_litgpts_order(state: Any, model: nn.Module) -> dict[str, Any]:
    """Return a model's or an optimizer's state whose rearranged tensors tell a checkpoint where their rows belong.

    The tensors share their memory with the state's, so that a checkpoint may be read into them. With it a checkpoint
    has LitGPT's order whatever the layout, and any other layout goes on from it.
    """
    held = {
        f"{name.replace(f'{_WRAPPED}.', '')}.{kind}": module.held_rows
        for name, module in model.named_modules()
        if hasattr(module, "held_rows")
        for kind, _ in module.named_parameters(recurse=False)
    }
    return {name: _rearranged(value, held[name]) if name in held else value for name, value in state.items()}


def _rearranged(value: Any, rows: Rows) -> Any:
    if isinstance(value, dict):  # an optimizer's, of one weight
        return {name: _rearranged(one, rows) for name, one in value.items()}
    if not isinstance(value, DTensor) or value.dim() == 0:
        return value
    pieces = list(_pieces(value, rows))
    shards = LocalShardsWrapper([piece for piece, _ in pieces], [offset for _, offset in pieces])
    return DTensor(shards, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _pieces(weight: DTensor, rows: Rows) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield the runs of rows that this rank has, each with its place in LitGPT's order."""
    local = weight.to_local().detach()
    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    ends = accumulate(count for _, count in rows)
    for (first, count), end in zip(rows, ends, strict=True):
        begin = end - count
        low, high = max(begin, offset[0]), min(end, offset[0] + len(local))
        if low < high:
            yield local[low - offset[0] : high - offset[0]], (first + low - begin, *offset[1:])
