"""Training: what it sees and writes depends on the spec and the step alone, wherever it runs and is resumed."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from corpora import cut_into
from hypothesis import given
from hypothesis import strategies as st
from waiting import free_port

from litgpt_demo.config import DataConfig, TrainConfig
from litgpt_demo.data.dataset import open_dataset, plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.manifests import write_manifest
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import committed, folder_of
from litgpt_demo.training.feed import Data, open_data
from litgpt_demo.training.loop import main
from litgpt_demo.training.reading import load_weights
from litgpt_demo.training.step import learning_rate, step_seed

NewRun: TypeAlias = Callable[..., Path]


def train(run: Path) -> None:
    assert main(["--run", str(run)]) == 0


def rows(run: Path) -> list[dict[str, Any]]:
    return rows_of((run / "metrics.jsonl").read_text())


def told(run: Path) -> list[dict[str, Any]]:
    """What the metrics say of the model, not of how long it took or how often it was started and saved."""
    timed = {"seconds", "tokens_per_second", "step_seconds", "data_seconds", "memory", "mfu", "first_step_seconds"}
    return [
        {name: value for name, value in row.items() if name not in timed}
        for row in rows(run)
        if row["kind"] in {"step", "evaluation"}
    ]


def steps_kept(run: Path) -> list[int]:
    return [found.step for found in committed(open_storage(str(run)))]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    from litgpt.model import GPT

    from litgpt_demo.models.model import litgpt_config
    from litgpt_demo.runs import read_spec

    spec = read_spec(open_storage(str(run)))
    model = GPT(litgpt_config(spec.model, vocab_size=open_dataset(spec.dataset).vocab_size))
    state = {name: torch.full_like(value, math.nan) for name, value in model.state_dict().items()}
    load_weights(run / folder_of(step), state)
    return state


def identical(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- the data ---------------------------------------------------------------------------------------------------------


def test_a_dataset_of_numbered_files_is_read_as_the_one_file(
    new_run: NewRun, tiny_dataset: Path, corpus: Path, tmp_path: Path
) -> None:
    data = DataConfig.model_validate(
        {
            "corpus": {"kind": "files", "paths": [str(corpus)], "separator": "\n\n"},
            "tokenizer": {"kind": "train", "vocab_size": 300},
            "validation_fraction": 0.05,
            "max_file_bytes": 40_000,
        }
    )
    planned = plan_dataset(data)
    with cut_into(15_000):
        manifest = prepare(planned, open_storage(str(tmp_path / "root")))
    assert len(manifest.train.files) > 2

    def opened(dataset: Path) -> Data:
        spec = read_spec(open_storage(str(new_run(dataset.name, dataset=dataset))))
        return open_data(spec, dataset)

    numbered, whole = opened(tmp_path / "root" / planned.path), opened(tiny_dataset)
    numbers = np.arange(len(whole.train), dtype=np.uint64)
    assert len(numbered.train) == len(whole.train)
    for one, other in zip(numbered.train.read(numbers), whole.train.read(numbers), strict=True):
        assert np.array_equal(one, other)


# --- the schedule -----------------------------------------------------------------------------------------------------


@given(
    steps=st.integers(1, 3000),
    warmup=st.integers(0, 400),
    high=st.floats(1e-6, 1.0),
    share=st.none() | st.floats(0.0, 1.0),
)
def test_the_learning_rate_rises_to_its_highest_and_falls_to_its_lowest_at_the_last_step(
    steps: int, warmup: int, high: float, share: float | None
) -> None:
    low = high / 10 if share is None else high * share
    settings = TrainConfig(
        learning_rate=high, min_learning_rate=None if share is None else low, warmup_steps=warmup, max_tokens=1
    )
    rates = [learning_rate(settings, step=step, steps=steps) for step in range(steps)]
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert max(rates) <= high * (1 + 1e-9)
    if rising:
        assert rising[0] == pytest.approx(high / warmup)
    if len(rising) == warmup and falling:
        assert falling[0] == pytest.approx(high)
    if len(falling) > 1:
        assert falling[-1] == pytest.approx(low)


def test_the_learning_rate_of_a_small_run_is_as_drawn_by_hand() -> None:
    settings = TrainConfig(learning_rate=1.0, min_learning_rate=0.0, warmup_steps=2, max_steps=7)
    rates = [learning_rate(settings, step=step, steps=7) for step in range(7)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0])


def test_every_step_of_every_rank_has_a_seed_of_its_own_that_torch_takes() -> None:
    seeds = [step_seed(seed=seed, step=step, rank=rank) for seed in (1, 2) for step in range(20) for rank in range(8)]
    assert len(set(seeds)) == len(seeds)
    torch.manual_seed(max(seeds))


# --- one process ------------------------------------------------------------------------------------------------------


def test_the_loss_falls_and_the_metrics_tell_all_of_it(finished: Path) -> None:
    losses = curve(rows(finished), "step", "loss")
    validation = curve(rows(finished), "evaluation", "validation_loss")
    assert list(losses) == list(range(1, 13))
    assert list(validation) == [4, 8, 12]
    assert losses[1] == pytest.approx(math.log(300), rel=0.1)
    assert losses[12] < losses[1] - 1
    assert validation[12] < validation[4]
    kinds = [row["kind"] for row in rows(finished)]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    first = next(row for row in rows(finished) if row["kind"] == "step")
    assert first["tokens"] == 8 * 32
    assert first["learning_rate"] == pytest.approx(0.01)


def test_a_finished_run_keeps_its_last_checkpoints_and_no_scratch(finished: Path) -> None:
    assert steps_kept(finished) == [12, 8]
    newest = committed(open_storage(str(finished)))[0]
    assert (newest.tokens, newest.run, newest.world_size) == (12 * 8 * 32, "finished", 1)
    assert newest.validation_loss == curve(rows(finished), "evaluation", "validation_loss")[12]
    names = {path.name for path in finished.iterdir()}
    assert names == {"checkpoints", "config.json", "metrics.csv", "metrics.jsonl"}


def test_a_finished_run_that_is_started_again_changes_nothing(finished_copy: Path) -> None:
    before = weights(finished_copy, 12)
    train(finished_copy)
    assert identical(weights(finished_copy, 12), before)
    assert steps_kept(finished_copy) == [12, 8]


@pytest.mark.long
def test_a_run_killed_in_the_middle_ends_as_if_it_had_not_been(new_run: NewRun) -> None:
    through, killed = (new_run(name, max_steps=30, micro_batch=8, evaluate_every=10) for name in ("through", "killed"))
    command = [sys.executable, "-m", "litgpt_demo", "train", "--run", str(killed)]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while not steps_kept(killed):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    reached = steps_kept(killed)[0]
    assert 0 < reached < 30
    train(killed)
    starts = [row["step"] for row in rows(killed) if row["kind"] == "start"]
    assert starts == [0, reached]
    train(through)
    assert told(killed) == told(through)
    assert identical(weights(killed, 30), weights(through, 30))


def test_accumulating_gradients_changes_only_rounding(finished: Path, new_run: NewRun) -> None:
    whole = new_run("whole", micro_batch=8)
    train(whole)
    alike(whole, finished)


def test_another_seed_is_another_training(finished: Path, new_run: NewRun) -> None:
    other = new_run("other", seed=7)
    train(other)
    assert curve(rows(other), "step", "loss")[1] != curve(rows(finished), "step", "loss")[1]


def test_a_damaged_last_checkpoint_costs_the_steps_since_the_one_before(
    finished: Path, finished_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shard,) = (finished_copy / folder_of(12)).glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1])
    train(finished_copy)
    warned = capsys.readouterr().out
    assert f"warning: checkpoints/step-00000012 does not verify and was moved to {finished_copy}/set-aside/" in warned
    assert f"{shard} has " in warned
    assert identical(weights(finished_copy, 12), weights(finished, 12))
    assert told(finished_copy) == told(finished)


# --- refused ----------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_stops_the_run_with_what_to_change(new_run: NewRun) -> None:
    wild = new_run("wild", learning_rate=1e30, clip_norm=None, warmup_steps=0, checkpoint_every=1, log_every=100)
    with pytest.raises(UserError, match=r"of step \d+ is .*A lower train\.learning_rate=1e\+30"):
        main(["--run", str(wild)])
    for step in steps_kept(wild):
        assert all(weight.isfinite().all() for weight in weights(wild, step).values())
    assert 12 not in steps_kept(wild)


def test_a_rank_in_a_world_of_another_size_refuses_to_train_alone(new_run: NewRun) -> None:
    run = new_run("lonely", world_size=2)
    with pytest.raises(UserError, match="one of 1, the run was submitted for 2"):
        main(["--run", str(run)])
    assert not (run / "metrics.jsonl").exists()


def spoilt(dataset: Path, folder: Path) -> Path:
    copy = Path(shutil.copytree(dataset, folder / dataset.name))
    content = bytearray((copy / "val.bin").read_bytes())
    content[100] ^= 4
    (copy / "val.bin").write_bytes(content)
    return copy


def test_a_dataset_with_a_flipped_bit_is_refused_before_the_first_step(
    new_run: NewRun, tiny_dataset: Path, tmp_path: Path
) -> None:
    run = new_run("run", dataset=spoilt(tiny_dataset, tmp_path))
    with pytest.raises(DataError, match=r"val\.bin has crc32c"):
        main(["--run", str(run)])
    assert not (run / "metrics.jsonl").exists()
    assert steps_kept(run) == []


def test_the_dataset_of_another_run_is_refused(
    new_run: NewRun, tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(tiny_dataset, tmp_path / "other"))
    manifest = open_dataset(str(other))
    write_manifest(open_storage(str(other)), manifest.model_copy(update={"key": "0123456789"}))
    monkeypatch.setenv("LITGPT_DATASET", str(other))
    with pytest.raises(DataError, match=f"is the dataset 0123456789, this run was made for {manifest.key}"):
        main(["--run", str(new_run("run"))])


def test_a_validation_split_shorter_than_a_sample_is_refused(new_run: NewRun) -> None:
    from litgpt_demo.config import ModelConfig

    long = ModelConfig(name=None, config={"n_layer": 1, "n_embd": 32, "n_head": 2}, sequence_length=8000)
    with pytest.raises(UserError, match=r"val\.bin has \d+ tokens, .*larger data\.validation_fraction"):
        main(["--run", str(new_run("run", model=long))])


def test_a_run_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json is not there; start the run with `train-litgpt run`"):
        main(["--run", str(tmp_path)])


# --- several processes ------------------------------------------------------------------------------------------------


def torchrun(run: Path, *, processes: int, arguments: Sequence[str] = ()) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}", "-m", "litgpt_demo", "--", "train", "--run", str(run), *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr


def alike(one: Path, other: Path) -> None:
    """The same 12 steps but for rounding."""
    for kind, name, count in [("step", "loss", 12), ("step", "grad_norm", 12), ("evaluation", "validation_loss", 3)]:
        first, second = (curve(rows(run), kind, name) for run in (one, other))
        assert len(first) == count
        assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.training
def test_two_processes_see_what_one_sees(finished: Path, new_run: NewRun) -> None:
    two = new_run("two", world_size=2)
    torchrun(two, processes=2)
    alike(two, finished)
    assert committed(open_storage(str(two)))[0].world_size == 2


@pytest.mark.long
@pytest.mark.training
def test_a_sharded_training_with_activation_checkpointing_is_the_plain_one_and_resumes_on_one_process(
    finished: Path, new_run: NewRun
) -> None:
    decaying = {"weight_decay": 5.0}
    plain = new_run("plain", **decaying)
    train(plain)
    # So strong that a strategy which loses the decay, as FSDP's first version did, shows in the loss.
    assert curve(rows(plain), "step", "loss")[12] > curve(rows(finished), "step", "loss")[12] + 0.01
    sharded = new_run("sharded", world_size=2, strategy="fsdp", activation_checkpointing=True, **decaying)
    torchrun(sharded, processes=2)
    alike(sharded, plain)
    assert rows(sharded)[0]["parameters"] == rows(plain)[0]["parameters"]
    assert len(list((sharded / folder_of(12)).glob("*.distcp"))) == 2
    shutil.rmtree(sharded / folder_of(12))
    new_run("sharded", world_size=1, strategy="fsdp", activation_checkpointing=True, **decaying)
    train(sharded)
    assert [row["step"] for row in rows(sharded) if row["kind"] == "start"] == [0, 8]
    alike(sharded, plain)
