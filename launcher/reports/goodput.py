"""The goodput ledger: where the wall time of a run went, over all its attempts.

`ledger` is pure: it makes a ledger of records of the run index, nodes' reports and rows of metrics. The parts add up to
the time from the first attempt's record to the last attempt's end. Each moment is booked once: the ledger walks from
one known moment to the next, and never back. Time that no record explains is booked as unknown. Inside an attempt,
times are seconds since its node began, by a monotonic clock; the moments of two machines are held in their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from launcher.config import PlatformConfig
from launcher.formatting import duration_text, share_text
from launcher.job import JobState
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
    GATE = "gate"
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
    """The time between an attempt and one that another command started: nobody wanted it to run."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class AttemptTimes:
    """Everything that is recorded of one attempt's times."""

    record: AttemptRecord
    end: AttemptEnd | None
    """None while nobody has seen it end."""
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


@dataclass(kw_only=True)
class Ledger:
    """Seconds of each part, and node-seconds in which machines were held for it."""

    seconds: dict[Part, float] = field(default_factory=lambda: defaultdict(float))
    held: dict[Part, float] = field(default_factory=lambda: defaultdict(float))
    cost: dict[Part, float] = field(default_factory=lambda: defaultdict(float))
    """Dollars of each part, at the price of the machines that each attempt had."""
    process_seconds: float = 0.0
    """Seconds in which GPUs were held, or processes where there are no GPUs."""
    price: RecordedPrice | None = None
    now: float = 0.0
    """The moment up to which everything is booked."""
    nodes: int = 0
    """Machines that are held at that moment."""
    processes: int = 1
    """The processes of each of them."""
    usd_per_hour: float = 0.0
    """The price of each of them."""

    def until(self, moment: float | None, part: Part, within: Mapping[Part, float] | None = None) -> None:
        """Book the time until `moment`: to `within` as much as it says and there is, the rest to `part`.

        A moment that is not known, or has passed, books nothing.
        """
        left = 0.0 if moment is None else max(0.0, moment - self.now)
        self.now += left
        for each, seconds in (*(within or {}).items(), (part, left)):
            taken = min(left, max(0.0, seconds))
            self.seconds[each] += taken
            self.held[each] += taken * self.nodes
            self.cost[each] += taken * self.nodes * self.usd_per_hour / 3600
            self.process_seconds += taken * self.nodes * self.processes
            left -= taken

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())

    @property
    def usd(self) -> float:
        """The dollars that all parts have cost."""
        return sum(self.cost.values())

    @property
    def spent(self) -> list[tuple[Part, float]]:
        """The parts that took time, in their order."""
        return [(part, seconds) for part in Part if (seconds := self.seconds.get(part, 0.0)) > 0]

    @property
    def note(self) -> str:
        known = "Wall time over all attempts; training is what counts, lost work what was trained again."
        if (price := self.price) is None:
            return known
        return (
            f"{known} Cost: the time in which machines were held, at ${price.usd:,.2f} an hour of {price.machine}, "
            f"{price.source}; an attempt on other machines has their price."
        )

    def rows(self) -> list[dict[str, str]]:
        """The table, the sum last; parts that took no time are left out, and the cost where no price is known."""
        parts = [(part.value, seconds, self.cost.get(part, 0.0)) for part, seconds in self.spent]
        return [
            {"part": name, "time": duration_text(seconds), "share": share_text(seconds / (self.wall or 1.0))}
            | ({"cost": f"${usd:,.2f}"} if self.price else {})
            for name, seconds, usd in [*parts, ("wall time", self.wall, self.usd)]
        ]


