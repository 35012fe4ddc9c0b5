from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.reports.curves import downsample, smoothed, summary

CURVES = st.dictionaries(st.integers(0, 10**7), st.floats(), max_size=400)
LOSSES = st.dictionaries(st.integers(0, 10**7), st.floats(-1e3, 1e3), min_size=2, max_size=400)


def start(*, step: int = 0, steps: int = 100) -> dict[str, Any]:
    return {"kind": "start", "step": step, "steps": steps, "tokens_per_step": 1000}


def step(number: int, *, loss: float | str = 3.0, pace: float = 500.0) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "loss": loss,
        "learning_rate": 1e-4,
        "tokens": number * 1000,
        "tokens_per_second": pace,
        "step_seconds": 1000 / pace,
    }


# --- progress ---------------------------------------------------------------------------------------------------------


def test_before_the_first_row_nothing_is_known() -> None:
    progress = summary([])
    assert (progress.step, progress.steps, progress.percent, progress.tokens) == (0, None, 0.0, 0)
    assert progress.loss is progress.validation_loss is progress.tokens_per_second is progress.eta_seconds is None


def test_progress_shows_the_newest_step_and_the_newest_evaluation() -> None:
    rows = [
        start(),
        step(1, loss=5.0),
        {"kind": "evaluation", "step": 1, "validation_loss": 4.9, "seconds": 1.0},
        step(2, loss=4.0),
    ]
    progress = summary(rows)
    assert (progress.step, progress.loss, progress.validation_loss) == (2, 4.0, 4.9)
    assert (progress.tokens, progress.percent, progress.learning_rate) == (2000, 2.0, 1e-4)


def test_progress_tells_how_well_the_devices_are_used() -> None:
    rows = [start(), *[step(number) | {"mfu": 0.01 * number, "memory": 10**9} for number in (40, 41, 42)]]
    progress = summary(rows)
    assert progress.mfu == pytest.approx(0.41)
    assert progress.memory == 10**9
    assert "MFU 41 %" in progress.facts
    assert summary([start(), step(1)]).mfu is None


def test_no_end_is_promised_before_two_steps() -> None:
    assert summary([start(), step(1)]).eta_seconds is None
    assert summary([start(), step(1), step(2)]).eta_seconds is not None


def test_time_left_counts_steps_at_the_recent_pace() -> None:
    slow_start = [step(number, pace=1.0) for number in range(1, 11)]
    recent = [step(number, pace=500.0) for number in range(11, 21)]
    progress = summary([start(), *slow_start, *recent])
    assert progress.tokens_per_second == 500.0
    assert progress.eta_seconds == pytest.approx(80 * 2.0)


def test_time_left_counts_evaluations_and_checkpoints_too() -> None:
    rows = [start(), *[step(number) for number in range(1, 11)]]
    rows.append({"kind": "evaluation", "step": 10, "validation_loss": 3.0, "seconds": 15.0})
    rows.append({"kind": "checkpoint", "step": 10, "seconds": 5.0, "path": "checkpoints/step-00000010"})
    assert summary(rows).eta_seconds == pytest.approx(90 * (2.0 + 20.0 / 10))


def test_a_resumed_training_stands_where_it_resumed() -> None:
    """Not at the farthest step that the lost attempt reached, and with the loss of what was kept."""
    rows = [start(), *[step(number, loss=9.0 - number / 10) for number in range(1, 61)], start(step=50)]
    progress = summary(rows)
    assert (progress.step, progress.percent, progress.tokens) == (50, 50.0, 50_000)
    assert progress.loss == pytest.approx(4.0)
    assert progress.tokens_per_second is progress.eta_seconds is None


def test_a_repeated_step_counts_as_it_went_last() -> None:
    rows = [start(), step(51, loss=1.0), start(step=50), step(51, loss=2.0)]
    assert summary(rows).loss == 2.0


def test_the_pace_is_that_of_the_newest_attempt() -> None:
    rows = [start(), *[step(number, pace=900.0) for number in range(1, 51)], start(step=50)]
    rows += [step(number, pace=450.0) for number in (51, 52)]
    assert summary(rows).tokens_per_second == 450.0


def test_a_finished_training_has_no_time_left() -> None:
    progress = summary([start(steps=2), step(1), step(2), {"kind": "end", "step": 2, "seconds": 4.0}])
    assert (progress.percent, progress.eta_seconds) == (100.0, 0.0)


def test_a_log_joined_too_late_for_its_start_still_shows_steps() -> None:
    progress = summary([step(70), step(71)])
    assert (progress.step, progress.steps, progress.percent, progress.eta_seconds) == (71, None, 0.0, None)


def test_a_loss_that_is_no_number_is_shown_as_such() -> None:
    loss = summary([start(), step(1, loss="nan")]).loss
    assert loss is not None
    assert math.isnan(loss)


# --- curves -----------------------------------------------------------------------------------------------------------


@given(CURVES, st.integers(4, 200))
def test_a_thinned_curve_keeps_its_ends_and_extremes(points: Mapping[int, float], limit: int) -> None:
    kept = downsample(points, limit)
    finite = {step: value for step, value in points.items() if abs(value) <= 1e300}  # what can be drawn
    assert len(kept) <= limit
    assert kept.items() <= finite.items()
    assert list(kept) == sorted(kept)
    assert len(kept) == len(finite) or len(finite) > limit
    if finite:
        assert {min(finite), max(finite)} <= kept.keys()
        assert min(kept.values()) == min(finite.values())
        assert max(kept.values()) == max(finite.values())


def test_a_spike_of_one_step_survives_thinning() -> None:
    points = dict.fromkeys(range(100_000), 3.0) | {54_321: 7.0}
    assert downsample(points)[54_321] == 7.0


def test_thinning_to_almost_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="limit=3 leaves no room"):
        downsample({1: 1.0}, limit=3)


@given(LOSSES)
def test_an_average_stays_within_its_curve(points: Mapping[int, float]) -> None:
    averages = smoothed(points, 0.2)
    assert list(averages) == sorted(points)
    low, high = min(points.values()), max(points.values())
    assert all(low - 1e-6 <= value <= high + 1e-6 for value in averages.values())


def test_an_average_does_not_lag_a_falling_loss() -> None:
    points = {number: 10.0 - number / 100 for number in range(1000)}
    averages = smoothed(points)
    assert all(averages[number] == pytest.approx(points[number]) for number in range(980))
