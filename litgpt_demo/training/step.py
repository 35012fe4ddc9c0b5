"""One optimizer step, and one evaluation."""

from __future__ import annotations

import math
from time import monotonic

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from litgpt_demo.batches import Numbers, Windows, batch_numbers, share_of
from litgpt_demo.training.loss import loss_of
from litgpt_demo.training.schedule import learning_rate, step_seed
from litgpt_demo.training.setup import Training


def read_batch(training: Training, windows: Windows, numbers: Numbers) -> tuple[Tensor, Tensor]:
    inputs, targets = windows.read(numbers)
    device = training.fabric.device
    return torch.from_numpy(inputs).to(device), torch.from_numpy(targets.copy()).to(device)


def train_step(training: Training, step: int) -> tuple[Tensor, Tensor, float]:
    """One optimizer step.

    Returns:
        This rank's mean loss and the gradient's norm, both on the device, and the seconds spent reading samples.
    """
    spec, fabric, train = training.spec, training.fabric, training.spec.train
    torch.manual_seed(step_seed(seed=train.seed, step=step, rank=fabric.global_rank))
    for group in training.optimizer.param_groups:
        group["lr"] = learning_rate(train, step=step, steps=spec.steps)
    numbers = batch_numbers(
        step=step,
        global_batch=train.global_batch,
        windows=len(training.data.train),
        dataset_key=spec.dataset_key,
        seed=train.seed,
    )
    mine = share_of(numbers, rank=fabric.global_rank, world_size=fabric.world_size)
    passes = train.accumulation(fabric.world_size)
    total, reading = torch.zeros((), device=fabric.device), 0.0
    for index in range(passes):
        began = monotonic()
        inputs, targets = read_batch(
            training, training.data.train, mine[index * train.micro_batch : (index + 1) * train.micro_batch]
        )
        reading += monotonic() - began
        with fabric.no_backward_sync(training.model, enabled=index < passes - 1):
            loss = loss_of(training.model, inputs, targets) / passes
            fabric.backward(loss)
        total += loss.detach()
    limit = math.inf if train.clip_norm is None else train.clip_norm
    norm = fabric.clip_gradients(training.model, training.optimizer, max_norm=limit, error_if_nonfinite=False)
    training.optimizer.step()
    training.optimizer.zero_grad()
    assert norm is not None
    return total, norm.full_tensor() if isinstance(norm, DTensor) else norm, reading


@torch.no_grad()
def evaluate(training: Training) -> float:
    """Mean loss over the first `evaluation_windows` validation samples, the same ones on any number of ranks."""
    fabric, train = training.fabric, training.spec.train
    windows = training.data.validation
    count = min(train.evaluation_windows, len(windows))
    numbers = np.arange(count, dtype=np.uint64)[fabric.global_rank :: fabric.world_size]
    numbers_of_one = np.zeros(1, dtype=np.uint64)
    sums = torch.zeros(2, dtype=torch.float64, device=fabric.device)
    training.model.eval()
    # Every rank makes the same number of forward passes, with an empty share as zero weight: FSDP's are collective.
    each = math.ceil(math.ceil(count / fabric.world_size) / train.micro_batch)
    for index in range(each):
        part = numbers[index * train.micro_batch : (index + 1) * train.micro_batch]
        weight = len(part)
        inputs, targets = read_batch(training, windows, part if weight else numbers_of_one)
        loss = loss_of(training.model, inputs, targets)
        sums += torch.tensor([float(loss) * weight, weight], dtype=torch.float64, device=fabric.device)
    training.model.train()
    if fabric.world_size > 1:
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])
