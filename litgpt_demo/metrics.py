"""Metrics: one JSON object per line from rank 0, marked so that it can be picked out of any log stream.

The same lines land in the run's metrics.jsonl. Everything shown live comes from this one channel, on all platforms.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from litgpt_demo.storage.local import NO_ROOM, explaining

METRICS_MARK = "@litgpt-metrics "

Row: TypeAlias = Mapping[str, Any]
"""`kind` says what it is, and all have `step`.

- `start`: steps, tokens_per_step, parameters, world_size, device, device_name, precision, flops_per_token, peak_flops
  (of one device, null where it is not known), memory_estimate; its step is the one resumed from.
- `step`: loss, learning_rate, grad_norm, tokens (seen so far), tokens_per_second, step_seconds, data_seconds (spent
  waiting for samples), memory, and mfu (the model's arithmetic as a share of the devices' peak) where that is known.
- `evaluation`: validation_loss, perplexity, seconds.
- `checkpoint`: seconds (that training stood still), save_seconds (in the background, until committed), bytes, path.
- `skip`: why, windows; a step whose batch was left out. `leave`: why; training ends here, to be gone on with.
- `network`, measured before: ranks, nodes, bytes, algbw, busbw and floor in GB/s, seconds.
- `end`: seconds.

Times are in seconds; memory in bytes, the most that rank 0 held so far: tensors on a GPU, its process on a CPU. Tokens,
their rate and losses (nats per token) are of the whole job."""


def marked(row: Row) -> str:
    """The line that carries `row` through a log. A loss that is not a number is kept as text: JSON has no NaN."""
    finite = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return METRICS_MARK + json.dumps(finite, separators=(",", ":"))


def parsed(line: str) -> dict[str, Any] | None:
    """The row that a log line carries, whatever torchrun or a platform put before it; None if it carries none."""
    _, mark, text = line.partition(METRICS_MARK)
    if not mark:
        return None
    try:
        row = json.loads(text)
    except json.JSONDecodeError:  # cut short by a kill; the step it told of is repeated after the resume
        return None
    return row if isinstance(row, dict) else None


def rows_of(content: bytes | str) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a line that is damaged is left out."""
    text = content if isinstance(content, str) else content.decode(errors="replace")
    return [row for line in text.splitlines() if (row := parsed(METRICS_MARK + line)) is not None]


def curve(rows: Iterable[Row], kind: str, name: str) -> dict[int, float]:
    """Step to value of one metric. A step that was repeated after a resume counts once, as it went last."""
    points = {int(row["step"]): float(row[name]) for row in rows if row.get("kind") == kind and name in row}
    return dict(sorted(points.items()))


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats per token; beyond e^700 there is no float."""
    return math.exp(min(loss, 700.0))


class MetricsFile:
    """Rank 0's side: prints each row and appends it to a local metrics.jsonl."""

    def __init__(self, path: Path, *, resumed_from: int) -> None:
        """Goes on with an older attempt's file, without the steps that this attempt will repeat."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = rows_of(path.read_bytes()) if path.exists() else []
        lines = [marked(row).removeprefix(METRICS_MARK) for row in kept if row.get("step", 0) <= resumed_from]
        text = "".join(f"{line}\n" for line in lines).encode()
        aside = path.with_name(f".{path.name}.partial")
        with explaining(str(path), needed=len(text)):
            aside.write_bytes(text)
            aside.replace(path)
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
        """Append what still waits.

        Raises:
            DiskFull: there is no room for it.
        """
        with explaining(self._file.name, needed=len(self._waiting)), self._file:
            self._append()
