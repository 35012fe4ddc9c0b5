"""Metrics: one JSON object per line from rank 0, with a mark by which it is found in any log stream.

The same lines are in the run's metrics.jsonl. Everything shown live comes from this one channel, on all platforms.
A script on a node can write anything into it. A line that is not a row by `COLUMNS` is counted, and never raises.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from litgpt_demo.documents import Unreadable, first_problem
from litgpt_demo.storage.local import NO_ROOM, atomic_write, translate_os_errors

METRICS_MARK = "@litgpt-metrics "

Row: TypeAlias = Mapping[str, Any]
"""One event of a training, of one `kind`, with its `step` and the columns of that kind."""

MOST_LINE = 1 << 20
"""Bytes of the longest line that is read. A step without an update lists its windows, 10 bytes each."""
MOST_FILE = 256 << 20
"""Bytes of the largest metrics.jsonl that is read: rows of 750,000 steps."""
_MOST_COLUMNS = 96

_Count = Annotated[int, Field(ge=0, le=2**53)]  # the most steps, tokens and bytes that a float can count
_Attempt = Annotated[int, Field(ge=0, lt=10**9)]
_Name = Annotated[str, Field(max_length=64)]
_Text = Annotated[str, Field(max_length=4096)]
_Seconds = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # a time since the epoch is the largest
_Scalar = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63)] | bool | float | _Text | None


class Column(NamedTuple):
    """A column of the rows."""

    type: Any
    """Its type as pydantic reads it. A row with another one is refused. A float that is not finite is text in JSON."""
    kinds: str
    """The kinds of rows that have it."""
    in_csv: bool = False
    """True if metrics.csv has it; docs/howto/fit-model.md then explains it."""


COLUMNS = {
    "tokens": Column(_Count, "step", in_csv=True),  # seen by the whole job; tokens.<source> for each of a mixture
    "loss": Column(float, "step", in_csv=True),  # nats per token; loss.<source> since the last row
    "learning_rate": Column(float, "step", in_csv=True),
    "grad_norm": Column(float, "step", in_csv=True),  # before clipping
    "validation_loss": Column(float, "evaluation", in_csv=True),  # validation_loss.<source> for each of a mixture
    "perplexity": Column(float, "evaluation", in_csv=True),
    "tokens_per_second": Column(float, "step", in_csv=True),  # of the whole job, without evaluations and saves
    "mfu": Column(float | None, "step", in_csv=True),
    "step_seconds": Column(float, "step", in_csv=True),
    "data_seconds": Column(float, "step", in_csv=True),  # spent waiting for samples
    "memory": Column(_Count, "step", in_csv=True),  # the peak so far, in bytes, of rank 0
    "seconds": Column(float, "evaluation checkpoint network end", in_csv=True),  # a checkpoint's: training stood still
    "save_seconds": Column(float, "checkpoint", in_csv=True),  # in the background, until committed
    "bytes": Column(_Count, "checkpoint network", in_csv=True),
    "path": Column(_Text, "checkpoint"),
    "taken": Column(_Seconds, "checkpoint"),  # when its state was, by the clock of `elapsed`
    "first_step_seconds": Column(_Seconds, "step"),  # an attempt's first one, which also compiles
    "why": Column(_Text, "skip leave"),  # a `skip` is a step without an update, and has a list of its `windows`
    # The `step` of a `start` is the one resumed from.
    "steps": Column(_Count, "start"),
    "tokens_per_step": Column(_Count, "start"),
    "parameters": Column(_Count, "start"),
    "world_size": Column(_Count, "start"),
    "device": Column(_Text, "start"),
    "device_name": Column(_Text, "start"),
    "precision": Column(_Text, "start"),
    "flops_per_token": Column(float, "start"),
    "peak_flops": Column(float | None, "start"),  # of one device; null where it is not known
    "memory_estimate": Column(_Count, "start"),
    # A job has these only on a node that node.agent runs, and `elapsed` in every row: the seconds since the node began.
    "elapsed": Column(_Seconds, "start step evaluation checkpoint skip leave network end"),
    "attempt": Column(_Attempt, "start"),
    "node_started": Column(_Seconds, "start"),  # since the epoch
    "network_test_seconds": Column(_Seconds, "start"),
    "stage_seconds": Column(_Seconds, "start"),
    # Bandwidths are in GB/s.
    "ranks": Column(_Count, "network"),
    "nodes": Column(_Count, "network"),
    "algbw": Column(float, "network"),
    "busbw": Column(float, "network"),
    "floor": Column(float, "network"),
}
"""Every column of our own rows but lists and those of one source. All readers, views and stores of rows use it.
Times are in seconds, memory in bytes."""

NUMBERS = frozenset(name for name, column in COLUMNS.items() if column.type is not _Text)
CSV_COLUMNS = ("kind", "step", *(name for name, column in COLUMNS.items() if column.in_csv))
"""The columns of metrics.csv, in its order."""


class _AnyRow(BaseModel):
    """A row of any script. Columns that are not ours are kept if they are plain."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[_Name, _Scalar | Annotated[list[_Scalar], Field(max_length=65_536)]]

    kind: _Name
    step: _Count


