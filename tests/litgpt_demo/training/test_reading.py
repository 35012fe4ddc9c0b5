"""Reading checkpoints that anyone may have written: nothing in them is executed, and what was saved comes back."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile import seal, spoil_bytes, spoil_index, spoil_tensors
from hypothesis import given
from hypothesis import strategies as st
from states import keep, pair, training_of
from torch.distributed.checkpoint.metadata import Metadata

from litgpt_demo.errors import DataError, Fault
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import folder_of
from litgpt_demo.training.reading import load_weights, read_index
from litgpt_demo.training.resuming import resume


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    run = open_storage(str(tmp_path / "run"))
    keep(run, pair(1, steps=2), 2)
    return tmp_path / "run" / folder_of(2)


@pytest.mark.parametrize("spoil", [spoil_index, spoil_bytes, spoil_tensors])
def test_resuming_executes_nothing_of_a_checkpoint_and_says_who_may_have_written_it(
    spoil: Callable[[Path, Path], None], finished_copy: Path, tmp_path: Path
) -> None:
    folder, marker = finished_copy / folder_of(12), tmp_path / "executed"
    spoil(folder, marker)
    seal(folder)
    training = training_of(finished_copy)
    with pytest.raises(DataError, match=r"names posix.mkdir for its reader to call.* look who may write there") as told:
        resume(training, tell=print)
    assert not marker.exists()
    assert str(folder) in str(told.value)
    assert told.value.fault is Fault.DATA


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a checkpoint whose index somebody else writes."""
    return tmp_path_factory.mktemp("hostile")


words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}(\.[A-Za-z_][A-Za-z0-9_]{0,12}){0,2}", fullmatch=True)
near = st.sampled_from(
    [
        ("builtins", "eval"), ("torch", "load"), ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"), ("torch", "float32.__reduce__"),
        ("pathlib", "PosixPath.unlink"),
    ]
)  # fmt: skip


@given(name=st.tuples(words, words) | near, protocol=st.sampled_from([0, 4]))
def test_any_name_but_those_that_an_index_holds_is_refused(name: tuple[str, str], protocol: int, folder: Path) -> None:
    """The names of classes that are allowed are long, and none of them is found by chance."""
    module, attribute = (part.encode() for part in name)
    named = {
        0: b"c%s\n%s\n." % (module, attribute),
        4: b"\x80\x04\x8c%c%s\x8c%c%s\x93." % (len(module), module, len(attribute), attribute),
    }
    (folder / ".metadata").write_bytes(named[protocol])
    with pytest.raises(DataError, match=r"names .* for its reader to call"):
        read_index(folder)


@given(content=st.binary(max_size=200))
def test_bytes_of_any_kind_are_a_data_error(content: bytes, folder: Path) -> None:
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(DataError):
        read_index(folder)


def test_an_index_cannot_change_the_classes_that_it_is_made_of(tmp_path: Path) -> None:
    """The state of an object that is a class would be set on the class, for all that this process does later."""
    name = f"c{Metadata.__module__}\nMetadata\n".encode()
    (tmp_path / ".metadata").write_bytes(name + b"(N(dS'version'\nS'changed'\nstb.")
    with pytest.raises(DataError):
        read_index(tmp_path)
    assert Metadata.version is None


@pytest.mark.parametrize("place", ["../__0_0.distcp", "/etc/passwd", ""])
def test_an_entry_lies_in_a_file_of_the_checkpoint(checkpoint: Path, place: str) -> None:
    index = read_index(checkpoint)
    next(iter(index.storage_data.values())).relative_path = place
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(DataError, match="is not a file of the checkpoint's folder"):
        read_index(checkpoint)


@pytest.mark.parametrize("whose", ["torch\nSize", "pathlib\nPosixPath"])
def test_an_attribute_of_anything_but_the_one_enumeration_is_refused(whose: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(f"cbuiltins\ngetattr\n(c{whose}\nS'unlink'\ntR.".encode())
    with pytest.raises(DataError, match=r"names builtins\.getattr for its reader to call"):
        read_index(tmp_path)


class _AsPython3112(pickle.Pickler):
    """Stores members of enumerations as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, thing: Any) -> Any:
        return (getattr, (type(thing), thing.name)) if isinstance(thing, Enum) else NotImplemented


def test_an_index_that_debian_12s_own_python_wrote_is_read(checkpoint: Path) -> None:
    expected = read_index(checkpoint)
    with (checkpoint / ".metadata").open("wb") as file:
        _AsPython3112(file, protocol=4).dump(expected)
    assert b"getattr" in (checkpoint / ".metadata").read_bytes()
    assert read_index(checkpoint).state_dict_metadata == expected.state_dict_metadata


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_checkpoints_that_torchs_own_save_wrote_are_read_in_every_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    """Early checkpoints of this project are such, with the folder that they were saved to."""
    saved, read = torch.ones(3, 4).to(dtype), torch.zeros(3, 4).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"weight": saved}}, checkpoint_id=tmp_path, no_dist=True)
    load_weights(tmp_path, {"weight": read})
    assert torch.equal(saved.float(), read.float())
