"""Saving in the background of a training, and going on from what was saved.

A save blocks the training only while it collects references. A thread copies what they refer to, which the next
step only reads until its optimizer changes it; so that waits for the copy. The thread then writes the copy, moves it to
the run, and commits it together with those of the other ranks.

Built of torch.distributed.checkpoint's planner and writer. Its own `async_save` copies all that a rank has, under DDP
the whole state on every rank; here a rank copies what it writes, into memory that every save uses again.
"""

from __future__ import annotations

import mmap
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from litgpt_demo.documents import FileRecord, at_rest, fetch_verified, misread
from litgpt_demo.errors import DataError, NetworkError, NodeError, TrainLitgptError
from litgpt_demo.storage import Storage
from litgpt_demo.storage.local import translate_os_errors
from litgpt_demo.training import checkpoints
from litgpt_demo.training.checkpoint_reader import (
    OPTIMIZER,
    WEIGHTS,
    State,
    files_of_state,
    load_checkpoint,
    training_state,
)
from litgpt_demo.training.checkpoints import INDEX, CheckpointManifest
from litgpt_demo.training.ranks import Ranks, thread_of
from litgpt_demo.training.reporting import warn
from litgpt_demo.training.setup import Training

T = TypeVar("T")
Written: TypeAlias = list[WriteResult]

_ALIGNED = 64  # bytes to which torch's own allocator aligns tensors

# Bytes: each tensor is a zip archive of its own within the file (seen with torch 2.13: 1.4 to 1.6 KiB).
_AROUND_A_TENSOR = 2048


@dataclass(kw_only=True)
class Saved:
    """The result of a save."""

    step: int
    taken: float
    """When the state was taken that it holds, on the monotonic clock."""
    stall: float = 0.0
    """Seconds that training stood still for it."""
    seconds: float = 0.0
    """Seconds from the start of the save until it was committed, verified and older checkpoints were pruned."""
    size: int = 0
    """Bytes of all its files."""
    failed: TrainLitgptError | None = None
    """The reason why there is no such checkpoint."""
    warning: str | None = None
    """The advice to a person, if any: there is none, or older ones that are no longer kept could not be removed."""


