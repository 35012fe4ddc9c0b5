"""Saving next to the training: what is saved is the state at that moment, and an error costs one save, no training."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from states import Pair, pair, same, tensors, training_of
from torch import nn

from litgpt_demo.errors import DataError, DiskFull, UserError
from litgpt_demo.storage import LocalStorage, ObjectInfo, Storage, open_storage
from litgpt_demo.training.checkpoints import committed, folder_of
from litgpt_demo.training.reading import load_shards
from litgpt_demo.training.resuming import resume
from litgpt_demo.training.saving import Saved, Saver
from litgpt_demo.training.setup import Training
from litgpt_demo.training.step import train_step

sys.path.append(str(Path(__file__).parents[2] / "fakes"))
from bucket_emulator import bucket_emulator
from bucket_faults import FOREVER, Fault, FaultyBucket, faulty_bucket

NewTraining: TypeAlias = Callable[..., Training]


@pytest.fixture
def new_training(new_run: Callable[..., Path]) -> NewTraining:
    """Makes a training of a run that may be there already: `new_training("run", seed=2)`."""

    def make(name: str = "run", *, root: Storage | None = None, **changes: object) -> Training:
        return training_of(new_run(name, **changes), root)

    return make


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyBucket]:
    with bucket_emulator("checkpoints") as address, faulty_bucket(address) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        yield proxy


def steps_kept(training: Training) -> list[int]:
    return [found.step for found in committed(training.run)]


def whole(training: Training) -> Pair:
    return training.model.module, training.optimizer.optimizer


def now(training: Training) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors(*whole(training))]


def left_in(training: Training) -> list[str]:
    """Every file of the run's checkpoints and of the scratch folder, whoever made it."""
    scratch = training.scratch.rglob("*")
    return training.run.within("checkpoints").list() + [str(path) for path in scratch if path.suffix == ".distcp"]


def silent(saved: Saved) -> None:
    assert saved.warning is None, saved.warning


# --- what is saved ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_saved_is_the_state_at_that_moment_whatever_the_training_does_next(tmp_path: Path, device: str) -> None:
    """With a state so large that its copy takes longer than the training needs to change it."""
    trained, other = pair(1, width=768, device=device), pair(2, steps=0, width=768, device=device)
    fabric = Fabric(accelerator=device, devices=1)
    model = fabric.setup_module(trained[0])
    training = stepped_by_hand(tmp_path, fabric, model, fabric.setup_optimizers(trained[1]))
    model(torch.randint(0, 64, (2, 32), device=device)).square().mean().backward()
    before = [tensor.clone() for tensor in tensors(*trained)]
    with Saver(training, tell=silent) as saver:
        saver.save(1, None)
        training.optimizer.param_groups[0]["lr"] = 0.5  # as the next step begins
        training.optimizer.step()
    assert not all(map(torch.equal, before, tensors(*trained)))
    load_shards(*other, Path(training.run.address(folder_of(1))), precision={})
    assert all(map(torch.equal, before, tensors(*other)))
    assert other[1].param_groups[0]["lr"] == 1e-2


def stepped_by_hand(folder: Path, fabric: Fabric, model: nn.Module, optimizer: object) -> Training:
    """A training without data, of which only saving is asked."""
    from litgpt_demo.config import ModelConfig, TrainConfig, TrainingSpec

    spec = TrainingSpec(
        run="run", dataset="none", dataset_key="none", model=ModelConfig(), train=TrainConfig(), steps=9, world_size=1
    )
    nothing = {"data": None, "feed": None}
    run = open_storage(str(folder / "run"))
    return Training(
        spec=spec, fabric=fabric, model=model, optimizer=optimizer, run=run, scratch=folder / "scratch", **nothing
    )


def test_a_training_goes_on_from_it_bit_for_bit_whatever_the_random_state_was(new_training: NewTraining) -> None:
    through, first = new_training("through"), new_training("run")
    dropout(through), dropout(first)
    for number in range(4):
        train_step(through, number)
    with Saver(first, tell=silent) as saver:
        for number in range(2):
            train_step(first, number)
        saver.save(2, None)
        train_step(first, 2)  # and is killed
    torch.manual_seed(99)  # what another process would have
    second = new_training("run")
    dropout(second)
    assert resume(second, tell=pytest.fail) == 2
    for number in range(2, 4):
        train_step(second, number)
    assert same(whole(second), whole(through))


def dropout(training: Training) -> None:
    """LitGPT's models have none; this one does now."""
    training.model.module.transformer.h[0].register_forward_hook(lambda _, __, out: nn.functional.dropout(out, 0.5))


