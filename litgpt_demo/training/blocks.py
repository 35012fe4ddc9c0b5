"""Changes to a model's blocks before training: recomputed, in float8, compiled."""

from __future__ import annotations

import os
from functools import partial

import torch
from litgpt.model import Block
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from litgpt_demo.config import TrainConfig
from litgpt_demo.errors import UserError
from litgpt_demo.node.environment import require_executable_cache
from litgpt_demo.training.loss import LossGPT


def prepare_blocks(model: LossGPT, train: TrainConfig, device: torch.device) -> None:
    """Apply what the settings ask for, in the order in which each sees what it has to."""
    if train.compile != "none":
        require_executable_cache(os.environ)
    if train.float8:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
            has = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
            raise UserError(
                f"train.float8=true needs a GPU that multiplies in float8 (H100, L4 or newer); this is {has}; "
                "leave it off"
            )
        multiply_in_float8(model)
    if train.activation_checkpointing != "none":
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        selective = train.activation_checkpointing == "selective"
        wrap = partial(checkpoint_wrapper, context_fn=contexts) if selective else checkpoint_wrapper
        apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda one: isinstance(one, Block))
    if train.compile == "blocks":
        # The forward alone: hooks, FSDP's among them, stay outside. One compilation serves all blocks that are alike.
        for block in model.transformer.h:
            block.forward = torch.compile(block.forward)
    elif train.compile == "model":
        model.body = torch.compile(model.body)  # type: ignore[method-assign]


_aten = torch.ops.aten
# What costs arithmetic; recomputing the rest costs memory traffic alone.
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _policy(_context: object, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def multiply_in_float8(model: LossGPT, *, emulate: bool = False) -> None:
    """The blocks' products in float8, each tensor scaled by its largest value; the output projection stays as it is.

    Weights keep their names and precision.

    Args:
        emulate: round as float8 does and multiply in a wider type, which runs anywhere, slowly.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def convertible(module: nn.Module, _name: str) -> bool:
        # Float8 products want both sides in multiples of 16.
        return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0

    convert_to_float8_training(
        model.transformer, module_filter_fn=convertible, config=Float8LinearConfig(emulate=emulate)
    )
