"""Saving in the background of a training.

A save blocks the training only while it collects references. A background thread copies the tensors to host memory.
The next step may run forward and backward meanwhile; only its optimizer update waits until the copy is complete. The
thread then writes the copy, moves it to the run, and commits it together with those of the other ranks.

It is built of torch.distributed.checkpoint's planner and writer. Its own `async_save` copies all that a rank has, with
DDP the whole state on every rank. Here a rank copies what it writes, into memory that every save uses again.
"""

from __future__ import annotations

import mmap
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from litgpt_demo.data.batches import samples_seen
from litgpt_demo.documents import FileRecord
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.storage.local import translate_os_errors
from litgpt_demo.training import checkpoints
from litgpt_demo.training.chain import Link
from litgpt_demo.training.checkpoint_reader import AVERAGE, OPTIMIZER, WEIGHTS, State, training_state
from litgpt_demo.training.checkpoints import CheckpointManifest
from litgpt_demo.training.digests import Leaves, row_leaves, weights_digest
from litgpt_demo.training.ranks import Ranks, thread_of
from litgpt_demo.training.reporting import warn
from litgpt_demo.training.setup import Training

Written: TypeAlias = list[WriteResult]

_ALIGNED = 64  # bytes to which torch's own allocator aligns tensors

# Bytes: each tensor is a zip archive of its own within the file (seen with torch 2.13: 1.4 to 1.6 KiB).
_AROUND_A_TENSOR = 2048


@dataclass(kw_only=True)
class SaveResult:
    step: int
    taken: float
    """When the state was taken that it holds, on the monotonic clock."""
    stall: float = 0.0
    """Seconds that training stood still for it."""
    seconds: float = 0.0
    """Seconds from the start of the save until it was committed, verified and older checkpoints were pruned."""
    size: int = 0
    link: Link | None = None
    """The digests of the checkpoint."""
    error: TrainLitgptError | None = None
    warning: str | None = None
    """Advice to a person: there is no such checkpoint, or older ones could not be pruned."""


