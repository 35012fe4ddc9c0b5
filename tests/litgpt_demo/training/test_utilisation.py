"""How well a training uses its device: a share of a peak that cannot be beaten."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.config import TrainConfig
from litgpt_demo.training.utilisation import Peak


@pytest.fixture(scope="module")
def peak() -> Peak:
    return Peak(torch.device("cpu"), TrainConfig(precision="32-true"))


def test_the_peak_of_a_cpu_is_what_it_does_in_products(peak: Peak) -> None:
    assert peak.flops is not None
    assert 1e8 < peak.flops < 1e14


@pytest.mark.long
@given(rates=st.lists(st.floats(min_value=0, max_value=1e16), max_size=20), flops=st.sampled_from([None, 1.0, 1e9]))
def test_no_share_is_ever_above_one(rates: list[float], flops: float | None, peak: Peak) -> None:
    measured, peak.flops = peak.flops, flops
    shares = [peak.share(rate) for rate in rates]
    assert all(share is None or 0 <= share <= 1 for share in shares)
    peak.flops = measured
    peak.measure_again()


def test_a_peak_that_was_measured_under_load_is_measured_again_when_a_training_beats_it(peak: Peak) -> None:
    assert peak.flops is not None
    pace, peak.flops = peak.flops / 4, peak.flops / 10  # another process had the cores
    assert peak.share(pace) is None
    assert peak.share(pace / 10) is None  # a peak that was beaten is none
    peak.measure_again()
    share = peak.share(pace)
    assert share is not None
    assert share < 1
