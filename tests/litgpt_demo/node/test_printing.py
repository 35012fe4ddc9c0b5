"""A log that has no room loses lines, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DROPPING = "from litgpt_demo.node.printing import drop_what_does_not_fit; drop_what_does_not_fit(); "


@pytest.mark.parametrize("unbuffered", [True, False])
def test_a_program_that_prints_into_a_full_disk_ends_as_it_would_have(unbuffered: bool) -> None:
    command = [sys.executable, *(["-u"] if unbuffered else []), "-c", f"{DROPPING}print('x' * 100_000); exit(40)"]
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(command, stdout=full, stderr=full).returncode == 40


def test_an_unbuffered_program_shows_a_line_at_once(tmp_path: Path) -> None:
    program = f"{DROPPING}print('up'); input()"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.communicate("\n")
    assert process.returncode == 0
