"""A terminal with one program in it, as its user sees it: text that appears, keys that are pressed, an exit code."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Runs a command as the foreground process group of a pseudo-terminal; ends it where a test leaves it running."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> None:
        self._keys, screen = os.openpty()
        self._process = subprocess.Popen(
            command, env={**env, "COLUMNS": "200"}, cwd=cwd, preexec_fn=partial(_log_in, screen)
        )
        os.close(screen)
        self._raw = ""
        self._signalled = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._keys >= 0:
            os.close(self._keys)

    @property
    def text(self) -> str:
        """Everything shown so far, without colours and movements of the cursor."""
        return _ESCAPES.sub("", self._raw).replace("\r\n", "\n")

    def read_until(self, pattern: str, *, within: float) -> str:
        """Wait until the pattern is shown; returns the text."""
        deadline = time.monotonic() + within
        while not re.search(pattern, self.text):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} was not shown within {within} s:\n{self.text[-3000:]}"
            assert self._read(left), f"it ended before {pattern!r} was shown:\n{self.text[-3000:]}"
        return self.text

    def wait_until_caught(self, number: signal.Signals) -> None:
        """Wait until the program handles a signal."""
        status = Path(f"/proc/{self._process.pid}/status")
        while not int(re.findall(r"SigCgt:\s+(\w+)", status.read_text())[0], 16) & 1 << number - 1:
            assert self._process.poll() is None, self.text
            time.sleep(0.01)

    def press_ctrl_c(self) -> None:
        os.write(self._keys, b"\x03")
        self._signalled = time.monotonic()

    def send(self, number: signal.Signals) -> None:
        """Signal the program alone, not its group."""
        self._process.send_signal(number)
        self._signalled = time.monotonic()

    def close(self) -> None:
        """Close the window."""
        os.close(self._keys)
        self._keys = -1
        self._signalled = time.monotonic()

    def end(self, *, within: float = 60) -> tuple[int, float]:
        """Wait for the program's end; returns its exit code and the seconds since the last key or signal."""
        deadline = time.monotonic() + within
        while self._keys >= 0 and self._read(max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, f"it has not ended within {within} s:\n{self.text[-3000:]}"
        code = self._process.wait(timeout=max(1.0, deadline - time.monotonic()))
        return code, time.monotonic() - self._signalled

    def _read(self, seconds: float) -> bool:
        """Read what is shown next, if anything is within `seconds`; False at the end."""
        if not select.select([self._keys], [], [], seconds)[0]:
            return True
        try:
            shown = os.read(self._keys, 1 << 16)
        except OSError:  # Linux: the last process that had the terminal open has ended
            return False
        self._raw += shown.decode(errors="replace")
        return bool(shown)


def _log_in(screen: int) -> None:
    """What a login does: the terminal is this session's own, and no signal is ignored, as it is in background jobs."""
    os.login_tty(screen)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
