"""The events of runs in Prefect: what automations are triggered by, and what their messages can say.

An event has the run as its resource, `train-litgpt.run.<run>`, and its fields as payload; Prefect adds the flow run
with its tags. Prefect sends events from a queue of its own, in another thread: a server that is away stops and slows
no run, and what happens meanwhile is dropped after some seconds. What must not be lost is in the run's folder.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import ClassVar
from uuid import NAMESPACE_URL, UUID, uuid5

from prefect.context import FlowRunContext
from prefect.events import emit_event

from launcher.formatting import loss_text
from launcher.runs.index import AttemptRecord
from litgpt_demo.metrics import Row

RESOURCE = "train-litgpt.run."
"""The beginning of a run's resource id."""

_CHECKPOINTS = 60.0
"""Seconds between two events of checkpoints. One that is not sent for them is dropped after some 7 s (Prefect 3.8), so
that the queue of a run whose server is away stays short."""
_LOSSES = 64  # evaluations that are kept, for checkpoints are committed later than they are taken


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """An event of a run. Its fields and `text` are the payload."""

    name: ClassVar[str]

    run: str
    """The name of the run."""
    folder: str
    """The address of the run's folder."""
    sweep: str | None
    """The name of the sweep that the run is a trial of."""
    attempt: int
    submitted: float
    """Seconds since the epoch at which the attempt was written down."""
    step: int
    """The training step that it happened at; of a verdict the run's newest checkpoint."""

    @property
    def text(self) -> str:
        """Return the event as a sentence for a person."""
        raise NotImplementedError

    @property
    def payload(self) -> dict[str, object]:
        """Return the fields and the text as JSON can have them; a number that is not finite is null."""
        told = {name: None if _is_endless(value) else value for name, value in asdict(self).items()}
        return {"text": self.text, **told}

    @property
    def id(self) -> UUID:
        """Return the id of the event, which follows from what happened.

        Prefect's server keeps one of several events with an id, and tells its automations of one where they come within
        five minutes: two orchestrators that follow one job tell the same.
        """
        return uuid5(NAMESPACE_URL, f"{self.name} {self.folder} {self.attempt} {self.submitted} {self.step}")


@dataclass(frozen=True, kw_only=True)
class RunStarted(RunEvent):
    """An attempt began to train: rank 0 has loaded the model and data and written its first row."""

    name: ClassVar[str] = "train-litgpt.run.started"

    steps: int
    """The number of steps of the whole run."""
    platform: str
    processes: int
    """The number of ranks."""

    @property
    def text(self) -> str:
        """Return the event as a sentence for a person."""
        place = f"{self.processes} processes on {self.platform}"
        return f"{self.run}: attempt {self.attempt} trains with {place}, from step {self.step:,} to {self.steps:,}"


@dataclass(frozen=True, kw_only=True)
class CheckpointCommitted(RunEvent):
    """A checkpoint is whole: the run can go on from it wherever its training ends."""

    name: ClassVar[str] = "train-litgpt.checkpoint.committed"

    validation_loss: float | None
    """Nats per token, of the newest evaluation up to that step."""

    @property
    def text(self) -> str:
        """Return the event as a sentence for a person."""
        loss = f", validation loss {loss_text(self.validation_loss)}" if self.validation_loss is not None else ""
        return f"{self.run}: the checkpoint of step {self.step:,} is committed{loss}"


@dataclass(frozen=True, kw_only=True)
class VerdictGiven(RunEvent):
    """An attempt ended badly, and what follows is decided. What the job printed is left to its logs."""

    name: ClassVar[str] = "train-litgpt.verdict"

    fault: str
    """The class of the failure."""
    node: int | None
    rank: int | None
    machine: str
    """The machine that is to blame; empty where that is nobody's or not clear."""
    action: str
    """`restart` where another attempt follows, else `stop`."""
    reason: str
    """The reason for the action, where the class is not all of it."""
    advice: str
    logs: str
    """The address of the attempt's logs."""

    @property
    def text(self) -> str:
        """Return the event as a sentence for a person."""
        where = "" if self.node is None else f" on node {self.node}"
        where += "" if self.rank is None else f", rank {self.rank}"
        follows = "another attempt follows" if self.action == "restart" else f"no other follows: {self.advice}"
        return f"{self.run}: attempt {self.attempt} ended as {self.fault}{where}; {follows}"


