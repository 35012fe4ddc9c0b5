"""The parent of this process, which waits for it: its lines on standard input, and its end."""

from __future__ import annotations

import os
from queue import SimpleQueue
from threading import Thread

PROGRESS = "progress: "
"""The beginning of a line about the current work of a process."""


def report_progress(what: str) -> None:
    """Print a line for the parent about the current work of this process."""
    print(f"{PROGRESS}{what}", flush=True)


def follow_parent() -> SimpleQueue[str]:
    """Return the lines that the parent writes on standard input; end this process when the parent closes it or dies."""
    lines = SimpleQueue[str]()

    def read() -> None:
        # Unbuffered: a thread that waits in sys.stdin holds a lock that Python needs to end.
        with open(0, "rb", buffering=0, closefd=False) as pipe:
            for line in pipe:
                lines.put(line.decode())
        os._exit(1)

    Thread(target=read, name="parent", daemon=True).start()
    return lines
