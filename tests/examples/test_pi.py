from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCRIPT = Path(__file__).parents[2] / "examples" / "pi.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("examples_pi", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pi = load()


@given(st.integers(1, 3000), st.integers(1, 64))
def test_the_ranks_share_the_intervals_evenly_and_their_parts_add_up_to_the_whole(steps: int, ranks: int) -> None:
    shares = [pi.share(steps, rank, ranks) for rank in range(ranks)]
    assert [interval for share in shares for interval in share] == list(range(steps))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    whole = math.fsum(pi.area(share, steps) for share in shares)
    assert whole == pytest.approx(pi.area(range(steps), steps), rel=1e-13)


@pytest.mark.parametrize("steps", [10, 1000])
def test_the_error_is_a_sixth_of_the_step_squared(steps: int) -> None:
    # Euler-Maclaurin: (f'(1) - f'(0)) h² / 12 with f' = -2 at 1 and 0 at 0; the next term vanishes.
    assert math.pi - pi.area(range(steps), steps) == pytest.approx(1 / (6 * steps**2), rel=1e-3)


def test_one_process_needs_no_torchrun() -> None:
    ended = subprocess.run([sys.executable, SCRIPT, "--steps", "1000"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"pi = 3\.141592486923\d\d, error 2e-07, 1 rank on 1 node\n", ended.stdout)
