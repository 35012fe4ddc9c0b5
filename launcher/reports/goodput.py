"""The goodput ledger: where the wall time of a run went, over all its attempts.

`ledger` is pure: it makes a ledger of records of the run index, nodes' reports and rows of metrics. The parts add up to
the time from the first attempt's record to the last attempt's end. Each moment is booked once: the ledger walks from
one known moment to the next, and never back. Time that no record explains is booked as unknown. Inside an attempt,
times are seconds since its node began, by a monotonic clock; the moments of two machines are held in their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from launcher.config import PlatformConfig
from launcher.formatting import duration_text, share_text
from launcher.job import JobState
from launcher.machines import ListPrice
from launcher.runs.index import AttemptEnd, AttemptRecord, Index
from litgpt_demo.metrics import Row
from litgpt_demo.runs import NodeReport, RecordedPrice, node_reports
from litgpt_demo.storage import open_storage


class Part(StrEnum):
    """The parts of a run's wall time, in the order in which they come."""

    QUEUE = "queue"
    """The time from the attempt's record until the last machine was found."""
    PULL = "image pull"
    """The time from then until the last container began."""
    START = "start and end"
    """Processes that start, meet, load the model, and end: of the first life's beginning and the last one's end."""
    NETWORK_TEST = "network test"
    STAGE = "stage-in"
    FIRST_STEP = "first step"
    """The first step of each life, as far as it took longer than a usual one."""
    TRAINING = "training"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint stall"
    LOST = "lost work"
    """Training after the checkpoint that the next life resumed from."""
    RESTART = "restart"
    """The time from a failure to the next life's first step, without what has a part of its own."""
    COLLECTING = "collecting"
    """A job that makes models of a training that has ended."""
    STOPPED = "not running"
    """The time between an attempt and one that another command started: no command wanted the run to work."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class AttemptTimes:
    """Everything that is recorded of one attempt's times."""

    record: AttemptRecord
    end: AttemptEnd | None
    """None while no orchestrator has seen it end."""
    reports: Sequence[NodeReport] = ()


def attempt_times(index: Index, run: str) -> list[AttemptTimes]:
    """Return what is recorded of the times of a run's attempts, oldest first; damaged reports are left out."""
    ends = index.ends(run)
    return [
        AttemptTimes(
            record=record,
            end=ends.get(record.attempt),
            reports=node_reports(open_storage(record.directory), all_lives=True),
        )
        for record in index.records(run)
    ]


@dataclass(frozen=True)
class _Span:
    until: float | None
    """Seconds since the epoch. A span books nothing if its end is unknown or has passed."""
    part: Part
    nodes: int
    """The number of machines that are held."""
    within: Mapping[Part, float] = field(default_factory=dict)
    """Seconds of other parts within it, which are booked first."""


@dataclass(kw_only=True)
class Ledger:
    """Seconds and dollars of each part of a run."""

    seconds: dict[Part, float] = field(default_factory=lambda: defaultdict(float))
    cost: dict[Part, float] = field(default_factory=lambda: defaultdict(float))
    """Dollars of each part, at the price of each attempt's machines."""
    process_seconds: float = 0.0
    """Seconds in which GPUs were held, or processes if there are no GPUs."""
    price: RecordedPrice | None = None
    now: float = 0.0
    """The moment up to which everything is booked."""

    def book(self, span: _Span, *, processes: int, usd_per_hour: float) -> None:
        """Book the time from now until the end of a span, on machines of N processes and this price."""
        if span.until is None or span.until <= self.now:
            return
        unbooked = span.until - self.now
        self.now = span.until
        for part, seconds in (*span.within.items(), (span.part, unbooked)):
            booked = min(unbooked, max(0.0, seconds))
            self.seconds[part] += booked
            self.cost[part] += booked * span.nodes * usd_per_hour / 3600
            self.process_seconds += booked * span.nodes * processes
            unbooked -= booked

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())

    @property
    def usd(self) -> float:
        return sum(self.cost.values())

    @property
    def spent(self) -> list[tuple[Part, float]]:
        """The parts that took time, in their order."""
        return [(part, self.seconds[part]) for part in Part if self.seconds.get(part, 0.0) > 0]

    @property
    def note(self) -> str:
        note = "Wall time over all attempts; only training counts, and lost work was trained again."
        if self.price is None:
            return note
        return (
            f"{note} Cost: the time in which machines were held, at ${self.price.usd:,.2f} an hour of "
            f"{self.price.machine}, {self.price.source}; an attempt on other machines has their price."
        )

    def rows(self) -> list[dict[str, str]]:
        """Return the table, the sum last; parts that took no time are left out, and the cost if no price is known."""
        parts = [(part.value, seconds, self.cost[part]) for part, seconds in self.spent]
        rows = []
        for name, seconds, usd in [*parts, ("wall time", self.wall, self.usd)]:
            row = {"part": name, "time": duration_text(seconds), "share": share_text(seconds / (self.wall or 1.0))}
            if self.price is not None:
                row["cost"] = f"${usd:,.2f}"
            rows.append(row)
        return rows


