"""What a training's rows say of its progress, and its curves: thinned, and as text that mermaid accepts."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.curves import downsample, summary
from launcher.reports import mermaid

CURVES = st.dictionaries(st.integers(0, 10**7), st.floats(), max_size=400)
START = {"kind": "start", "step": 0, "steps": 100, "tokens_per_step": 1000}


def steps(first: int, last: int, *, pace: float = 500.0) -> list[dict[str, Any]]:
    """Steps whose loss falls by 0.1 each, from 9 on."""
    speed = {"tokens_per_second": pace, "step_seconds": 1000 / pace}
    numbers = range(first, last + 1)
    return [{"kind": "step", "step": step, "loss": 9.0 - step / 10, "tokens": step * 1000, **speed} for step in numbers]


def test_progress_shows_the_newest_step_with_evaluation() -> None:
    """It shows no end before there is a pace."""
    assert (summary([]).step, summary([]).steps, summary([]).eta_seconds) == (0, None, None)
    assert summary([START, *steps(1, 1)]).eta_seconds is None
    evaluation = {"kind": "evaluation", "step": 1, "validation_loss": 4.9, "seconds": 1.0}
    progress = summary([START, *steps(1, 1), evaluation, *steps(2, 2)])
    assert (progress.step, progress.loss, progress.validation_loss) == (2, 8.8, 4.9)
    assert (progress.tokens, progress.percent) == (2000, 2.0)
    assert progress.eta_seconds is not None
    late = summary(steps(70, 71))
    assert (late.step, late.steps, late.eta_seconds) == (71, None, None), "the log was joined after its start"
    assert summary([START, *steps(1, 100), {"kind": "end", "step": 100, "seconds": 4.0}]).eta_seconds == 0


def test_time_left_includes_evaluations_plus_checkpoints() -> None:
    """Steps count at the recent pace."""
    recent = summary([START, *steps(1, 10, pace=1.0), *steps(11, 20)])
    assert recent.eta_seconds == pytest.approx(80 * 2.0)
    evaluation = {"kind": "evaluation", "step": 10, "validation_loss": 3.0, "seconds": 15.0}
    checkpoint = {"kind": "checkpoint", "step": 10, "seconds": 5.0, "path": "checkpoints/step-00000010"}
    assert summary([START, *steps(1, 10), evaluation, checkpoint]).eta_seconds == pytest.approx(90 * (2.0 + 20.0 / 10))


def test_time_left_counts_the_larger_batches_to_come() -> None:
    start = {**START, "run_tokens": 400_000}
    assert summary([start, *steps(1, 50)]).eta_seconds == pytest.approx(350_000 / 500.0)


def test_progress_of_a_resumed_run_has_the_newest_pace() -> None:
    """It begins at the step of the checkpoint."""
    rows = [START, *steps(1, 60), {**START, "step": 50}]
    progress = summary(rows)
    assert (progress.step, progress.tokens, round(progress.loss or 0, 6)) == (50, 50_000, 4.0)
    assert progress.tokens_per_second is progress.eta_seconds is None
    assert summary([*rows, *steps(51, 52, pace=450.0)]).tokens_per_second == 450.0


@given(CURVES, st.integers(4, 200))
def test_a_thinned_curve_keeps_its_ends_and_extremes(points: Mapping[int, float], limit: int) -> None:
    kept = downsample(points, limit)
    finite = {step: value for step, value in points.items() if abs(value) <= 1e300}  # what can be drawn
    assert len(kept) == len(finite) or len(kept) <= limit < len(finite)
    assert kept.items() <= finite.items()
    assert list(kept) == sorted(kept)
    for ends in (min, max):
        assert not finite or (ends(kept), ends(kept.values())) == (ends(finite), ends(finite.values()))


# As in the lexer of mermaid 11's xychart: no exponents, and a quoted string ends at the next quote.
NUMBER = r"[+-]?(?:\d+(?:\.\d+)?|\.\d+)"
LABEL = r'"[\w\s.,:()/+-]+"'
BLOCK = rf"""```mermaid
%%\{{init: ((?!%%).)*\}}%%
xychart-beta
    title {LABEL}
    x-axis {LABEL} {NUMBER} --> {NUMBER}
    y-axis {LABEL}( {NUMBER} --> {NUMBER})?
(    line ({LABEL} )?\[{NUMBER}(, {NUMBER})*\]
)+```"""


@given(CURVES, st.text(), st.text(), st.text(min_size=1))
def test_any_curves_give_a_valid_mermaid_chart_or_none(
    points: Mapping[int, float], title: str, y_label: str, name: str
) -> None:
    block = mermaid.lines(title, {name: points, "validation": {}}, y_label=y_label)
    finite = [step for step, value in points.items() if abs(value) < 1e100]
    assert bool(block) is (len(finite) >= 2)
    assert not block or re.fullmatch(BLOCK, block), block
