"""Reading a checkpoint's files, which anyone who may write to the run's folder may have written.

Torch keeps them as pickles, and a pickle names functions for its reader to call. No name is followed here but those of
the few classes that a checkpoint holds: the index goes through a list of them, every entry through torch's own reader
of weights.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as _FORMATS
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from litgpt_demo.errors import DataError, one_line
from litgpt_demo.training.checkpoints import INDEX

State: TypeAlias = dict[str, Any]

MODEL = "model"
WEIGHTS = f"{MODEL}."
"""The beginning of a weight's name in an index, of which only training reads all other names."""

AVERAGE = "average"
"""The beginning of the names of the moving averages of the weights in an index, and of the files that hold them."""

OPTIMIZER = "training"
"""The beginning of the names of the files that hold neither weights nor their averages."""

# Types that torch 2.13 puts into an index, as the index names them; data types come on top. A path is where torch's own
# `save` wrote to, which early checkpoints hold (Python 3.13 has it in another module).
_STORED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip

_REMEDY = (
    "Nothing of it was executed. A training with another version of torch wrote it, or another user did: check who may "
    "write there, then remove that folder, and training and collection take the checkpoint before"
)


def training_state(
    model: Any, optimizer: Any, precision: Mapping[str, Any], average: Mapping[str, Tensor] | None = None
) -> State:
    """Return all that training continues from but the step: references to tensors that live on, copies of the rest.

    The optimizer's part is only its averages: the reader's config has its settings. `precision` is
    the state of the loss scaling, empty where losses are not scaled. `average` has the averaged weights, if there are.
    """
    weights, optimizers = get_state_dict(model, optimizer)
    state = {MODEL: weights, "optimizer": {"state": optimizers["state"]}}
    if average:
        state[AVERAGE] = dict(average)
    return state | ({"precision": dict(precision)} if precision else {})


def load_checkpoint(
    model: Any,
    optimizer: Any,
    folder: Path,
    *,
    precision: Any = None,
    average: Mapping[str, Tensor] | None = None,
    address: str = "",
) -> None:
    """Read a checkpoint into `model`, `optimizer`, whose settings stay, `average` and the loss scaling `precision`."""
    state = training_state(model, optimizer, {} if precision is None else precision.state_dict(), average)
    _read(state, folder, address)
    optimizers = {**get_optimizer_state_dict(model, optimizer), **state["optimizer"]}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizers)
    if "precision" in state:
        precision.load_state_dict(state["precision"])


def files_of_state(state: State, folder: Path, *, address: str = "") -> set[str]:
    """Return the files that this rank reads to fill a `training_state`; only the index of `folder` is read."""
    reader, _, plan = _planned(state, folder, address)
    return {reader.storage_data[item.storage_index].relative_path for item in plan.items}


def files_of_weights(folder: Path, *, kind: str = MODEL, address: str = "") -> set[str]:
    """Return the files that `load_weights` reads, by name; only the index of `folder` is read."""
    places = read_index(folder, address=address).storage_data.items()
    return {place.relative_path for index, place in places if index.fqn.startswith(f"{kind}.")}


def load_weights(folder: Path, into: dict[str, Any], *, kind: str = MODEL, address: str = "") -> None:
    """Read only the weights, or with kind=AVERAGE their averages, in full, into the tensors of a state dict.

    One process suffices, whatever wrote them.
    """
    _read({kind: into}, folder, address)


def read_index(folder: Path, *, address: str = "") -> Metadata:
    """Return the names, shapes and places of all that a checkpoint's files hold."""
    where = f"{address or folder}/{INDEX}"
    try:
        with (folder / INDEX).open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"it holds a {type(metadata).__name__}")
        for name, stored in metadata.state_dict_metadata.items():
            if not (isinstance(name, str) and isinstance(stored, TensorStorageMetadata | BytesStorageMetadata)):
                raise ValueError(f"the entry {name!r} is a {type(stored).__name__}")
        for index, place in metadata.storage_data.items():
            name = place.relative_path
            if not isinstance(index, MetadataIndex) or name in {"", ".."} or Path(name).name != name:
                raise ValueError(f"{index!r} is stored in {name!r}, which is not a file of the checkpoint's folder")
            if getattr(place, "transform_descriptors", None):
                raise ValueError(f"{index!r} is stored in a form that training does not write")
    except OSError:
        raise
    except Exception as error:  # damaged pickles raise whatever the step that they broke raises
        raise DataError(f"{where} is not the index of a checkpoint ({one_line(error)}). {_REMEDY}") from error
    return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        """Return a stand-in that makes the object: a class itself could be changed by the rest of the file."""
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        refused = pickle.UnpicklingError(f"it names {module}.{name} for its reader to call")
        if (module, name) == ("builtins", "getattr"):
            # A member of the one enumeration in an index: Python 3.11.0 to 3.11.3, Debian 12's own among them, stores
            # it as `getattr(enumeration, name)` (3.11.2's enum.py, line 1233).
            def member(_: type, kind: object, name: str) -> Any:
                if not isinstance(kind, type) or kind.__name__ != _FORMATS.__name__:
                    raise refused
                return _FORMATS[name]

            return type(name, (), {"__new__": member})
        if name not in _STORED.get(module, ()):
            raise refused
        kind = super().find_class(module, name)

        def make(_: type, *values: Any) -> Any:
            return kind(*values) if values else object.__new__(kind)

        return type(name, (), {"__new__": make})


class _Planner(DefaultLoadPlanner):
    """Torch's planner, which would execute what it reads as bytes: numbers, flags and tuples of them."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        own = BytesIO()
        torch.save(torch.load(value, weights_only=True), own)
        own.seek(0)
        super().load_bytes(read_item, own)


def _planned(state: State, folder: Path, address: str) -> tuple[FileSystemReader, _Planner, LoadPlan]:
    """Plan without torch's `load`: it warns in a single process, and has ranks agree on plans that never change."""
    reader, planner, metadata = FileSystemReader(folder), _Planner(), read_index(folder, address=address)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    return reader, planner, planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))


def _read(state: State, folder: Path, address: str) -> None:
    reader, planner, plan = _planned(state, folder, address)
    with explain_unpickling_errors(address or str(folder)):
        reader.read_data(plan, planner).wait()


@contextmanager
def explain_unpickling_errors(address: str) -> Iterator[None]:
    """Explain torch's refusal of a pickle in our words: its own advises to execute it."""
    try:
        yield
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        how = f"names {found[1]} for its reader to call" if found else "is not one that torch reads"
        what = f"{address} holds a pickle that {how}, but a checkpoint holds only weights and plain values. {_REMEDY}"
        raise DataError(what) from error
