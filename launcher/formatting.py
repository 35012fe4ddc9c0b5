"""Numbers and others' text as people read them: in the terminal, in Prefect's artifacts and in the report."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.job import LogLine

NOTHING = "–"
"""The sign that stands in for a missing number."""

_COUNTS = ((1e6, "M"), (1e9, "B"), (1e12, "T"))
_BYTES = ((1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"), (1e15, "PB"))
_SECONDS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def shown(show: Callable[[Any], str], value: object, otherwise: str = NOTHING) -> str:
    """Return a value as `show` writes it, or `otherwise` where there is none."""
    return otherwise if value is None else show(value)


def setting_text(value: object) -> str:
    """Return four digits of a drawn number, which has 17: they distinguish the trials of a sweep."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def size_text(nodes: int, processes: int) -> str:
    """Return the size of a job: `2 nodes x 1 process`."""
    of_nodes, of_processes = f"{nodes} nodes", f"{processes} processes"
    if nodes == 1:
        of_nodes = "1 node"
    if processes == 1:
        of_processes = "1 process"
    return f"{of_nodes} x {of_processes}"


def count_text(count: float) -> str:
    """12,345 below a million, three digits above: 1.23 M, 9.03 B."""
    return _scaled(count, _COUNTS) or f"{round(count):,}"


def bytes_text(size: float) -> str:
    """Decimal units, as disks and networks are sold: 999 bytes, 1.50 kB, 54.0 GB."""
    return _scaled(size, _BYTES) or f"{round(size)} bytes"


def rate_text(tokens_per_second: float | None) -> str:
    """12,345 tok/s; one decimal below ten."""
    if tokens_per_second is None or not math.isfinite(tokens_per_second):
        return NOTHING
    return f"{tokens_per_second:.1f} tok/s" if tokens_per_second < 9.95 else f"{count_text(tokens_per_second)} tok/s"


def share_text(share: float | None) -> str:
    """Two digits of a share of one, as per cent: 41 %, 3.2 %, 0.07 %."""
    if share is None or not math.isfinite(share):
        return NOTHING
    percent = float(f"{100 * share:.2g}")
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:g} %"


def duration_text(seconds: float | None) -> str:
    """The two largest units: 0.4 s, 3 min 20 s, 5 h 2 min, 12 d 3 h."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    # Round to the smaller of the two units that will be shown first, so that nothing ever reads "59 min 60 s".
    for (size, name), (below, small) in pairwise(_SECONDS):
        count, rest = divmod(round(seconds / below), size // below)
        if count and rest:
            return f"{count} {name} {rest} {small}"
        if count:
            return f"{count} {name}"
    return f"{round(seconds)} s"


def loss_text(loss: float | None) -> str:
    """Four decimals, or text if the loss is not finite."""
    if loss is None:
        return NOTHING
    if math.isnan(loss):
        return "not a number"
    return f"{loss:.4f}" if math.isfinite(loss) else "infinite"


def _scaled(number: float, units: tuple[tuple[float, str], ...]) -> str:
    for size, name in reversed(units):
        # 999.9995 M shall read 1.00 B, not 1000 M: a number belongs to the unit that it rounds to.
        # Above the largest of all numbers that is infinite; a number that damaged metrics hold may be as large.
        rounded = min(float(f"{number:.3g}"), sys.float_info.max)
        if rounded >= size:
            scaled = rounded / size
            return f"{scaled:,.{max(0, 2 - int(math.log10(scaled)))}f} {name}"
    return ""


ACTIVE = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
"""Characters that are not text, as ranges of a regular expression. They are controls except tab and newline, characters
that change the order of text, and halves of characters, which no encoding accepts."""

_COLOUR = r"\x1b\[[0-9;:]{0,40}m"
_COLOUR_OR_ACTIVE = re.compile(rf"({_COLOUR})|[{ACTIVE}]")


def harmless(text: str) -> str:
    """Return text that cannot control a terminal: characters that could are written out, as `\\x1b`.
    Colours stay unless NO_COLOR is set, and end with the text."""
    if os.environ.get("NO_COLOR"):  # https://no-color.org
        text = re.sub(_COLOUR, "", text)
    shown = _COLOUR_OR_ACTIVE.sub(lambda found: found[1] or found[0].encode("unicode_escape").decode(), text)
    return f"{shown}\x1b[0m" if "\x1b" in shown else shown


def terminal_text(line: str) -> str:
    """Return the last state of a line in which a progress bar returned to the start many times."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def readable(line: LogLine) -> str:
    """Return the line as it is printed, a metrics row as text. A prefix of torchrun stays."""
    from litgpt_demo.metrics import METRICS_MARK, from_log_line

    row = from_log_line(line.text)
    if row is None:
        return str(line)
    before = line.text.partition(METRICS_MARK)[0].rstrip()
    try:
        text = _row_text(row)
    except (KeyError, TypeError, ValueError, OverflowError):  # a node may write anything
        text = ", ".join(f"{name} {value}" for name, value in row.items())
    text = " ".join(text.splitlines())  # a text in a row must not look like a line of another node
    return str(replace(line, text=f"{before} {text}".lstrip()))


def _row_text(row: Mapping[str, Any]) -> str:
    step = f"step {row['step']}  " if row["kind"] != "network" else ""
    match row["kind"]:
        case "start":
            ranks = f"{row['world_size']} ranks on {row['device_name']}, {row['precision']}"
            if row["step"]:
                begins = f"continues after step {row['step']} of {row['steps']}"
            else:
                begins = f"starts, {row['steps']} steps"
            return f"{begins}: {count_text(row['parameters'])} parameters, {ranks}"
        case "step":
            used = f"  MFU {share_text(row['mfu'])}" if row.get("mfu") is not None else ""
            waited = row["data_seconds"]
            late = f"  waited {duration_text(waited)} for data" if waited > 0.1 * row["step_seconds"] else ""
            return (
                f"{step}loss {loss_text(row['loss'])}  gradient {row['grad_norm']:.3g}  "
                f"learning rate {row['learning_rate']:.3g}  {rate_text(row['tokens_per_second'])}  "
                f"{bytes_text(row['memory'])}{used}{late}"
            )
        case "evaluation":
            return f"{step}validation loss {loss_text(row['validation_loss'])} ({duration_text(row['seconds'])})"
        case "checkpoint" if "seconds" not in row:  # of an attempt that was killed before it could report it
            return f"{step}was saved in {row['path']}"
        case "checkpoint":
            stood, saved = duration_text(row["seconds"]), duration_text(row["save_seconds"])
            return (
                f"{step}saved {row['path']}, {bytes_text(row['bytes'])} "
                f"(training stood still for {stood}, committed after {saved})"
            )
        case "skip":
            return f"{step}its update is skipped: {row['why']}"
        case "leave":
            return f"{step}leaves: {row['why']}"
        case "network":
            floor = f", at least {row['floor']:.3g} are required" if "floor" in row else ""
            among = f"{row['ranks']} ranks on {row['nodes']} nodes"
            speed = f"{row['busbw']:.3g} GB/s (busbw)"
            return f"network: all-reduce of {bytes_text(row['bytes'])} among {among}, {speed}{floor}"
        case "end":
            return f"{step}ends after {duration_text(row['seconds'])}"
    raise ValueError(row["kind"])
