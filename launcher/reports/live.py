"""The page of a training while it runs: figures, pictures, nodes, and where else to look. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from launcher.formatting import (
    NOTHING,
    bytes_text,
    count_text,
    duration_text,
    loss_text,
    money_text,
    rate_text,
    share_text,
)
from launcher.job import JobState, JobStatus
from launcher.reports import mermaid
from launcher.reports.curves import Progress, summary
from launcher.reports.goodput import AttemptTimes, ledger
from launcher.reports.markdown import grid, joined, linked, markdown_table
from launcher.reports.nodes import gpu_health, node_table
from launcher.reports.places import RunPlace
from litgpt_demo.metrics import GpuRow, Row, curve
from litgpt_demo.runs import RecordedPrice

_NODES = 32  # those that something is wrong with come first
_FORESEEN = 10 * 365 * 86_400
"""Seconds of the longest training whose end has a date."""


@dataclass(frozen=True, kw_only=True)
class LivePage:
    """Everything that the page of a running attempt shows."""

    rows: Sequence[Row] = ()
    """The metrics of the run, as far as they are known."""
    nodes: Sequence[GpuRow] = ()
    """The newest health of each node that told of its GPUs."""
    stragglers: Sequence[Row] = ()
    """The newest row of kind `straggler` of each rank that the others waited for."""
    attempt: int = 1
    status: JobStatus | None = None
    """The state of the job; None before it is known."""
    times: Sequence[AttemptTimes] = ()
    """The times of all attempts, this one last."""
    price: RecordedPrice | None = None
    """None where the machines have no list price."""
    places: Sequence[RunPlace] = ()
    now: float = 0.0
    """Seconds since the epoch."""


def live_markdown(page: LivePage) -> str:
    """Return the page; what is not known is left out."""
    figures = [(name, value) for name, value in _figures(page) if value != NOTHING]
    nodes = node_table(page.nodes, page.stragglers)[:_NODES]
    return joined(
        [
            "" if page.rows else "The job has not reported a step yet.",
            markdown_table(("Figure", "Now"), figures) if figures else "",
            *training_charts(page.rows),
            "### Nodes" if nodes else "",
            grid(nodes) if nodes else "",
            "### Where to look" if page.places else "",
            linked(("What", "Where"), page.places) if page.places else "",
        ]
    )


def of_steps(progress: Progress) -> str:
    """Return the step, and how many there are where that is known."""
    return f"{progress.step:,} of {progress.steps:,}" if progress.steps else f"{progress.step:,}"


def _figures(page: LivePage) -> list[tuple[str, str]]:
    progress = summary(page.rows)
    percent = f" ({progress.percent:.0f} %)" if progress.steps else ""
    evaluated = "" if progress.evaluated is None else f" at step {progress.evaluated:,}"
    so_far, to_the_end = _costs(page, progress)
    return [
        ("State", _state(page.status)),
        ("Step", of_steps(progress) + percent if page.rows else NOTHING),
        ("Training loss", loss_text(progress.loss)),
        ("Validation loss", loss_text(progress.validation_loss) + evaluated),
        ("Learning rate", NOTHING if progress.learning_rate is None else f"{progress.learning_rate:.3g}"),
        ("Tokens seen", count_text(progress.tokens) if progress.tokens else NOTHING),
        ("Throughput", rate_text(progress.tokens_per_second)),
        ("MFU", share_text(progress.mfu)),
        ("Peak memory of rank 0", NOTHING if progress.memory is None else bytes_text(progress.memory)),
        ("GPU health", gpu_health(page.nodes, page.stragglers) or NOTHING),
        ("Time left", _time_left(progress.eta_seconds, page.now)),
        ("Cost so far", so_far),
        ("Cost at the end", to_the_end),
        ("Attempt", _attempt(page)),
    ]


def _state(status: JobStatus | None) -> str:
    """Return the state of a job, and what it waits for."""
    if status is None or status.state is JobState.UNKNOWN:
        return NOTHING
    return ": ".join([status.state.value, *[reason.what for reason in status.reasons[:1]]])


def _time_left(seconds: float | None, now: float) -> str:
    """Return the time that is left, and what the clock shows then."""
    if not seconds or not 0 < seconds < _FORESEEN:
        return NOTHING
    end = datetime.fromtimestamp(now + seconds, UTC)
    return f"{duration_text(seconds)}, until {end:%Y-%m-%d %H:%M} UTC"


def _attempt(page: LivePage) -> str:
    """Return the number of the attempt, and how often the training was started again, within it too."""
    lives = sum(row.get("kind") == "start" and row.get("attempt", page.attempt) == page.attempt for row in page.rows)
    restarts = page.attempt - 1 + max(0, lives - 1)
    return f"{page.attempt:,}" + (f", after {restarts:,} restart{'s' * (restarts > 1)}" if restarts else "")


def _costs(page: LivePage, progress: Progress) -> tuple[str, str]:
    """Return the cost until now and at the end, if the machines have a list price.

    The cost until now is that of the goodput ledger; to it comes the time left, with as many machines as there are now.
    """
    if page.price is None or (so_far := ledger(page.times, page.rows, page.price).cost) is None:
        return NOTHING, NOTHING
    starts = [row for row in page.rows if row.get("kind") == "start"]
    nodes = int(starts[-1].get("nodes", 0)) if starts else 0
    machines = nodes or (page.times[-1].nodes if page.times else 0)
    listed = f"at list price: {machines:,} x {page.price.machine} for ${page.price.usd:,.2f} an hour"
    left = progress.eta_seconds
    if not left or not machines:
        return f"{money_text(so_far)}, {listed}", NOTHING
    return f"{money_text(so_far)}, {listed}", money_text(so_far + left / 3600 * page.price.usd * machines)


# --- pictures ---------------------------------------------------------------------------------------------------------


def training_charts(rows: Sequence[Row]) -> list[str]:
    """Return the pictures of a training that can be drawn: loss, learning rate and throughput over its steps.

    All have a legend: without one mermaid draws up to the right edge, which cuts the last step's number.
    """
    losses = {"training": curve(rows, "step", "loss"), "validation": curve(rows, "evaluation", "validation_loss")}
    rate = curve(rows, "step", "learning_rate")
    drawn = [
        mermaid.lines("Loss", losses, y_label="loss, nats per token"),
        mermaid.lines("Learning rate", {"rate": rate}, y_label="learning rate", from_zero=True),
        _throughput_lines(rows),
    ]
    return [chart for chart in drawn if chart]


def _throughput_lines(rows: Sequence[Row]) -> str:
    """Return the points in thousands where they are many: mermaid writes every tick out in full."""
    pace, unit = curve(rows, "step", "tokens_per_second"), "tokens per second"
    if max(pace.values(), default=0.0) >= 10_000:
        pace, unit = {step: value / 1000 for step, value in pace.items()}, f"thousand {unit}"
    return mermaid.lines("Throughput", {"tokens/s": pace}, y_label=unit, from_zero=True)
