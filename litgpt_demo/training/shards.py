"""A rank's share of a checkpoint: which it is, a copy of it in host memory, and its file.

Built of torch.distributed.checkpoint's planner and writer. Its own `async_save` copies all that a rank has, under DDP
the whole state on every rank; here a rank copies what it writes, into memory that every save uses again.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from litgpt_demo.storage.local import explaining
from litgpt_demo.training.checkpoints import INDEX
from litgpt_demo.training.ranks import Ranks

State: TypeAlias = dict[str, Any]
Written: TypeAlias = list[WriteResult]

# Bytes: each tensor is a zip archive of its own within the file (seen with torch 2.13: 1.4 to 1.6 KiB).
_AROUND_A_TENSOR = 2048


def training_state(model: Any, optimizer: Any, precision: Mapping[str, Any]) -> State:
    """Everything that training goes on from but the step: references to tensors that live on, copies of the rest.

    Args:
        precision: the state of the loss scaling, empty where losses are not scaled.
    """
    weights, state = get_state_dict(model, optimizer)
    # The next step sets its learning rate before this one's is written down.
    state["param_groups"] = deepcopy(state["param_groups"])
    return {"model": weights, "optimizer": state} | ({"precision": dict(precision)} if precision else {})


class Shards:
    """The share of one rank. `copy` and `write` belong to the thread that saves, `now` to the one that trains."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None
        self._copies: dict[MetadataIndex, Tensor | BytesIO] = {}
        self._written: int | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def _size(self) -> int:
        """Bytes that the share needs on the disk: those of the file before, or at most so many for the first one."""
        if self._written is not None:
            return self._written
        tensors = (copy for copy in self._copies.values() if isinstance(copy, Tensor))
        return sum(tensor.numel() * tensor.element_size() + _AROUND_A_TENSOR for tensor in tensors)

    def now(self) -> Any:
        """The moment up to which the device has to have come before `copy` may read, as training has asked of it."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def agree(self, state: State) -> None:
        """The first time, all ranks agree on whose share is what; it stays so, because the state keeps its form."""
        if self._plan is None:
            # What is whole on every rank of a sharded training is small: in one file, the others are read by few ranks.
            sharded = any(isinstance(weight, DTensor) for weight in state["model"].values())
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=sharded)

            def whole(plans: list[SavePlan]) -> list[SavePlan]:
                plans, self._metadata = planner.create_global_plan(plans)
                return _Writer("").prepare_global_plan(plans)

            self._plan = self._ranks.deal(lambda: _flattened(planner, state).create_local_plan(), whole)

    def copy(self, state: State, moment: Any) -> None:
        """Take a copy of this rank's share of `state`."""
        assert self._plan is not None
        planner = _flattened(DefaultSavePlanner(), state)
        with self._beside(moment):
            for item in self._plan.items:
                self._copies[item.index] = _copied(planner.resolve_data(item), self._copies.get(item.index))

    @contextmanager
    def _beside(self, moment: Any) -> Iterator[None]:
        """Copy on a stream of its own, so that the device goes on training while it is read."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_event(moment)
            yield
        if self._stream is not None:
            self._stream.synchronize()

    def write(self, folder: Path) -> Written:
        """Write the copy into `folder`, which may be another one on every rank: nothing but file names is shared."""
        assert self._plan is not None
        with explaining(str(folder), needed=self._size()):
            folder.mkdir(parents=True)
            written: Written = _Writer(folder).write_data(self._plan, _Copies(self._copies)).wait()
        self._written = sum(file.stat().st_size for file in folder.iterdir())
        return written

    def write_index(self, folder: Path, written: list[Written]) -> Path:
        """Rank 0's: the file that says where everything is in the ranks' files."""
        assert self._metadata is not None
        with explaining(str(folder), needed=len(pickle.dumps((self._metadata, written)))):
            _Writer(folder).finish(self._metadata, written)
        return folder / INDEX


def _flattened(planner: DefaultSavePlanner, state: State) -> DefaultSavePlanner:
    planner.set_up_planner(state, is_coordinator=True)
    return planner


def _copied(source: Tensor | BytesIO, copy: Tensor | BytesIO | None) -> Tensor | BytesIO:
    if isinstance(source, BytesIO):
        return source
    if not isinstance(copy, Tensor):
        like = torch.contiguous_format
        copy = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda, memory_format=like)
    return copy.copy_(source.detach(), non_blocking=True)


class _Copies(DefaultSavePlanner):
    """Stands for the state where a writer asks for its values."""

    def __init__(self, copies: Mapping[MetadataIndex, Tensor | BytesIO]) -> None:
        super().__init__()
        self._copies = copies

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        return self._copies[write_item.index]


class _Writer(FileSystemWriter):
    """One file per rank, whose bytes depend on the state alone: no random id of the save, no path."""

    def __init__(self, folder: Path | str) -> None:
        # What is written lies in host memory already: nothing to be copied ahead.
        super().__init__(folder, single_file_per_rank=True, sync_files=False, per_thread_copy_ahead=0)

    def storage_meta(self) -> StorageMeta | None:
        return None