def test_the_loss_scale_is_saved(tmp_path: Path) -> None:
    def scaled(folder: Path) -> tuple[Training, MixedPrecision]:
        precision = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**40))
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[precision])
        model = fabric.setup_module(nn.Linear(4, 4))
        # A fused optimizer scales by itself, which Fabric does not clip.
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), foreach=True))
        return stepped_by_hand(folder, fabric, model, optimizer), precision

    training, precision = scaled(tmp_path)
    with Saver(training, tell=silent) as saver:
        for factor in (1.0, 1e-9, 1e-9):  # the first one overflows
            training.fabric.backward(training.model(torch.ones(2, 4)).sum() * factor)
            training.optimizer.step()
            training.optimizer.zero_grad()
        saver.save(3, None)
    assert precision.scaler is not None
    assert precision.scaler.get_scale() < 2.0**40
    again, other = scaled(tmp_path)
    assert resume(again, tell=pytest.fail) == 3
    assert other.state_dict() == precision.state_dict()
    assert other.state_dict()["_growth_tracker"] == 2


def test_the_save_before_is_waited_for_and_every_save_is_told(new_training: NewTraining) -> None:
    told: list[Saved] = []
    training = new_training(keep_last=9)
    with Saver(training, tell=told.append) as saver:
        for number in range(1, 5):
            train_step(training, number)
            assert saver.save(number, float(number)) > 0
    assert steps_kept(training) == [4, 3, 2, 1] == [saved.step for saved in reversed(told)]
    for saved, manifest in zip(told, reversed(committed(training.run)), strict=True):
        assert (saved.size, manifest.validation_loss) == (manifest.size, float(saved.step))
        assert saved.stall > 0
        assert saved.seconds > 0
        assert saved.warning is None
    assert list(training.scratch.rglob("*.distcp")) == []


def test_a_training_that_falls_commits_what_is_in_flight(new_training: NewTraining) -> None:
    training = new_training()
    train_step(training, 0)

    def fall() -> None:
        with Saver(training, tell=silent) as saver:
            saver.save(1, None)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fall()
    assert steps_kept(training) == [1]


# --- what goes wrong --------------------------------------------------------------------------------------------------


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The disk is full for whoever writes more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_one_save_and_is_told_with_what_to_free(new_training: NewTraining) -> None:
    training, told = new_training(), list[Saved]()
    with Saver(training, tell=told.append) as saver:
        train_step(training, 0)
        with no_file_above(10_000):
            saver.save(1, None)
            train_step(training, 1)
            saver.save(2, None)  # waits for the first, and fails too
            with pytest.raises(DiskFull, match="File too large"):
                saver.finish()
        assert left_in(training) == []
        train_step(training, 2)
        saver.save(3, None)
    assert [saved.failed is None for saved in told] == [False, False, True]
    assert told[0].warning is not None
    assert told[0].warning.startswith("the checkpoint of step 1 was not saved: ")
    assert " bytes are needed, " in told[0].warning
    assert f"older checkpoints are in {training.run.address('checkpoints')}" in told[0].warning
    again = new_training()
    assert resume(again, tell=pytest.fail) == 3
    assert same(whole(again), whole(training))


def test_a_run_whose_last_save_fails_has_failed(new_training: NewTraining) -> None:
    training, told = new_training(), list[Saved]()
    train_step(training, 0)

    def train() -> None:
        with Saver(training, tell=told.append) as saver:
            saver.save(1, None)

    with no_file_above(10_000), pytest.raises(DiskFull, match="make room"):
        train()
    assert len(told) == 1


@dataclass(frozen=True)
class RottenDisk(LocalStorage):
    """Turns a bit of every shard that it is given while there is a file `rotten` in it."""

    def upload(self, source: Path, path: str, *, move: bool = False) -> ObjectInfo:
        stored = super().upload(source, path, move=move)
        if path.endswith(".distcp") and self.exists("rotten"):
            file = Path(self.address(path))
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        return stored


def test_nothing_is_removed_before_its_successor_verifies(new_training: NewTraining, tmp_path: Path) -> None:
    training, told = new_training(root=RottenDisk(str(tmp_path / "root")), keep_last=1, keep_best=0), list[Saved]()
    with Saver(training, tell=told.append) as saver:
        train_step(training, 0)
        saver.save(1, None)
        saver.finish()
        training.run.write("rotten", b"")
        saver.save(2, None)
        with pytest.raises(DataError, match=r"__0_0\.distcp has \d+ bytes and crc32c"):
            saver.finish()
        assert steps_kept(training) == [1]
        training.run.remove("rotten")
        saver.save(3, None)
    assert steps_kept(training) == [3]


