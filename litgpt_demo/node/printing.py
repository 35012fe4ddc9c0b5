"""Printing into a log whose disk may be full."""

from __future__ import annotations

import io
import sys
from typing import Any

from litgpt_demo.storage.local import NO_ROOM


class LossyLog(io.FileIO):
    """A file that drops lines for which the disk has no room, and glues no other to what is left of them."""

    _in_line = False
    """What was written last has no end of its line."""
    _cut = False
    """The line so begun is one whose rest was dropped."""
    _dropping = False
    """What comes next is the rest of such a line."""

    def write(self, block: Any, /) -> int:
        text = whole = bytes(block)
        if self._dropping:
            _, newline, text = whole.partition(b"\n")
            self._dropping = not newline
        if text and self._cut:
            text = b"\n" + text
        left = memoryview(text)
        try:
            while left:
                done = super().write(left) or 0
                self._in_line = left[done - 1] != ord("\n") if done else self._in_line
                self._cut, left = False, left[done:]
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._cut, self._dropping = self._in_line, not text.endswith(b"\n")
        return len(whole)


def drop_what_does_not_fit() -> None:
    """Let `print` lose a line where the disk of the log is full.

    Without this the line raises OSError and ends what runs, and Python ends with 120 when it cannot flush its output.
    """
    sys.stdout, sys.stderr = _onto(sys.stdout), _onto(sys.stderr)


def _onto(stream: object) -> io.TextIOWrapper:
    assert isinstance(stream, io.TextIOWrapper)
    stream.flush()
    log = LossyLog(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        # As Python does it: with PYTHONUNBUFFERED nothing is held back.
        log if stream.write_through else io.BufferedWriter(log),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
