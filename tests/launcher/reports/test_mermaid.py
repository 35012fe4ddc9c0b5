"""Charts for Prefect's pages: text that mermaid accepts, with the curves where their steps are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from launcher.reports import mermaid

CURVES = st.dictionaries(st.integers(0, 10**7), st.floats(), max_size=400)

# As in the lexer of mermaid 11's xychart: no exponents, and a quoted string ends at the next quote.
NUMBER = r"[+-]?(?:\d+(?:\.\d+)?|\.\d+)"
LABEL = r'"[\w\s.,:()/+-]+"'


def drawn(block: str) -> dict[str, list[float]]:
    """The lines of a chart as mermaid would read it; fails on anything outside the grammar."""
    first, init, kind, title, x_axis, y_axis, *lines, last = block.split("\n")
    assert (first, kind, last) == ("```mermaid", "xychart-beta", "```")
    directive = re.fullmatch(r"%%\{init: (.*)\}%%", init)
    assert directive
    assert json.loads(directive[1])
    assert "%%" not in directive[1]
    for axis, line in {"title": title, "x-axis": x_axis, "y-axis": y_axis}.items():
        assert re.fullmatch(rf"    {axis} {LABEL}(?: {NUMBER} --> {NUMBER})?", line)
    found = [re.fullmatch(rf"    line ({LABEL} )?\[({NUMBER}(?:, {NUMBER})*)\]", line) for line in lines]
    assert all(found)
    return {(one[1] or "").strip('" '): [*map(float, one[2].split(", "))] for one in found if one}


@given(CURVES, CURVES)
def test_any_curves_give_a_chart_that_mermaid_accepts_or_none(
    training: Mapping[int, float], validation: Mapping[int, float]
) -> None:
    block = mermaid.lines("Loss", {"training": training, "validation": validation}, y_label="nats per token")
    steps = {step for one in (training, validation) for step, value in one.items() if abs(value) < 1e100}
    assert bool(block) is (len(steps) >= 2)
    assert not block or drawn(block)


@given(st.text(), st.text(), st.text(min_size=1))
def test_no_label_breaks_out_of_its_quotes(title: str, y_label: str, name: str) -> None:
    assert len(drawn(mermaid.lines(title, {name: {1: 1.0, 2: 2.0}}, y_label=y_label))) == 1
