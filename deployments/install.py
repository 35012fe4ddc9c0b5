"""pip with a line of progress: what it is at and for how long, and all that it said if it fails.

python deployments/install.py NAME ARGUMENTS…    what follows `pip install`; NAME is what people call it

Only the standard library is imported: nothing else is installed yet.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

# --no-compile: Python compiles what is imported when it is; compiling all that is installed takes a minute.
PIP = [
    sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-compile",
    "--progress-bar", "off",
]  # fmt: skip
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
# A requirement, or the path of a file that pip has already: the name ends where the version begins.
_COLLECTING = re.compile(r"(?:Collecting|Processing) (?:\S*/)?(\w[\w.]*(?:-[A-Za-z]\w*)*)")
_DOWNLOADING = re.compile(r"\s*Downloading (?:\S*/)?(\S+?)-\d\S* (\([\d.]+ \w+\))")
_LAST = 30  # lines of pip's that explain a failure


@dataclass
class Progress:
    """The words of pip so far."""

    name: str
    collected: int = 0
    doing: str = "starting"
    said: list[str] = field(default_factory=list)

    def hear(self, line: str) -> bool:
        """Take in a line of pip's output; return whether something new has begun that a log should have."""
        self.said.append(line)
        if collecting := _COLLECTING.match(line):
            self.collected += 1
            self.doing = f"{_packages(self.collected)} collected, now {collecting[1]}"
            return self.collected == 1
        if downloading := _DOWNLOADING.match(line):
            self.doing = f"{_packages(self.collected)} collected, downloading {' '.join(downloading.groups())}"
        if line.startswith("Installing collected packages: "):
            self.collected = line.count(",") + 1
            self.doing = f"installing {_packages(self.collected)}"
            return True
        return False


def _packages(count: int) -> str:
    return f"{count} package{'' if count == 1 else 's'}"


def _spin(progress: Progress, begun: float, ended: threading.Event) -> None:
    """Draw the live line of a terminal until pip has ended."""
    for turn in range(10**9):
        seconds = time.monotonic() - begun
        line = f"{_SPINNER[turn % len(_SPINNER)]} {progress.name}: {progress.doing} ({seconds:.0f} s)"
        sys.stdout.write(f"\r\033[K{line}")
        sys.stdout.flush()
        if ended.wait(0.1):
            break
    sys.stdout.write("\r\033[K")


def install(name: str, arguments: list[str]) -> int:
    """Run `pip install`; return its exit code."""
    progress, begun, ended = Progress(name), time.monotonic(), threading.Event()
    live = sys.stdout.isatty()
    drawing = threading.Thread(target=_spin, args=(progress, begun, ended), daemon=True)
    if live:
        drawing.start()
    with subprocess.Popen(
        [*PIP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if progress.hear(line.rstrip()) and not live:
                print(f"  {name}: {progress.doing}", flush=True)
    ended.set()
    if live:
        drawing.join()
    seconds = time.monotonic() - begun
    if pip.returncode != 0:
        print("\n".join(progress.said[-_LAST:]), file=sys.stderr)
        print(f"✗ {name}: pip ended with {pip.returncode} after {seconds:.0f} s", file=sys.stderr)
    else:
        print(f"✓ {name}: {_packages(progress.collected)} ({seconds:.0f} s)", flush=True)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(install(sys.argv[1], sys.argv[2:]))