class Saver:
    """Saves the state of a training, one save at a time. Every rank has one, enters it, and calls it alike.

    An error that has a name (a full disk, a bucket that refuses) costs that one save; any other ends the training.
    """

    def __init__(
        self, training: Training, *, tell: Callable[[Saved], object], before_commit: Callable[[], object] = bool
    ) -> None:
        """`tell` hears on rank 0 what became of each save, in the thread of the training, at the next step or later.
        `before_commit` stores on rank 0, in the thread of the save, what a checkpoint must not be committed without."""
        self._training, self._tell, self._before_commit = training, tell, before_commit
        self._ranks = Ranks.of(training.fabric)
        self._shards = Shards(self._ranks, training.fabric.device)
        self._thread = thread_of(training.fabric.device, "checkpoint")
        self._pending: tuple[Saved, Event, Future[None]] | None = None
        """The save that has begun, its event that the state may change again, and the thread's work for it."""
        self._last: Saved | None = None
        self._hook = training.optimizer.optimizer.register_step_pre_hook(lambda *_: self._before_update())

    def save(self, step: int, validation_loss: float | None) -> float:
        """Begin to save the state after `step` steps, when the save before has ended; `validation_loss` is this step's.

        Returns the seconds that it took; the next step may wait some more before it changes the state: `tell` hears.
        """
        began = monotonic()
        self._finalize()
        training, device, seconds = self._training, self._training.fabric.device, self._training.clock.seconds
        precision = training.fabric.strategy.precision.state_dict()
        state = training_state(training.model.module, training.optimizer.optimizer, precision)
        # Up to here the device has to have come before the state may be read.
        moment = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        saved, copied = Saved(step=step, taken=began), Event()
        work = self._thread.submit(self._commit, saved, copied, state, moment, validation_loss, seconds)
        saved.stall = monotonic() - began
        self._pending = saved, copied, work
        return saved.stall

    def _commit(
        self, saved: Saved, copied: Event, state: State, moment: Any, validation_loss: float | None, seconds: float
    ) -> None:
        """Make the checkpoint, in the thread, on all ranks; an error of one is raised on all, and nothing is left."""
        began, shards, ranks, step = monotonic(), self._shards, self._ranks, saved.step
        run, spec, folder = self._training.run, self._training.spec, self._training.scratch / f"step-{step}"
        train, place = spec.train, checkpoints.folder_of(step)

        def write() -> Written:
            try:
                shards.copy(state, moment)
            finally:
                copied.set()
            return shards.write(folder)

        def index(written: list[Written]) -> None:
            run.remove(place)  # before anything is published: a save that was cut short may have left files
            shards.write_index(folder, written)

        def commit(records: list[list[FileRecord]]) -> int:
            own = {(key, train.seed) for key in self._training.data.manifest.sample_keys}
            earlier = spec.origin.trained_on if spec.origin else ()
            manifest = CheckpointManifest(
                format=checkpoints.FORMAT,
                run=spec.run,
                step=step,
                tokens=step * train.global_batch * spec.model.sequence_length,
                dataset_key=spec.dataset_key,
                trained_on=tuple(sorted({*own, *earlier})),
                config={"model": spec.model.model_dump(mode="json"), "train": train.shaping_settings()},
                validation_loss=validation_loss,
                evaluation_windows=None if validation_loss is None else train.evaluation_windows,
                seconds=seconds,
                world_size=spec.world_size,
                versions={name: version(name) for name in ("torch", "lightning", "litgpt", "numpy")},
                # By name, so that resuming deals each rank as many bytes to compare.
                files=tuple(sorted((record for each in records for record in each), key=lambda record: record.path)),
            )
            self._before_commit()
            checkpoints.commit(run, manifest)
            return manifest.size

        try:
            shards.agree(state)
            ranks.together(write, index)
            mine = sorted(folder.iterdir())
            names = [path.name for path in mine]
            saved.size = ranks.together(lambda: checkpoints.publish(mine, run, step), commit)
            ranks.together(lambda: checkpoints.verify(run, step, names), lambda _: None)
        except Exception:
            if ranks.number == 0:  # nobody works on it any more
                with suppress(TrainLitgptError):  # the error that led here is the one to tell; no manifest, no belief
                    run.remove(place)
            raise
        finally:
            copied.set()
            shutil.rmtree(folder, ignore_errors=True)  # of a save that failed, on a disk that may be full
        if ranks.number == 0:
            try:
                checkpoints.retire(run, last=train.keep_last, best=train.keep_best, every=train.keep_every)
            except TrainLitgptError as error:  # the checkpoint is there all the same
                saved.warning = (
                    f"the checkpoint of step {step} is saved, but older ones in {run.address('checkpoints')} could not "
                    f"be removed: {error}. The next save tries again"
                )
        saved.seconds = monotonic() - began

    def finish(self) -> None:
        """Wait for the save in flight, if there is one, and raise what the last one failed of."""
        self._finalize()
        if self._last is not None and self._last.failed is not None:
            raise self._last.failed

    def _before_update(self) -> None:
        if self._pending is None:
            return
        began, (saved, copied, work) = monotonic(), self._pending
        copied.wait()
        saved.stall += monotonic() - began
        if work.done():
            self._finalize()

    def _finalize(self) -> None:
        if self._pending is None:
            return
        (self._last, _, work), self._pending = self._pending, None
        try:
            work.result()
        except TrainLitgptError as error:
            self._last.failed, place = error, self._training.run.address("checkpoints")
            self._last.warning = (
                f"the checkpoint of step {self._last.step} was not saved: {error}. Training goes on and the next save "
                f"tries again. Where room is short: older checkpoints are in {place}, and smaller train.keep_last and "
                "train.keep_best keep fewer"
            )
        if self._ranks.number == 0:
            self._tell(self._last)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
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
            self._shards.close()


