"""What a rank holds before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from litgpt.model import GPT, Block
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from litgpt_demo.config import TrainingSpec
from litgpt_demo.model import decay_groups, initialise, litgpt_config
from litgpt_demo.storage import Storage
from litgpt_demo.training.data import Data


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything one rank holds."""

    spec: TrainingSpec
    data: Data
    fabric: Fabric
    model: Any
    """Fabric's wrapper of the (possibly DDP or FSDP) model: what is called."""
    optimizer: Any
    run: Storage
    scratch: Path


def set_up(spec: TrainingSpec, data: Data, fabric: Fabric, run: Storage, scratch: Path) -> Training:
    """Model and optimizer with their initial values, distributed as the strategy says."""
    config = litgpt_config(spec.model, vocab_size=data.manifest.vocab_size)
    with fabric.init_module(empty_init=False):
        model = GPT(config)
    model.max_seq_length = spec.model.sequence_length
    initialise(model, seed=spec.train.seed)
    if spec.train.activation_checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    if spec.train.compile:
        model.compile()
    wrapped = fabric.setup_module(model)
    fused = fabric.device.type in {"cuda", "cpu"}
    adamw = torch.optim.AdamW(
        decay_groups(wrapped, spec.train.weight_decay), lr=spec.train.learning_rate, betas=spec.train.betas, fused=fused
    )
    optimizer = fabric.setup_optimizers(adamw)
    return Training(spec=spec, data=data, fabric=fabric, model=wrapped, optimizer=optimizer, run=run, scratch=scratch)
