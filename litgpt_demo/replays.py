"""The result of a replay: steps of a run that were trained again, and the samples of the last of them, by their losses.

Nodes write it (litgpt_demo.training.replaying), and launchers read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from pydantic import ConfigDict

from litgpt_demo.config import Settings
from litgpt_demo.documents import parse_json
from litgpt_demo.storage import Storage


class _Figures(Settings):
    """A figure that is not finite is text in JSON, as in metrics."""

    model_config = ConfigDict(ser_json_inf_nan="strings")


class ReplayedStep(_Figures):
    """Losses are nats per token, and norms those of the whole gradient before clipping. A recorded figure is None where
    the run's metrics have none."""

    step: int
    recorded_loss: float | None
    loss: float
    recorded_grad_norm: float | None
    grad_norm: float
    recorded_batch_sha256: str | None = None
    batch_sha256: str = ""

    @property
    def has_other_batch(self) -> bool:
        """Return whether the samples differ from the recorded ones; False if none are recorded."""
        return self.recorded_batch_sha256 not in {None, self.batch_sha256}

    @property
    def differences(self) -> list[float | None]:
        """Return the relative differences of the loss and of the gradient norm. None where none is recorded."""
        pairs = [(self.recorded_loss, self.loss), (self.recorded_grad_norm, self.grad_norm)]
        return [None if recorded is None else _difference(recorded, value) for recorded, value in pairs]

    @property
    def largest_difference(self) -> float | None:
        """Return the larger one of these: infinite for other samples, None if none is recorded."""
        if self.has_other_batch:
            return math.inf
        return _largest(self.differences)


class DocumentPart(_Figures):
    """The part of a document that is in a sample."""

    position: int
    """Its first token in the training split."""
    beginning: str
    """Its first tokens as text."""
    tokens: int
    """Its targets in the sample."""
    loss: float
    """The mean of their losses."""


class ReplayedSample(_Figures):
    id: int
    """As `python -m litgpt_demo windows` prints it."""
    loss: float
    source: str = ""
    """The source of a mixture. Empty where there is one source."""
    text: str = ""
    """The beginning of its text, of the worst samples only."""
    documents: tuple[DocumentPart, ...] = ()
    """The documents with the highest losses in it, of the worst samples only."""


class Replay(_Figures):
    """Steps that were trained again."""

    run: str
    began_at: int
    """The step of the checkpoint that it began at; 0 for the initial weights."""
    world_size: int
    device: str
    steps: tuple[ReplayedStep, ...]
    samples: tuple[ReplayedSample, ...]
    """All samples of the last of these steps, the highest loss first."""

    @property
    def largest_difference(self) -> float | None:
        return _largest(step.largest_difference for step in self.steps)


def _largest(differences: Iterable[float | None]) -> float | None:
    return max((difference for difference in differences if difference is not None), default=None)


def _difference(recorded: float, value: float) -> float:
    if recorded == value or (math.isnan(recorded) and math.isnan(value)):
        return 0.0
    difference = abs(value - recorded) / abs(recorded) if recorded else math.inf
    return difference if math.isfinite(difference) else math.inf


def by_loss(losses: Iterable[float]) -> list[int]:
    """Return the places of the losses, the highest one first, after those that are not a number."""
    pairs = [(not math.isnan(loss), -loss, place) for place, loss in enumerate(losses)]
    return [place for *_, place in sorted(pairs)]


def read_replay(storage: Storage, path: str) -> Replay:
    return parse_json(storage.read(path), Replay, where=storage.address(path), fix="replay the steps again")