class Saver:
    """Saves the state of a training, one save at a time. Every rank has one, enters it, and calls it alike.

    An error that has a name (a full disk, a bucket that refuses) costs that one save; any other ends the training.
    """

    def __init__(
        self,
        training: Training,
        *,
        on_result: Callable[[SaveResult], object],
        before_commit: Callable[[], object] = lambda: None,
    ) -> None:
        # `on_result` gets the result of each save on rank 0, in the thread of the training, at the next step or later.
        # `before_commit` is called on rank 0, in the thread of the save: it stores what has to precede a checkpoint.
        self._training, self._on_result, self._before_commit = training, on_result, before_commit
        self._ranks = Ranks.of(training.fabric)
        self._references = StateReferences(training)
        self._shards = ShardWriter(self._ranks, training.fabric.device)
        self._thread = thread_of(training.fabric.device, "checkpoint")
        # The save in flight: its result, an event that is set when the copy is complete, and the thread's work.
        self._pending: tuple[SaveResult, Event, Future[None]] | None = None
        self._last: SaveResult | None = None
        self._hook = training.optimizer.optimizer.register_step_pre_hook(lambda *_: self._before_update())

    def save(self, step: int, validation_loss: float | None) -> float:
        """Begin to save the state after `step` steps, once the save before has ended. Return the seconds taken."""
        began = monotonic()
        self._finalize()
        training, device = self._training, self._training.fabric.device
        state, ready_event = self._references.collect(), None
        if device.type == "cuda":  # the device must have come this far before the state may be read
            ready_event = torch.cuda.current_stream(device).record_event()
        result, staged = SaveResult(step=step, taken=began), Event()
        noted = validation_loss, training.timer.seconds, training.chain.batches
        work = self._thread.submit(self._save, result, staged, state, ready_event, *noted)
        result.stall = monotonic() - began
        self._pending = result, staged, work
        return result.stall

    def _save(
        self,
        result: SaveResult,
        staged: Event,
        state: State,
        ready_event: Any,
        validation_loss: float | None,
        seconds: float,
        batches: str,
    ) -> None:
        began, ranks, run, step = monotonic(), self._ranks, self._training.run, result.step
        folder = self._training.scratch / f"step-{step}"

        def write() -> Written:
            try:
                self._shards.stage_to_host(state, ready_event)
            finally:
                staged.set()
            return self._shards.write(folder)

        def write_index(written: list[Written]) -> None:
            # Before anything is published: a save that was cut short may have left files.
            run.remove(checkpoints.folder_of(step))
            self._shards.write_index(folder, written)

        try:
            self._shards.plan(state)
            ranks.gather_then_broadcast(write, write_index)
            weights = ranks.gather_then_broadcast(self._shards.weight_leaves, self._shards.weights_digest)
            result.link = self._training.chain.link(weights=weights, batches=batches)
            paths = sorted(folder.iterdir())
            names = [path.name for path in paths]
            commit = partial(self._commit, result, validation_loss, seconds)
            result.size = ranks.gather_then_broadcast(lambda: checkpoints.upload_files(paths, run, step), commit)
            ranks.gather_then_broadcast(lambda: checkpoints.verify(run, step, names), lambda _: None)
            self._training.chain.committed(result.link)
        except Exception:
            if ranks.rank == 0:  # no rank works on it any more
                with suppress(TrainLitgptError):  # the first error is the one to report; no manifest, no checkpoint
                    run.remove(checkpoints.folder_of(step))
            raise
        finally:
            staged.set()
            shutil.rmtree(folder, ignore_errors=True)  # of a save that failed, on a disk that may be full
        if ranks.rank == 0:
            train = self._training.spec.train
            try:
                checkpoints.prune(run, last=train.keep_last, best=train.keep_best, every=train.keep_every)
            except TrainLitgptError as error:  # the new checkpoint exists all the same
                result.warning = (
                    f"the checkpoint of step {step} is saved, but older ones in {run.address('checkpoints')} could not "
                    f"be removed: {error}. The next save tries it again"
                )
        result.seconds = monotonic() - began

    def _commit(
        self, result: SaveResult, validation_loss: float | None, seconds: float, records: Sequence[Sequence[FileRecord]]
    ) -> int:
        step = result.step
        spec, train = self._training.spec, self._training.spec.train
        manifest = CheckpointManifest(
            format=checkpoints.FORMAT,
            run=spec.run,
            step=step,
            tokens=spec.tokens_after(step),
            dataset_hash=spec.dataset_hash,
            trained_on=samples_seen(spec, self._training.data.train, step),
            config={"model": spec.model.model_dump(mode="json"), "train": train.shaping_settings()},
            validation_loss=validation_loss,
            evaluation_samples=None if validation_loss is None else train.evaluation_samples,
            seconds=seconds,
            link=result.link,
            world_size=spec.world_size,
            versions={name: version(name) for name in ("torch", "lightning", "litgpt", "numpy")},
            # By name, so that in a resume each rank verifies as many bytes.
            files=tuple(sorted((record for part in records for record in part), key=lambda record: record.path)),
        )
        self._before_commit()
        checkpoints.commit(self._training.run, manifest)
        return manifest.size

    def finish(self) -> None:
        """Wait for the save in flight, if there is one, and raise the error of the last one."""
        self._finalize()
        if self._last is not None and self._last.error is not None:
            raise self._last.error

    def _before_update(self) -> None:
        if self._pending is None:
            return
        began, (result, staged, work) = monotonic(), self._pending
        staged.wait()
        result.stall += monotonic() - began
        if work.done():
            self._finalize()

    def _finalize(self) -> None:
        if self._pending is None:
            return
        result, _, work = self._pending
        self._pending, self._last = None, result
        try:
            work.result()
        except TrainLitgptError as error:
            result.error = error
            result.warning = (
                f"the checkpoint of step {result.step} was not saved: {error}. Training continues and the next save "
                f"tries again. If the disk is full, set a smaller train.keep_last and train.keep_best, or remove older "
                f"checkpoints from {self._training.run.address('checkpoints')}"
            )
        if self._ranks.rank == 0:
            self._on_result(result)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self.finish()
            else:
                # The error that ended the training is the one to report, and may be why this fails too.
                with suppress(Exception):
                    self._finalize()
        finally:
            self._hook.remove()
            self._thread.shutdown()
            self._shards.close()


