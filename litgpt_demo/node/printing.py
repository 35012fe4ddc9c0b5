"""Printing into a log whose disk may be full."""

from __future__ import annotations

import io
import sys
from typing import Any

from litgpt_demo.storage.local import NO_ROOM


class _Log(io.FileIO):
    """A file that drops what the disk has no room for."""

    def write(self, block: Any, /) -> int:
        left = memoryview(block).cast("B")
        try:
            while left:
                left = left[super().write(left) or 0 :]
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        return memoryview(block).nbytes


def drop_what_does_not_fit() -> None:
    """Let `print` lose a line where the disk of the log is full.

    Without this the line raises OSError and ends what runs, and Python ends with 120 when it cannot flush its output.
    """
    sys.stdout, sys.stderr = _onto(sys.stdout), _onto(sys.stderr)


def _onto(stream: object) -> io.TextIOWrapper:
    assert isinstance(stream, io.TextIOWrapper)
    stream.flush()
    log = _Log(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        # As Python does it: with PYTHONUNBUFFERED nothing is held back.
        log if stream.write_through else io.BufferedWriter(log),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