class Shards:
    """The share of one rank: which it is, a copy of it in host memory, and its files."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._agreed, self._plan, self._metadata = False, SavePlan([]), Metadata({})
        self._copies: dict[MetadataIndex, Tensor | BytesIO] = {}
        self._pinned: Tensor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def agree(self, state: State) -> None:
        """The first time, all ranks agree on whose share is what; it stays so, because the state keeps its form."""
        if self._agreed:
            return
        # What is whole on every rank of a sharded training is small: in one file, the others are read by few ranks. Of
        # copies, whole or one for each node, all ranks write a part.
        sharded = any(isinstance(one, DTensor) and one.device_mesh.ndim == 1 for one in state["model"].values())
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=sharded)
        planner.set_up_planner(state, is_coordinator=True)

        def whole(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self._metadata = planner.create_global_plan(plans)
            return _Writer("").prepare_global_plan(plans)

        self._plan, self._agreed = self._ranks.deal(planner.create_local_plan, whole), True

    def copy(self, state: State, moment: Any) -> None:
        """Take a copy of this rank's share of `state`, once the device has come to `moment`, a CUDA event.

        On a stream of its own, so that the device goes on training while it is read.
        """
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=True)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_event(moment)
            taken = {item.index: planner.resolve_data(item) for item in self._plan.items}
            if not self._copies:
                tensors = {index: source for index, source in taken.items() if isinstance(source, Tensor)}
                self._copies |= self._room_for(tensors)
            for index, source in taken.items():
                if isinstance(source, Tensor):  # which has room: the plan is the same for all saves
                    cast(Tensor, self._copies[index]).copy_(source.detach(), non_blocking=True)
                else:
                    self._copies[index] = source
        if self._stream is not None:
            self._stream.synchronize()

    def _room_for(self, sources: Mapping[MetadataIndex, Tensor]) -> dict[MetadataIndex, Tensor]:
        """Return host memory for a copy of each tensor: one block of their bytes, which the device writes directly.

        torch's own pinned memory is a block for each tensor, of the next power of two, which is never given back.
        """
        sizes = [-(-source.nbytes // _ALIGNED) * _ALIGNED for source in sources.values()]
        block = mmap.mmap(-1, max(1, sum(sizes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self._stream is not None:
            self._pinned = torch.frombuffer(block, dtype=torch.uint8)
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if int(error := cudart.cudaHostRegister(self._pinned.data_ptr(), len(block), 0)):  # every cudaError is true
                warn(f"saves are copied through pageable memory, which is slower: cudaHostRegister answered {error}")
                self._pinned = None
        copies = dict[MetadataIndex, Tensor]()
        for (index, source), start in zip(sources.items(), accumulate(sizes, initial=0), strict=False):
            flat = torch.empty(0, dtype=source.dtype)  # no buffer has no bytes
            if count := source.numel():
                flat = torch.frombuffer(block, dtype=source.dtype, count=count, offset=start)
            copies[index] = flat.view(source.shape)
        return copies

    def close(self) -> None:
        """Give the host memory back."""
        self._copies.clear()
        if self._pinned is not None:
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cudart.cudaHostUnregister(self._pinned.data_ptr()))
            self._pinned = None

    def write(self, folder: Path) -> Written:
        """Write the copy into `folder`, which may be another one on every rank: nothing but file names is shared."""
        tensors = (copy for copy in self._copies.values() if isinstance(copy, Tensor))
        at_most = sum(tensor.nbytes + _AROUND_A_TENSOR for tensor in tensors)
        planner = DefaultSavePlanner()
        planner.resolve_data = lambda write_item: self._copies[write_item.index]  # type: ignore[method-assign]
        with translate_os_errors(str(folder), needed=at_most):
            folder.mkdir(parents=True)
            # What is written lies in host memory already: nothing to be copied ahead.
            writer, written = _Writer(folder, sync_files=False, per_thread_copy_ahead=0), Written()
            # The optimizer's state in a file of its own: collection fetches none of it from a bucket.
            for kind, weights in (("", True), (OPTIMIZER, False)):
                items = [item for item in self._plan.items if item.index.fqn.startswith(WEIGHTS) is weights]
                prefix = replace(self._plan.storage_data, prefix=kind + self._plan.storage_data.prefix)
                plan = replace(self._plan, items=items, storage_data=prefix)
                written += writer.write_data(plan, planner).wait() if items else []
        return written

    def write_index(self, folder: Path, written: list[Written]) -> None:
        """Rank 0's: the file that says where everything is in the ranks' files."""
        with translate_os_errors(str(folder), needed=len(pickle.dumps((self._metadata, written)))):
            _Writer(folder, sync_files=False).finish(self._metadata, written)


class _Writer(FileSystemWriter):
    """One file per plan, whose bytes depend on the state alone: no random id of the save, no path."""

    def storage_meta(self) -> StorageMeta | None:
        return None


def resume(training: Training, *, tell: Callable[[str], object]) -> int:
    """Load the newest checkpoint that verifies, on all ranks; returns the steps done, 0 without one.

    Those that do not verify by two readings are set aside, and `tell` hears on rank 0 where and why. A NodeError on the
    machine that reads sound ones wrongly; a DataError where none of the run's checkpoints is left.
    """
    ranks, run, local_rank = training.ranks, training.run, training.fabric.local_rank
    model, optimizer = training.model.module, training.optimizer.optimizer
    precision = training.fabric.strategy.precision
    # Nodes share no folder, though they may share a machine.
    node, processes = ranks.number - local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    folder = training.scratch.parent / f"resume-{node}"

    def set_aside(path: str, error: DataError) -> None:
        tell(f"{path} does not verify and was moved to {checkpoints.set_aside(run, path, str(error))}: {error}")

    misreadings: list[NodeError] = []

    def noting(action: Callable[[], T]) -> Callable[[], T]:
        def act() -> T:
            try:
                return action()
            except NodeError as error:
                misreadings.append(error)
                raise

        return act

    @contextmanager
    def blaming(own: Sequence[object] = misreadings) -> Iterator[None]:
        """Let the machine alone that reads wrongly say so: the error of one rank is raised on all."""
        try:
            yield
        except NodeError as error:
            if own:
                raise
            raise NetworkError(f"a rank on another machine has left: {error}") from error

    def damaged(path: str, error: DataError) -> None:
        checkpoints.require_damaged(run, path, error)
        set_aside(path, error)

    def candidates() -> list[CheckpointManifest]:
        found = checkpoints.committed(run, damaged=damaged)
        for manifest in found:
            checkpoints.require_same(run, manifest, training.spec)
        return found

    def settle(place: Storage, path: str, error: DataError, doubted: list[FileRecord]) -> None:
        """Set a checkpoint aside, unless the first rank on a node without doubts finds sound what others do not."""
        each = ranks.together(lambda: (node, doubted), lambda each: each)
        doubting = {where for where, records in each if records}
        judge = next((number for number, (where, _) in enumerate(each) if where not in doubting), None)
        records = [record for _, records in each for record in records]

        def is_sound() -> bool:
            return ranks.number == judge and all(
                at_rest(place, record.path) == (record.size, record.crc32c) for record in records
            )

        def decide(sound: list[bool]) -> None:
            if any(sound):
                raise misread(place.address(), error.what)
            set_aside(path, error)

        with blaming(doubted):
            ranks.together(is_sound, decide)

    def right(manifest: CheckpointManifest, records: Sequence[FileRecord]) -> bool:
        """Whether the files that the ranks bring and compare, each these of its own, are what they should be."""
        path, doubted = checkpoints.folder_of(manifest.step), list[FileRecord]()
        place = run.within(path)

        def bring_own() -> None:
            try:
                fetch_verified(place, records, lambda: folder)
            except DataError:
                doubted.extend(records)
                raise

        try:
            with blaming():
                ranks.together(noting(bring_own), lambda _: None)
        except DataError as error:
            settle(place, path, error, doubted)
            return False
        return True

    def read_here(address: str) -> tuple[int, set[str]]:
        state = training_state(model, optimizer, precision.state_dict())
        return node, files_of_state(state, folder, address=address)

    done, before = 0, 0.0
    with blaming():
        found = ranks.first(noting(candidates))
    for manifest in found:
        place = run.within(checkpoints.folder_of(manifest.step))
        address, local, files = place.address(), place.local_path(), manifest.files
        # All ranks see all of a local folder, and have a share of it each; of a bucket, of what their node reads.
        if local is not None:
            verified = right(manifest, files[ranks.number :: ranks.world])
        elif verified := right(manifest, [file for file in files if file.path == INDEX and local_rank == 0]):
            needs = ranks.together(partial(read_here, address), lambda found: found)
            here = {name for where, names in needs for name in names if where == node}
            verified = right(manifest, [file for file in files if file.path in here][local_rank::processes])
        if not verified:
            optimizer.state.clear()  # which is made to see what is read: a training begins without
            continue
        state = precision.state_dict()
        if saved := load_checkpoint(model, optimizer, local or folder, precision=state, address=address):
            precision.load_state_dict(saved)
        ranks.first(lambda: None)  # until then some rank may still read
        if local is None and local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        done, before = manifest.step, manifest.seconds
        break
    else:
        ranks.first(lambda: checkpoints.require_beginning(run))
    training.clock.before, training.clock.begun = before, monotonic()
    return done