class StateReferences:
    """References to all tensors of a training's state.

    Torch finds them by a walk through all modules, in 10 ms for 76 weights. It is repeated once a tensor is in other
    memory than it found. The references keep that memory, so no other tensor can have its addresses.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._model, self._optimizer = training, training.model.module, training.optimizer.optimizer
        self._state, self._places = State(), list[object]()

    def collect(self) -> State:
        """Return the `training_state`."""
        precision, average = self._training.fabric.strategy.precision.state_dict(), self._training.average_tensors
        if self._places != self._find_places():
            self._state = training_state(self._model, self._optimizer, precision, average)
            self._places = self._find_places()  # the walk has given the optimizer a state if it had none
        elif precision:
            self._state["precision"] = precision
        return self._state

    @torch.no_grad()
    def _find_places(self) -> list[object]:
        values = list[Any]()
        # FSDP's hooks of state_dict shard what an evaluation has left gathered.
        for named in (self._model.state_dict(), self._training.average_tensors or {}, *self._optimizer.state.values()):
            values += (*named, *named.values())
        return [_place(value.to_local() if isinstance(value, DTensor) else value) for value in values]


def _place(value: Any) -> object:
    return (value.data_ptr(), value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else value


class ShardWriter:
    """The share of one rank in a checkpoint: its plan, a copy of it in host memory, and its files."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._plan: SavePlan | None = None
        self._metadata = Metadata({})
        self._copies: dict[MetadataIndex, Tensor | BytesIO] = {}
        self._pinned: Tensor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def plan(self, state: State) -> None:
        """Agree with all ranks on the share of each, the first time. It stays so, because the state keeps its form."""
        if self._plan is not None:
            return
        # With FSDP, replicated tensors are small, so one rank writes them, and the others' files are read by few ranks.
        # With DDP or HSDP the replicas share the writing.
        tensors = state["model"].values()
        sharded = any(isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 1 for tensor in tensors)
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=sharded)
        planner.set_up_planner(state, is_coordinator=True)

        def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self._metadata = planner.create_global_plan(plans)
            return _Writer("").prepare_global_plan(plans)

        self._plan = self._ranks.gather_then_scatter(planner.create_local_plan, plan_all)

    def stage_to_host(self, state: State, ready_event: Any) -> None:
        # The copy has a stream of its own, so that the device continues training meanwhile.
        assert self._plan is not None
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=True)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_event(ready_event)
            sources = {item.index: planner.resolve_data(item) for item in self._plan.items}
            if not self._copies:
                tensors = {index: source for index, source in sources.items() if isinstance(source, Tensor)}
                self._copies |= self._allocate(tensors)
            for index, source in sources.items():
                if isinstance(source, Tensor):  # its memory exists: the plan is the same for all saves
                    cast(Tensor, self._copies[index]).copy_(source.detach(), non_blocking=True)
                else:
                    self._copies[index] = source
        if self._stream is not None:
            self._stream.synchronize()

    def _allocate(self, sources: Mapping[MetadataIndex, Tensor]) -> dict[MetadataIndex, Tensor]:
        # torch's own pinned memory is a block for each tensor, of the next power of two, which is never given back.
        sizes = [-(-source.nbytes // _ALIGNED) * _ALIGNED for source in sources.values()]
        block = mmap.mmap(-1, max(1, sum(sizes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self._stream is not None:
            self._pinned = torch.frombuffer(block, dtype=torch.uint8)
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(cudart.cudaHostRegister(self._pinned.data_ptr(), len(block), 0))
            if error != 0:
                warn(f"saves are copied through pageable memory, which is slower: cudaHostRegister returned {error}")
                self._pinned = None
        copies = dict[MetadataIndex, Tensor]()
        for (index, source), start in zip(sources.items(), accumulate(sizes, initial=0), strict=False):
            flat = torch.empty(0, dtype=source.dtype)  # frombuffer takes no empty buffer
            if source.numel():
                flat = torch.frombuffer(block, dtype=source.dtype, count=source.numel(), offset=start)
            copies[index] = flat.view(source.shape)
        return copies

    def close(self) -> None:
        self._copies.clear()
        if self._pinned is not None:
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cudart.cudaHostUnregister(self._pinned.data_ptr()))
            self._pinned = None

    def write(self, folder: Path) -> Written:
        """Write the copy into `folder`, which may be another one on every rank: only file names are shared."""
        assert self._plan is not None
        tensors = (copy for copy in self._copies.values() if isinstance(copy, Tensor))
        at_most = sum(tensor.nbytes + _AROUND_A_TENSOR for tensor in tensors)
        planner = DefaultSavePlanner()
        planner.resolve_data = lambda write_item: self._copies[write_item.index]  # type: ignore[method-assign]
        with translate_os_errors(str(folder), needed=at_most):
            folder.mkdir(parents=True)
            # The copy is in host memory already: nothing has to be copied ahead.
            writer, written = _Writer(folder, sync_files=False, per_thread_copy_ahead=0), Written()
            # Collection does not fetch the optimizer's state from a bucket, so that has a file of its own.
            by_kind: dict[str, list[WriteItem]] = {"": [], AVERAGE: [], OPTIMIZER: []}
            for item in self._plan.items:
                if item.index.fqn.startswith(WEIGHTS):
                    by_kind[""].append(item)
                else:
                    by_kind[AVERAGE if item.index.fqn.startswith(f"{AVERAGE}.") else OPTIMIZER].append(item)
            for kind, items in by_kind.items():
                if items:
                    prefix = replace(self._plan.storage_data, prefix=kind + self._plan.storage_data.prefix)
                    plan = replace(self._plan, items=items, storage_data=prefix)
                    written += writer.write_data(plan, planner).wait()
        return written

    def weight_leaves(self) -> list[Leaves]:
        """Return the leaves of this rank's part of the weights."""
        parts = []
        for index, copy in self._copies.items():
            if isinstance(copy, Tensor) and index.fqn.startswith(WEIGHTS):
                first_row = index.offset[0] if index.offset else 0
                parts.append(Leaves(index.fqn.removeprefix(WEIGHTS), first_row, row_leaves(copy)))
        return parts

    def weights_digest(self, parts: list[list[Leaves]]) -> str:
        """Return the digest of the weights from the leaves of all ranks, on rank 0, which has the plan of all."""
        stored = self._metadata.state_dict_metadata.items()
        forms = {
            name.removeprefix(WEIGHTS): (form.properties.dtype, form.size)
            for name, form in stored
            if name.startswith(WEIGHTS) and isinstance(form, TensorStorageMetadata)
        }
        return weights_digest((part for of_rank in parts for part in of_rank), forms)

    def write_index(self, folder: Path, written: list[Written]) -> None:
        """Write the file of rank 0 that says where everything is in the files of all ranks."""
        with translate_os_errors(str(folder), needed=len(pickle.dumps((self._metadata, written)))):
            _Writer(folder, sync_files=False).finish(self._metadata, written)


class _Writer(FileSystemWriter):
    """One file per plan, whose bytes depend only on the state: no random id of the save, no path."""

    def storage_meta(self) -> StorageMeta | None:
        return None
