"""Environments with another torch than that of the tests, made once per machine in the user's cache."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

# Bytes that one takes, CUDA's libraries included, and what pip needs beside them for a while.
_ROOM = 10 * 2**30

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
    home.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not note.exists() or note.read_text().splitlines() != wanted:
            _make(folder, python, wanted)
            note.write_text("\n".join(wanted))
    if upon_ours:  # of the checkout that runs now
        purelib = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        Path(purelib, "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def _make(folder: Path, python: Path, wanted: list[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if (free := shutil.disk_usage(folder.parent).free) < _ROOM:
        pytest.skip(f"{wanted[0]} needs {_ROOM >> 30} GiB in {folder.parent}, and {free >> 30} are free")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *wanted],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0 and (why := _NOT_TO_BE_HAD.search(done.stderr)):
        pytest.skip(f"{wanted[0]} cannot be had here: {why[0]}")
    assert done.returncode == 0, done.stderr
