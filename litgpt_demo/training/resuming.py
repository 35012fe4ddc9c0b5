"""Resuming a training from its newest checkpoint that verifies, on all ranks alike."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import NoReturn

from litgpt_demo.documents import FileRecord, at_rest, fetch_verified, misread
from litgpt_demo.errors import DataError, NetworkError, NodeError
from litgpt_demo.storage import Storage
from litgpt_demo.training import checkpoints
from litgpt_demo.training.checkpoint_reader import files_of_state, load_checkpoint
from litgpt_demo.training.checkpoints import INDEX, CheckpointManifest
from litgpt_demo.training.saving import StateReferences
from litgpt_demo.training.setup import Training


def resume(training: Training, *, on_warning: Callable[[str], object]) -> int:
    """Load the newest checkpoint that verifies. Return its step; 0 if the run has no checkpoint.

    A checkpoint that does not verify by two readings is quarantined, and `on_warning` gets the place and the reason on
    rank 0. Raises a NodeError on the machine that misreads sound files, and a DataError if the run has checkpoints and
    all are quarantined.
    """
    resumption = _Resumption(training, on_warning)
    for manifest in resumption.candidates():
        if resumption.verifies(manifest):
            resumption.load(manifest)
            training.timer.previous, training.timer.started = manifest.seconds, monotonic()
            training.chain.resume(manifest.link)
            return manifest.step
        training.optimizer.optimizer.state.clear()  # made for seeing what is read; a training begins without it
    training.ranks.run_on_rank_zero(lambda: checkpoints.require_beginning(training.run))
    training.timer.previous, training.timer.started = 0.0, monotonic()
    return 0


def load_checkpoint_before(training: Training, step: int, *, on_warning: Callable[[str], object]) -> int:
    """Load the newest checkpoint before a step that verifies, and change nothing in the run. Return its step; 0 if
    there is none. `on_warning` gets the place and the reason of a damaged one on rank 0."""
    resumption = _Rereading(training, on_warning)
    for manifest in resumption.candidates():
        if manifest.step < step and resumption.verifies(manifest):
            resumption.load(manifest)
            return manifest.step
        training.optimizer.optimizer.state.clear()  # as in `resume`
    return 0


def _blame(error: NodeError, *, own: bool) -> NoReturn:
    """Raise the error of a machine that misreads. All ranks get it: on another machine it is a NetworkError."""
    if own:
        raise error
    raise NetworkError(f"a rank on another machine has left: {error}") from error


class _Resumption:
    def __init__(self, training: Training, on_warning: Callable[[str], object]) -> None:
        self._training, self._on_warning = training, on_warning
        self._run, self._ranks, self._local_rank = training.run, training.ranks, training.fabric.local_rank
        # Nodes share no folder, though they may share a machine.
        self._node = self._ranks.rank - self._local_rank
        self._scratch = training.scratch.parent / f"resume-{self._node}"

    def candidates(self) -> list[CheckpointManifest]:
        """Return the run's checkpoints, newest first, as rank 0 reads them; quarantine damaged ones."""
        try:
            return self._ranks.run_on_rank_zero(self._read_candidates)
        except NodeError as error:
            _blame(error, own=self._ranks.rank == 0)

    def _read_candidates(self) -> list[CheckpointManifest]:
        def on_damaged(path: str, error: DataError) -> None:
            checkpoints.require_damaged(self._run, path, error)
            self._quarantine(path, error)

        manifests = checkpoints.list_complete(self._run, on_damaged=on_damaged)
        for manifest in manifests:
            checkpoints.require_same(self._run, manifest, self._training.spec)
        return manifests

    def _quarantine(self, path: str, error: DataError) -> None:
        address = checkpoints.quarantine(self._run, path, str(error))
        self._on_warning(f"{path} does not verify and was moved to {address}: {error}")

    def _folder(self, manifest: CheckpointManifest) -> Storage:
        return self._run.within(checkpoints.folder_of(manifest.step))

    def verifies(self, manifest: CheckpointManifest) -> bool:
        """Verify a checkpoint's files on all ranks. Return False after it was quarantined."""
        files = manifest.files
        if self._folder(manifest).local_path() is not None:  # all ranks see all of it, and verify a share each
            return self._fetch(manifest, files[self._ranks.rank :: self._ranks.world_size])
        # From a bucket, each node fetches the index, and then the files that its own ranks read.
        index = [file for file in files if file.path == INDEX and self._local_rank == 0]
        if not self._fetch(manifest, index):
            return False
        needs = self._ranks.gather_then_broadcast(partial(self._needs, manifest), lambda needs: needs)
        names = {name for node, needed in needs for name in needed if node == self._node}
        needed = [file for file in files if file.path in names]
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return self._fetch(manifest, needed[self._local_rank :: processes])

    def _needs(self, manifest: CheckpointManifest) -> tuple[int, set[str]]:
        state = StateReferences(self._training).collect()
        return self._node, files_of_state(state, self._scratch, address=self._folder(manifest).address())

    def _fetch(self, manifest: CheckpointManifest, records: Sequence[FileRecord]) -> bool:
        local_error: Exception | None = None

        def fetch() -> None:
            nonlocal local_error
            try:
                fetch_verified(self._folder(manifest), records, lambda: self._scratch)
            except (DataError, NodeError) as error:
                local_error = error
                raise

        try:
            self._ranks.gather_then_broadcast(fetch, lambda _: None)
        except NodeError as error:
            _blame(error, own=isinstance(local_error, NodeError))
        except DataError as error:
            self._settle(manifest, error, [*records] if isinstance(local_error, DataError) else [])
            return False
        return True

    def _settle(self, manifest: CheckpointManifest, error: DataError, doubted: list[FileRecord]) -> None:
        # The judge is the first rank on a node without doubts. If it finds the files sound, this machine misreads them.
        ranks, folder = self._ranks, self._folder(manifest)
        doubts = ranks.gather_then_broadcast(lambda: (self._node, doubted), lambda doubts: doubts)
        doubting_nodes = {node for node, records in doubts if records}
        judges = [rank for rank, (node, _) in enumerate(doubts) if node not in doubting_nodes]
        all_doubted = [record for _, records in doubts for record in records]

        def is_sound() -> bool:
            if ranks.rank not in judges[:1]:
                return False
            return all(at_rest(folder, record.path) == (record.size, record.crc32c) for record in all_doubted)

        def decide(sound: list[bool]) -> None:
            if any(sound):
                raise misread(folder.address(), error.what)
            self._quarantine(checkpoints.folder_of(manifest.step), error)

        try:
            ranks.gather_then_broadcast(is_sound, decide)
        except NodeError as misreading:
            _blame(misreading, own=bool(doubted))

    def load(self, manifest: CheckpointManifest) -> None:
        model, optimizer = self._training.model.module, self._training.optimizer.optimizer
        precision, folder = self._training.fabric.strategy.precision, self._folder(manifest)
        local, address = folder.local_path(), folder.address()
        average, files = self._training.average_tensors, local or self._scratch
        load_checkpoint(model, optimizer, files, precision=precision, average=average, address=address)
        self._ranks.run_on_rank_zero(lambda: None)  # until then some rank may still read
        if local is None and self._local_rank == 0:
            shutil.rmtree(self._scratch, ignore_errors=True)


class _Rereading(_Resumption):
    def _quarantine(self, path: str, error: DataError) -> None:
        self._on_warning(f"{path} does not verify and is not used: {error}")
