"""The exchange of every step's numbers among ranks, without anyone waiting for the device or for the others.

Each step ends with a sum, over all ranks, of a few numbers, which travels to host memory while the next step runs and
is read after it. All ranks read the same sums after the same step, so they decide alike: to report, to stop, to leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from litgpt_demo.training.step import Passed


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step, as all ranks know it."""

    done: int
    """Steps, this one included."""
    loss: float
    """The mean over all ranks; each saw an equal share of the batch."""
    grad_norm: float
    leave: bool
    """A rank was asked to leave."""
    time_up: bool
    """True if it has been trained for long enough, by the clock of a rank."""
    ended: float
    """When the device was done with it, on this host's monotonic clock."""
    own: Passed
    """What this rank alone knows."""


class Exchange:
    """The steps' numbers on their way: `put` after every step, `take` when there is time."""

    def __init__(self, fabric: Fabric) -> None:
        self._device, self._world = fabric.device, fabric.world_size
        self._underway: deque[Callable[[], StepResult]] = deque()
        self._last_event, self._last_ended = self._event(), monotonic()

    def put(self, done: int, passed: Passed, *, leave: bool, time_up: bool) -> None:
        """Send the numbers of a step on their way. The ranks do so in the same order."""
        on_gpu = self._device.type == "cuda"
        flags = torch.tensor([leave, time_up], dtype=torch.float64, pin_memory=on_gpu)
        own = torch.stack([passed.loss.double(), passed.norm.double()])
        sums = torch.cat([own, flags.to(self._device, non_blocking=True)])
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
            loss, norm, leave, time_up = sums.tolist()
            return StepResult(
                done=done,
                loss=loss / self._world,
                grad_norm=norm / self._world,  # it is the whole gradient's on every rank
                leave=leave > 0,
                time_up=time_up > 0,
                ended=ended,
                own=passed,
            )

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
