"""One optimizer step, and one evaluation. Neither waits for the device: what they return is read when it is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from litgpt_demo.config import TrainConfig
from litgpt_demo.training.feed import read_samples, to_device
from litgpt_demo.training.setup import Training


class Passed(NamedTuple):
    """A step as the rank that has done it knows it."""

    loss: Tensor
    """This rank's mean, on the device."""
    norm: Tensor
    """The gradient's, on the device."""
    waited: float
    """Seconds spent waiting for samples."""


def train_step(training: Training, step: int) -> Passed:
    """Make one optimizer step."""
    spec, fabric, train = training.spec, training.fabric, training.spec.train
    torch.manual_seed(step_seed(seed=train.seed, step=step, rank=fabric.global_rank))
    for group in training.optimizer.param_groups:
        group["lr"] = learning_rate(train, step=step, steps=spec.steps)
    batches, waited = training.feed.take(step)
    total, skips = torch.zeros((), device=fabric.device), train.on_not_finite == "skip"
    for index, (inputs, targets) in enumerate(batches, 1):
        with fabric.no_backward_sync(training.model, enabled=index < len(batches)):
            loss = training.model(inputs, targets)
            share = loss if len(batches) == 1 else loss / len(batches)
            # An infinite loss may have finite gradients. Without, all ranks see it in the norm of their sum.
            fabric.backward(share * torch.where(loss.detach().isfinite(), 1.0, math.nan) if skips else share)
        total += loss.detach()
    limit = math.inf if train.clip_norm is None else train.clip_norm
    norm = fabric.clip_gradients(training.model, training.optimizer, max_norm=limit, error_if_nonfinite=False)
    assert norm is not None
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if skips and training.scaler is None:
        # The fused AdamW reads it on the device, and makes no update where it is 1.
        training.optimizer.optimizer.found_inf = (~whole.isfinite()).float()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return Passed(total / len(batches), whole, waited)


@torch.no_grad()
def evaluate(training: Training, *, beat: Callable[[], object] = lambda: None) -> float:
    """Mean loss over the first `evaluation_windows` validation samples, the same ones on any number of ranks.

    Args:
        beat: called before every forward pass.
    """
    fabric, train = training.fabric, training.spec.train
    windows = training.data.validation
    count = min(train.evaluation_windows, len(windows))
    numbers = np.arange(count, dtype=np.uint64)[fabric.global_rank :: fabric.world_size]
    sums = torch.zeros(2, dtype=torch.float64, device=fabric.device)
    training.model.eval()
    # Every rank makes the same number of forward passes, with an empty share as zero weight: FSDP's are collective.
    each = math.ceil(math.ceil(count / fabric.world_size) / train.micro_batch)
    for index in range(each):
        beat()
        part = numbers[index * train.micro_batch : (index + 1) * train.micro_batch]
        samples = read_samples(windows, part if len(part) else np.zeros(1, dtype=np.uint64), fabric.device)
        loss = training.model(*to_device(samples, fabric.device)).double()
        sums += torch.stack([loss * len(part), torch.full_like(loss, len(part))])
    training.model.train()
    if fabric.world_size > 1:
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def learning_rate(train: TrainConfig, *, step: int, steps: int) -> float:
    """Return the rate of step `step` (from 0): up in a line, then down a cosine to the minimum at the last step."""
    low = train.learning_rate / 10 if train.min_learning_rate is None else train.min_learning_rate
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, steps - 1 - train.warmup_steps)
    return low + (train.learning_rate - low) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def step_seed(*, seed: int, step: int, rank: int) -> int:
    """Return the seed of torch's generators at a step: dropout is a function of the step, and resumes exactly."""
    return int.from_bytes(blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=7).digest(), "little")
