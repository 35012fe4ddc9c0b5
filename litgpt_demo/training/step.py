"""One optimizer step, the reduction of its metrics across ranks, and one evaluation.

No function here waits for all that the device has to do, except in LitGPT's mixture of experts: each expert counts its
tokens. Between two micro-batches, the host waits for those that it launched before the newest one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from time import monotonic
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from litgpt_demo import timeouts
from litgpt_demo.data.batches import MixtureDataset, global_positions, rank_slice, validation_sources, weighted_mean
from litgpt_demo.optimizers import set_learning_rate
from litgpt_demo.schedules import learning_rate_at
from litgpt_demo.training import digests
from litgpt_demo.training.setup import Training, read_samples, to_device


class LocalStepStats(NamedTuple):
    loss: Tensor
    """This rank's mean, on the device."""
    norm: Tensor
    """The norm of the whole gradient, on the device."""
    data_wait: float
    batch_sum: int = 0
    """`digests.batch_sum` of this rank's share of the batch."""
    by_source: Tensor | None = None
    """For a mixture: each source's sum of this rank's losses of samples, and their number; on the device."""
    token_losses: Tensor | None = None
    """If they are kept: the losses of this rank's targets, of shape (samples, length); on the device."""


def train_step(
    training: Training, step: int, should_stop: Callable[[], bool] = lambda: False, *, keep_token_losses: bool = False
) -> LocalStepStats | None:
    """Make one update. Every rank calls `should_stop` between two micro-batches, and if it returns True on all of them,
    the step is given up: it returns None, and the weights and the optimizer stay as they were."""
    spec, fabric, train = training.spec, training.fabric, training.spec.train
    # Dropout is a function of the step, so a resumed run draws the same.
    drawn = blake2b(f"{train.seed}/{step}/{fabric.global_rank}".encode(), digest_size=7).digest()
    torch.manual_seed(int.from_bytes(drawn, "little"))
    set_learning_rate(training.optimizer, learning_rate_at(train, step, steps=spec.steps))
    batch = training.feed.get(step)
    module, last = training.model.module, len(batch.micro_batches)
    sharded = isinstance(module, FSDPModule)
    total, skips = torch.zeros((), device=fabric.device), train.on_nonfinite == "skip"
    windows, token_losses = training.data.train, list[Tensor]()
    for index, (inputs, targets) in enumerate(batch.micro_batches, 1):
        if index > 1 and should_stop():
            training.optimizer.zero_grad()
            return None
        if keep_token_losses or isinstance(windows, MixtureDataset):
            module.per_token_loss_out = torch.empty(targets.numel(), dtype=torch.float32, device=fabric.device)
            token_losses.append(module.per_token_loss_out)
        # Sharded gradients are reduced after every pass, for a rank may have no room for all of them. Only the
        # all-reduce between the replicas of a hybrid waits for the last pass.
        if sharded:
            module.set_requires_all_reduce(index == last)
        with nullcontext() if sharded else fabric.no_backward_sync(training.model, enabled=index < last):
            loss = training.model(inputs, targets)
            share = loss if last == 1 else loss / last
            if skips:
                # An infinite loss may have finite gradients. With NaN, all ranks see it in the norm of their sum.
                share = share * torch.where(loss.detach().isfinite(), 1.0, math.nan)
            fabric.backward(share)
        total += loss.detach()
    norm: Tensor | None
    if train.clip_norm is None:
        # Of the optimizer itself: after its wrapper the scaler would divide by the scale once more.
        optimizer, precision = training.optimizer.optimizer, fabric.strategy.precision
        precision.unscale_gradients(optimizer)
        norm = get_total_norm(weight.grad for weight in precision.main_params(optimizer) if weight.grad is not None)
    else:
        limit = train.clip_norm
        norm = fabric.clip_gradients(training.model, training.optimizer, max_norm=limit, error_if_nonfinite=False)
    assert norm is not None
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if skips and training.scaler is None:
        # The fused AdamW reads it on the device, and makes no update where it is 1.
        training.optimizer.optimizer.found_inf = (~norm.isfinite()).float()
    training.optimizer.step()
    if training.average is not None:
        training.average.update(step)
    training.optimizer.zero_grad()
    module.per_token_loss_out = None
    by_source, losses_kept = None, None
    if keep_token_losses:
        losses_kept = torch.cat(token_losses).view(-1, windows.length)
    if isinstance(windows, MixtureDataset):
        positions = global_positions(spec, step)
        positions = rank_slice(positions, rank=fabric.global_rank, world_size=fabric.world_size)
        sources = torch.from_numpy(windows.schedule.source_at(positions)[0]).to(fabric.device, non_blocking=True)
        losses = torch.cat(token_losses).view(len(sources), -1).mean(1, dtype=torch.float64)
        by_source = losses.new_zeros(2, len(windows.names))
        by_source.index_add_(1, sources, torch.stack([losses, torch.ones_like(losses)]))
    return LocalStepStats(total / last, norm, batch.seconds_waited, batch.digest, by_source, losses_kept)


