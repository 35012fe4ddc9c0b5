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
MOST_TEXT = 4096
"""Characters of the longest text in a column."""

_Text = Annotated[str, Field(max_length=MOST_TEXT)]
_Seconds = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # a time since the epoch is the largest
_Scalar = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63)] | bool | float | _Text | None


class Column(NamedTuple):
    """A column of the rows. docs/reference/metrics.md is written from these."""

    type: Any
    """Its type as pydantic reads it. A row with another one is refused. A float that is not finite is text in JSON."""
    kinds: str
    """The kinds of rows that have it."""
    meaning: str
    unit: str = ""
    in_csv: bool = False
    """True if metrics.csv has it."""


ROW_KINDS = {
    "start": "the beginning of an attempt, whose `step` is the one resumed from",
    "step": "a step of the optimizer",
    "evaluation": "an evaluation on the validation split",
    "sample": "a text by the model, which continues one of `train.sample_prompts`",
    "checkpoint": "a committed checkpoint",
    "skip": "a step without an update, with the ids of the bad samples in `windows`",
    "leave": "the end of an attempt that saved and left before its last step",
    "network": "the network test before the training",
    "end": "the end of the training",
}
"""Kind of row to its meaning."""

COLUMNS = {
    "tokens": Column(_Count, "step", "Tokens that the whole job has seen.", "tokens", in_csv=True),
    "loss": Column(float, "step", "Loss of the whole batch.", "nats per token", in_csv=True),
    "learning_rate": Column(float, "step", "Learning rate of the step.", in_csv=True),
    "grad_norm": Column(float, "step", "Norm of the gradient of the whole batch, before clipping.", in_csv=True),
    "validation_loss": Column(float, "evaluation", "Loss on the validation samples.", "nats per token", in_csv=True),
    "perplexity": Column(float, "evaluation", "The exponential of `validation_loss`.", in_csv=True),
    "bits_per_byte": Column(
        float, "evaluation", "That loss per byte of text. It compares models with different tokenizers.", "bits",
        in_csv=True,
    ),
    "batch_sha256": Column(_Text, "step", "Digest of the samples of the step's batch."),
    "tokens_per_second": Column(
        float, "step", "Rate of the whole job, without evaluations and saves.", "tokens/s", in_csv=True
    ),
    "mfu": Column(
        float | None, "step", "The model's FLOPs as a share of the devices' peak, if that is known.",
        in_csv=True,
    ),
    "step_seconds": Column(float, "step", "Time of a step.", "s", in_csv=True),
    "data_seconds": Column(float, "step", "Time since the last row in which rank 0 awaited samples.", "s", in_csv=True),
    "memory": Column(
        _Count, "step", "Peak of rank 0 so far: tensors on a GPU, the whole process on a CPU.", "bytes", in_csv=True
    ),
    "memory_reserved": Column(
        _Count, "step", "Peak of the memory that torch holds on rank 0's GPU, for tensors or in reserve.", "bytes",
        in_csv=True,
    ),
    "allocation_retries": Column(
        _Count, "step", "Times that rank 0's GPU was full and torch gave memory back. Each costs time.", in_csv=True
    ),
    "seconds": Column(
        float, "evaluation sample checkpoint network end",
        "Time that it took. For a checkpoint, the time in which the training stood still. The last text of a step has "
        "the time of all its texts.", "s", in_csv=True,
    ),
    "save_seconds": Column(
        float, "checkpoint", "Time of the save until its commit, in parallel with the training.", "s", in_csv=True
    ),
    "bytes": Column(
        _Count, "checkpoint network", "Size of all files of the checkpoint, or of the fastest all-reduce's tensor.",
        "bytes", in_csv=True,
    ),
    "path": Column(_Text, "checkpoint", "Folder of the checkpoint in the run."),
    "taken": Column(_Seconds, "checkpoint", "When its state was taken, by the clock of `elapsed`.", "s"),
    "weights_sha256": Column(_Text, "checkpoint", "Digest of the weights."),
    "batches_sha256": Column(_Text, "checkpoint", "Digest of all batches until then."),
    "previous_chain": Column(_Text, "checkpoint", "The `chain_sha256` of the checkpoint before."),
    "chain_sha256": Column(_Text, "checkpoint", "Digest of the three columns before it."),
    "first_step_seconds": Column(_Seconds, "step", "Time of the attempt's first step, which also compiles.", "s"),
    "prompt": Column(_Text, "sample", "The beginning that the model got."),
    "text": Column(_Text, "sample", "The model's continuation, without the prompt."),
    "why": Column(_Text, "skip leave", "The reason."),
    "steps": Column(_Count, "start", "Steps of the whole run.", "steps"),
    "run_tokens": Column(_Count, "start", "Tokens of the whole run.", "tokens"),
    "tokens_per_step": Column(_Count, "start", "Tokens of a step of the whole job, with the largest batch.", "tokens"),
    "parameters": Column(_Count, "start", "Parameters of the model."),
    "world_size": Column(_Count, "start", "Ranks of the job."),
    "threads": Column(_Count, "start", "Threads of a rank on a CPU. Their number decides the order of sums."),
    "device": Column(_Text, "start", "Device of rank 0, as torch names it."),
    "device_name": Column(_Text, "start", "Name of that device's model."),
    "precision": Column(_Text, "start", "`train.precision`."),
    "compile": Column(_Text, "start", "The part of the model that torch.compile compiles."),
    "flops_per_token": Column(float, "start", "FLOPs of the model for a token.", "FLOP"),
    "peak_flops": Column(float | None, "start", "Peak of one device. Null if it is unknown.", "FLOP/s"),
    "memory_estimate": Column(_Count, "start", "Estimated memory of a rank.", "bytes"),
    # A job has these only on a node that node.agent runs.
    "elapsed": Column(
        _Seconds, "start step evaluation sample checkpoint skip leave network end", "Time since the node began.", "s"
    ),
    "attempt": Column(_Attempt, "start", "Number of the attempt."),
    "node_started": Column(_Seconds, "start", "When the node began, since the epoch.", "s"),
    "network_test_seconds": Column(_Seconds, "start", "Time of the network test.", "s"),
    "stage_seconds": Column(_Seconds, "start", "Time in which the dataset was copied to the node.", "s"),
    "ranks": Column(_Count, "network", "Ranks that took part."),
    "nodes": Column(_Count, "network", "Nodes that took part."),
    "algbw": Column(float, "network", "Bytes of the tensor divided by the time of an all-reduce.", "GB/s"),
    "busbw": Column(float, "network", "Bandwidth of a link, which does not depend on the number of ranks.", "GB/s"),
    "floor": Column(float, "network", "The least `busbw` that passes.", "GB/s"),
}  # fmt: skip
"""Every column of our own rows but lists and those of one source. All readers, views and stores of rows use it."""

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
