"""SIGTERM: a machine that is taken away says so, and a training leaves after the step it is in."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def heeding_sigterm() -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM ends nothing; the function given says whether it came."""
    came = False

    def heed(_number: int, _frame: object) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGTERM, heed)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGTERM, before)
