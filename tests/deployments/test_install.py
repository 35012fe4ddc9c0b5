"""pip as `make` calls it: it never says nothing for long, and says everything where it fails."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[2] / "deployments" / "install.py"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with two packages, one of which needs the other."""
    for name, needs in (("first", ""), ("second", "Requires-Dist: first\n")):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            info = f"{name}-1.0.dist-info"
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    return tmp_path


def command(wheels: Path, package: str) -> list[str]:
    """How `make` would install one of them, away from this environment."""
    place = ["--no-index", "--find-links", str(wheels), "--target", str(wheels / "site")]
    return [sys.executable, str(INSTALL), "two packages", *place, package]


@pytest.mark.long
def test_a_log_has_a_line_when_something_new_begins_and_one_at_the_end(wheels: Path) -> None:
    done = subprocess.run(command(wheels, "second"), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    collecting, installing, end = done.stdout.splitlines()
    assert collecting == "  two packages: 1 package collected, now second"
    assert installing == "  two packages: installing 2 packages"
    assert re.fullmatch(r"✓ two packages: 2 packages \(\d+ s\)", end)
    assert done.stderr == ""
    assert (wheels / "site" / "first.py").exists()


@pytest.mark.long
def test_a_terminal_has_one_live_line_that_says_how_long_it_has_taken(wheels: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(command(wheels, "second"), stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        sent = b""
        try:
            while piece := os.read(ours, 65536):
                sent += piece
        except OSError:  # how Linux says that the other side of a terminal is closed
            pass
    os.close(ours)
    assert process.returncode == 0
    assert sent.count(b"\n") == 1, "all but the last line is written over"
    last = sent.decode().rstrip().rsplit("\r\033[K", 1)[-1]
    assert re.fullmatch(r"✓ two packages: 2 packages \(\d+ s\)", last)
    assert re.search(r"[⠋-⠿] two packages: \S.* \(\d+ s\)", sent.decode())


def test_a_failure_ends_with_what_pip_said_and_its_exit_code(wheels: Path) -> None:
    done = subprocess.run(command(wheels, "third"), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "No matching distribution found for third" in done.stderr
    assert re.search(r"✗ two packages: pip ended with 1 after \d+ s", done.stderr)
