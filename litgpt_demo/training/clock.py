"""The time that a run has been trained for, over all its attempts."""

from __future__ import annotations

from time import monotonic


class Clock:
    """Seconds of training that count: those up to a checkpoint that a later attempt went on from, and this one's own.

    What a crash cost is left out: it was trained again.
    """

    def __init__(self) -> None:
        self.go_on_from(0.0)

    def go_on_from(self, seconds: float) -> None:
        """The training stands where it stood after `seconds`."""
        self.before, self._begun = seconds, monotonic()

    @property
    def seconds(self) -> float:
        """Trained until now."""
        return self.before + monotonic() - self._begun

    def at_least(self, seconds: float) -> None:
        """Another rank's clock, a moment ahead of this one, says that it is so late."""
        self.before += max(0.0, seconds - self.seconds)
