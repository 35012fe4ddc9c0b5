"""What the metrics rows say: how far a training is, its curves thinned for the eye, and as mermaid charts.

Pure: rows in, values and text out. The rows are described in litgpt_demo.metrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median

from launcher.figures import duration_text, loss_text, rate_text, share_text
from litgpt_demo.metrics import Row

RECENT = 10
"""Step rows that "now" is taken over: enough to hide one slow step, few enough to show a slow node."""

_GRID = 129  # positions along a mermaid chart, 5 pixels each
_PLOTTABLE = 1e100  # beyond it the arithmetic of an axis overflows
# Readable on white and on black; the `base` theme of Prefect's pages would draw in cream on white.
_MERMAID = (
    '%%{init: {"themeVariables": {"xyChart": {"plotColorPalette": "#3b82f6"}}, '
    '"xyChart": {"width": 760, "height": 320}}}%%'
)

# --- progress ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training is; what is not known yet is None."""

    step: int
    steps: int | None
    loss: float | None
    """Training loss of the newest logged step; nats per token, as is the validation loss."""
    validation_loss: float | None
    learning_rate: float | None
    tokens: int
    """Seen by the whole job."""
    tokens_per_second: float | None
    """Median of the newest steps of this attempt; evaluations and checkpoints do not count."""
    mfu: float | None
    """Share of the devices' peak that the model's arithmetic took, as a median too; None where no peak is known."""
    memory: int | None
    """Most bytes that rank 0 held so far."""
    eta_seconds: float | None
    """Until the last step, with the evaluations and checkpoints on the way; None before two steps of this attempt."""
    percent: float

    @property
    def outcome(self) -> list[str]:
        """What is known of a training that does not run, each in a word or two."""
        return [] if self.loss is None else [f"loss {loss_text(self.loss)}"]

    @property
    def facts(self) -> list[str]:
        """What is known of one that runs: loss, throughput, MFU, time left."""
        pace = None if self.tokens_per_second is None else rate_text(self.tokens_per_second)
        used = None if self.mfu is None else f"MFU {share_text(self.mfu)}"
        left = f"{duration_text(self.eta_seconds)} left" if self.eta_seconds else None
        return [*self.outcome, *(fact for fact in (pace, used, left) if fact is not None)]


def summary(rows: Sequence[Row]) -> Progress:
    """Where the training stands after `rows`, in the order they were written.

    After a restart that is the step it resumed from, not the farthest step that was ever reached.
    """
    start, attempt = _newest_attempt(rows)
    step = int(attempt[-1].get("step", 0)) if attempt else 0
    steps = int(start["steps"]) if "steps" in start else None
    tokens = _as_of(rows, step, "step", "tokens")
    recent, used = (
        [float(row[name]) for row in attempt if name in row][-RECENT:] for name in ("tokens_per_second", "mfu")
    )
    memory = _as_of(rows, step, "step", "memory")
    return Progress(
        step=step,
        steps=steps,
        loss=_as_of(rows, step, "step", "loss"),
        validation_loss=_as_of(rows, step, "evaluation", "validation_loss"),
        learning_rate=_as_of(rows, step, "step", "learning_rate"),
        tokens=int(step * start.get("tokens_per_step", 0) if tokens is None else tokens),
        tokens_per_second=median(recent) if recent else None,
        mfu=median(used) if used else None,
        memory=None if memory is None else int(memory),
        eta_seconds=_remaining_seconds(attempt, steps - step) if steps is not None else None,
        percent=min(100.0, 100 * step / steps) if steps else 0.0,
    )


def _newest_attempt(rows: Sequence[Row]) -> tuple[Row, Sequence[Row]]:
    """The last `start` row, and all rows from it on; all there are where a log was joined too late to hold one."""
    for number in reversed(range(len(rows))):
        if rows[number].get("kind") == "start":
            return rows[number], rows[number:]
    return {}, rows


def _as_of(rows: Sequence[Row], step: int, kind: str, name: str) -> float | None:
    """The newest value at `step` or before it; from the end, because a live view asks again and again."""
    for row in reversed(rows):
        if row.get("kind") == kind and name in row and int(row["step"]) <= step:
            return float(row[name])
    return None


def _remaining_seconds(attempt: Sequence[Row], remaining: int) -> float | None:
    if remaining <= 0:
        return 0.0
    paces = [float(row["step_seconds"]) for row in attempt if "step_seconds" in row]
    if len(paces) < 2:
        return None
    pauses = sum(float(row["seconds"]) for row in attempt if row.get("kind") in ("evaluation", "checkpoint"))
    done = int(attempt[-1].get("step", 0)) - int(attempt[0].get("step", 0))
    return remaining * (median(paces[-RECENT:]) + pauses / max(done, 1))


# --- curves -----------------------------------------------------------------------------------------------------------


