"""Checkpoints: whole or not there, right or quarantined, as many as were asked for, and nothing of them executed."""

import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bucket_faults import FailureClass, FaultyBucket
from hostile import seal, spoil_bytes, spoil_index, spoil_tensors
from hypothesis import given
from hypothesis import strategies as st
from states import keep, manifest_of, pair, publish_pair, same, step, training_of
from torch.distributed.checkpoint.metadata import Metadata

from litgpt_demo.config import ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.documents import fetch_verified
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.storage import BucketStorage, Storage, open_storage
from litgpt_demo.training import checkpoints
from litgpt_demo.training.checkpoint_reader import load_checkpoint, load_weights, read_index
from litgpt_demo.training.checkpoints import commit, folder_of, list_complete
from litgpt_demo.training.resuming import resume

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run"))


@pytest.fixture
def place(root: str) -> Storage:
    """A run in a folder, and one in a bucket."""
    return open_storage(root)


def test_a_checkpoint_restores_all_bits_without_a_warning(place: Storage, tmp_path: Path) -> None:
    trained, restored, alone = pair(1, steps=3), pair(2, steps=0), pair(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keep(place, trained, 3)
        folder = fetch_verified(place.within(folder_of(3)), list_complete(place)[0].files, lambda: tmp_path / "fetched")
        load_checkpoint(*restored, folder)
        load_weights(folder, alone[0].state_dict())
    assert same(trained, restored)
    assert all(map(torch.equal, trained[0].parameters(), alone[0].parameters()))
    for which in (trained, restored):
        step(which, torch.Generator().manual_seed(9))
    assert same(trained, restored)


def test_next_save_removes_parts_of_a_killed_one(bucket: BucketStorage, proxy: FaultyBucket, tmp_path: Path) -> None:
    """No listing shows them, and the step that they are of may never come again."""
    (shard := tmp_path / "shard").write_bytes(bytes(range(100)))
    proxy.arm(FailureClass(on="compose", do="refuse", status=403, times=2))
    for place in (f"{folder_of(3)}/a.distcp", "evaluations/a.bin"):
        with pytest.raises(UserError, match="refused"):
            replace(bucket, part_size=20).upload(shard, place)
    keep(bucket, pair(1), 8)
    assert {name.rpartition("/")[0] for name in proxy.objects()} == {folder_of(8), "evaluations"}


@pytest.mark.parametrize("spoil", [b"", b'{"format": 1', b"[]", b"\xff"])
def test_a_damaged_manifest_is_none_and_is_told(run: Storage, spoil: bytes) -> None:
    keep(run, pair(1), 4)
    keep(run, pair(2), 8)
    run.write(f"{folder_of(8)}/manifest.json", spoil)
    warnings_given: dict[str, DataError] = {}
    assert [found.step for found in list_complete(run, on_damaged=warnings_given.__setitem__)] == [4]
    assert list(warnings_given) == [folder_of(8)]
    keep(run, pair(3), 6)  # and training goes on
    assert [found.step for found in list_complete(run)] == [6, 4]
    assert run.exists(f"{folder_of(8)}/__0_0.distcp")  # what is to be looked at is not thinned out


def test_a_checkpoint_that_does_not_verify_is_no_progress(place: Storage) -> None:
    keep(place, pair(1), 4)
    assert (checkpoints.newest_step(place), checkpoints.newest_step(place, max_step=3)) == (4, 3)
    content, shard = keep(place, pair(2), 8), f"{folder_of(8)}/__0_0.distcp"
    without_index = tuple(file for file in content.files if file.path != checkpoints.INDEX)
    commit(place, content.model_copy(update={"files": without_index}))
    assert checkpoints.newest_step(place) == 4
    commit(place, content)
    assert (checkpoints.newest_step(place), checkpoints.newest_step(place, min_bytes=10**9)) == (8, 0)
    place.write(shard, bytes(place.stat(shard).size))
    assert checkpoints.newest_step(place) == 4


def test_a_quarantined_folder_is_kept_with_the_reason(place: Storage) -> None:
    files = keep(place, pair(1), 4).files
    first = open_storage(checkpoints.quarantine(place, folder_of(4), "a bit is wrong"))
    assert list_complete(place) == []
    assert place.within("checkpoints").list() == []
    assert first.read("why.txt") == b"a bit is wrong\n"
    assert {(record.path, record.crc32c) for record in first.inventory()} >= {
        (record.path, record.crc32c) for record in files
    }
    keep(place, pair(2), 4)
    assert checkpoints.quarantine(place, folder_of(4), "again") != first.address()


def test_a_save_that_never_ended_is_removed_by_the_next(run: Storage) -> None:
    keep(run, pair(1), 4)
    publish_pair(run, pair(2), 8)
    assert [found.step for found in list_complete(run)] == [4]
    keep(run, pair(2), 9)
    assert not Path(run.root, folder_of(8)).exists()


SPEC = TrainingSpec(
    run="run", dataset="/datasets/ours-hash", dataset_hash="hash", steps=10, world_size=1,
    model=ModelConfig(name="pythia-14m"), train=TrainConfig(),
)  # fmt: skip


def test_a_checkpoint_of_another_model_or_dataset_is_refused(run: Storage) -> None:
    model = {"model": ModelConfig(name="pythia-31m").model_dump(mode="json")}
    checkpoints.require_same(run, manifest_of(4, config={"model": SPEC.model.model_dump(mode="json")}), SPEC)
    checkpoints.require_same(run, manifest_of(4, format=1), SPEC)  # which did not say what it was of
    with pytest.raises(DataError, match=r"step-00000004 is of the model .*pythia-31m.*, but this run trains"):
        checkpoints.require_same(run, manifest_of(4, config=model), SPEC)
    with pytest.raises(DataError, match=r"step-00000004 was trained on dataset theirs, but this run is on hash"):
        checkpoints.require_same(run, manifest_of(4, dataset_hash="theirs"), SPEC)


def test_a_training_ends_with_its_last_step_or_its_time() -> None:
    timed = SPEC.model_copy(update={"train": TrainConfig.model_validate({"max_time": "1h"})})
    assert [checkpoints.reached_end(manifest_of(number), SPEC) for number in (9, 10)] == [False, True]
    assert [checkpoints.reached_end(manifest_of(4, seconds=seconds), timed) for seconds in (1800.0, 3600.0)] == [
        False,
        True,
    ]


LOSS = st.none() | st.floats(0, 20) | st.sampled_from([1.0, 2.0])
LOSSES = st.dictionaries(st.integers(1, 10**6), st.tuples(LOSS, st.sampled_from([64, 256])), min_size=1, max_size=12)


@given(losses=LOSSES, last=st.integers(1, 5), best=st.integers(0, 5), every=st.none() | st.integers(1, 5))
def test_the_newest_best_and_eternal_are_kept_alone(
    losses: dict[int, tuple[float | None, int]], last: int, best: int, every: int | None
) -> None:
    """The best of each number of evaluation windows: losses of different samples are not ranked."""
    manifests = [manifest_of(step, loss, evaluation_samples=windows) for step, (loss, windows) in losses.items()]
    kept = checkpoints.steps_to_keep(manifests, last=last, best=best, every=every)
    eternal = {step for step in losses if every is not None and step % every == 0}
    always = set(sorted(losses)[-last:]) | eternal
    assert always <= kept <= set(losses)
    for samples in (64, 256):
        scored = {step: loss for step, (loss, windows) in losses.items() if loss is not None and windows == samples}
        ranked = sorted(scored.values())[:best]
        assert ranked == sorted(loss for step, loss in scored.items() if step in kept)[:best]
        assert len(kept & set(scored) - always) <= best
    assert kept - always <= {step for step, (loss, _) in losses.items() if loss is not None}


@pytest.fixture
def checkpoint(run: Storage) -> Path:
    keep(run, pair(1, steps=2), 2)
    return Path(run.root, folder_of(2))


@pytest.mark.parametrize("spoil", [spoil_index, spoil_bytes, spoil_tensors])
def test_resuming_executes_nothing_of_a_checkpoint(
    spoil: Callable[[Path, Path], None], finished_copy: Path, tmp_path: Path
) -> None:
    """The error says who may have written it."""
    folder, marker = finished_copy / folder_of(12), tmp_path / "executed"
    spoil(folder, marker)
    seal(folder)
    training = training_of(finished_copy)
    with pytest.raises(
        DataError, match=r"names posix.mkdir for its reader to call.* check who may write there"
    ) as refusal:
        resume(training, on_warning=print)
    assert not marker.exists()
    assert str(folder) in str(refusal.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a checkpoint whose index somebody else writes."""
    return tmp_path_factory.mktemp("hostile")


dotted_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}(\.[A-Za-z_][A-Za-z0-9_]{0,12}){0,2}", fullmatch=True)
near = st.sampled_from(
    [
        ("builtins", "eval"), ("torch", "load"), ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"), ("torch", "float32.__reduce__"),
        ("pathlib", "PosixPath.unlink"),
    ]
)  # fmt: skip


@given(name=st.tuples(dotted_names, dotted_names) | near, protocol=st.sampled_from([0, 4]))
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
def test_only_one_enumeration_has_attributes_in_a_pickle(whose: str, tmp_path: Path) -> None:
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
def test_checkpoints_of_torchs_own_save_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    """Early checkpoints of this project are such, with the folder that they were saved to."""
    saved, read = torch.ones(3, 4).to(dtype), torch.zeros(3, 4).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"weight": saved}}, checkpoint_id=tmp_path, no_dist=True)
    load_weights(tmp_path, {"weight": read})
    assert torch.equal(saved.float(), read.float())
