"""The search for a rank that the others wait for: a slow GPU, a throttled machine, a slow disk.

Ranks that train together take the same time for a step, whoever is slow. What differs is the time that each takes
alone: until it begins the backward pass in which gradients are exchanged, waiting for samples included. Those times
travel with the step's other numbers (litgpt_demo.training.exchange). With `train.strategy: fsdp` the forward pass
already waits for the others, and only waiting for samples tells ranks apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

# Steps over which a rank's median is taken: one step may be slow for many reasons, and half of these may not.
WINDOW = 16
# Steps between two looks: at each one a thousand ranks' medians take a millisecond of rank 0.
_LOOK = 4
# Seconds per step that nobody minds, however many times as long as the others' they are.
_LEAST = 0.005


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that the others wait for."""

    rank: int
    since: int
    """The first of the last steps in which it was."""
    seconds: float
    """The median of what it takes alone."""
    others: float
    """The same of the other ranks."""

    @property
    def factor(self) -> float:
        return self.seconds / max(self.others, 1e-9)


class StragglerWatch:
    """Looks at what each rank took alone for the last steps."""

    def __init__(self, slower: float | None) -> None:
        """
        Args:
            slower: how many times as long as the others' median a rank takes that is told; None looks at nothing.
        """
        self._slower = slower
        self._steps: deque[tuple[int, Sequence[float]]] = deque(maxlen=WINDOW)
        self._told: int | None = None

    def add(self, done: int, alone: Sequence[float]) -> Straggler | None:
        """Take the seconds of a step, by rank; return who has become slow, once until it is not any more."""
        if self._slower is None or len(alone) < 2:
            return None
        self._steps.append((done, alone))
        if len(self._steps) < WINDOW or done % _LOOK:
            return None
        # The lower of the two in the middle: more than half of the steps took as long.
        taken = np.sort(np.array([step for _, step in self._steps]), axis=0)[(WINDOW - 1) // 2].tolist()
        slowest = max(range(len(taken)), key=taken.__getitem__)
        others = median(seconds for rank, seconds in enumerate(taken) if rank != slowest)
        if taken[slowest] < self._slower * others or taken[slowest] < others + _LEAST:
            self._told = None
            return None
        if self._told == slowest:
            return None
        self._told = slowest
        since = next(number for number, step in self._steps if step[slowest] >= self._slower * others)
        return Straggler(rank=slowest, since=since, seconds=taken[slowest], others=others)

    def forget(self) -> None:
        """Begin anew: training has gone back to an earlier step."""
        self._steps.clear()
