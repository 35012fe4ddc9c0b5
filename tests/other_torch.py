"""Environments with another torch than that of the tests, made once per machine in the user's cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

# pip's words where it is the machine that cannot have a wheel, and not the requirement that is wrong.
_NOT_TO_BE_HAD = re.compile(r"No matching distribution found for torch==|ConnectionError|Read timed out|No space left")


def python_with(torch: str, *packages: str, upon_ours: bool = False) -> Path:
    """Return the interpreter of an environment with that torch; skips the test where the wheel cannot be had.

    It is made by pip as it is configured here: some gigabytes, within minutes. Later calls find it.

    Args:
        packages: what pip installs beside it.
        upon_ours: whatever else the tests' own environment has is there too, behind what pip installed.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train-litgpt"
    folder = home / f"torch-{torch}{'-upon' if upon_ours else ''}"
    python, note = folder / "bin" / "python", folder / "installed"
    wanted = [f"torch=={torch}", *packages]
    if not note.exists() or note.read_text().splitlines() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *wanted]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode != 0 and (why := _NOT_TO_BE_HAD.search(done.stderr)):
            pytest.skip(f"{wanted[0]} cannot be had here: {why[0]}")
        assert done.returncode == 0, done.stderr
        note.write_text("\n".join(wanted))
    if upon_ours:  # of the checkout that runs now
        ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        purelib = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
        Path(purelib, "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