_FIELDS: dict[str, Any] = {name: (column.type, None) for name, column in COLUMNS.items()}
_Row = create_model("_Row", __base__=_AnyRow, **_FIELDS)


def to_log_line(row: Row) -> str:
    """Return the line that carries `row` through a log. A float that is not finite becomes text: JSON has no NaN."""
    finite = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return METRICS_MARK + json.dumps(finite, separators=(",", ":"))


def from_log_line(line: str, bad: Unreadable | None = None) -> dict[str, Any] | None:
    """Return the row in a log line, whatever torchrun or a platform put before it; None if it has none.

    `bad` counts a line with the mark and no row: a kill cut it short, or a script made it up.
    """
    _, mark, text = line.partition(METRICS_MARK)
    return _parse_row(text.encode(errors="replace"), bad) if mark else None


def rows_of(content: bytes | str, bad: Unreadable | None = None) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl. A damaged line is counted in `bad` and left out."""
    if isinstance(content, str):
        content = content.encode(errors="replace")
    rows = (_parse_row(line, bad) for line in io.BytesIO(content) if not line.isspace())
    return [row for row in rows if row is not None]


def damaged_lines() -> Unreadable:
    """Return a counter of damaged lines."""
    return Unreadable("lines of metrics")


def _parse_row(text: bytes, bad: Unreadable | None) -> dict[str, Any] | None:
    try:
        if len(text) > MOST_LINE:
            raise ValueError(f"it has {len(text):,} bytes, and no row has more than {MOST_LINE:,}")
        row = _Row.model_validate_json(text).model_dump(exclude_unset=True, exclude_none=True)
        if len(row) > _MOST_COLUMNS:
            raise ValueError(f"it has {len(row)} columns, and no row has more than {_MOST_COLUMNS}")
    except ValueError as error:
        if bad is not None:
            problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
            bad.add(f"{text[:80].decode(errors='replace').strip()!r} ({problem})")
        return None
    return row


def curve(rows: Iterable[Row], kind: str, name: str) -> dict[int, float]:
    """Return step to value of one metric. A step that was repeated after a resume counts once, with its last value."""
    points = {int(row["step"]): float(row[name]) for row in rows if row.get("kind") == kind and name in row}
    return dict(sorted(points.items()))


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats per token; beyond e^700 there is no float."""
    return math.exp(min(loss, 700.0))


class MetricsFile:
    """Prints each row of rank 0, and appends it to a local metrics.jsonl."""

    def __init__(self, path: Path, *, resumed_from: int) -> None:
        """Continue the file of an older attempt, without the steps that this attempt will repeat."""
        rows = rows_of(path.read_bytes()) if path.exists() else []
        lines = [to_log_line(row).removeprefix(METRICS_MARK) for row in rows if row["step"] <= resumed_from]
        text = "".join(f"{line}\n" for line in lines).encode()
        with translate_os_errors(str(path), needed=len(text)):
            with atomic_write(path, durable=False) as partial_file:
                partial_file.write(text)
            self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def write(self, row: Row) -> None:
        """Print the row and append it to the file. If the disk is full, it is kept for the next row or for `close`."""
        line = to_log_line(row)
        self._unwritten += line.removeprefix(METRICS_MARK).encode() + b"\n"
        try:
            self._append()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        # One write: print makes two, and torchrun's tee can put another rank's text between them.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def _append(self) -> None:
        while self._unwritten:
            # A disk that is nearly full may take a part of it.
            written = self._file.write(self._unwritten)
            self._unwritten = self._unwritten[written:]

    def close(self) -> None:
        """Append the rows that were kept; DiskFull if there is no room for them."""
        with translate_os_errors(self._file.name, needed=len(self._unwritten)), self._file:
            self._append()
