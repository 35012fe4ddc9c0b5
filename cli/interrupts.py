"""Ctrl-C, SIGTERM and a closed terminal: the command line ends within two seconds, without a traceback.

Only light modules are imported here, so that a key press is answered while everything else is still loading.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Seconds that `with` and `finally` blocks of a plain command have to clean up.
_CLEANING = 1.5
# Seconds that a blocked terminal or pipe may take to accept the last output.
_FLUSHING = 0.5


def answer() -> None:
    """End this process on any of the signals, from now on."""
    _install(_end_command)


def answer_at_once() -> None:
    """End this process silently on a signal: the command is done, and only libraries are still shutting down."""
    _install(lambda number, _: finish(128 + number))


@contextlib.contextmanager
def queued() -> Iterator[SimpleQueue[int | None]]:
    """Put signals into a queue instead of handling them."""
    received: SimpleQueue[int | None] = SimpleQueue()
    previous = _install(lambda number, _: received.put(number))
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def finish(code: int) -> NoReturn:
    """End this process and its children now, except a child with a session of its own, such as a local job's
    supervisor."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(child.pid) == os.getsid(0):
                child.kill()
    watchdog = threading.Timer(_FLUSHING, os._exit, [code])
    watchdog.daemon = True
    watchdog.start()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # a closed pipe, a write that was interrupted
            stream.flush()
    os._exit(code)


def _install(handler: Callable[[int, FrameType | None], Any]) -> dict[int, Any]:
    """Handle the signals; return the previous handlers. An ignored signal stays ignored: `nohup`, a background job."""
    previous: dict[int, Any] = {}
    for number in SIGNALS:
        current = signal.getsignal(number)
        if current is not signal.SIG_IGN:
            previous[number] = current
            signal.signal(number, handler)
    return previous


def _end_command(number: int, _frame: FrameType | None) -> None:
    answer_at_once()  # to the next signal
    with contextlib.suppress(OSError):  # the terminal is gone
        os.write(2, b"\ninterrupted\n")
    watchdog = threading.Timer(_CLEANING, finish, [128 + number])
    watchdog.daemon = True
    watchdog.start()
    raise SystemExit(128 + number)