class StepResult(NamedTuple):
    """The figures of a step over all ranks, the same on each of them."""

    done: int
    """Steps, this one included."""
    loss: float
    """The mean over all ranks; each saw an equal share of the batch."""
    grad_norm: float
    stop_reason: str | None
    """None to continue: `preempted` if a rank received a signal, `max_time` by the clock of a rank."""
    ended: float
    """When the device came to the end of the step, on the monotonic clock."""
    local: LocalStepStats
    seconds: float
    """The time of the step by the clocks of the hosts, on average."""
    batch_sha256: str
    """The digest of the samples of its batch."""
    by_source: list[float]
    """For a mixture: the sums of each source's samples' losses, and then their numbers; of all ranks."""


class StopVote:
    """Lets all ranks know, between the same two micro-batches, that one of them received a signal.

    The ranks vote about every half second, or between all micro-batches if those take longer. A vote is read when the
    next one begins, so no rank waits for it.
    """

    SECONDS = 0.5

    def __init__(self, training: Training, signals: Sequence[int]) -> None:
        self._training, self._signals = training, signals
        self._calls = 0
        self._calls_per_vote = 1
        self._vote: tuple[Tensor, Any] | None = None
        self._event: Any = None

    def adapt(self, step_seconds: float, micro_batches: int) -> None:
        """Adapt the pace of the votes to a step's time, which must be the same on all ranks."""
        self._calls_per_vote = max(1, math.ceil(self.SECONDS * micro_batches / step_seconds))

    def result(self) -> bool:
        """Return the result of the vote before if it is time for another, which begins. Every rank must call it."""
        is_alone = self._training.fabric.world_size == 1
        self._calls += 1
        if self._calls < self._calls_per_vote and not is_alone:
            return False
        self._calls = 0
        if self._training.fabric.device.type == "cuda":
            # The host may launch one micro-batch ahead of the device: what it has launched has to end before a save.
            launched_before, self._event = self._event, torch.cuda.current_stream().record_event()
            if launched_before is not None:
                launched_before.synchronize()
        if is_alone:
            return bool(self._signals)
        before, stop = self._vote, torch.tensor([bool(self._signals)], dtype=torch.uint8)
        self._vote = stop, dist.all_reduce(stop, dist.ReduceOp.MAX, group=self._training.ranks.group, async_op=True)
        if before is None:
            return False
        before[1].wait()
        return bool(before[0])


@dataclass(frozen=True, kw_only=True)
class _Pending:
    done: int
    sums: Tensor
    ready: Any
    """A CUDA event, or a collective's work, after which `sums` are complete; None if they are already."""
    submitted: float
    local: LocalStepStats


