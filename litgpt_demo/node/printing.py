"""Printing into a log whose disk may be full."""

from __future__ import annotations

import fcntl
import io
import os
import re
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from litgpt_demo.storage.local import NO_ROOM

# Bytes: what a log holds back for lines that tell of trouble, what a file system gives back at the least, and a line,
# which waits in memory for its end; one that goes on is broken.
_RESERVE, _BLOCK, _LONGEST = 16 * 1024, 4096, 2**20
_TELLING = re.compile(rb"warning|error|node \d+ ends with", re.IGNORECASE)

_turn = threading.RLock()


class LossyLog(io.FileIO):
    """A file that has a line whole or, where its disk has no room, not at all; room is kept for lines of trouble.

    Streams and processes may share it.
    """

    def __init__(self, file: Path | int, mode: str, *, closefd: bool = True) -> None:
        super().__init__(file, mode, closefd=closefd)
        self._begun = b""
        self._reserve: Any = None
        with suppress(OSError):  # a terminal, or a system without /proc
            if stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                folder = Path(f"/proc/self/fd/{self.fileno()}").readlink().parent
                self._reserve = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
                self._is_reserved()

    def write(self, block: Any, /) -> int:
        given = bytes(block)
        text = self._begun + given
        end = len(text) if len(text) > _LONGEST else text.rfind(b"\n") + 1
        self._begun = text[end:]
        with self._alone():
            for line in re.findall(rb"[^\n]+\n?|\n", text[:end]):
                self._add(line if line.endswith(b"\n") else line + b"\n")
        return len(given)

    def close(self) -> None:
        if not self.closed and self._begun:
            self.write(b"\n")
        if self._reserve is not None:
            self._reserve.close()
        super().close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let nobody else write: a cut line is taken back from the file's end.

        Terminals and /dev/null are not locked: somebody else may hold such a lock for ever.
        """
        with _turn:
            if self._reserve is not None:
                with suppress(OSError):  # of a file system without locks
                    fcntl.lockf(self, fcntl.LOCK_EX)
            try:
                yield
            finally:
                with suppress(OSError):
                    fcntl.lockf(self, fcntl.LOCK_UN)

    def _add(self, line: bytes) -> None:
        if not _TELLING.search(line):
            _ = self._is_reserved() and self._fits(line)
            return
        while not self._fits(line) and self._reserve is not None and (held := self._reserve.seek(0, os.SEEK_END)):
            self._reserve.truncate(max(0, held - _BLOCK))

    def _is_reserved(self) -> bool:
        """Return whether all that is to be held back is, or can be now."""
        missing = 0 if self._reserve is None else _RESERVE - self._reserve.seek(0, os.SEEK_END)
        try:
            return not missing or bool(self._reserve.write(b" " * missing) == missing)
        except OSError:
            return False

    def _fits(self, line: bytes) -> bool:
        done = 0
        try:
            while done < len(line):
                done += super().write(line[done:]) or 0
        except OSError as error:
            if done and self.tell() == os.fstat(self.fileno()).st_size:
                self.truncate(self.seek(-done, os.SEEK_CUR))
            if error.errno not in NO_ROOM:
                raise
        return done == len(line)


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
