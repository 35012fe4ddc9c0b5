"""Charts for Prefect's pages: text that mermaid accepts, with the curves where their steps are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.reports import mermaid

CURVES = st.dictionaries(st.integers(0, 10**7), st.floats(), max_size=400)
LOSSES = st.dictionaries(st.integers(0, 10**7), st.floats(-1e3, 1e3), min_size=2, max_size=400)

# As in the lexer of mermaid 11's xychart: no exponents, and a quoted string ends at the next quote.
NUMBER = r"[+-]?(?:\d+(?:\.\d+)?|\.\d+)"
UNITS = {'"step"': 1, '"thousand steps"': 1_000, '"million steps"': 1_000_000}
LABEL = r'"[\w\s.,:()/+-]+"'


def parsed_chart(block: str) -> dict[str, Any]:
    """A chart as mermaid would read it; fails on anything outside the grammar."""
    first, init, kind, title, x_axis, y_axis, *lines, last = block.split("\n")
    assert (first, kind, last) == ("```mermaid", "xychart-beta", "```")
    directive = re.fullmatch(r"%%\{init: (.*)\}%%", init)
    assert directive
    assert "%%" not in directive[1]
    x_range = re.fullmatch(rf"    x-axis ({LABEL}) ({NUMBER}) --> ({NUMBER})", x_axis)
    y_range = re.fullmatch(rf"    y-axis {LABEL} ({NUMBER}) --> ({NUMBER})", y_axis)
    values = [re.fullmatch(rf"    line ({LABEL} )?\[({NUMBER}(?:, {NUMBER})*)\]", line) for line in lines]
    assert x_range
    assert y_range
    assert re.fullmatch(rf"    title {LABEL}", title)
    return {
        "settings": json.loads(directive[1]),
        "x": tuple(round(float(end) * UNITS[x_range[1]]) for end in x_range.groups()[1:]),
        "y": tuple(map(float, y_range.groups())),
        "lines": {
            (found[1] or "").strip('" '): [float(text) for text in found[2].split(", ")] for found in values if found
        },
        "unread": values.count(None),
    }


@given(CURVES, CURVES)
def test_any_curves_give_a_chart_that_mermaid_accepts_or_none(
    training: Mapping[int, float], validation: Mapping[int, float]
) -> None:
    points = [(step, value) for one in (training, validation) for step, value in one.items() if abs(value) < 1e100]
    block = mermaid.lines("Loss", {"training": training, "validation": validation}, y_label="nats per token")
    if len({step for step, _ in points}) < 2:
        assert block == ""
        return
    chart = parsed_chart(block)
    low, high = chart["y"]
    assert chart["unread"] == 0
    assert chart["x"] == (min(points)[0], max(points)[0])
    assert low < high
    assert all(low <= value <= high for values in chart["lines"].values() for value in values)


@given(LOSSES)
def test_a_chart_begins_and_ends_as_its_curve_does(points: Mapping[int, float]) -> None:
    chart = parsed_chart(mermaid.lines("Loss", {"": points}, y_label="nats"))
    close = (chart["y"][1] - chart["y"][0]) / 1000
    assert chart["lines"][""][0] == pytest.approx(points[min(points)], abs=close)
    assert chart["lines"][""][-1] == pytest.approx(points[max(points)], abs=close)


def test_steps_keep_their_distances_on_the_axis() -> None:
    """mermaid spaces values evenly, so a curve logged at steps 0, 90 and 100 has to be resampled."""
    values = parsed_chart(mermaid.lines("Loss", {"": {0: 10.0, 90: 1.0, 100: 0.0}}, y_label="nats"))["lines"][""]
    expected = [10.0 - 10.0 * position / (len(values) - 1) for position in range(len(values))]
    assert values == pytest.approx(expected, abs=10.0 / 128 / 2)


def test_a_validation_curve_is_seen_from_its_first_evaluation_on() -> None:
    training, validation = {step: 9.0 - step / 20 for step in range(101)}, {25: 8.0, 75: 6.0}
    chart = parsed_chart(mermaid.lines("Loss", {"training": training, "validation": validation}, y_label="nats"))
    assert list(chart["lines"]) == ["training", "validation"]
    drawn = chart["lines"]["validation"]
    assert len(drawn) == 129
    assert (drawn[32], drawn[64], drawn[96], drawn[-1]) == pytest.approx((8.0, 7.0, 6.0, 6.0))
    assert chart["settings"]["themeCSS"] == ".line-plot-1 path{clip-path:inset(-9px -9px -9px 25.00%)}"


@pytest.mark.parametrize("last", [60, 9_999, 300_000, 9_999_999, 25_000_000])
def test_the_ticks_of_a_long_training_have_room_beside_each_other(last: int) -> None:
    axis = mermaid.lines("Loss", {"": {1: 2.0, last: 1.0}}, y_label="nats").splitlines()[4]
    assert len(axis.split(" --> ")[1].partition(".")[0]) <= 4


def test_a_chart_from_zero_shows_zero() -> None:
    block = mermaid.lines("Throughput", {"": {1: 90.0, 2: 100.0}}, y_label="tokens per second", from_zero=True)
    assert parsed_chart(block)["y"][0] == 0


@given(st.text(), st.text(), st.text(min_size=1))
def test_no_label_breaks_out_of_its_quotes(title: str, y_label: str, name: str) -> None:
    plain = parsed_chart(mermaid.lines("Loss", {"training": {1: 1.0, 2: 2.0}}, y_label="nats"))
    other = parsed_chart(mermaid.lines(title, {name: {1: 1.0, 2: 2.0}}, y_label=y_label))
    assert list(other.pop("lines").values()) == list(plain.pop("lines").values())
    assert other == plain


def test_a_chart_has_no_ground_of_its_own_so_that_the_page_puts_no_frame_around_it() -> None:
    settings = parsed_chart(mermaid.lines("Loss", {"": {1: 1.0, 2: 2.0}}, y_label="nats"))["settings"]
    assert settings["themeVariables"]["xyChart"]["backgroundColor"] == "transparent"
