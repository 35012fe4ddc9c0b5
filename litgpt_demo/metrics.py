"""Metrics: one JSON object per line from rank 0, marked so that it can be picked out of any log stream.

The same lines land in the run's metrics.jsonl. Everything shown live comes from this one channel, on all platforms.
A script on a node may write anything into it: what is no row by the schema here is counted, and never raises.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from litgpt_demo.documents import Unreadable, first_problem
from litgpt_demo.storage.local import NO_ROOM, explaining, replacing

METRICS_MARK = "@litgpt-metrics "

Row: TypeAlias = Mapping[str, Any]
"""`kind` says what it is, and all have `step`; docs/training.md tells what the figures are.

- `start`: steps, tokens_per_step, parameters, world_size, device, device_name, precision, flops_per_token, peak_flops
  (of one device, null where it is not known), memory_estimate; its step is the one resumed from. On a node of ours
  also attempt, node_started (since the epoch), gate_seconds and stage_seconds, which came before.
- `step`: loss, learning_rate, grad_norm, tokens, tokens_per_second, step_seconds, data_seconds, memory, and mfu where
  it is known; the first of an attempt has first_step_seconds, in which that step also compiled.
- `evaluation`: validation_loss, perplexity, seconds. Of a mixture, also validation_loss.<source>, and steps have
  tokens.<source> and loss.<source>, of its samples since the step before that is told, where there were any.
- `checkpoint`: seconds (that training stood still), save_seconds (in the background, until committed), bytes, path,
  taken (when its state was; on the clock of `elapsed`).
- `skip`: why, windows; a step without an update. `leave`: why; training ends here, to be gone on with.
- `network`, measured before: ranks, nodes, bytes, algbw, busbw and floor in GB/s, seconds.
- `end`: seconds.

On a node of ours all have `elapsed`: seconds since the node began, when the row was written. Times are in seconds,
memory in bytes; tokens, their rate and losses (nats per token) are of the whole job."""


MOST_LINE = 1 << 20
"""Bytes of the longest line that is read. A step without an update lists its windows, 10 bytes each."""
MOST_FILE = 256 << 20
"""Bytes of the largest metrics.jsonl that is read: rows of 750,000 steps."""

_Count = Annotated[int, Field(ge=0, le=2**53)]  # as many steps, tokens and bytes as a float can count
_Name = Annotated[str, Field(max_length=64)]
_Text = Annotated[str, Field(max_length=4096)]
_Seconds = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # since the epoch is the most that there is
_Scalar = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63)] | bool | float | _Text | None


class _Columns(BaseModel):
    """A row as far as anything of ours reads it; other columns are kept if they are as plain."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[_Name, _Scalar | Annotated[list[_Scalar], Field(max_length=65_536)]]

    kind: _Name
    step: _Count


_KNOWN: tuple[tuple[Any, str], ...] = (
    (_Count, "steps tokens tokens_per_step parameters world_size memory memory_estimate bytes ranks nodes"),
    (Annotated[int, Field(ge=0, lt=10**9)], "attempt"),
    (_Seconds, "elapsed node_started gate_seconds stage_seconds first_step_seconds taken"),
    # Whatever is not finite comes as text, because JSON has no NaN, and is a float again here.
    (float, "loss validation_loss perplexity learning_rate grad_norm tokens_per_second flops_per_token"),
    (float | None, "mfu peak_flops"),
    (float, "seconds save_seconds step_seconds data_seconds algbw busbw floor"),
    (_Text, "device device_name precision path why"),
)
COLUMNS: dict[str, Any] = {name: (kind, None) for kind, names in _KNOWN for name in names.split()}
"""All columns of our own rows but lists and those of a source; a row that has another type in one is no row."""
NUMBERS = frozenset(name for name, (kind, _) in COLUMNS.items() if kind is not _Text)
_Row = create_model("_Row", __base__=_Columns, **COLUMNS)


def marked(row: Row) -> str:
    """The line that carries `row` through a log. A loss that is not a number is kept as text: JSON has no NaN."""
    finite = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return METRICS_MARK + json.dumps(finite, separators=(",", ":"))


def parsed(line: str, bad: Unreadable | None = None) -> dict[str, Any] | None:
    """The row that a log line carries, whatever torchrun or a platform put before it; None if it carries none.

    `bad` counts a line that carries the mark and no row: one that a kill cut short, or that a script made up.
    """
    _, mark, text = line.partition(METRICS_MARK)
    return _row(text.encode(errors="replace"), bad) if mark else None


def rows_of(content: bytes | str, bad: Unreadable | None = None) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a line that is damaged is counted in `bad`, and left out."""
    lines = io.BytesIO(content if isinstance(content, bytes) else content.encode(errors="replace"))
    return [row for line in lines if not line.isspace() and (row := _row(line, bad)) is not None]


def damaged_lines() -> Unreadable:
    """Return the count of damaged lines, before any is."""
    return Unreadable("lines of metrics")


def _row(text: bytes, bad: Unreadable | None) -> dict[str, Any] | None:
    try:
        if len(text) > MOST_LINE:
            raise ValueError(f"it has {len(text):,} bytes, and no row has more than {MOST_LINE:,}")
        row = _Row.model_validate_json(text).model_dump(exclude_unset=True, exclude_none=True)
        if len(row) > 96:
            raise ValueError(f"it has {len(row)} columns, and no row has more than 96")
    except ValueError as error:
        if bad is not None:
            why = first_problem(error) if isinstance(error, ValidationError) else str(error)
            bad.add(f"{text[:80].decode(errors='replace').strip()!r} ({why})")
        return None
    return row


def curve(rows: Iterable[Row], kind: str, name: str) -> dict[int, float]:
    """Step to value of one metric. A step that was repeated after a resume counts once, as it went last."""
    points = {int(row["step"]): float(row[name]) for row in rows if row.get("kind") == kind and name in row}
    return dict(sorted(points.items()))


def perplexity(loss: float) -> float:
    """Of a loss in nats per token; beyond e^700 there is no float."""
    return math.exp(min(loss, 700.0))


class MetricsFile:
    """Rank 0's side: prints each row and appends it to a local metrics.jsonl."""

    def __init__(self, path: Path, *, resumed_from: int) -> None:
        """Goes on with an older attempt's file, without the steps that this attempt will repeat."""
        kept = rows_of(path.read_bytes()) if path.exists() else []
        lines = [marked(row).removeprefix(METRICS_MARK) for row in kept if row["step"] <= resumed_from]
        text = "".join(f"{line}\n" for line in lines).encode()
        with explaining(str(path), needed=len(text)):
            with replacing(path, durable=False) as aside:
                aside.write(text)
            self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def write(self, row: Row) -> None:
        """Print the row and append it to the file; where the disk is full it waits for the next row, or for `close`."""
        line = marked(row)
        self._waiting += line.removeprefix(METRICS_MARK).encode() + b"\n"
        try:
            self._append()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        # One write: print makes two, and torchrun's tee can put another rank's text between them.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def _append(self) -> None:
        while self._waiting:
            # A disk that is nearly full may take a part of it.
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def close(self) -> None:
        """Append what still waits; DiskFull where there is no room for it."""
        with explaining(self._file.name, needed=len(self._waiting)), self._file:
            self._append()
