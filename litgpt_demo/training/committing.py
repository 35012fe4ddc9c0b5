"""Committing a state in memory as a verified checkpoint: what the ranks do in the background."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from time import monotonic
from typing import Any

from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.manifests import FileRecord
from litgpt_demo.training import checkpoints
from litgpt_demo.training.checkpoints import CheckpointManifest
from litgpt_demo.training.ranks import Ranks
from litgpt_demo.training.setup import Training
from litgpt_demo.training.shards import Shards, State, Written


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A checkpoint that is there."""

    seconds: float
    """Seconds from the start to the end of pruning older checkpoints."""
    size: int
    """Bytes of all its files."""
    unremoved: TrainLitgptError | None
    """The reason why older ones that are no longer kept could not be removed."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """One checkpoint in the making. All ranks make it, each in a thread that makes one at a time."""

    training: Training
    ranks: Ranks
    shards: Shards
    step: int
    validation_loss: float | None
    seconds: float
    """Seconds of training until then, over all attempts."""
    state: State
    moment: Any
    """The state, as `Shards.now` gave it."""
    copied: Event
    """Set when the state may change again, also when the save has failed."""

    def run(self) -> Committed:
        """Make it.

        Raises:
            TrainLitgptError: on all ranks, what went wrong on one; nothing is left that looks like a checkpoint.
        """
        began, run, step, train = monotonic(), self.training.run, self.step, self.training.spec.train
        folder, first = self.training.scratch / f"step-{step}", self.ranks.number == 0

        def write() -> Written:
            try:
                self.shards.copy(self.state, self.moment)
            finally:
                self.copied.set()
            return self.shards.write(folder)

        def index(written: list[Written]) -> None:
            checkpoints.clear(run, step)  # before anything is published: a save that was cut short may have left files
            self.shards.write_index(folder, written)

        def commit(records: list[list[FileRecord]]) -> CheckpointManifest:
            manifest = checkpoints.manifest_of(
                self.training.spec,
                step=step,
                validation_loss=self.validation_loss,
                seconds=self.seconds,
                files=[record for each in records for record in each],
            )
            checkpoints.commit(run, manifest)
            return manifest

        try:
            self.shards.agree(self.state)
            self.ranks.together(write, index)
            mine = sorted(folder.iterdir())
            names = [path.name for path in mine]
            manifest = self.ranks.together(lambda: checkpoints.publish(mine, run, step), commit)
            self.ranks.together(lambda: checkpoints.verify(run, step, names), lambda _: None)
        except Exception:
            if first:  # nobody works on it any more
                with suppress(TrainLitgptError):  # the error that led here is the one to tell; no manifest, no belief
                    checkpoints.clear(run, step)
            raise
        finally:
            self.copied.set()
            shutil.rmtree(folder, ignore_errors=True)  # of a save that failed, on a disk that may be full
        unremoved = None
        if first:
            try:
                checkpoints.retire(run, last=train.keep_last, best=train.keep_best, every=train.keep_every)
            except TrainLitgptError as error:  # the checkpoint is there all the same
                unremoved = error
        return Committed(seconds=monotonic() - began, size=manifest.size, unremoved=unremoved)