def thinned(points: Mapping[int, float], limit: int = 120) -> dict[int, float]:
    """At most `limit` of the points, in step order: the ends, and the lowest and highest of each stretch between them.

    No spike is lost that way. Points that are not finite cannot be drawn and are left out.
    """
    if limit < 4:
        raise ValueError(f"limit={limit} leaves no room for two ends and two extremes; give at least 4")
    steps = sorted(step for step, value in points.items() if math.isfinite(value))
    if len(steps) <= limit:
        return {step: points[step] for step in steps}
    inner, buckets = steps[1:-1], (limit - 2) // 2
    edges = [len(inner) * number // buckets for number in range(buckets + 1)]
    kept = {steps[0], steps[-1]}
    for first, past in pairwise(edges):
        kept.add(min(inner[first:past], key=points.__getitem__))
        kept.add(max(inner[first:past], key=points.__getitem__))
    return {step: points[step] for step in sorted(kept)}


def smoothed(points: Mapping[int, float], stretch: float = 0.02) -> dict[int, float]:
    """The mean around each point, over about `stretch` of all points.

    Centred, and narrow at the start, so that it does not lag a steep fall; only the past counts at the end, so that it
    does not end on the last point's noise.
    """
    finite = {step: value for step, value in sorted(points.items()) if math.isfinite(value)}
    sums, last = [0.0, *accumulate(finite.values())], len(finite) - 1
    reach = round(stretch * len(finite) / 2)
    averages = {}
    for number, step in enumerate(finite):
        first, past = number - min(reach, number), number + min(reach, number, last - number) + 1
        averages[step] = (sums[past] - sums[first]) / (past - first)
    return averages


# --- mermaid ----------------------------------------------------------------------------------------------------------


def mermaid(title: str, points: Mapping[int, float], *, y_label: str, from_zero: bool = False) -> str:
    """A fenced mermaid chart of the points, empty where fewer than two can be drawn.

    Prefect's pages draw it, GitHub's too.
    """
    drawn = {step: points[step] for step in sorted(points) if abs(points[step]) < _PLOTTABLE}
    if len(drawn) < 2:
        return ""
    low, high = _padded(min(drawn.values()), max(drawn.values()))
    low = min(low, 0.0) if from_zero else low
    # Four digits of the range: an exponent, which other formats would give, is not in mermaid's grammar.
    decimals = max(0, 4 - math.floor(math.log10(high - low)))
    lines = (
        _MERMAID,
        "xychart-beta",
        f'    title "{_plain(title)}"',
        f'    x-axis "step" {min(drawn)} --> {max(drawn)}',
        f'    y-axis "{_plain(y_label)}" {low:.{decimals}f} --> {high:.{decimals}f}',
        f"    line [{', '.join(f'{value:.{decimals}f}' for value in _on_grid(drawn))}]",
    )
    return "\n".join(("```mermaid", *lines, "```"))


def mermaid_bars(title: str, bars: Mapping[str, float], *, x_label: str, y_label: str) -> str:
    """A fenced mermaid chart of named bars, empty where there are none."""
    if not bars:
        return ""
    names = ", ".join(f'"{_plain(name)}"' for name in bars)
    lines = (
        _MERMAID,
        "xychart-beta",
        f'    title "{_plain(title)}"',
        f'    x-axis "{_plain(x_label)}" [{names}]',
        f'    y-axis "{_plain(y_label)}" 0 --> {1.05 * max(bars.values()):.2f}',
        f"    bar [{', '.join(f'{value:.2f}' for value in bars.values())}]",
    )
    return "\n".join(("```mermaid", *lines, "```"))


def _on_grid(points: Mapping[int, float]) -> list[float]:
    """Values at _GRID evenly spaced steps: mermaid knows no other spacing on a numeric axis.

    Where points are dense, each position takes the mean of those around it; where they are sparse, the straight line
    between its neighbours. The ends are the first and the last point themselves.
    """
    steps = list(points)
    first, span = steps[0], steps[-1] - steps[0]
    dense: dict[int, list[float]] = {}
    for step in steps[1:-1]:
        dense.setdefault(round((step - first) / span * (_GRID - 1)), []).append(points[step])
    values, left = [points[first]], 0
    for position in range(1, _GRID - 1):
        at = first + span * position / (_GRID - 1)
        while steps[left + 1] < at:
            left += 1
        here = dense.get(position)
        values.append(fmean(here) if here else _between(points, steps[left], steps[left + 1], at))
    return [*values, points[steps[-1]]]


def _between(points: Mapping[int, float], left: int, right: int, at: float) -> float:
    share = (at - left) / (right - left)
    return points[left] * (1 - share) + points[right] * share


def _padded(low: float, high: float) -> tuple[float, float]:
    """A range with a little air; around a flat curve too, whose range would be empty."""
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - air, high + air


def _plain(text: str) -> str:
    """Text that cannot end the quoted string it stands in, nor start a directive or an entity."""
    return " ".join(re.sub(r"[^\w\s.,:()/+-]", " ", text).split()) or " "
