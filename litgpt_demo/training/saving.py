"""Saving in the background of a training.

A save blocks the training only while it collects references. A thread copies what they refer to, which the next
step only reads until its optimizer changes it; so that waits for the copy. The thread then writes the copy, moves it to
the run, and commits it together with those of the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Event
from time import monotonic
from types import TracebackType

from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.training.committing import Committed, Save
from litgpt_demo.training.ranks import Ranks
from litgpt_demo.training.setup import Training
from litgpt_demo.training.shards import Shards, training_state


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The result of a save."""

    step: int
    place: str
    """Address of the run's checkpoints."""
    stall: float
    """Seconds that training stood still for it."""
    taken: float
    """When the state was taken that it holds, on the monotonic clock."""
    seconds: float = 0.0
    """Seconds from the start of the save until it was committed, verified and older checkpoints were pruned."""
    size: int = 0
    """Bytes of all its files."""
    failed: TrainLitgptError | None = None
    """The reason why there is no such checkpoint."""
    unremoved: TrainLitgptError | None = None
    """The reason why older ones that are no longer kept could not be removed."""

    @property
    def warning(self) -> str | None:
        """The advice to a person, if any."""
        if self.failed is not None:
            return (
                f"the checkpoint of step {self.step} was not saved: {self.failed}. Training goes on and the next save "
                f"tries again. Where room is short: older checkpoints are in {self.place}, and smaller train.keep_last "
                "and train.keep_best keep fewer"
            )
        if self.unremoved is not None:
            return (
                f"the checkpoint of step {self.step} is saved, but older ones in {self.place} could not be removed: "
                f"{self.unremoved}. The next save tries again"
            )
        return None


@dataclass(kw_only=True)
class _PendingSave:
    """A save that has begun."""

    step: int
    copied: Event
    commit: Future[Committed]
    stall: float
    taken: float


class Saver:
    """Saves the state of a training, one save at a time. Every rank has one and calls it alike, as in

        with Saver(training, tell=print) as saver:
            ...
            saver.save(step, validation_loss)

    An error that has a name (a full disk, a bucket that refuses) costs that one save; any other ends the training.
    """

    def __init__(self, training: Training, *, tell: Callable[[Saved], object]) -> None:
        """
        Args:
            tell: hears on rank 0 what became of each save, in the thread of the training, at the next step or later.
        """
        self._training, self._tell = training, tell
        self._ranks = Ranks.of(training.fabric)
        self._shards = Shards(self._ranks, training.fabric.device)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: _PendingSave | None = None
        self._last: Saved | None = None
        self._hook = training.optimizer.optimizer.register_step_pre_hook(lambda *_: self._before_update())

    def save(self, step: int, validation_loss: float | None) -> float:
        """Begin to save the state after `step` steps, when the save before has ended.

        Args:
            validation_loss: of this step, if it was evaluated.

        Returns:
            The seconds that it took; the next step may wait some more before it changes the state, which `tell` hears.
        """
        began = monotonic()
        self._finalize()
        training, copied, seconds = self._training, Event(), self._training.clock.seconds
        precision = training.fabric.strategy.precision.state_dict()
        save = Save(
            training=training,
            ranks=self._ranks,
            shards=self._shards,
            step=step,
            validation_loss=validation_loss,
            seconds=seconds,
            state=training_state(training.model.module, training.optimizer.optimizer, precision),
            moment=self._shards.now(),
            copied=copied,
        )
        commit, stall = self._thread.submit(save.run), monotonic() - began
        self._pending = _PendingSave(step=step, copied=copied, commit=commit, stall=stall, taken=began)
        return stall

    def finish(self) -> None:
        """Wait for the save in flight, if there is one.

        Raises:
            TrainLitgptError: the last save failed.
        """
        self._finalize()
        if self._last is not None and self._last.failed is not None:
            raise self._last.failed

    def _before_update(self) -> None:
        """The optimizer is about to change what is being copied."""
        if self._pending is None:
            return
        began = monotonic()
        self._pending.copied.wait()
        self._pending.stall += monotonic() - began
        if self._pending.commit.done():
            self._finalize()

    def _finalize(self) -> None:
        """Wait for the save in flight and tell what became of it."""
        if (pending := self._pending) is None:
            return
        self._pending, done, failed = None, None, None
        try:
            done = pending.commit.result()
        except TrainLitgptError as error:
            failed = error
        place = self._training.run.address("checkpoints")
        saved = Saved(step=pending.step, place=place, stall=pending.stall, taken=pending.taken)
        if done is not None:
            saved = replace(saved, seconds=done.seconds, size=done.size, unremoved=done.unremoved)
        self._last = replace(saved, failed=failed)
        if self._ranks.number == 0:
            self._tell(self._last)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave nothing in flight; after a training that ended well, the last save has to have succeeded."""
        try:
            if error is None:
                self.finish()
            else:
                with suppress(Exception):  # what ended the training is the error to tell, and may be why this fails too
                    self._finalize()
        finally:
            self._hook.remove()
            self._thread.shutdown()
