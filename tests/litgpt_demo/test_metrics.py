"""One channel from rank 0 to all that is shown: it survives prefixes, cuts, resumes and losses that are no number."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.metrics import METRICS_MARK, MetricsFile, curve, damaged_lines, marked, parsed, rows_of
from litgpt_demo.runs import METRICS, read_metrics
from litgpt_demo.storage import open_storage

OTHERS = st.dictionaries(
    st.text(max_size=20).map("x{}".format),
    st.booleans() | st.integers(-(2**63), 2**63) | st.text() | st.floats(allow_nan=False, allow_infinity=False),
)
ROWS = st.builds(
    lambda others, kind, step: {"kind": kind, "step": step, **others},
    OTHERS,
    st.text(max_size=20),
    st.integers(0, 2**53),
)
STEP = '{"kind":"step","step":2,"loss":3.5,"step_seconds":1.5}'
HOSTILE = {
    "no step": '{"kind":"step"}',
    "no kind": '{"step":1}',
    "nested": '{"kind":"step","step":1,"x":' + "[" * 100_000,
    "a step of 5,000 digits": '{"kind":"step","step":1' + "0" * 5_000 + "}",
    "a negative step": '{"kind":"step","step":-1}',
    "an infinite step": '{"kind":"step","step":1e999}',
    "a step that is text": '{"kind":"step","step":"two"}',
    "a loss that is an object": '{"kind":"step","step":1,"loss":{}}',
    "memory that is not finite": '{"kind":"step","step":1,"memory":NaN}',
    "half a surrogate pair": '{"kind":"\\ud800","step":1}',
    "a column's name of 1 MB": '{"kind":"step","step":1,"' + "x" * 1_000_000 + '":1}',
    "a line of 2 MB": '{"kind":"step","step":1}' + " " * 2_000_000,
    "a thousand columns": '{"kind":"step","step":1' + "".join(f',"x{number}":1' for number in range(1000)) + "}",
    "twice the same column, the last one bad": '{"kind":"step","step":1,"step":-1}',
    "cut short": '{"kind":"step","st',
    "no object": "[1]",
}
PREFIXES = st.text(alphabet=st.characters(exclude_characters="\n\r")).filter(lambda text: METRICS_MARK[0] not in text)


@given(row=ROWS, prefix=PREFIXES)
def test_a_row_comes_back_from_behind_any_prefix(row: dict[str, Any], prefix: str) -> None:
    line = marked(row)
    assert "\n" not in line
    assert parsed(prefix + line) == parsed(line + "\r\n") == row
    assert parsed(line.removeprefix(METRICS_MARK)) is None


@pytest.mark.parametrize("loss", [math.nan, math.inf])
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


@given(st.lists(ROWS))
def test_a_metrics_file_is_read_row_by_row_without_its_cut_end(rows: list[dict[str, Any]]) -> None:
    text = "".join(marked(row).removeprefix(METRICS_MARK) + "\n" for row in rows)
    assert rows_of(text) == rows
    assert rows_of(text + '{"kind":"st') == rows


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_a_line_that_is_no_row_is_counted_and_the_others_are_read(line: str) -> None:
    bad = damaged_lines()
    assert parsed(METRICS_MARK + line, bad) is None
    assert rows_of(f"{STEP}\n{line}\n{STEP}\n", bad) == [json.loads(STEP)] * 2
    assert bad.count == 2
    assert str(bad).startswith("2 lines of metrics could not be read; the first: ")
    assert len(str(bad)) < 1000
    assert str(bad).isprintable()


@given(st.lists(st.binary(max_size=200) | st.sampled_from([STEP.encode(), b"\x00", b'{"kind":"step","step":1,'])))
def test_whatever_bytes_are_in_the_channel_every_row_can_be_used(lines: list[bytes]) -> None:
    content, bad = b"\n".join(lines), damaged_lines()
    rows = rows_of(content, bad)
    assert len(rows) + bad.count == len([line for line in content.split(b"\n") if line and not line.isspace()])
    for row in rows:
        assert isinstance(row["step"], int)
        assert parsed(marked(row)) == row or not all(map(math.isfinite, filter(_is_float, row.values())))
    for line in content.decode(errors="surrogateescape").split("\n"):
        parsed(METRICS_MARK + line, bad)


def _is_float(value: object) -> bool:
    return isinstance(value, float)


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


def test_a_file_of_metrics_that_would_fill_the_memory_is_counted_and_not_read(tmp_path: Path) -> None:
    with (tmp_path / METRICS).open("wb") as file:
        file.truncate(257 << 20)
    assert read_metrics(open_storage(str(tmp_path)), bad := damaged_lines()) == []
    assert "268,435,456" in str(bad)