def test_a_bucket_that_refuses_costs_one_save(new_training: NewTraining, bucket: FaultyBucket) -> None:
    training, told = new_training(root=open_storage("gs://checkpoints/run")), list[Saved]()
    with Saver(training, tell=told.append) as saver:
        train_step(training, 0)
        bucket.arm(Fault(on="upload", do="refuse", status=403, times=FOREVER))
        saver.save(1, None)
        train_step(training, 1)
        with pytest.raises(UserError, match=r"gs://checkpoints/run/checkpoints/step-00000001/"):
            saver.finish()
        assert left_in(training) == []
        bucket.arm()
        saver.save(2, None)
    assert steps_kept(training) == [2]
    assert [saved.failed is None for saved in told] == [False, True]


def test_old_checkpoints_that_cannot_be_removed_cost_no_save(new_training: NewTraining, bucket: FaultyBucket) -> None:
    root = open_storage("gs://checkpoints/run")
    training, told = new_training(root=root, keep_last=1, keep_best=0), list[Saved]()
    with Saver(training, tell=told.append) as saver:
        train_step(training, 0)
        saver.save(1, None)
        saver.finish()
        bucket.arm(Fault(on="delete", do="refuse", status=403, times=FOREVER))
        saver.save(2, None)
        saver.finish()
        bucket.arm()
        assert steps_kept(training) == [2, 1]
        saver.save(3, None)
    assert steps_kept(training) == [3]
    assert [saved.failed for saved in told] == [None] * 3
    warned = told[1].warning
    assert warned is not None
    assert warned.startswith("the checkpoint of step 2 is saved, but older ones in gs://checkpoints/run/checkpoints")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_bucket_with_bad_days_keeps_what_was_saved(
    new_training: NewTraining, bucket: FaultyBucket, seed: int
) -> None:
    root = open_storage("gs://checkpoints/run")
    training = new_training(root=root)
    bucket.arm_at_random(seed)
    with Saver(training, tell=silent) as saver:
        for number in range(3):
            train_step(training, number)
            saver.save(number + 1, None)
    again = new_training(root=root)
    assert resume(again, tell=pytest.fail) == 3
    assert same(whole(again), whole(training))


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(new_training: NewTraining) -> Training:
    """A training with checkpoints of its steps 1, 2 and 3."""
    training = new_training("three", keep_last=9)
    with Saver(training, tell=silent) as saver:
        for number in range(3):
            train_step(training, number)
            saver.save(number + 1, None)
    return training


def file_of(training: Training, number: int, name: str) -> Path:
    return Path(training.run.address(f"{folder_of(number)}/{name}"))


def test_what_does_not_verify_is_set_aside_by_name_and_never_read_again(
    three: Training, new_training: NewTraining
) -> None:
    shard, index = file_of(three, 3, "__0_0.distcp"), file_of(three, 2, ".metadata")
    shard.write_bytes(shard.read_bytes()[:-1])
    index.unlink()
    told: list[str] = []
    assert resume(new_training("three"), tell=told.append) == 1
    first, second = told
    assert first.startswith("checkpoints/step-00000003 does not verify and was moved to ")
    assert f"{shard} has " in first
    assert f"{index} is missing" in second
    assert steps_kept(three) == [1]
    assert (Path(three.run.root) / "set-aside/step-00000003.1/__0_0.distcp").exists()
    assert resume(new_training("three"), tell=pytest.fail) == 1


def test_a_damaged_manifest_is_set_aside(three: Training, new_training: NewTraining) -> None:
    manifest = file_of(three, 3, "manifest.json")
    manifest.write_text(manifest.read_text().replace('"tokens": 768', '"tokens": 769'))
    told: list[str] = []
    assert resume(new_training("three"), tell=told.append) == 2
    assert f"{manifest} is not as it was written: it says that its crc32c is " in told[0]


def test_without_one_that_verifies_training_begins_anew(three: Training, new_training: NewTraining) -> None:
    for number in (1, 2, 3):
        file_of(three, number, "__0_0.distcp").write_bytes(b"")
    told: list[str] = []
    assert resume(new_training("three"), tell=told.append) == 0
    assert len(told) == 3


def test_a_checkpoint_of_another_model_is_refused(three: Training, new_training: NewTraining) -> None:
    from training_runs import MODEL

    wider = MODEL.model_copy(update={"config": {"n_layer": 2, "n_embd": 64, "n_head": 2}})
    with pytest.raises(DataError, match=r"step-00000003 is of the model .*'n_embd': 32.* trains .*'n_embd': 64"):
        resume(new_training("three", model=wider), tell=pytest.fail)
    assert steps_kept(three) == [3, 2, 1]


def test_a_checkpoint_of_another_dataset_is_refused(three: Training) -> None:
    spec = three.spec.model_copy(update={"dataset_key": "0123456789"})
    with pytest.raises(DataError, match=f"was trained on dataset {three.spec.dataset_key}, this run is on 0123456789"):
        resume(replace(three, spec=spec), tell=pytest.fail)
    assert steps_kept(three) == [3, 2, 1]
