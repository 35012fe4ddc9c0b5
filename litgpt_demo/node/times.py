"""The seconds of a node's life, on a clock that nobody sets: told to its ranks, so that the metrics tell them on.

The clock of the day says once when the node began. All else is counted from there by the machine's monotonic clock,
which its processes share: a clock that is set by an hour meanwhile changes nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

TIMES = "LITGPT_NODE_TIMES"
"""The environment variable of a node's ranks that tells them."""


@dataclass(kw_only=True)
class NodeTimes:
    """The times of one node."""

    attempt: int = 0
    """The number of the attempt; 0 where its folder is not called so."""
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    begun: float = field(default_factory=time.monotonic)
    """The same moment on the monotonic clock."""
    gate: float = 0.0
    """Seconds of the measurement of the network."""
    stage: float = 0.0
    """Seconds in which the datasets were brought here and verified."""

    @classmethod
    def told(cls) -> NodeTimes | None:
        """Return what a rank's node has told it; None for a rank that no node of ours started."""
        words = os.environ.get(TIMES)
        return cls(**json.loads(words)) if words else None

    def words(self) -> str:
        """Return the value of TIMES."""
        return json.dumps(asdict(self))

    def elapsed(self, moment: float | None = None) -> float:
        """Return the seconds from the node's start to a moment of the monotonic clock, by default now."""
        return round((time.monotonic() if moment is None else moment) - self.begun, 3)

    @contextmanager
    def spent_on(self, what: Literal["gate", "stage"]) -> Iterator[None]:
        """Add the seconds in between, also where they end with an error."""
        began = time.monotonic()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.monotonic() - began)

    def columns(self) -> dict[str, Any]:
        """Return what the `start` row of the metrics tells of it."""
        return {**({"attempt": self.attempt} if self.attempt else {}), "node_started": self.started, **self.phases()}

    def phases(self) -> dict[str, float]:
        """Return the seconds of what came before the ranks, for the node's report too."""
        return {"gate_seconds": round(self.gate, 3), "stage_seconds": round(self.stage, 3)}
