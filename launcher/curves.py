"""Progress and curves of a training, read from its rows (litgpt_demo.metrics), with fewer points for the eye."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

from launcher.formatting import NOTHING, duration_text, loss_text, rate_text, share_text
from litgpt_demo.metrics import Row

RECENT = 10
"""Step rows that "now" is taken over: enough to hide one slow step, few enough to show a slow node."""
_PAUSES = ("evaluation", "sample", "checkpoint")
"""Kinds of rows in whose seconds the training stood still."""
_DRAWN = 1e300
"""The bound of what a chart shows. NaN is below no bound."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a training; what is not known yet is None."""

    step: int
    steps: int | None
    loss: float | None
    """Training loss of the newest logged step; nats per token, as is the validation loss."""
    validation_loss: float | None
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
    start: Row
    """The start row of the newest attempt; empty where a log was joined too late to contain it."""

    @property
    def facts(self) -> list[str]:
        """The facts that are known: loss, throughput, time left, MFU."""
        loss, pace = f"loss {loss_text(self.loss)}", rate_text(self.tokens_per_second)
        remaining, used = f"{duration_text(self.eta_seconds or None)} left", f"MFU {share_text(self.mfu)}"
        return [fact for fact in (loss, pace, remaining, used) if NOTHING not in fact]


def summary(rows: Sequence[Row]) -> Progress:
    """Return the progress after `rows`; after a restart it is the step that was resumed from, not the farthest step."""
    begun = next((number for number in reversed(range(len(rows))) if rows[number].get("kind") == "start"), None)
    start: Row = {}
    attempt = rows[begun or 0 :]
    if begun is not None:
        start = attempt[0]
    step, steps, percent, eta = 0, None, 0.0, None
    if attempt:
        step = int(attempt[-1].get("step", 0))
    tokens = _as_of(rows, step, "step", "tokens")
    if tokens is None:
        tokens = 0
    paces = [float(row["step_seconds"]) for row in attempt if "step_seconds" in row]
    if "steps" in start:
        steps = int(start["steps"])
        percent = min(100.0, 100 * step / (steps or 1))
        if step >= steps:
            eta = 0.0
        elif len(paces) > 1:
            still = [float(row.get("seconds", 0)) for row in attempt if row.get("kind") in _PAUSES]
            pauses = sum(still) / max(step - int(attempt[0].get("step", 0)), 1)
            eta = (steps - step) * (median(paces[-RECENT:]) + pauses)
            speed = _recent(attempt, "tokens_per_second")
            if "run_tokens" in start and speed:  # later steps may have larger batches
                eta = (start["run_tokens"] - tokens) / speed + (steps - step) * pauses
    memory = _as_of(rows, step, "step", "memory")
    return Progress(
        step=step,
        steps=steps,
        loss=_as_of(rows, step, "step", "loss"),
        validation_loss=_as_of(rows, step, "evaluation", "validation_loss"),
        tokens=int(tokens),
        tokens_per_second=_recent(attempt, "tokens_per_second"),
        mfu=_recent(attempt, "mfu"),
        memory=None if memory is None else int(memory),
        eta_seconds=eta,
        percent=percent,
        start=start,
    )


def _recent(rows: Sequence[Row], name: str) -> float | None:
    values = [float(row[name]) for row in rows if name in row][-RECENT:]
    return median(values) if values else None


def _as_of(rows: Sequence[Row], step: int, kind: str, name: str) -> float | None:
    """The newest value at `step` or before it; from the end, because a live view repeats this query."""
    for row in reversed(rows):
        if row.get("kind") == kind and name in row and int(row["step"]) <= step:
            return float(row[name])
    return None


def downsample(points: Mapping[int, float], limit: int = 120) -> dict[int, float]:
    """Return at most `limit` (4 or more) of the points, in step order: the ends, and the extremes of each stretch, so
    that no spike is lost. Points that cannot be drawn are left out."""
    steps = sorted(step for step, value in points.items() if abs(value) <= _DRAWN)
    if len(steps) <= limit:
        return {step: points[step] for step in steps}
    inner, buckets = steps[1:-1], (limit - 2) // 2
    edges = [len(inner) * number // buckets for number in range(buckets + 1)]
    kept = {steps[0], steps[-1]}
    for first, past in pairwise(edges):
        kept |= {extreme(inner[first:past], key=points.__getitem__) for extreme in (min, max)}
    return {step: points[step] for step in sorted(kept)}


def smoothed(points: Mapping[int, float], stretch: float = 0.02) -> dict[int, float]:
    """Return the mean around each point, over about `stretch` of all points. It is centred, and narrow at both ends, so
    that it neither lags a steep fall nor ends on the last point's noise."""
    finite = {step: value for step, value in sorted(points.items()) if math.isfinite(value)}
    sums, last, averages = [0.0, *accumulate(finite.values())], len(finite) - 1, {}
    for number, step in enumerate(finite):
        reach = min(round(stretch * len(finite) / 2), number)
        first, past = number - reach, number + min(reach, last - number) + 1
        averages[step] = (sums[past] - sums[first]) / (past - first)
    return averages
