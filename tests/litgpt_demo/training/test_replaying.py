"""Steps that are trained again: the same bits, the same samples, and the document behind a spike."""

import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import corpus_in, prepared
from hostile import flip_a_bit
from states import training_of
from training_runs import NewRun, TrainElsewhere, rows, train

from litgpt_demo.data.batches import sample_ids_for_step
from litgpt_demo.errors import UserError
from litgpt_demo.replays import Replay, read_replay
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.checkpoints import folder_of
from litgpt_demo.training.replaying import main


def replayed(run: Path | str, steps: str, folder: Path, *options: str) -> Replay:
    """Replay in this process, with the result outside of the run."""
    assert main(["--run", str(run), "--steps", steps, "--out", str(folder / "replay.json"), *options]) == 0
    return read_replay(open_storage(str(folder)), "replay.json")


def files_of(run: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def test_replayed_steps_have_the_bits_of_the_recorded_ones(finished: Path, tmp_path: Path) -> None:
    found = replayed(finished, "9-11", tmp_path)
    assert (found.began_at, found.world_size, [step.step for step in found.steps]) == (8, 1, [9, 10, 11])
    recorded = {row["step"]: row for row in rows(finished, "step")}
    for step in found.steps:
        assert step.loss == step.recorded_loss == recorded[step.step]["loss"]
        assert step.batch_sha256 == step.recorded_batch_sha256 == recorded[step.step]["batch_sha256"]
        assert step.grad_norm == step.recorded_grad_norm == recorded[step.step]["grad_norm"]
    assert found.largest_difference == 0
    assert replayed(finished, "12", tmp_path).began_at == 8, "its own checkpoint is behind it"
    assert np.mean([sample.loss for sample in found.samples]) == pytest.approx(found.steps[-1].loss, rel=1e-6)
    assert [sample.loss for sample in found.samples] == sorted((sample.loss for sample in found.samples), reverse=True)


def test_replay_from_the_start_draws_the_same_initial_weights(finished: Path, tmp_path: Path) -> None:
    found = replayed(finished, "2-3", tmp_path, "--from-start")
    assert (found.began_at, found.largest_difference) == (0, 0)


def test_replay_passes_over_a_damaged_checkpoint(new_run: NewRun, tmp_path: Path) -> None:
    """It stays where it is: a run may be training meanwhile, and only that may quarantine."""
    run = new_run("run", keep_every=4)
    train(run)
    for path in (run / folder_of(8)).glob("*.distcp"):
        flip_a_bit(path)
    before = files_of(run)
    found = replayed(run, "10", tmp_path)
    assert (found.began_at, found.largest_difference) == (4, 0)
    flip_a_bit(next((run / folder_of(4)).glob("*.distcp")))
    before |= {path: path.stat().st_mtime_ns for path in (run / folder_of(4)).iterdir()}
    with pytest.raises(UserError, match="no checkpoint before step 10 verifies"):
        replayed(run, "10", tmp_path)
    assert files_of(run) == before


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "muon", "weight_average": 0.9, "attention": "documents"},
        {"global_batch": [{"batch": 4}, {"batch": 8, "after": 4}], "schedule": "wsd", "precision": "bf16-mixed"},
        {"activation_checkpointing": "full", "z_loss": 0.01, "on_nonfinite": "skip", "log_every": 3},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_replay_has_the_settings_of_the_run(new_run: NewRun, tmp_path: Path, settings: dict[str, Any]) -> None:
    run = new_run("run", **settings)
    train(run)
    found = replayed(run, "10-12", tmp_path)
    assert (found.began_at, found.largest_difference) == (8, 0)
    has_row = [step.recorded_loss is not None for step in found.steps]
    assert has_row == [step.step % settings.get("log_every", 1) == 0 for step in found.steps]


def test_replay_of_two_ranks_after_a_kill_has_their_bits(new_run: NewRun, train_elsewhere: TrainElsewhere) -> None:
    """With another number of ranks it differs by rounding."""
    run = new_run("run", world_size=2, strategy="fsdp", micro_batch=1)
    assert -signal.SIGKILL in train_elsewhere((run, 2, 8))[0]
    assert train_elsewhere((run, 2, 0)) == [[0, 0]]
    assert train_elsewhere((run, 2, 0), replays="9-10") == [[0, 0]]
    assert train_elsewhere((run, 4, 0), replays="9-11") == [[0] * 4]
    same, near = (read_replay(open_storage(str(run)), f"replays/{steps}.json") for steps in ("9-10", "9-11"))
    assert (same.world_size, same.largest_difference) == (2, 0)
    assert near.world_size == 4
    assert near.largest_difference == pytest.approx(0, abs=1e-4)
    assert [row["step"] for row in rows(run, "start")] == [0, 4]


def test_replay_from_a_bucket_writes_only_its_result(finished: Path, bucket: Storage, tmp_path: Path) -> None:
    for path in filter(Path.is_file, finished.rglob("*")):
        bucket.upload(path, str(path.relative_to(finished)))
    before = set(bucket.list())
    out = f"{bucket.root}/replays/9-9.json"
    assert main(["--run", bucket.root, "--steps", "9", "--out", out]) == 0
    assert read_replay(bucket, "replays/9-9.json").largest_difference == 0
    assert set(bucket.list()) - before == {"replays/9-9.json"}


def test_document_of_noise_is_the_worst_of_its_step(new_run: NewRun, tmp_path: Path) -> None:
    noise = "".join(random.Random(1).choices("qzxj#@~^|{}", k=200))
    texts = [f"{number} bottles on the wall, and {number} of them may fall" for number in range(60)]
    texts[30] = noise
    manifest, folder = prepared(corpus_in(tmp_path / "texts", texts), tmp_path / "root", validation_fraction=0.05)
    run = new_run("run", dataset=folder, learning_rate=0.01, max_steps=20, keep_every=4)
    train(run)
    training = training_of(run)
    training.feed.close()
    tokens = training.data.train.files[0].tolist()
    ends = [place for place, token in enumerate(tokens) if token == manifest.end_of_text]
    longest = max(range(1, len(ends)), key=lambda number: ends[number] - ends[number - 1])
    middle = (ends[longest - 1] + ends[longest]) // 2 // 32
    step = max(
        step for step in range(1, 21) if middle in sample_ids_for_step(training.spec, training.data.train, step - 1)
    )
    found = replayed(run, f"{step}-{step}", tmp_path)
    assert (found.largest_difference, found.samples[0].id) == (0, middle)
    worst = found.samples[0].documents[0]
    assert worst.position == ends[longest - 1] + 1
    assert len(worst.beginning) > 10
    assert noise.startswith(worst.beginning)
    assert found.samples[0].text in noise
    assert [bool(sample.documents) for sample in found.samples] == [True] * 5 + [False] * 3
