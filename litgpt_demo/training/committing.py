"""Committing a state in memory as a verified checkpoint: what the ranks do in the background."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
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
        began = monotonic()
        try:
            manifest = self._committed()
        except Exception:
            self._undo()
            raise
        finally:
            self.copied.set()
            shutil.rmtree(self._folder, ignore_errors=True)  # of a save that failed, on a disk that may be full
        unremoved = self._prune()
        return Committed(seconds=monotonic() - began, size=manifest.size, unremoved=unremoved)

    def _committed(self) -> CheckpointManifest:
        run, step = self.training.run, self.step
        self.shards.agree(self.state)
        self.ranks.together(self._write, self._index)
        mine = sorted(self._folder.iterdir())
        names = [path.name for path in mine]
        manifest = self.ranks.together(lambda: checkpoints.publish(mine, run, step), self._commit)
        self.ranks.together(lambda: checkpoints.verify(run, step, names), lambda _: None)
        return manifest

    @property
    def _folder(self) -> Path:
        return self.training.scratch / f"step-{self.step}"

    def _write(self) -> Written:
        try:
            self.shards.copy(self.state, self.moment)
        finally:
            self.copied.set()
        return self.shards.write(self._folder)

    def _index(self, written: list[Written]) -> None:
        """Clear the place on rank 0 before anything is published: a save that was cut short may have left files."""
        checkpoints.clear(self.training.run, self.step)
        self.shards.write_index(self._folder, written)

    def _commit(self, records: list[list[FileRecord]]) -> CheckpointManifest:
        files = [record for each in records for record in each]
        manifest = checkpoints.manifest_of(
            self.training.spec,
            step=self.step,
            validation_loss=self.validation_loss,
            seconds=self.seconds,
            files=files,
        )
        checkpoints.commit(self.training.run, manifest)
        return manifest

    def _undo(self) -> None:
        """Clean up on rank 0, when nobody works on it any more."""
        if self.ranks.number == 0:
            with suppress(TrainLitgptError):  # the error that led here is the one to tell; no manifest, not believed
                checkpoints.clear(self.training.run, self.step)

    def _prune(self) -> TrainLitgptError | None:
        train = self.training.spec.train
        if self.ranks.number == 0:
            try:
                checkpoints.retire(
                    self.training.run, last=train.keep_last, best=train.keep_best, every=train.keep_every
                )
            except TrainLitgptError as error:  # the checkpoint is there all the same
                return error
        return None
