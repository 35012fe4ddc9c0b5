"""One optimizer step, and one evaluation. Neither waits for the device: what they return is read when it is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from litgpt_demo.config import TrainConfig
from litgpt_demo.data.batches import AnyWindows, Numbers, by_source
from litgpt_demo.training.exchange import Stopwatch
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
    alone: Stopwatch
    """The time until it needed the other ranks."""
    balance: Tensor | None
    """This rank's load-balance loss, of a mixture of experts."""


def train_step(training: Training, step: int) -> Passed:
    """Make one optimizer step."""
    spec, fabric, train = training.spec, training.fabric, training.spec.train
    alone = Stopwatch(fabric.device)
    torch.manual_seed(step_seed(seed=train.seed, step=step, rank=fabric.global_rank))
    for group in training.optimizer.param_groups:
        group["lr"] = learning_rate(train, step=step, steps=spec.steps)
    batches, waited = training.feed.take(step)
    # The scale makes a mean over learned targets of one over all; the balance of experts is over all tokens.
    training.model.module.balance_weight = train.balance_loss / (training.feed.scale or 1.0)
    total, balance = torch.zeros((), device=fabric.device), None
    for index, (inputs, targets) in enumerate(batches, 1):
        # FSDP that does not sum at once keeps whole gradients until it does: all that sharding was to save.
        later = index < len(batches) and train.sharding is None
        with fabric.no_backward_sync(training.model, enabled=later):
            loss = training.model(inputs, targets)
            if training.feed.scale != 1:
                loss = loss * training.feed.scale
            if index == len(batches):
                alone.stop()
            fabric.backward(loss if len(batches) == 1 else loss / len(batches))
        total += loss.detach()
        if (found := training.model.module.imbalance) is not None:
            balance = found / len(batches) + (0 if balance is None else balance)
    limit = math.inf if train.clip_norm is None else train.clip_norm
    norm = fabric.clip_gradients(training.model, training.optimizer, max_norm=limit, error_if_nonfinite=False)
    training.optimizer.step()
    training.optimizer.zero_grad()
    assert norm is not None
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return Passed(total / len(batches), whole, waited, alone, balance)


@torch.no_grad()
def evaluate(training: Training, *, beat: Callable[[], object] = lambda: None) -> tuple[float, dict[str, float]]:
    """Return the mean loss over the first `evaluation_windows` validation samples, the same ones on any number of
    ranks, and that over those of each source of a mixture.

    Args:
        beat: called before every forward pass.
    """
    windows = training.data.validation
    groups = by_source(windows, min(training.spec.train.evaluation_windows, len(windows)))
    sums = summed_losses(training, [(windows, numbers) for numbers in groups.values()], beat)
    total = sums.sum(dim=0)
    sources = {name: float(one[0] / one[1]) for name, one in zip(groups, sums, strict=True) if name and one[1]}
    return float(total[0] / total[1]), sources


@torch.no_grad()
def summed_losses(
    training: Training, groups: Sequence[tuple[AnyWindows, Numbers]], beat: Callable[[], object]
) -> Tensor:
    """Return of each group of samples the sum of their losses and the sum of their learned shares, over all ranks.

    Every rank has to call it. Their ratio is the mean loss of a learned token, in nats; shape (groups, 2), float64.

    Args:
        beat: called before every forward pass.
    """
    training.model.eval()
    sums = torch.stack([_summed_loss(training, windows, numbers, beat) for windows, numbers in groups])
    training.model.train()
    if training.fabric.world_size > 1:
        dist.all_reduce(sums)
    return sums


def _summed_loss(training: Training, windows: AnyWindows, numbers: Numbers, beat: Callable[[], object]) -> Tensor:
    """Return the sum of the losses of this rank's share of some samples, and that of their learned shares."""
    fabric, reader, size = training.fabric, training.reader, training.spec.train.micro_batch
    own = numbers[reader.number :: reader.count]
    sums = torch.zeros(2, dtype=torch.float64, device=fabric.device)
    # Every rank makes the same number of forward passes, with an empty share as zero weight: FSDP's are collective.
    each = math.ceil(math.ceil(len(numbers) / reader.count) / size)
    for index in range(each):
        beat()
        part = own[index * size : (index + 1) * size]
        samples = read_samples(windows, part if len(part) else np.zeros(1, dtype=np.uint64), fabric.device)
        inputs, targets = to_device(samples, fabric.device)
        loss = training.model(inputs, targets).double()
        learned = (targets >= 0).double().mean() if windows.masked else torch.ones_like(loss)
        sums += torch.stack([loss, learned]) * len(part)
    return sums


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
