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
from waiting import until

from launcher.job import Job, JobState
from launcher.platforms.local.platform import LocalPlatform

SCRIPT = Path(__file__).parents[2] / "examples" / "pi.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("examples_pi", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pi = load()


@given(st.integers(1, 5000), st.integers(1, 64))
def test_every_interval_belongs_to_exactly_one_rank_and_the_shares_are_even(steps: int, ranks: int) -> None:
    shares = [pi.share(steps, rank, ranks) for rank in range(ranks)]
    assert [interval for share in shares for interval in share] == list(range(steps))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 3000), st.integers(1, 64))
def test_the_ranks_parts_add_up_to_the_whole(steps: int, ranks: int) -> None:
    parts = math.fsum(pi.area(pi.share(steps, rank, ranks), steps) for rank in range(ranks))
    assert parts == pytest.approx(pi.area(range(steps), steps), rel=1e-13)


@given(st.integers(1, 2000))
def test_the_whole_is_the_trapezoid_rule_with_half_weight_at_both_ends(steps: int) -> None:
    heights = [4 / (1 + (point / steps) ** 2) for point in range(steps + 1)]
    rule = math.fsum([heights[0] / 2, *heights[1:-1], heights[-1] / 2]) / steps
    assert pi.area(range(steps), steps) == pytest.approx(rule, rel=1e-13)


@pytest.mark.parametrize("steps", [10, 100, 1000])
def test_the_error_is_a_sixth_of_the_step_squared(steps: int) -> None:
    # Euler-Maclaurin: (f'(1) - f'(0)) h² / 12 with f' = -2 at 1 and 0 at 0; the next term vanishes.
    assert math.pi - pi.area(range(steps), steps) == pytest.approx(1 / (6 * steps**2), rel=1e-3)


def test_more_intervals_than_fit_in_memory_at_once_are_added_up_in_blocks() -> None:
    assert pi.area(range(2_500_000), 2_500_000) == pytest.approx(math.pi, abs=1e-13)


def test_one_process_needs_no_torchrun() -> None:
    ended = subprocess.run(
        [sys.executable, SCRIPT, "--steps", "1000"], capture_output=True, text=True, check=True, timeout=60
    )
    assert re.fullmatch(r"pi = 3\.141592486923\d\d, error 2e-07, 1 rank on 1 node\n", ended.stdout)


@pytest.mark.long
@pytest.mark.training
def test_eight_ranks_on_two_nodes_find_pi(tmp_path: Path) -> None:
    program = (str(SCRIPT), "--steps", "1000003")
    job = Job(name="pi", attempt=1, nodes=2, processes=4, program=program, directory=str(tmp_path / "pi"))
    platform = LocalPlatform()
    job_id = platform.submit(platform.render(job))
    try:
        until(lambda: not platform.status(job_id).state.live)
        lines = platform.logs(job_id).lines
        assert platform.status(job_id).state is JobState.SUCCEEDED, "\n".join(map(str, lines))
        (said,) = [line.text for line in lines if "pi = " in line.text]
        assert said.startswith("[rank0]:pi = 3.141592653589")
        assert said.endswith("8 ranks on 2 nodes")
    finally:
        platform.cancel(job_id)