class MetricReducer:
    """Sums the figures of a step over all ranks, on a GPU one step late.

    A step's sums travel from a GPU to host memory while the next step runs, and are read after it. All ranks read the
    same sums after the same step, so they decide alike: to report, to stop, to leave.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._device, self._world_size = fabric.device, fabric.world_size
        self._on_gpu = fabric.device.type == "cuda"
        self._pending: deque[_Pending] = deque()
        self._last_event, self._last_ended = self._record_event(), monotonic()
        self._last_submitted = monotonic()

    def submit(self, done: int, local: LocalStepStats, *, leave: bool, time_up: bool) -> None:
        """Begin to reduce the figures of a step. All ranks do so in the same order."""
        now = monotonic()
        known = [leave, time_up, now - self._last_submitted, *digests.to_limbs(local.batch_sum)]
        self._last_submitted = now
        own = torch.tensor(known, dtype=torch.float64, pin_memory=self._on_gpu)
        figures = [torch.stack([local.loss.double(), local.norm.double()]), own.to(self._device, non_blocking=True)]
        if local.by_source is not None:
            figures.append(local.by_source.flatten())
        sums, ready = torch.cat(figures), None
        if self._world_size > 1:
            ready = dist.all_reduce(sums, async_op=True)
        if self._on_gpu:
            if ready is not None:
                ready.wait()  # the stream waits, the host does not
            sums = torch.empty(len(sums), dtype=torch.float64, pin_memory=True).copy_(sums, non_blocking=True)
            ready = self._record_event()
        self._pending.append(_Pending(done=done, sums=sums, ready=ready, submitted=monotonic(), local=local))

    def collect(self, *, max_in_flight: int) -> StepResult | None:
        """Return the oldest step in flight, as soon as its sums are complete; None if none is, or on a GPU at most
        `max_in_flight` are."""
        if len(self._pending) <= (max_in_flight if self._on_gpu else 0):
            return None
        step = self._pending.popleft()
        ended = step.submitted
        if self._on_gpu:
            step.ready.synchronize()
            ended = self._last_ended + self._last_event.elapsed_time(step.ready) / 1000
            self._last_event, self._last_ended = step.ready, ended
        elif step.ready is not None:
            step.ready.wait()
        loss, norm, leave, time_up, seconds, *others = step.sums.tolist()
        limbs, by_source = others[: digests.LIMBS], others[digests.LIMBS :]
        reason = None
        if leave > 0:
            reason = "preempted"
        elif time_up > 0:
            reason = "max_time"
        # The norm is the whole gradient's on every rank.
        loss, norm, seconds = (figure / self._world_size for figure in (loss, norm, seconds))
        return StepResult(step.done, loss, norm, reason, ended, step.local, seconds, digests.of_limbs(limbs), by_source)

    def _record_event(self) -> Any:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class SplitLoss(NamedTuple):
    """The loss on the validation samples of one source, or of all of them by their shares."""

    loss: float
    """Nats per token."""
    bytes_per_token: float
    """Bytes of text that a token stands for, on average."""

    @property
    def bits_per_byte(self) -> float:
        """Return the loss per byte of text, which compares models with different tokenizers; NaN without text."""
        if not self.bytes_per_token:
            return math.nan
        return self.loss / math.log(2) / self.bytes_per_token


@torch.no_grad()
def evaluate(training: Training, *, done: int) -> tuple[SplitLoss, dict[str, SplitLoss]]:
    """Return the mean validation loss, weighted by the sources' shares, and that of each source by its name."""
    fabric, train, windows = training.fabric, training.spec.train, training.data.validation
    sources = validation_sources(windows, train.evaluation_samples)
    sums = torch.zeros(2, len(sources), dtype=torch.float64, device=fabric.device)
    sizes = training.data.bytes_of_tokens.to(fabric.device)
    training.model.eval()
    for index, source in enumerate(sources):
        numbers = source.sample_ids[fabric.global_rank :: fabric.world_size]
        # Every rank makes the same number of forward passes, with an empty share as zero weight: FSDP's are collective.
        for start in range(0, math.ceil(len(source.sample_ids) / fabric.world_size), train.micro_batch):
            limit = max(timeouts.FIRST_PASS, train.hang_timeout)
            training.heart.beat(done, "evaluating", max_silence=limit)
            part = numbers[start : start + train.micro_batch]
            samples = read_samples(windows, part if len(part) else source.sample_ids[:1], fabric.device)
            inputs, targets = to_device(samples, fabric.device)
            sums[0, index] += training.model(inputs, targets).double() * len(part)
            sums[1, index] += sizes[targets[: len(part)]].sum()
    training.model.train()
    if fabric.world_size > 1:
        dist.all_reduce(sums)
    counts = [len(source.sample_ids) for source in sources]
    losses = [total / count for total, count in zip(sums[0].tolist(), counts, strict=True)]
    bytes_per_token = [total / count / windows.length for total, count in zip(sums[1].tolist(), counts, strict=True)]
    of_sources = map(SplitLoss, losses, bytes_per_token)
    by_source = {source.name: split for source, split in zip(sources, of_sources, strict=True) if source.name}
    return SplitLoss(weighted_mean(sources, losses), weighted_mean(sources, bytes_per_token)), by_source
