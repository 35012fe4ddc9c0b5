"""Waiting for what happens in other processes and threads."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(what: Callable[[], T], *, seconds: float = 180.0) -> T:
    """Return the first true answer. Most come within a second; the patience is for busy machines."""
    begun = time.monotonic()
    while not (found := what()):
        waited = time.monotonic() - begun
        assert waited < seconds, f"it did not happen within {seconds:.0f} s"
        time.sleep(min(0.25, 0.01 + waited / 20))  # often at first: a look may cost a request
    return found