@dataclass(frozen=True, kw_only=True)
class RunFinished(RunEvent):
    """A run is done for the first time: trained, collected, evaluated, reported."""

    name: ClassVar[str] = "train-litgpt.run.finished"

    loss: float | None
    """The training loss of the last step, nats per token."""
    validation_loss: float
    """Nats per token, of the model that was collected."""
    tokens: int
    seconds: float
    """The wall time over all attempts."""
    usd: float | None
    """The cost of all attempts at list price; null where the machines have none."""
    report: str
    """The address of the report."""

    @property
    def text(self) -> str:
        """Return the event as a sentence for a person."""
        cost = "" if self.usd is None else f", ${self.usd:,.2f} at list price"
        loss = loss_text(self.validation_loss)
        return f"{self.run} is finished: validation loss {loss} after {self.tokens:,} tokens{cost}; {self.report}"


RUN_EVENTS: tuple[type[RunEvent], ...] = (RunStarted, CheckpointCommitted, VerdictGiven, RunFinished)


def payload_fields(kind: type[RunEvent]) -> list[str]:
    """Return the names of the fields of an event's payload."""
    return ["text", *(field.name for field in fields(kind))]


def emit_run_event(event: RunEvent) -> None:
    """Hand an event to Prefect's queue; outside of a flow run there is no server that it would be of use to."""
    if FlowRunContext.get() is None:
        return
    resource = {"prefect.resource.id": f"{RESOURCE}{event.run}", "prefect.resource.name": event.run}
    emit_event(event.name, resource=resource, payload=event.payload, id=event.id)


class AttemptEvents:
    """Makes events of the rows of an attempt: its start, and of its checkpoints one a minute and the newest."""

    def __init__(self, record: AttemptRecord, folder: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin before the first row of the attempt `record`, whose run has this folder."""
        self._record, self._folder, self._clock = record, folder, clock
        self._started = False
        self._losses: deque[tuple[int, float]] = deque(maxlen=_LOSSES)
        self._checkpoint: int | None = None
        self._next = -math.inf

    def know(self, rows: Iterable[Row]) -> None:
        """Take up rows that an orchestrator before has handed on, and made events of."""
        for row in rows:
            self._note(row)
            self._started |= row.get("kind") == "start" and row.get("attempt") == self._record.attempt

    def take(self, row: Row) -> Iterator[RunEvent]:
        """Return the events of a new row; a job that its platform starts again within an attempt has one start."""
        self._note(row)
        if row.get("kind") == "start" and not self._started:
            self._started = True
            yield self._start(row)
        if row.get("kind") == "checkpoint":
            self._checkpoint = int(row["step"])
        if self._clock() >= self._next:
            yield from self.rest()

    def rest(self) -> Iterator[RunEvent]:
        """Return the event of the newest checkpoint, if it has had none."""
        if (step := self._checkpoint) is None:
            return
        self._checkpoint, self._next = None, self._clock() + _CHECKPOINTS
        losses = [loss for known, loss in self._losses if known <= step]
        record = self._record
        yield CheckpointCommitted(
            run=record.run, folder=self._folder, sweep=record.sweep, attempt=record.attempt, submitted=record.created,
            step=step, validation_loss=losses[-1] if losses else None,
        )  # fmt: skip

    def _note(self, row: Row) -> None:
        if row.get("kind") == "evaluation" and "validation_loss" in row:
            self._losses.append((int(row["step"]), float(row["validation_loss"])))

    def _start(self, row: Row) -> RunStarted:
        record = self._record
        return RunStarted(
            run=record.run, folder=self._folder, sweep=record.sweep, attempt=record.attempt, submitted=record.created,
            step=int(row["step"]), steps=int(row.get("steps", 0)), platform=str(record.platform.get("kind", "")),
            processes=int(row.get("world_size", 0)),
        )  # fmt: skip


def _is_endless(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
