import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCRIPT = Path(__file__).parents[2] / "examples" / "pi.py"
PI = runpy.run_path(str(SCRIPT), run_name="pi")


@given(st.integers(1, 3000), st.integers(1, 64))
def test_ranks_share_the_intervals_evenly(steps: int, ranks: int) -> None:
    """Their parts add up to the whole."""
    shares = [PI["share"](steps, rank, ranks) for rank in range(ranks)]
    assert [interval for share in shares for interval in share] == list(range(steps))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    total = math.fsum(PI["area"](share, steps) for share in shares)
    assert total == pytest.approx(PI["area"](range(steps), steps), rel=1e-13)


def test_one_process_needs_no_torchrun() -> None:
    ended = subprocess.run([sys.executable, SCRIPT, "--steps", "1000"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"pi = 3\.141592486923\d\d, error 2e-07, 1 rank on 1 node\n", ended.stdout)