def ledger(attempts: Sequence[AttemptTimes], rows: Sequence[Row], price: RecordedPrice | None = None) -> Ledger:
    """Return the ledger of a run. `price` is that of attempts whose platform this version cannot read."""
    book = Ledger(price=price)
    if attempts:
        book.now = attempts[0].record.created
    lives = _lives(rows)
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=False):
        platform = attempt.record.platform
        usd_per_hour = _usd_per_hour(attempt.record, price)
        for span in _spans(attempt, following, lives, rows):
            book.book(span, processes=_count(platform, "processes_per_node"), usd_per_hour=usd_per_hour)
    return book


def _spans(
    attempt: AttemptTimes, following: AttemptTimes | None, all_lives: Sequence[_Life], rows: Sequence[Row]
) -> Iterator[_Span]:
    record, end, reports = attempt.record, attempt.end, attempt.reports
    lives = [life for life in all_lives if life.start["attempt"] == record.attempt]
    later = next((life for life in all_lives if life.start["attempt"] > record.attempt), None)
    nodes = _count(record.platform, "nodes")
    scheduled = pulled = ended = None
    if end is not None:
        scheduled, pulled, ended = end.scheduled, end.pulled, end.ended
    reported = max((report.ended for report in reports), default=None)
    beginning = Part.START if record.attempt == 1 else Part.RESTART
    before_life = Part.UNKNOWN if pulled is None else beginning
    held = nodes if scheduled is not None else 0
    yield _Span(scheduled, Part.QUEUE, 0)
    yield _Span(pulled, Part.PULL, held)

    for life, next_life in zip(lives, [*lives[1:], later], strict=False):
        yield _Span(life.started, before_life, held)
        held = nodes
        network_test, stage = life.start.get("network_test_seconds", 0.0), life.start.get("stage_seconds", 0.0)
        within = {Part.NETWORK_TEST: network_test, Part.STAGE: stage}
        yield _Span(life.started + life.rows[0]["elapsed"], beginning, held, within)
        # A life stopped when its first rank fell, when the node of that rank reported, or when the attempt was over.
        own = [report for report in reports if report.started == life.started]
        moments = [rank.time for report in own for rank in report.ranks if rank.time is not None]
        moments += [report.ended for report in own]
        stopped = min((moment for moment in moments if moment >= life.last), default=None)
        is_last = life is lives[-1]
        if stopped is None and is_last:
            stopped = reported if ended is None else ended
        resumed = None if next_life is None else next_life.start["step"]
        yield from _training_spans(life, stopped, held, resumed=resumed)
        if stopped is None and next_life is not None and not is_last:
            yield _Span(next_life.started, Part.UNKNOWN, held)  # lost or restarting: no report distinguishes them
        beginning = Part.RESTART
        before_life = Part.UNKNOWN if pulled is None else beginning

    started = [report for report in reports if report.started is not None]
    if not lives and started:  # a script, or a job that collects, or a machine that took its rows with it
        first = min(started, key=lambda report: report.started or 0.0)
        yield _Span(first.started, before_life, held)
        held = nodes
        part = Part.UNKNOWN
        if first.exit_code != 0 and not first.ranks:
            part = beginning
        elif later is None and any(row.get("kind") == "end" for row in rows):
            part = Part.COLLECTING
        within = {Part.NETWORK_TEST: first.network_test_seconds, Part.STAGE: first.stage_seconds}
        yield _Span(first.ended, part, held, within)
    elif not lives:
        yield _Span(ended, Part.UNKNOWN, held)

    ending = Part.START if following is None else Part.RESTART
    yield _Span(reported, ending, held)
    yield _Span(ended, ending, held)
    if end is not None and ended is None:  # the end was noticed later, and no record says how much later
        yield _Span(end.seen, Part.UNKNOWN, held)
    if following is not None:
        # A cancellation, or a new command, made the time between the two attempts.
        is_cancelled = end is not None and end.state is JobState.CANCELLED
        is_same_command = record.flow_run == following.record.flow_run
        part = Part.RESTART if is_same_command and not is_cancelled else Part.STOPPED
        yield _Span(following.record.created, part, 0)


