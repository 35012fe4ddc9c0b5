"""The ratchet: the lines that each part may have. A number falls; it rises only with a reason in the commit message."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
SOURCE = ("cli", "deployments", "flows", "tasks", "launcher", "litgpt_demo", "train_litgpt")

# Part, and lines: Python for all but "test data", which is everything else below tests/ but the log of real tests.
ALLOWED = {
    "source": 43_045,
    "launcher": 18_467,
    "launcher/platforms/kubernetes": 3_002,
    "litgpt_demo": 19_246,
    "bench": 1_328,
    "tests": 37_221,
    "test data": 3_667,
}


def lines(name: str, checkout: Path = CHECKOUT) -> int:
    """Return the lines of a part's tracked files, as wc -l counts them."""
    folders = {"source": SOURCE, "test data": ("tests",)}.get(name, (name,))
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=checkout, capture_output=True, check=True).stdout
    files = [checkout / path.decode() for path in listed.split(b"\0") if path and not path.endswith(b"STATUS.md")]
    wanted = [path for path in files if (path.suffix == ".py") is (name != "test data") and path.is_file()]
    return sum(path.read_bytes().count(b"\n") for path in wanted)


@pytest.mark.parametrize("name", ALLOWED)
def test_no_part_grows(name: str) -> None:
    assert lines(name) <= ALLOWED[name], f"{name} has grown; what does the new code replace?"
