"""LitGPT models from settings, with initial weights that depend on the seed alone."""

from __future__ import annotations

import math

import torch
from litgpt.config import Config
from litgpt.model import GPT, GroupedTopkRouter
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from litgpt_demo import catalogue
from litgpt_demo.config import ModelConfig
from litgpt_demo.errors import UserError


def litgpt_config(model: ModelConfig, *, vocab_size: int) -> Config:
    """LitGPT's Config of this model for a tokenizer of `vocab_size` ids."""
    rows = catalogue.padded_vocabulary(model.name, model.config)
    if rows is not None and (problem := catalogue.vocabulary_problem(model.name, rows=rows, vocab_size=vocab_size)):
        raise UserError("; ".join(problem))
    length = model.sequence_length
    return Config(**catalogue.fields_of(model.name, model.config, sequence_length=length, vocab_size=vocab_size))


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
                weight, values = module.weight, torch.empty(module.weight.shape, dtype=torch.float32)
                values.normal_(0.0, std, generator=generator)
                if isinstance(weight, DTensor):  # every rank draws the same, and takes its part without communication
                    values = distribute_tensor(values, weight.device_mesh, weight.placements, src_data_rank=None)
                weight.copy_(values)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
            if isinstance(module, GroupedTopkRouter):
                module.e_score_correction_bias.zero_()


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """AdamW's parameter groups: matrices decay, vectors (biases, norms) do not."""
    matrices = [weight for weight in model.parameters() if weight.requires_grad and weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.requires_grad and weight.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
