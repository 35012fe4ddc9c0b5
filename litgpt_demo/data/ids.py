"""Token ids as they lie in files, counted while their bytes are read for something else too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(kw_only=True)
class Ids:
    """Totals of the ids in the blocks that were added."""

    dtype: str
    """numpy's name of their type."""
    end_of_text: int
    marks: int = 0
    """The bits that are no part of an id and say something else of it."""
    tokens: int = 0
    largest: int = -1
    ends: int = 0
    """The number of end-of-text ids."""
    last: int = -1

    def add(self, block: bytes) -> None:
        """Count a block; one that ends inside of an id is passed over: its size is wrong, and says more."""
        if not block or len(block) % np.dtype(self.dtype).itemsize:
            return
        ids = np.frombuffer(block, dtype=self.dtype)
        if self.marks:
            ids = ids & ~np.uint32(self.marks)
        self.tokens += len(ids)
        self.largest, self.last = max(self.largest, int(ids.max())), int(ids[-1])
        self.ends += int(np.count_nonzero(ids == self.end_of_text))