def ledger(attempts: Sequence[AttemptTimes], rows: Sequence[Row], price: RecordedPrice | None = None) -> Ledger:
    """The ledger of a run, from its attempts, the oldest first, and its metrics, as they were written.

    `price` is that of attempts whose platform this version cannot read; the others have their own.
    """
    every, book = _lives(rows), Ledger(price=price, now=attempts[0].record.created if attempts else 0.0)
    for attempt, next_one in zip(attempts, [*attempts[1:], None], strict=False):
        record, end, reports = attempt.record, attempt.end, attempt.reports
        lives = [life for life in every if life.start["attempt"] == record.attempt]
        later = next((life for life in every if life.start["attempt"] > record.attempt), None)
        scheduled, pulled, ended = (None, None, None) if end is None else (end.scheduled, end.pulled, end.ended)
        reported = max((report.ended for report in reports), default=None)
        asked = record.platform.get("nodes")
        nodes = asked if isinstance(asked, int) else 1
        processes = record.platform.get("processes")
        book.processes = processes if isinstance(processes, int) else 1
        book.usd_per_hour = _usd_per_hour(record, price)
        beginning = Part.START if record.attempt == 1 else Part.RESTART
        book.until(scheduled, Part.QUEUE)
        book.nodes = nodes if scheduled is not None else 0
        book.until(pulled, Part.PULL)
        for life, following in zip(lives, [*lives[1:], later], strict=False):
            book.until(life.started, beginning if pulled is not None else Part.UNKNOWN)
            book.nodes = nodes
            before = {Part.GATE: life.start.get("gate_seconds", 0.0), Part.STAGE: life.start.get("stage_seconds", 0.0)}
            book.until(life.started + life.rows[0]["elapsed"], beginning, before)
            # It stopped when its first rank fell, or the node of its first rank reported, or all of it was over.
            own = [report for report in reports if report.started == life.started]
            fell = [rank.time for report in own for rank in report.ranks if rank.time is not None]
            inside = [moment for moment in (*fell, *(report.ended for report in own)) if moment >= life.last]
            over = reported if ended is None else ended
            stop = min(inside) if inside else over if life is lives[-1] else None
            _book_training(book, life, stop, resumed=None if following is None else following.start["step"])
            if stop is None and following is not None and life is not lives[-1]:
                book.until(following.started, Part.UNKNOWN)  # lost or restarting: no report tells them apart
            beginning = Part.RESTART
        begun = {report.started: report for report in reports if report.started is not None}
        if not lives and begun:  # no row of metrics tells of it, and a node's report does
            first = begun[min(begun)]
            book.until(first.started, beginning if pulled is not None else Part.UNKNOWN)
            book.nodes = nodes
            before = {Part.GATE: first.gate_seconds, Part.STAGE: first.stage_seconds}
            # Whether its ranks trained is not known: a script writes no rows, and its machine may have taken them.
            trained = later is None and any(row.get("kind") == "end" for row in rows)
            never_began = first.exit_code != 0 and not first.ranks
            ran = Part.COLLECTING if trained else Part.UNKNOWN
            book.until(first.ended, beginning if never_began else ran, before)
        elif not lives:
            book.until(ended, Part.UNKNOWN)
        ending = Part.START if next_one is None else Part.RESTART
        book.until(reported, ending)
        book.until(ended, ending)
        if end is not None and ended is None:  # somebody looked later, and nothing says how much later
            book.until(end.seen, Part.UNKNOWN)
        book.nodes = 0
        if next_one is not None:
            # Who cancels a run, or starts it by a new command, made the time between the two.
            cancelled = end is not None and end.state is JobState.CANCELLED
            same = record.flow_run == next_one.record.flow_run
            book.until(next_one.record.created, Part.RESTART if same and not cancelled else Part.STOPPED)
    return book


def _usd_per_hour(record: AttemptRecord, price: RecordedPrice | None) -> float:
    try:
        settings = TypeAdapter[PlatformConfig](PlatformConfig).validate_python(record.platform)
    except ValidationError:
        return 0.0 if price is None else price.usd
    return 0.0 if settings.price is None else settings.price.usd


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


def _book_training(book: Ledger, life: _Life, stopped: float | None, *, resumed: int | None) -> None:
    """Book a life from its first step until it stopped; the next one, if there is one, `resumed` from that step."""
    rows, first, last = life.rows, life.rows[0]["elapsed"], life.rows[-1]["elapsed"]
    kept = last
    if left := any(row["kind"] in {"end", "leave"} for row in rows):
        # It came to the end of its work, or left it on purpose: behind its last step or evaluation is the last save.
        kept = max(row["elapsed"] for row in rows if row["kind"] not in {"checkpoint", "end"})
    elif resumed is not None:
        # Until the state that the next one resumed from was there: a checkpoint of it was taken, or a row tells of it.
        saved = [row for row in rows if row["kind"] == "checkpoint" and row["step"] == resumed and "taken" in row]
        told = [row["elapsed"] for row in rows if row["kind"] != "checkpoint" and row["step"] <= resumed]
        taken = [row["taken"] + row.get("seconds", 0.0) for row in saved]
        kept = min(last, *(taken or [max(told, default=first)]))
    elif stopped is not None:
        kept = max(last, stopped - life.started)  # it trained on after its last row, and nothing has shown it lost
    # How much longer its first step took than a usual one.
    part, within = Part.TRAINING, {Part.FIRST_STEP: 0.0, Part.EVALUATION: 0.0, Part.CHECKPOINT: 0.0}
    steps = [row for row in rows if row["kind"] == "step" and "step_seconds" in row]
    if steps and "first_step_seconds" in steps[0]:
        compiled, usual = steps[0]["first_step_seconds"], [row["step_seconds"] for row in steps[1:]]
        if (more := steps[0]["step"] - life.start["step"] - 1) > 0:  # the first row is of several steps
            usual.append(max(0.0, steps[0]["step_seconds"] * (more + 1) - compiled) / more)
        if usual:
            within[Part.FIRST_STEP] = max(0.0, compiled - median(usual))
        else:  # a single step: how long a usual one takes is not known
            part = Part.UNKNOWN
    for row in rows:  # the training stood still
        seconds = row.get("seconds", 0.0)
        if row["kind"] == "evaluation" and row["elapsed"] <= kept:
            within[Part.EVALUATION] += seconds
        # The last save begins at the very end, and what comes after is its stall.
        if row["kind"] == "checkpoint" and row.get("taken", kept) < kept:
            within[Part.CHECKPOINT] += seconds
    book.until(life.started + kept, part, within)
    if left:
        book.until(life.last, Part.CHECKPOINT)
    elif resumed is not None:
        book.until(stopped, Part.LOST)
