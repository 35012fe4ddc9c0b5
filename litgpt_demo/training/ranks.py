"""Collective calls: each rank runs a function, rank 0 combines the results, and an error of one is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from litgpt_demo import timeouts

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of a training. This process is one of them."""

    rank: int
    world_size: int
    group: Any = None

    @classmethod
    def of(cls, fabric: Fabric) -> Ranks:
        """Return all ranks, with a new group of their own: another thread can use it while training uses Fabric's.

        Every rank must call this. The group is in host memory, and waits for longer than a training's would.
        """
        group = None
        if fabric.world_size > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeouts.STATE_TRANSFER))
        return cls(rank=fabric.global_rank, world_size=fabric.world_size, group=group)

    def gather_then_scatter(self, action: Callable[[], T], combine: Callable[[list[T]], Sequence[R]]) -> R:
        """Run `action` on every rank. Rank 0 makes of all results, in the order of ranks, a return value for each rank.

        No rank returns before all have acted. An exception of one rank is raised on all of them.
        """
        outcomes: list[Any] = []
        results = self._gather(_result_or_exception(action))
        if self.rank == 0:
            errors = [result for result in results if isinstance(result, Exception)]
            combined: Any = errors[0] if errors else _result_or_exception(lambda: combine(results))
            outcomes = [combined] * self.world_size if isinstance(combined, Exception) else list(combined)
        outcome = self._scatter(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    def gather_then_broadcast(self, action: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Do the same, and return on every rank what `combine` returns on rank 0."""
        return self.gather_then_scatter(action, lambda results: [combine(results)] * self.world_size)

    def run_on_rank_zero(self, action: Callable[[], R]) -> R:
        """Return on every rank what `action` returns on rank 0."""
        return self.gather_then_broadcast(lambda: None, lambda _: action())

    def _gather(self, result: object) -> list[Any]:
        if self.world_size == 1:
            return [result]
        results = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(result, results, dst=0, group=self.group)
        return results or []

    def _scatter(self, outcomes: list[Any]) -> Any:
        if self.world_size == 1:
            return outcomes[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, outcomes or None, src=0, group=self.group)
        return received[0]


def thread_of(device: torch.device, name: str) -> ThreadPoolExecutor:
    """Return a thread that works on this device.

    A thread's own device is GPU 0, whatever the process uses. If it uses another one, it makes a context on GPU 0 all
    the same, and every rank of a node would hold some of GPU 0's memory.
    """

    def take_device() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    return ThreadPoolExecutor(1, name, initializer=take_device)


def _result_or_exception(action: Callable[[], T]) -> T | Exception:
    try:
        return action()
    except Exception as error:  # the peers wait for an answer, and the error is raised on all of them
        return error
