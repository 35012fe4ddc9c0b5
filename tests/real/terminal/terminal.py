"""A terminal with one program in it, as its user sees it: text that appears, keys that are pressed, an exit code."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path


class Terminal:
    """A command that runs as the foreground process group of a pseudo-terminal."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> None:
        self._keys, screen = os.openpty()
        start = partial(_log_in, screen)
        self.process = subprocess.Popen(command, env={**env, "COLUMNS": "200"}, cwd=cwd, preexec_fn=start)
        os.close(screen)
        self._open, self._raw = True, b""

    @property
    def text(self) -> str:
        """Everything shown so far, without lines that were erased, colours and movements of the cursor."""
        shown = re.sub(r"[^\n]*\r\x1b\[2K", "", self._raw.decode(errors="replace"))
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r\n", "\n")

    def read_until(self, pattern: str) -> None:
        """Wait until the pattern is shown."""
        while not re.search(pattern, self.text):
            assert self._read(), f"it ended before {pattern!r} was shown:\n{self.text[-3000:]}"

    def press_ctrl_c(self) -> None:
        os.write(self._keys, b"\x03")

    def close(self) -> None:
        """Close the window."""
        if self._open:
            os.close(self._keys)
        self._open = False

    def end(self) -> int:
        """Wait for the program's end, and read its last words where the window is open."""
        while self._open and self._read():
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


@contextmanager
def terminal(*command: str, env: Mapping[str, str], cwd: Path) -> Iterator[Terminal]:
    """Yield one, whose program ends with it."""
    made = Terminal(command, env=env, cwd=cwd)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            os.killpg(made.process.pid, signal.SIGKILL)
            made.process.wait()
        made.close()


def _log_in(screen: int) -> None:
    """What a login does: the terminal is this session's own, and no signal is ignored, as it is in background jobs."""
    os.login_tty(screen)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
