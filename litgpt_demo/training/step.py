"""One optimizer step, what the ranks tell each other of it, and one evaluation.

None waits for the device, but LitGPT's mixture of experts does: each expert counts its tokens (torch.where).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from hashlib import blake2b
from time import monotonic
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from litgpt_demo import timeouts
from litgpt_demo.data.batches import MixtureDataset, global_positions, rank_slice, validation_sources
from litgpt_demo.optimizers import set_learning_rate
from litgpt_demo.schedules import learning_rate_at
from litgpt_demo.training.setup import Training, read_samples, to_device


class Passed(NamedTuple):
    """A step as the rank that has done it knows it."""

    loss: Tensor
    """This rank's mean, on the device."""
    norm: Tensor
    """The gradient's, on the device."""
    waited: float
    """Seconds spent waiting for samples."""
    by_source: Tensor | None = None
    """Of a mixture, each source's sum of this rank's losses of samples, and their number; on the device."""


def train_step(training: Training, step: int) -> Passed:
    """Make one optimizer step."""
    spec, fabric, train = training.spec, training.fabric, training.spec.train
    # Dropout is a function of the step, and resumes with the same draws.
    drawn = blake2b(f"{train.seed}/{step}/{fabric.global_rank}".encode(), digest_size=7).digest()
    torch.manual_seed(int.from_bytes(drawn, "little"))
    set_learning_rate(training.optimizer, learning_rate_at(train, step, steps=spec.steps))
    batches, waited = training.feed.take(step)
    module, last = training.model.module, len(batches)
    sharded = isinstance(module, FSDPModule)
    total, skips = torch.zeros((), device=fabric.device), train.on_not_finite == "skip"
    windows, own = training.data.train, list[Tensor]()
    for index, (inputs, targets) in enumerate(batches, 1):
        if isinstance(windows, MixtureDataset):
            module.each = torch.empty(targets.numel(), dtype=torch.float32, device=fabric.device)
            own.append(module.each)
        # Sharded gradients are spread after every pass, for a rank may have no room for all of them; only between the
        # copies of a hybrid they wait for the last one.
        if sharded:
            module.set_requires_all_reduce(index == last)
        with nullcontext() if sharded else fabric.no_backward_sync(training.model, enabled=index < last):
            loss = training.model(inputs, targets)
            share = loss if last == 1 else loss / last
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
    module.each = None
    by_source = None
    if isinstance(windows, MixtureDataset):
        mine = rank_slice(
            global_positions(step, train.global_batch), rank=fabric.global_rank, world_size=fabric.world_size
        )
        which = torch.from_numpy(windows.schedule.source_at(mine)[0]).to(fabric.device, non_blocking=True)
        losses = torch.cat(own).view(len(which), -1).mean(1, dtype=torch.float64)
        by_source = losses.new_zeros(2, len(windows.names))
        by_source.index_add_(1, which, torch.stack([losses, torch.ones_like(losses)]))
    return Passed(total / last, whole, waited, by_source)


class StepResult(NamedTuple):
    """One step, as all ranks know it."""

    done: int
    """Steps, this one included."""
    loss: float
    """The mean over all ranks; each saw an equal share of the batch."""
    grad_norm: float
    why: str | None
    """The reason to leave, if there is one: preempted if a rank was asked to, max_time by the clock of a rank."""
    ended: float
    """When the device came to the end of the step, on the monotonic clock."""
    own: Passed
    by_source: list[float]
    """Of a mixture, the sums of each source's samples' losses, and then their numbers; of all ranks."""


class Exchange:
    """Sums of numbers of every rank, one step late.

    A step's sums travel to host memory while the next step runs and are read after it. All ranks read the same sums
    after the same step, so they decide alike: to report, to stop, to leave.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._device, self._world = fabric.device, fabric.world_size
        self._underway: deque[Callable[[], StepResult]] = deque()
        self._last_event, self._last_ended = self._event(), monotonic()

    def put(self, done: int, passed: Passed, *, leave: bool, time_up: bool) -> None:
        """Send the numbers of a step on their way. The ranks do so in the same order."""
        on_gpu = self._device.type == "cuda"
        flags = torch.tensor([leave, time_up], dtype=torch.float64, pin_memory=on_gpu)
        own = torch.stack([passed.loss.double(), passed.norm.double()])
        by_source = own.new_empty(0) if passed.by_source is None else passed.by_source.flatten()
        sums = torch.cat([own, flags.to(self._device, non_blocking=True), by_source])
        # A CUDA event, or a collective's work; None where the sums are there at once.
        arrived: Any = dist.all_reduce(sums, async_op=True) if self._world > 1 else None
        if on_gpu:
            if arrived is not None:
                arrived.wait()  # the stream waits, the host does not
            sums = torch.empty(len(sums), dtype=torch.float64, pin_memory=True).copy_(sums, non_blocking=True)
            arrived = self._event()
        put = monotonic()

        def result() -> StepResult:
            ended = put
            if on_gpu:
                arrived.synchronize()
                ended = self._last_ended + self._last_event.elapsed_time(arrived) / 1000
                self._last_event, self._last_ended = arrived, ended
            elif arrived is not None:
                arrived.wait()
            loss, norm, leave, time_up, *by_source = sums.tolist()
            # The norm is the whole gradient's on every rank.
            why = "preempted" if leave > 0 else "max_time" if time_up > 0 else None
            return StepResult(done, loss / self._world, norm / self._world, why, ended, passed, by_source)

        self._underway.append(result)

    def take(self, *, keep: int) -> StepResult | None:
        """The oldest step on its way, waited for; None if no more than `keep` are."""
        return self._underway.popleft()() if len(self._underway) > keep else None

    def _event(self) -> Any:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@torch.no_grad()
def evaluate(training: Training, *, done: int) -> tuple[float, dict[str, float]]:
    """Return the mean validation loss, of a mixture weighted by the sources' shares, and each source's by its name.

    The samples are `evaluation_windows` of each source, the same ones on any number of ranks.
    """
    fabric, train, windows = training.fabric, training.spec.train, training.data.validation
    sources = validation_sources(windows, train.evaluation_windows)
    sums = torch.zeros(len(sources), dtype=torch.float64, device=fabric.device)
    training.model.eval()
    for index, source in enumerate(sources):
        mine = source.numbers[fabric.global_rank :: fabric.world_size]
        # Every rank makes the same number of forward passes, with an empty share as zero weight: FSDP's are collective.
        for start in range(0, math.ceil(len(source.numbers) / fabric.world_size), train.micro_batch):
            training.heart.beat(done, "evaluating", allow=max(timeouts.FIRST_PASS, train.hang_after))
            part = mine[start : start + train.micro_batch]
            samples = read_samples(windows, part if len(part) else source.numbers[:1], fabric.device)
            sums[index] += training.model(*to_device(samples, fabric.device)).double() * len(part)
    training.model.train()
    if fabric.world_size > 1:
        dist.all_reduce(sums)
    losses = [total / len(source.numbers) for total, source in zip(sums.tolist(), sources, strict=True)]
    mean = sum(source.share * loss for source, loss in zip(sources, losses, strict=True))
    return mean, {source.name: loss for source, loss in zip(sources, losses, strict=True) if source.name}
