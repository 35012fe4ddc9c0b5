"""Log lines as people read them: what a metrics row says, in words, where the row itself is for programs."""

from __future__ import annotations

from launcher.formatting import bytes_text, count_text, duration_text, loss_text, rate_text, share_text
from launcher.job import LogLine
from litgpt_demo.metrics import METRICS_MARK, Row, parsed


def readable(line: LogLine) -> str:
    """Return the line as it is printed, a metrics row in words. Whatever torchrun put before the row stays."""
    row = parsed(line.text)
    if row is None:
        return str(line)
    before = line.text.partition(METRICS_MARK)[0].rstrip()
    try:
        words = _words(row)
    except (KeyError, TypeError, ValueError, OverflowError):  # no row of ours looks so, for a node may write anything
        words = ", ".join(f"{name} {value}" for name, value in row.items())
    words = " ".join(words.splitlines())  # a text in a row must not pass for a line of another node
    return str(LogLine(line.node, f"{before} {words}".lstrip()))


def _words(row: Row) -> str:
    step = f"step {row['step']}  " if row["kind"] != "network" else ""
    match row["kind"]:
        case "start":
            goes_on = f"goes on after step {row['step']} of {row['steps']}"
            ranks = f"{row['world_size']} ranks on {row['device_name']}, {row['precision']}"
            begins = goes_on if row["step"] else f"starts, {row['steps']} steps"
            return f"{begins}: {count_text(row['parameters'])} parameters, {ranks}"
        case "step":
            used = f"  MFU {share_text(row['mfu'])}" if row.get("mfu") is not None else ""
            waited = float(row["data_seconds"])
            late = f"  waited {duration_text(waited)} for data" if waited > 0.1 * float(row["step_seconds"]) else ""
            return (
                f"{step}loss {loss_text(float(row['loss']))}  gradient {float(row['grad_norm']):.3g}  "
                f"learning rate {float(row['learning_rate']):.3g}  {rate_text(row['tokens_per_second'])}  "
                f"{bytes_text(row['memory'])}{used}{late}"
            )
        case "evaluation":
            loss = loss_text(float(row["validation_loss"]))
            return f"{step}validation loss {loss} ({duration_text(row['seconds'])})"
        case "checkpoint":
            stood, saved = duration_text(row["seconds"]), duration_text(row["save_seconds"])
            return (
                f"{step}saved {row['path']}, {bytes_text(row['bytes'])} "
                f"(training stood still for {stood}, committed after {saved})"
            )
        case "skip":
            return f"{step}its update is left out: {row['why']}"
        case "leave":
            return f"{step}leaves: {row['why']}"
        case "network":
            floor = f", at least {row['floor']:.3g} are asked for" if "floor" in row else ""
            among = f"{row['ranks']} ranks on {row['nodes']} nodes"
            speed = f"{row['busbw']:.3g} GB/s (busbw)"
            return f"network: all-reduce of {bytes_text(row['bytes'])} among {among}, {speed}{floor}"
        case "end":
            return f"{step}ends after {duration_text(row['seconds'])}"
    raise ValueError(row["kind"])
