"""Collective actions of ranks: everyone a share, rank 0 the whole of it, and the error of one is everyone's."""

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
    """The ranks of a training, this process being one of them."""

    number: int
    world: int
    group: Any = None
    """The process group over which they speak, where they are several."""

    @classmethod
    def of(cls, fabric: Fabric) -> Ranks:
        """All ranks, over a new group of their own, so that another thread can speak while training does.

        Every rank has to ask. The group is in host memory, and waits for longer than a training's would.
        """
        group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeouts.STATE_TRANSFER))
            if fabric.world_size > 1
            else None
        )
        return cls(number=fabric.global_rank, world=fabric.world_size, group=group)

    def deal(self, action: Callable[[], T], whole: Callable[[list[T]], Sequence[R]]) -> R:
        """`action` on every rank; rank 0 makes of all results, in the order of ranks, one for each rank to return.

        Nobody returns before everybody has acted. An exception of one rank is raised on all of them.
        """
        mine = _outcome(action)
        results: list[Any] = [mine]
        if self.world > 1:
            results = [None] * self.world
            dist.gather_object(mine, results if self.number == 0 else None, dst=0, group=self.group)
        dealt: list[Any] = [None] * self.world
        if self.number == 0:
            failed = next((one for one in results if isinstance(one, Exception)), None)
            made: Any = _outcome(lambda: whole(results)) if failed is None else failed
            dealt = [made] * self.world if isinstance(made, Exception) else list(made)
        received = dealt[:1]
        if self.world > 1:
            dist.scatter_object_list(received, dealt if self.number == 0 else None, src=0, group=self.group)
        if isinstance(received[0], Exception):
            raise received[0]
        return received[0]  # type: ignore[no-any-return]

    def together(self, action: Callable[[], T], whole: Callable[[list[T]], R]) -> R:
        """The same, where every rank returns the same."""
        return self.deal(action, lambda results: [whole(results)] * self.world)

    def first(self, action: Callable[[], R]) -> R:
        """Return on every rank what `action` returns on rank 0."""
        return self.together(lambda: None, lambda _: action())


def thread_of(device: torch.device, name: str) -> ThreadPoolExecutor:
    """Return a thread that works on this device.

    A thread's own device is GPU 0, whatever the process uses. What it does on another makes a context there all the
    same, in which every rank of a node would hold some of GPU 0's memory.
    """

    def take_device() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    return ThreadPoolExecutor(1, name, initializer=take_device)


def _outcome(action: Callable[[], T]) -> T | Exception:
    try:
        return action()
    except Exception as error:  # whatever it is, the peers wait for an answer, and `deal` raises it on all of them
        return error
