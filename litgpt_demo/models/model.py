"""LitGPT models from settings, with initial weights that depend on the seed alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from litgpt import lora
from litgpt.config import Config
from litgpt.model import GPT, GroupedTopkRouter
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from litgpt_demo.config import LoraConfig, ModelConfig
from litgpt_demo.errors import UserError
from litgpt_demo.models import catalogue


def litgpt_config(model: ModelConfig, *, vocab_size: int, adapters: LoraConfig | None = None) -> Config:
    """LitGPT's Config of this model for a tokenizer of `vocab_size` ids; with adapters, that of LitGPT's LoRA.

    Raises:
        UserError: the tokenizer has more ids than the model has embeddings.
    """
    rows = catalogue.padded_vocabulary(model.name, model.config)
    if rows is not None and (problem := catalogue.vocabulary_problem(model.name, rows=rows, vocab_size=vocab_size)):
        raise UserError("; ".join(problem))
    length = model.sequence_length
    fields = catalogue.fields_of(model.name, model.config, sequence_length=length, vocab_size=vocab_size)
    if adapters is None:
        return Config(**fields)
    sizes = {"lora_r": adapters.rank, "lora_alpha": adapters.alpha, "lora_dropout": adapters.dropout}
    return lora.Config(**fields, **sizes, **{f"lora_{target}": True for target in adapters.targets})


def initialise(model: GPT, *, seed: int) -> None:
    """Small-normal weights, the projections back into the residual stream smaller still.

    GPT-NeoX's scheme (https://arxiv.org/abs/2204.06745, section 2.1), which `litgpt pretrain` uses too: a standard
    deviation of sqrt(2 / 5d), and 1 / (layers * sqrt(d)) for the projections.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    usual = math.sqrt(2 / (5 * config.n_embd))
    residual = 1 / (math.sqrt(config.n_embd) * config.n_layer)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding | GroupedTopkRouter):
                std = residual if name.endswith(".proj") else usual
                values = torch.empty(module.weight.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
                if (rows := getattr(module, "held_rows", None)) is not None:  # training.tensor
                    values = torch.cat([values[first : first + number] for first, number in rows])
                _assign(module.weight, values)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
            if isinstance(module, lora.LoRALinear) and hasattr(module, "lora_A"):
                # As LitGPT's `reset_parameters`, of our generator: adapters begin as nothing, for B is 0.
                bound = 1 / math.sqrt(module.lora_A.shape[1])
                values = torch.empty(module.lora_A.shape, dtype=torch.float32)
                _assign(module.lora_A, values.uniform_(-bound, bound, generator=generator))
                module.lora_B.zero_()
            if isinstance(module, GroupedTopkRouter):
                module.e_score_correction_bias.zero_()


def _assign(weight: Tensor, values: Tensor) -> None:
    """Every rank draws the same values, so a sharded weight takes its part of them without any communication."""
    if isinstance(weight, DTensor):
        shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        part = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
        weight.to_local().copy_(values[part])
    else:
        weight.copy_(values)


def base_weights(model: nn.Module) -> dict[str, Any]:
    """Return the weights of a model, or this rank's shards of them, under the names that they have without adapters."""
    weights = get_model_state_dict(model).items()
    return {base_name(name): weight for name, weight in weights if ".lora_" not in name}


def base_name(name: str) -> str:
    """Return the name that a weight has in a model without adapters."""
    return name.replace(".linear.", ".")


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """AdamW's parameter groups: matrices decay, vectors (biases, norms) do not."""
    matrices = [weight for weight in model.parameters() if weight.requires_grad and weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.requires_grad and weight.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
