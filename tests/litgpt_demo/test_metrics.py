"""One channel from rank 0 to all that is shown: it survives prefixes, cuts, resumes and losses that are no number."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.metrics import METRICS_MARK, MetricsFile, curve, marked, parsed, rows_of

ROWS = st.dictionaries(
    st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
)
PREFIXES = st.text(alphabet=st.characters(exclude_characters="\n\r")).filter(lambda text: METRICS_MARK[0] not in text)


@given(row=ROWS, prefix=PREFIXES)
def test_a_row_comes_back_from_behind_any_prefix(row: dict[str, Any], prefix: str) -> None:
    line = marked(row)
    assert "\n" not in line
    assert parsed(prefix + line) == parsed(line + "\r\n") == row


@pytest.mark.parametrize("prefix", ["[rank0]:", "node-0 | [rank0]:", "2026-01-01T00:00:00.123456Z stdout F "])
def test_a_row_comes_back_from_the_logs_that_we_meet(prefix: str) -> None:
    assert parsed(f"{prefix}{marked({'kind': 'step', 'step': 7, 'loss': 3.25})}") == {
        "kind": "step",
        "step": 7,
        "loss": 3.25,
    }


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_json_and_still_no_number_in_the_curve(loss: float) -> None:
    line = marked({"kind": "step", "step": 3, "loss": loss})
    json.loads(line.removeprefix(METRICS_MARK), parse_constant=pytest.fail)
    row = parsed(line)
    assert row is not None
    assert curve([row], "step", "loss")[3] == pytest.approx(loss, nan_ok=True)


@given(row=ROWS, data=st.data())
def test_a_line_cut_short_is_no_row(row: dict[str, Any], data: st.DataObject) -> None:
    line = marked(row)
    assert parsed(line[: data.draw(st.integers(0, len(line) - 1))]) is None


@pytest.mark.parametrize(
    "line", ["", "loss 3.25", METRICS_MARK, f"{METRICS_MARK}3", f"{METRICS_MARK}[1]", '{"kind":"step"}']
)
def test_other_lines_are_no_rows(line: str) -> None:
    assert parsed(line) is None


@given(st.lists(ROWS))
def test_a_metrics_file_is_read_row_by_row_without_its_cut_end(rows: list[dict[str, Any]]) -> None:
    text = "".join(marked(row).removeprefix(METRICS_MARK) + "\n" for row in rows)
    assert rows_of(text) == rows
    assert rows_of(text + '{"kind":"st') == rows


def test_a_step_that_was_repeated_counts_as_it_went_last() -> None:
    rows = [{"kind": "step", "step": step, "loss": loss} for step, loss in [(1, 9.0), (2, 8.0), (3, 7.0), (2, 6.0)]]
    rows += [{"kind": "evaluation", "step": 2, "validation_loss": 5.0}, {"kind": "step", "step": 4}]
    assert curve(rows, "step", "loss") == {1: 9.0, 2: 6.0, 3: 7.0}
    assert curve(rows, "evaluation", "validation_loss") == {2: 5.0}


def written(path: Path) -> list[tuple[str, int]]:
    return [(row["kind"], row["step"]) for row in rows_of(path.read_text())]


def test_rows_are_printed_and_kept_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs" / "metrics.jsonl"
    file = MetricsFile(path, resumed_from=0)
    file.write({"kind": "step", "step": 1, "loss": 2.5})
    # Before it is closed: a kill loses nothing.
    assert rows_of(path.read_text()) == [{"kind": "step", "step": 1, "loss": 2.5}]
    assert parsed(capsys.readouterr().out) == {"kind": "step", "step": 1, "loss": 2.5}
    file.close()


def test_a_resumed_file_drops_the_steps_that_are_repeated_and_a_cut_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, resumed_from=0)
    first.write({"kind": "start", "step": 0})
    for step in range(1, 6):
        first.write({"kind": "step", "step": step})
    first.close()
    path.write_text(path.read_text() + '{"kind":"step","st')
    again = MetricsFile(path, resumed_from=3)
    again.write({"kind": "start", "step": 3})
    again.write({"kind": "step", "step": 4})
    again.close()
    assert written(path) == [("start", 0), *(("step", step) for step in (1, 2, 3)), ("start", 3), ("step", 4)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