def _count(platform: Mapping[str, Any], name: str) -> int:
    value = platform.get(name)
    return value if isinstance(value, int) else 1


def _usd_per_hour(record: AttemptRecord, price: RecordedPrice | None) -> float:
    own: ListPrice | RecordedPrice | None = price
    with suppress(ValidationError):
        own = TypeAdapter[PlatformConfig](PlatformConfig).validate_python(record.platform).price
    return own.usd if own else 0.0


class _Life(NamedTuple):
    start: Row
    rows: list[Row]

    @property
    def started(self) -> float:
        return float(self.start["node_started"])

    @property
    def last(self) -> float:
        return self.started + float(self.rows[-1]["elapsed"])


def _lives(rows: Sequence[Row]) -> list[_Life]:
    lives: list[_Life] = []
    for row in rows:
        if row.get("kind") == "start":
            lives.append(_Life(row, []))
        if lives and "elapsed" in row:
            lives[-1].rows.append(row)
    return [life for life in lives if life.rows and {"attempt", "node_started"} <= life.start.keys()]


def _training_spans(life: _Life, stopped: float | None, nodes: int, *, resumed: int | None) -> Iterator[_Span]:
    rows, first, last = life.rows, life.rows[0]["elapsed"], life.rows[-1]["elapsed"]
    has_left = any(row["kind"] in {"end", "leave"} for row in rows)
    kept = last
    if has_left:
        # It came to the end of its work, or left on purpose: the last save follows the last step or evaluation.
        kept = max(row["elapsed"] for row in rows if row["kind"] not in {"checkpoint", "end"})
    elif resumed is not None:
        # Until the state that the next life resumed from: when its checkpoint was taken, or else its last row.
        saved = [row for row in rows if row["kind"] == "checkpoint" and row["step"] == resumed and "taken" in row]
        taken = [row["taken"] + row.get("seconds", 0.0) for row in saved]
        if not taken:
            steps_kept = [row["elapsed"] for row in rows if row["kind"] != "checkpoint" and row["step"] <= resumed]
            taken = [max(steps_kept, default=first)]
        kept = min(last, *taken)
    elif stopped is not None:
        kept = max(last, stopped - life.started)  # it trained on after its last row, and no row shows that as lost
    part = Part.TRAINING
    first_step = _extra_of_first_step(life)
    if first_step is None:
        part, first_step = Part.UNKNOWN, 0.0
    within = {Part.FIRST_STEP: first_step, Part.EVALUATION: 0.0, Part.CHECKPOINT: 0.0}
    for row in rows:  # the training stood still
        seconds = row.get("seconds", 0.0)
        if row["kind"] in {"evaluation", "sample"} and row["elapsed"] <= kept:
            within[Part.EVALUATION] += seconds
        # The last save begins at the very end, and what comes after is its stall.
        if row["kind"] == "checkpoint" and row.get("taken", kept) < kept:
            within[Part.CHECKPOINT] += seconds
    yield _Span(life.started + kept, part, nodes, within)
    if has_left:
        yield _Span(life.last, Part.CHECKPOINT, nodes)
    elif resumed is not None:
        yield _Span(stopped, Part.LOST, nodes)


def _extra_of_first_step(life: _Life) -> float | None:
    steps = [row for row in life.rows if row["kind"] == "step" and "step_seconds" in row]
    if not steps or "first_step_seconds" not in steps[0]:
        return 0.0
    compiled = float(steps[0]["first_step_seconds"])
    usual = [row["step_seconds"] for row in steps[1:]]
    further = steps[0]["step"] - life.start["step"] - 1  # steps that the first row is of, but the first one
    if further > 0:
        usual.append(max(0.0, steps[0]["step_seconds"] * (further + 1) - compiled) / further)
    if not usual:
        return None
    return max(0.0, compiled - float(median(usual)))
