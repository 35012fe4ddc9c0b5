"""The order in which a mixture's samples come from its sources.

Any 1,000 samples in a row hold of each source what its weight says, rounded up or down to a whole sample, and the
rounding evens out over the next thousands. Both follow from the place of a sample alone, so that nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np
import numpy.typing as npt

from litgpt_demo.data.dataset import DatasetManifest, Stage

PERIOD = 1000
"""The number of samples in a row that hold each source's share."""
_GOLDEN = 618  # thousandths: steps of the golden ratio spread over a circle most evenly

Integers = npt.NDArray[np.int64]


def drawn(stages: Sequence[Stage], *, step: int, steps: int, global_batch: int) -> Integers:
    """Return the number of samples that the first `step` steps of a run of `steps` take of each source."""
    total, begin = np.zeros(len(stages[0].millionths), dtype=np.int64), 0
    for stage in stages:
        end = min(step, stage.end(steps))
        if end > begin:
            total += Shares(stage.millionths).counts((end - begin) * global_batch)
            begin = end
    return total


def tokens_of_sources(
    dataset: DatasetManifest, *, step: int, steps: int, global_batch: int, length: int
) -> dict[str, int]:
    """Return the tokens of each source of a mixture that the first `step` steps train on; nothing of another dataset.

    Args:
        length: the tokens of a sample.
    """
    if not dataset.parts:
        return {}
    counts = drawn(dataset.stages, step=step, steps=steps, global_batch=global_batch)
    return {part.name: int(count) * length for part, count in zip(dataset.parts, counts, strict=True)}


@dataclass(frozen=True)
class Shares:
    """The endless order of samples in which each source has its share.

    A thousand samples are a block. Each source has as many places in every block as its share has whole samples. What
    its share has beyond that, some thousandths of a sample, is its arc of a circle. Markers that are 1,000 apart walk
    around the circle, a step each block, and every marker has one place in every block, which belongs to the source
    whose arc it stands on. No arc is longer than 999, so that two markers never stand on the same one; and no step is
    longer than the gap between the longest arc and the next marker, so that one marker's place in a block and another's
    in the next are never the same source's: hence a window across two blocks holds as much of it as one block does.
    """

    millionths: tuple[int, ...]
    """The shares of the sources; their sum is a million."""

    def sources_at(self, start: int, count: int) -> Integers:
        """Return the sources of `count` samples from the one at `start` (from 0)."""
        places = np.arange(start, start + count, dtype=np.int64)
        blocks, slots = places // PERIOD, self._slots[places % PERIOD]
        markers = slots - len(self.millionths)
        return np.where(markers < 0, slots, self._owners(np.maximum(markers, 0), blocks))

    def counts(self, count: int) -> Integers:
        """Return how many of the first `count` samples are each source's."""
        blocks, rest = divmod(count, PERIOD)
        cycles, left = divmod(blocks, PERIOD)  # after a thousand blocks the markers stand as in the beginning
        whole = self._floors * blocks + cycles * self._arcs + self._before[left]
        begun = np.bincount(self.sources_at(blocks * PERIOD, rest), minlength=len(self.millionths))
        return np.asarray(whole + begun, dtype=np.int64)

    @cached_property
    def _floors(self) -> Integers:
        """The whole samples of each source in a block."""
        return np.array(self.millionths, dtype=np.int64) // PERIOD

    @cached_property
    def _arcs(self) -> Integers:
        """The thousandths of a sample that each source has beyond them."""
        return np.array(self.millionths, dtype=np.int64) % PERIOD

    @property
    def _markers(self) -> int:
        return PERIOD - int(self._floors.sum())

    @cached_property
    def _step(self) -> int:
        """The step of the markers; it shares no factor with 1,000, so that they come to stand everywhere."""
        most = min(_GOLDEN, PERIOD - int(self._arcs.max()))
        return next(step for step in range(most, 0, -1) if gcd(step, PERIOD) == 1)

    @cached_property
    def _slots(self) -> Integers:
        """The owner of each place in a block: a source, or after the last source a marker. Each is spread evenly."""
        each = [*self._floors.tolist(), *[1] * self._markers]
        owners = np.repeat(np.arange(len(each)), each)
        single = (np.arange(self._markers) + 0.5) / max(1, self._markers)
        spread = [(np.arange(number) + 0.5) / max(1, number) for number in self._floors.tolist()]
        return owners[np.argsort(np.concatenate([*spread, single]), kind="stable")]

    @cached_property
    def _before(self) -> Integers:
        """The samples of each source at the markers' places in the first blocks, for 0 to 1,000 of them."""
        owned = np.zeros((PERIOD + 1, len(self.millionths)), dtype=np.int64)
        for marker in range(self._markers):
            blocks = np.arange(PERIOD, dtype=np.int64)
            np.add.at(owned, (blocks + 1, self._owners(np.full(PERIOD, marker), blocks)), 1)
        return np.cumsum(owned, axis=0)

    def _owners(self, markers: Integers, blocks: Integers) -> Integers:
        """Return the sources on whose arcs the markers stand."""
        around = max(1, self._markers) * PERIOD
        stand = (markers * PERIOD + (blocks % around) * self._step) % around
        return np.searchsorted(np.cumsum(self._arcs), stand, side="right")
