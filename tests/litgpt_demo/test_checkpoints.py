"""Checkpoints: whole or not there, the newest that verifies, and no more kept than was asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from litgpt.config import Config
from litgpt.model import GPT
from torch.optim import AdamW, Optimizer

from litgpt_demo.checkpoints import (
    CheckpointManifest,
    commit,
    committed,
    folder_of,
    load_shards,
    load_weights,
    newest_verified,
    publish_shards,
    retained,
    save_shards,
)
from litgpt_demo.faults import UserError
from litgpt_demo.model import decay_groups, initialise
from litgpt_demo.storage import Storage, open_storage

sys.path.append(str(Path(__file__).parents[1] / "fakes"))
from bucket_emulator import bucket_emulator
from bucket_faults import FOREVER, Fault, faulty_bucket

Pair = tuple[GPT, Optimizer]


def pair(seed: int, steps: int = 0) -> Pair:
    """A small model and its optimizer after a few steps."""
    model = GPT(Config(n_layer=2, n_embd=32, n_head=2, block_size=32, vocab_size=64, padding_multiple=64))
    initialise(model, seed=seed)
    optimizer = AdamW(decay_groups(model, 0.1), lr=1e-2, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        step((model, optimizer), generator)
    return model, optimizer


def step(trained: Pair, generator: torch.Generator) -> None:
    model, optimizer = trained
    model(torch.randint(0, 64, (2, 32), generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def manifest_of(number: int, loss: float | None = None) -> CheckpointManifest:
    return CheckpointManifest(
        format=1,
        run="run",
        step=number,
        tokens=number * 100,
        dataset_key="key",
        validation_loss=loss,
        world_size=1,
        versions={},
        files=(),
    )


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run"))


@pytest.fixture
def keep(run: Storage, tmp_path: Path) -> Callable[..., None]:
    """Saves and commits a pair as training does: `keep(pair, 4, loss=2.0)`."""

    def commits(trained: Pair, number: int, *, loss: float | None = None, last: int = 9, best: int = 0) -> None:
        save_shards(*trained, tmp_path / f"shards-{number}")
        files = publish_shards(tmp_path / f"shards-{number}", run, number)
        done = manifest_of(number, loss).model_copy(update={"files": tuple(files)})
        commit(run, done, keep_last=last, keep_best=best)

    return commits


def newest(run: Storage, tmp_path: Path, tell: Callable[[str], None] = pytest.fail) -> tuple[int, Path]:
    found = newest_verified(run, lambda: tmp_path / "scratch", tell=tell)
    assert found is not None
    return found[0].step, found[1]


def same(one: Pair, other: Pair) -> bool:
    """Bit for bit, weights and optimizer."""
    tensors = [
        [*model.state_dict().values(), *(value for state in optimizer.state.values() for value in state.values())]
        for model, optimizer in (one, other)
    ]
    return all(torch.equal(first, second) for first, second in zip(*tensors, strict=True))


def test_weights_and_optimizer_come_back_bit_for_bit(keep: Callable[..., None], run: Storage, tmp_path: Path) -> None:
    trained, other = pair(1, steps=3), pair(2)
    keep(trained, 3)
    number, folder = newest(run, tmp_path)
    load_shards(*other, folder)
    assert number == 3
    assert same(trained, other)
    for which in (trained, other):
        step(which, torch.Generator().manual_seed(9))
    assert same(trained, other)


def test_weights_alone_can_be_read_into_plain_tensors(keep: Callable[..., None], run: Storage, tmp_path: Path) -> None:
    trained, other = pair(1, steps=1), pair(2)
    keep(trained, 1)
    load_weights(newest(run, tmp_path)[1], other[0].state_dict())
    assert all(torch.equal(one, two) for one, two in zip(trained[0].parameters(), other[0].parameters(), strict=True))


def test_a_checkpoint_in_a_bucket_is_fetched_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket_emulator("checkpoints") as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        run, trained, other = open_storage("gs://checkpoints/run"), pair(1, steps=1), pair(2)
        save_shards(*trained, tmp_path / "shards")
        files = publish_shards(tmp_path / "shards", run, 1)
        commit(run, manifest_of(1).model_copy(update={"files": tuple(files)}), keep_last=1, keep_best=0)
        assert not (tmp_path / "shards").exists()
        _, folder = newest(run, tmp_path)
        load_shards(*other, folder)
    assert same(trained, other)


def test_a_flipped_bit_in_the_newest_makes_the_older_one_the_newest_and_is_told(
    keep: Callable[..., None], run: Storage, tmp_path: Path
) -> None:
    keep(pair(1), 4)
    keep(pair(2), 8)
    (shard,) = Path(run.root, folder_of(8)).glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    told: list[str] = []
    assert newest(run, tmp_path, told.append)[0] == 4
    (words,) = told
    assert words.startswith("checkpoint of step 8 is passed over")
    assert f"{shard} has crc32c" in words


@pytest.mark.parametrize("spoil", [b"", b'{"format": 1', b"[]"])
def test_a_damaged_manifest_is_none_and_is_told(
    keep: Callable[..., None], run: Storage, tmp_path: Path, spoil: bytes
) -> None:
    keep(pair(1), 4)
    keep(pair(2), 8)
    run.write(f"{folder_of(8)}/manifest.json", spoil)
    told: list[str] = []
    assert newest(run, tmp_path, told.append)[0] == 4
    assert len(told) == 1
    assert "step-00000008 is passed over" in told[0]
    keep(pair(3), 6)  # and training goes on
    assert [found.step for found in committed(run)] == [6, 4]


def test_a_folder_without_manifest_is_a_save_that_never_ended(
    keep: Callable[..., None], run: Storage, tmp_path: Path
) -> None:
    assert newest_verified(run, lambda: tmp_path / "scratch", tell=pytest.fail) is None
    keep(pair(1), 4)
    save_shards(*pair(2), tmp_path / "shards")
    publish_shards(tmp_path / "shards", run, 8)
    assert [found.step for found in committed(run)] == [4]
    assert newest(run, tmp_path)[0] == 4


# --- retention --------------------------------------------------------------------------------------------------------

LOSSES = st.dictionaries(
    st.integers(1, 10**6), st.none() | st.floats(0, 20) | st.sampled_from([1.0, 2.0]), min_size=1, max_size=12
)


@given(losses=LOSSES, last=st.integers(1, 5), best=st.integers(0, 5))
def test_the_newest_and_the_best_are_kept_and_nothing_else(
    losses: dict[int, float | None], last: int, best: int
) -> None:
    kept = retained([manifest_of(number, loss) for number, loss in losses.items()], last=last, best=best)
    scored = [loss for loss in losses.values() if loss is not None]
    assert kept <= set(losses)
    assert set(sorted(losses)[-last:]) <= kept
    assert min(last, len(losses)) <= len(kept) <= last + best
    if best:
        assert not scored or min(scored) in {losses[number] for number in kept}
    others = kept - set(sorted(losses)[-last:])
    assert all(losses[number] is not None for number in others)
    for number in others:  # no better one was thrown away
        assert all(loss is None or loss >= losses[number] for gone, loss in losses.items() if gone not in kept)


def test_training_leaves_the_last_two_and_the_best(keep: Callable[..., None], run: Storage) -> None:
    trained = pair(1)
    for number, loss in [(2, 3.0), (4, 1.0), (6, 2.0), (8, 2.5), (10, 2.75)]:
        keep(trained, number, loss=loss, last=2, best=1)
    assert [found.step for found in committed(run)] == [10, 8, 4]
    assert {path.split("/")[0] for path in run.within("checkpoints").list()} == {
        "step-00000004",
        "step-00000008",
        "step-00000010",
    }


def test_a_removal_cut_short_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket_emulator("checkpoints") as address, faulty_bucket(address) as bucket:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.url)
        run = open_storage("gs://checkpoints/run")
        run.write(f"{folder_of(4)}/__0_0.distcp", b"weights")
        commit(run, manifest_of(4), keep_last=1, keep_best=0)
        bucket.arm(Fault(on="delete", do="refuse", status=403, times=FOREVER, skip=1))
        with pytest.raises(UserError):
            commit(run, manifest_of(8), keep_last=1, keep_best=0)
        assert run.exists(f"{folder_of(4)}/__0_0.distcp")
        assert [found.step for found in committed(run)] == [8]


def test_newer_checkpoints_that_did_not_verify_are_not_kept_in_place_of_good_ones(
    keep: Callable[..., None], run: Storage, tmp_path: Path
) -> None:
    keep(pair(1), 4)
    keep(pair(2), 8)
    (shard,) = Path(run.root, folder_of(8)).glob("*.distcp")
    shard.write_bytes(b"")
    assert newest(run, tmp_path, print)[0] == 4
    keep(pair(3), 6, last=1)  # resumed from 4, with checkpoints at other steps than before
    assert newest(run, tmp_path)[0] == 6
    assert [found.step for found in committed(run)] == [6]
