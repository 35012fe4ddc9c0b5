"""A terminal with one program in it, as its user sees it: text that appears, keys that are pressed, an exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Runs a command as the foreground process group of a pseudo-terminal; ends it where a test leaves it running."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> None:
        self._keys, screen = os.openpty()
        self.process = subprocess.Popen(
            command, env={**env, "COLUMNS": "200"}, cwd=cwd, preexec_fn=partial(_log_in, screen)
        )
        os.close(screen)
        self._raw = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.close()

    @property
    def text(self) -> str:
        """Everything shown so far, without colours and movements of the cursor."""
        return _ESCAPES.sub("", self._raw.decode(errors="replace")).replace("\r\n", "\n")

    def read_until(self, pattern: str) -> None:
        """Wait until the pattern is shown."""
        while not re.search(pattern, self.text):
            assert self._read(), f"it ended before {pattern!r} was shown:\n{self.text[-3000:]}"

    def press_ctrl_c(self) -> None:
        os.write(self._keys, b"\x03")

    def close(self) -> None:
        """Close the window."""
        if self._keys >= 0:
            os.close(self._keys)
            self._keys = -1

    def end(self) -> int:
        """Wait for the program's end, and read its last words where the window is open."""
        while self._keys >= 0 and self._read():
            pass
        return self.process.wait()

    def _read(self) -> bool:
        """Read what is shown next; False at the end."""
        try:
            shown = os.read(self._keys, 1 << 16)
        except OSError:  # Linux: the last process that had the terminal open has ended
            return False
        self._raw += shown
        return bool(shown)


def _log_in(screen: int) -> None:
    """What a login does: the terminal is this session's own, and no signal is ignored, as it is in background jobs."""
    os.login_tty(screen)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
