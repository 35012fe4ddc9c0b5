"""Events of a pipeline, so that no step knows who listens: the command line shows them as steps and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from threading import RLock
from typing import Any, Literal, Self, TypeAlias

from launcher.job import JobId
from launcher.platforms.settings import PlatformSettings


class Step(StrEnum):
    """The steps of a pipeline: what people call each, and what its task in Prefect is called."""

    task: str

    DATASET = "dataset", "prepare-dataset"
    IMAGE = "image", "build-image"
    CREDENTIALS = "credentials", "get-credentials"
    TRAINING = "training", "train"
    CHECKPOINTS = "checkpoints", "collect-checkpoints"
    EVALUATION = "evaluation", "evaluate"
    SCRIPT = "script", "run-script"

    def __new__(cls, name: str, task: str) -> Self:
        step = str.__new__(cls, name)
        step._value_, step.task = name, task
        return step


TRAINING_STEPS = (Step.DATASET, Step.IMAGE, Step.CREDENTIALS, Step.TRAINING, Step.CHECKPOINTS)
SCRIPT_STEPS = (Step.IMAGE, Step.CREDENTIALS, Step.SCRIPT)


@dataclass(frozen=True, kw_only=True)
class StepStarted:
    step: Step
    what: str = ""


@dataclass(frozen=True, kw_only=True)
class StepProgress:
    """A step got further; `fraction` is None where the end is not known."""

    step: Step
    what: str
    fraction: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """A step ended well. `reused` means that its result existed already."""

    step: Step
    what: str
    reused: bool = False


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """A metrics row of a job that runs (litgpt_demo.metrics)."""

    row: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class MetricsKnown:
    """The rows that an earlier orchestrator has emitted, of a job that this one reattaches to."""

    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Output:
    line: str


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something a person should read: a finding, an attempt that ended, where things are."""

    what: str
    severity: str = "info"
    ends: bool = False
    """True for the last event of a trial."""


@dataclass(frozen=True, kw_only=True)
class FlowRunStarted:
    """A flow run of Prefect's began in this process: the pipeline itself, or a trial of a sweep."""

    id: str
    steps: tuple[Step, ...] = TRAINING_STEPS


JobPhase: TypeAlias = Literal["submitting", "started", "ended"]


@dataclass(frozen=True, kw_only=True)
class JobChanged:
    """A job is being submitted, continues by itself on its platform from now on, or has ended."""

    phase: JobPhase
    run: str
    """The name of the run or script that the job is an attempt of."""
    sweep: str | None = None
    """The name of the sweep that the run is a trial of."""
    root: str
    job_id: JobId
    platform: PlatformSettings


Event: TypeAlias = (
    StepStarted | StepProgress | StepDone | MetricsRow | MetricsKnown | Output | Note | FlowRunStarted | JobChanged
)

TRIAL: ContextVar[str] = ContextVar("trial", default="")
"""The trial of a sweep that the events are of, by what it varies; listeners are called where an event is reported."""

_LISTENERS: list[Callable[[Event], None]] = []
_LOCK = RLock()


def report(event: Event) -> None:
    """Hand an event to the listeners, one event at a time: they come from several threads."""
    with _LOCK:
        for receive in [*_LISTENERS]:
            receive(event)


@dataclass(frozen=True)
class Listener:
    """Calls `receive` with each event while it is entered."""

    receive: Callable[[Event], None]

    def __enter__(self) -> Self:
        _LISTENERS.append(self.receive)
        return self

    def __exit__(self, *exception: object) -> None:
        _LISTENERS.remove(self.receive)
