"""One channel from rank 0 to all that is shown: it survives prefixes, cuts, resumes and losses that are no number."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from litgpt_demo.metrics import (
    METRICS_MARK,
    NUMBERS,
    MetricsFile,
    curve,
    damaged_lines,
    from_log_line,
    rows_of,
    to_log_line,
)
from litgpt_demo.runs import METRICS, read_metrics
from litgpt_demo.storage import open_storage

VALUES = st.booleans() | st.integers(-(2**63), 2**63) | st.text() | st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.builds(
    lambda kind, step, others: {"kind": kind, "step": step, **others},
    st.text(max_size=20), st.integers(0, 2**53), st.dictionaries(st.text(max_size=20).map("x{}".format), VALUES),
)  # fmt: skip
STEP = '{"kind":"step","step":2,"loss":3.5,"step_seconds":1.5}'
HOSTILE = [
    '{"step":1}',
    '{"kind":"step","step":1,"x":' + "[" * 100_000,
    '{"kind":"step","step":1' + "0" * 5_000 + "}",
    '{"kind":"step","step":1e999}',
    '{"kind":"step","step":1,"loss":{}}',
    '{"kind":"step","step":1,"memory":NaN}',
    '{"kind":"\\ud800","step":1}',
    '{"kind":"step","step":1}' + " " * 2_000_000,
    '{"kind":"step","step":1' + "".join(f',"x{number}":1' for number in range(1000)) + "}",
    '{"kind":"step","step":1,"step":-1}',
]
PREFIXES = st.text(alphabet=st.characters(exclude_characters="\n\r")).filter(lambda text: METRICS_MARK[0] not in text)


@given(row=ROWS, prefix=PREFIXES, data=st.data())
def test_a_row_is_read_behind_any_prefix(row: dict[str, Any], prefix: str, data: st.DataObject) -> None:
    """A line that was cut short has none."""
    line = to_log_line(row)
    assert "\n" not in line
    assert from_log_line(prefix + line) == from_log_line(line + "\r\n") == row
    assert from_log_line(line.removeprefix(METRICS_MARK)) is None
    assert from_log_line(line[: data.draw(st.integers(0, len(line) - 1))]) is None


def test_a_loss_of_nan_is_json_and_nan_in_the_curve() -> None:
    line = to_log_line({"kind": "step", "step": 3, "loss": math.nan})
    json.loads(line.removeprefix(METRICS_MARK), parse_constant=pytest.fail)
    assert math.isnan(curve([from_log_line(line) or {}], "step", "loss")[3])


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_a_number_of_another_type_costs_its_row(name: str) -> None:
    text, bad = json.dumps({"kind": "step", "step": 3, name: "abc"}), damaged_lines()
    assert rows_of(f"{STEP}\n{text}\n{STEP}", bad) == [json.loads(STEP)] * 2
    assert name in str(bad)


LINES = st.binary(max_size=200) | st.sampled_from([STEP, "\0", '{"kind":"step","step":1,', *HOSTILE]).map(str.encode)


@given(st.lists(LINES))
@example([STEP.encode(), *map(str.encode, HOSTILE), STEP.encode()])
def test_whatever_bytes_are_in_the_channel_every_row_can_be_used(lines: list[bytes]) -> None:
    content, bad = b"\n".join(lines), damaged_lines()
    rows = rows_of(content, bad)
    assert rows == [json.loads(STEP)] * content.split(b"\n").count(STEP.encode())
    assert len(rows) + bad.count == len([line for line in content.split(b"\n") if line and not line.isspace()])
    assert len(str(bad)) < 1000
    assert str(bad).isprintable()
    for line in content.decode(errors="surrogateescape").split("\n"):
        assert from_log_line(METRICS_MARK + line, bad) in (None, json.loads(STEP))


def test_a_step_that_was_repeated_counts_as_it_went_last() -> None:
    rows = [{"kind": "step", "step": step, "loss": loss} for step, loss in [(1, 9.0), (2, 8.0), (3, 7.0), (2, 6.0)]]
    rows += [{"kind": "evaluation", "step": 2, "validation_loss": 5.0}, {"kind": "step", "step": 4}]
    assert curve(rows, "step", "loss") == {1: 9.0, 2: 6.0, 3: 7.0}
    assert curve(rows, "evaluation", "validation_loss") == {2: 5.0}


def test_a_metrics_file_keeps_rows_and_drops_repeated_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row is printed and stored at once. A resumed file drops a line that was cut short too."""
    path = tmp_path / "runs" / "metrics.jsonl"
    first = MetricsFile(path, resumed_from=0)
    for step in range(1, 6):
        first.write({"kind": "step", "step": step})
        assert rows_of(path.read_text())[-1] == {"kind": "step", "step": step}  # before it is closed: a kill loses none
    assert from_log_line(capsys.readouterr().out.splitlines()[-1]) == {"kind": "step", "step": 5}
    first.close()
    path.write_text(path.read_text() + '{"kind":"step","st')
    MetricsFile(path, resumed_from=3).close()
    assert [row["step"] for row in rows_of(path.read_text())] == [1, 2, 3]
    assert list(path.parent.iterdir()) == [path]


def test_a_metrics_file_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    (tmp_path / METRICS).touch()
    os.truncate(tmp_path / METRICS, 257 << 20)
    assert read_metrics(open_storage(str(tmp_path)), bad := damaged_lines()) == []
    assert "268,435,456" in str(bad)
