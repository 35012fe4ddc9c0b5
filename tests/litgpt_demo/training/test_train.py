"""Training: what it sees and writes depends on the spec and the step alone, wherever it runs and is resumed."""

import gc
import gzip
import json
import math
import os
import shutil
import signal
import sys
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bucket_faults import FaultyBucket
from hostile import flip_a_bit
from litgpt.config import Config
from litgpt.model import GPT
from states import training_of
from training_runs import NewRun, TrainElsewhere, alike, ends, rows, train, write_run

from litgpt_demo.config import ModelConfig, TrainConfig
from litgpt_demo.data.batches import open_samples, sample_ids_for_step
from litgpt_demo.data.dataset import open_dataset
from litgpt_demo.documents import write_manifest
from litgpt_demo.errors import DataError, Preempted, UserError
from litgpt_demo.export.weights import Weights
from litgpt_demo.heartbeat import NODE_DIRECTORY, Heartbeat, read_beats, waits_for_peers
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.node.environment import TIMES, NodeTimer
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training import loop, setup
from litgpt_demo.training.chain import NO_LINK
from litgpt_demo.training.checkpoint_reader import read_index
from litgpt_demo.training.checkpoints import CheckpointManifest, commit, folder_of, list_complete, reached_end
from litgpt_demo.training.loop import fit, grace_warning, main, seconds_left
from litgpt_demo.training.ranks import Ranks
from litgpt_demo.training.reporting import PROFILES
from litgpt_demo.training.step import LocalStepStats, MetricReducer, train_step


def told(run: Path) -> list[dict[str, Any]]:
    """What the metrics say of the model, not of how long it took or how often it was started and saved."""
    names = ("step", "tokens", "loss", "grad_norm", "learning_rate", "validation_loss", "batch_sha256")
    return [{name: row.get(name) for name in names} for row in rows(run, "step", "evaluation")]


def steps_kept(run: Path) -> list[int]:
    return [found.step for found in list_complete(open_storage(str(run)))]


def losses_kept(run: Path) -> list[tuple[int, float | None, int | None]]:
    """Step, validation loss and its windows of each checkpoint that is kept."""
    return [
        (found.step, found.validation_loss, found.evaluation_samples) for found in list_complete(open_storage(str(run)))
    ]


def newest(run: Path) -> CheckpointManifest:
    return list_complete(open_storage(str(run)))[0]


def shards(run: Path) -> list[bytes]:
    """The weights and the optimizer's state in the end, byte for byte."""
    return [path.read_bytes() for path in sorted((run / folder_of(12)).glob("*.distcp"))]


def test_the_loss_falls_in_metrics_and_checkpoints(finished: Path) -> None:
    losses = curve(rows(finished), "step", "loss")
    validation = curve(rows(finished), "evaluation", "validation_loss")
    assert list(losses) == list(range(1, 13))
    assert list(validation) == [4, 8, 12]
    assert losses[1] == pytest.approx(math.log(300), rel=0.1)
    assert losses[12] < losses[1] - 1
    assert validation[12] < validation[4]
    steps, saved = rows(finished, "step"), rows(finished, "checkpoint")
    assert [row["tokens"] for row in steps] == [step * 8 * 32 for step in range(1, 13)]
    assert all(row["tokens_per_second"] > 0 and row["memory"] > 0 for row in steps)
    assert [row["step"] for row in saved] == [4, 8, 12]
    assert steps_kept(finished) == [12, 8]
    last = newest(finished)
    assert (last.tokens, last.world_size) == (12 * 8 * 32, 1)
    assert (last.validation_loss, last.evaluation_samples) == (validation[12], 7)
    names = {path.name for path in finished.iterdir()}
    assert names == {"checkpoints", "config.json", "metrics.csv", "metrics.jsonl"}, "no scratch is left"


@pytest.fixture(scope="module")
def elsewhere(
    tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory, train_elsewhere: TrainElsewhere
) -> dict[str, Path]:
    """Runs of other processes: one was killed in its second save, one has two ranks, of one they share the weights."""
    folder = tmp_path_factory.mktemp("elsewhere")
    settings: dict[str, dict[str, Any]] = {
        "killed": {}, "two": {"world_size": 2, "micro_batch": 1}, "sharded": {"world_size": 2, "strategy": "fsdp"},
    }  # fmt: skip
    runs = {name: write_run(folder / name, tiny_dataset, **changes) for name, changes in settings.items()}
    codes = train_elsewhere((runs["killed"], 1, 8), (runs["two"], 2, 0), (runs["sharded"], 2, 0))
    assert codes == [[-signal.SIGKILL], [0, 0], [0, 0]]
    return runs


def test_a_run_killed_in_the_middle_ends_as_if_it_had_not_been(elsewhere: dict[str, Path], finished: Path) -> None:
    killed = elsewhere["killed"]
    assert (killed / folder_of(8)).exists()
    assert steps_kept(killed) == [4]  # the save in which it was killed is none
    train(killed)
    assert [row["step"] for row in rows(killed, "start")] == [0, 4]
    assert told(killed) == told(finished)
    for _ in range(2):
        assert steps_kept(killed) == [12, 8]
        assert shards(killed) == shards(finished)
        train(killed)  # a finished run that is started again changes nothing


def test_z_loss_is_trained_and_not_reported(new_run: NewRun, finished: Path) -> None:
    run = new_run("z", max_steps=1, warmup_steps=0, z_loss=0.1)
    train(run)
    [step], before = rows(run, "step"), rows(finished, "step")[0]
    assert step["loss"] == before["loss"]
    assert step["grad_norm"] > before["grad_norm"]


def test_garbage_is_collected_between_steps_alone(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all ranks in the same step, for each waits for the slowest. All of it when a checkpoint was begun."""
    collected, run = list[str](), new_run("run", max_steps=4)
    monkeypatch.setattr(loop, "_STEPS_BETWEEN_COLLECTIONS", 2)
    monkeypatch.setattr(loop, "train_step", lambda *of: collected.append(str(gc.isenabled())) or train_step(*of))
    monkeypatch.setattr("gc.collect", lambda generation=2: collected.append(f"collect {generation}"))
    train(run)
    assert collected == ["collect 1", "collect 2", "False", "False", "collect 1", "False", "False"]
    assert gc.isenabled()


def test_a_growing_batch_is_the_same_on_any_ranks(new_run: NewRun, train_elsewhere: TrainElsewhere) -> None:
    """And after a kill: one run resumes inside its first stage, and one at the end of it."""
    stages = [{"batch": 4}, {"batch": 8, "after": 4}]
    settings: dict[str, dict[str, Any]] = {
        "uninterrupted": {}, "inside": {"checkpoint_every": 3}, "between": {}, "two": {"world_size": 2},
        "sharded": {"world_size": 2, "strategy": "fsdp", "micro_batch": 1},
    }  # fmt: skip
    runs = {name: new_run(name, global_batch=stages, **changes) for name, changes in settings.items()}
    codes = train_elsewhere(
        (runs["uninterrupted"], 1, 0), (runs["inside"], 1, 6), (runs["between"], 1, 8), (runs["two"], 2, 0),
        (runs["sharded"], 2, 0),
    )  # fmt: skip
    assert codes == [[0], [-signal.SIGKILL], [-signal.SIGKILL], [0, 0], [0, 0]]
    samples = [4, 8, 12, 16, *range(24, 88, 8)]
    assert [row["tokens"] for row in rows(runs["uninterrupted"], "step")] == [32 * count for count in samples]
    assert newest(runs["uninterrupted"]).tokens == 32 * 80
    for name, start in (("inside", 3), ("between", 4)):
        train(runs[name])
        assert [row["step"] for row in rows(runs[name], "start")] == [0, start]
        assert told(runs[name]) == told(runs["uninterrupted"])
        assert shards(runs[name]) == shards(runs["uninterrupted"])
    for name in ("two", "sharded"):
        alike(runs[name], runs["uninterrupted"])


@pytest.mark.parametrize("name", ["killed", "two", "sharded"])
def test_digests_of_batches_do_not_depend_on_the_ranks(elsewhere: dict[str, Path], finished: Path, name: str) -> None:
    if name == "killed":
        train(elsewhere[name])
    seen = [[row["batch_sha256"] for row in rows(run, "step")] for run in (elsewhere[name], finished)]
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 12
    links = [
        [manifest.link for manifest in list_complete(open_storage(str(run)))] for run in (elsewhere[name], finished)
    ]
    assert [link and link.batches for link in links[0]] == [link and link.batches for link in links[1]]
    assert (links[0] == links[1]) == (name == "killed")


def test_the_digest_of_a_batch_is_of_its_token_ids(finished: Path, tiny_dataset: Path) -> None:
    """As another program computes it from the dataset's files."""
    spec = read_spec(open_storage(str(finished)))
    windows, length = (
        open_samples(spec, tiny_dataset, open_dataset(str(tiny_dataset)), "train"),
        spec.model.sequence_length,
    )
    tokens = np.fromfile(tiny_dataset / "train.bin", dtype="<u2").astype("<u4")
    for row in rows(finished, "step"):
        numbers = [int(number) for number in sample_ids_for_step(spec, windows, row["step"] - 1)]
        samples = [tokens[number * length : (number + 1) * length + 1] for number in numbers]
        total = sum(int(sha256(sample.tobytes()).hexdigest(), 16) for sample in samples)
        assert row["batch_sha256"] == f"{total % 2**256:064x}"


@pytest.mark.parametrize("name", ["killed", "two", "sharded"])
def test_each_checkpoint_is_linked_to_the_one_before(elsewhere: dict[str, Path], name: str) -> None:
    run = elsewhere[name]
    if name == "killed":
        train(run)
    of_rows = rows(run, "checkpoint")
    kept = {manifest.step: manifest.link for manifest in list_complete(open_storage(str(run)))}
    previous = NO_LINK
    for row in of_rows:
        names = ("previous_chain", "weights_sha256", "batches_sha256")
        assert row["previous_chain"] == previous
        previous = sha256(bytes.fromhex("".join(row[name] for name in names))).hexdigest()
        assert row["chain_sha256"] == previous
        link = kept.get(row["step"])
        assert link is None or link.columns() == {name: row[name] for name in (*names, "chain_sha256")}
    assert [row["step"] for row in of_rows][-1] == 12
    last = kept[12]
    assert last is not None
    assert Weights(run / folder_of(12)).digest() == last.weights


def test_a_checkpoint_without_its_row_gets_one_at_the_resume(new_run: NewRun, finished: Path) -> None:
    """A kill between the commit of a checkpoint and its row leaves no gap in the chain."""
    run = new_run("run")
    leave_in(5, run, micro_batch=2)
    links = rows(run, "checkpoint")
    metrics = run / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if '"kind":"checkpoint"' not in line]
    metrics.write_text("".join(lines))
    train(run)
    names = ("step", "path", *(name for name in links[0] if name.endswith(("sha256", "chain"))))
    of_rows = [{name: row[name] for name in names} for row in rows(run, "checkpoint")]
    assert of_rows[0] == {name: links[0][name] for name in names}
    assert of_rows == [{name: row[name] for name in names} for row in rows(finished, "checkpoint")]


@pytest.mark.parametrize("name", ["two", "sharded"])
def test_two_processes_train_as_one_does(elsewhere: dict[str, Path], finished: Path, name: str) -> None:
    alike(elsewhere[name], finished)
    assert newest(elsewhere[name]).world_size == 2
    assert len(list((elsewhere[name] / folder_of(12)).glob("*_0.distcp"))) == 4  # both write both
    shares = [path.stat().st_size for path in (elsewhere[name] / folder_of(12)).glob("__?_0.distcp")]
    assert len(shares) == 2
    assert max(shares) < 0.7 * sum(shares)  # nobody writes what another one does


@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("ddp", 2), ("fsdp", 2), ("hybrid", 4)])
def test_rotary_tables_are_float32_with_every_strategy(
    new_run: NewRun, train_elsewhere: TrainElsewhere, strategy: str, ranks: int
) -> None:
    settings: dict[str, Any] = {"precision": "bf16-true", "micro_batch": 1, "max_steps": 2, "warmup_steps": 0}
    run = new_run("run", world_size=ranks, strategy=strategy, **settings)
    assert train_elsewhere((run, ranks, 0), nodes=2 if ranks == 4 else 1) == [[0] * ranks]
    assert [end["tables"] for end in ends(run)] == [["torch.float32"] * 2] * ranks


def test_attention_within_documents_is_alike_everywhere(
    new_run: NewRun, finished: Path, train_elsewhere: TrainElsewhere
) -> None:
    """It resumes bit for bit, and differs by rounding where ranks share the batch or the weights."""
    names = {"killed": {}, "ddp": {"world_size": 2}, "hybrid": {"world_size": 4, "strategy": "hybrid"}}
    runs = {name: new_run(name, attention="documents", **changes) for name, changes in names.items()}
    plain = new_run("plain", attention="documents")
    assert train_elsewhere((runs["killed"], 1, 8), (runs["ddp"], 2, 0)) == [[-signal.SIGKILL], [0, 0]]
    assert train_elsewhere((runs["hybrid"], 4, 0), nodes=2) == [[0] * 4]
    train(plain)
    train(runs["killed"])
    assert told(runs["killed"]) == told(plain)
    assert shards(runs["killed"]) == shards(plain)
    alike(runs["ddp"], plain)
    alike(runs["hybrid"], plain)
    for kind, name in (("step", "loss"), ("evaluation", "validation_loss")):
        masked, causal = (list(curve(rows(run), kind, name).values()) for run in (plain, finished))
        assert masked != pytest.approx(causal, rel=1e-5)


def test_mixed_precision_trains_sharded_on_cpus(new_run: NewRun, train_elsewhere: TrainElsewhere) -> None:
    """A CPU's LayerNorm takes no weights of another type than its inputs'."""
    settings: dict[str, Any] = {"precision": "bf16-mixed", "max_steps": 2, "warmup_steps": 0, "evaluation_samples": 1}
    run = new_run("run", world_size=2, strategy="fsdp", **settings)
    assert train_elsewhere((run, 2, 0)) == [[0, 0]]
    assert [row["step"] for row in rows(run, "step")] == [1, 2]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_sharded_gradients_are_summed_in_float32(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: Any = SimpleNamespace(size=lambda _: 2, device_type="cuda")
    policies = []
    monkeypatch.setattr(setup, "fully_shard", lambda _, **options: policies.append(options["mp_policy"]))
    with torch.device("meta"):
        model = GPT(Config(n_layer=1, n_embd=32, n_head=2, padded_vocab_size=64))
    setup._apply_fsdp(model, copies, train=TrainConfig.model_validate({"precision": precision}))
    assert [policy.reduce_dtype for policy in policies] == [torch.float32] * 2


def test_a_run_resumes_with_another_strategy_and_world_size(
    elsewhere: dict[str, Path], finished: Path, tiny_dataset: Path, tmp_path: Path, train_elsewhere: TrainElsewhere
) -> None:
    """The state that it resumes from has the same bits."""
    run = Path(shutil.copytree(elsewhere["sharded"], tmp_path / "sharded"))
    before = curve(rows(run), "step", "loss")
    for strategy, world_size, step in (("hybrid", 4, 8), ("ddp", 1, 10)):
        shutil.rmtree(run / folder_of(12))
        write_run(run, tiny_dataset, world_size=world_size, strategy=strategy, micro_batch=1, checkpoint_every=2)
        assert (run / folder_of(step)).exists()
        if world_size == 1:
            train(run)
        else:
            assert train_elsewhere((run, world_size, 0), nodes=2) == [[0, 0, 0, 0]]
            sizes = [path.stat().st_size for path in (run / folder_of(12)).glob("*.distcp")]
            assert len(sizes) == 8, "both nodes write, though each has all"
        assert rows(run, "start")[-1]["step"] == step
        assert curve(rows(run), "step", "loss")[step + 1] == pytest.approx(before[step + 1], abs=1e-6)
        alike(run, finished)


def test_a_node_fetches_only_the_shards_that_its_ranks_read(
    elsewhere: dict[str, Path], bucket: Storage, proxy: FaultyBucket, train_elsewhere: TrainElsewhere
) -> None:
    for path in filter(Path.is_file, elsewhere["sharded"].rglob("*")):
        bucket.upload(path, str(path.relative_to(elsewhere["sharded"])))
    proxy.arm()
    assert train_elsewhere((bucket.root, 2, 0), nodes=2) == [[0, 0]]
    starts = [row["step"] for row in rows_of(bucket.read("metrics.jsonl")) if row["kind"] == "start"]
    assert starts == [0, 12]
    assert proxy.downloaded < 1.75 * newest(elsewhere["sharded"]).size  # rank 0's half by both, the other one by one
    index = read_index(elsewhere["sharded"] / folder_of(12)).storage_data
    step_files = {place.relative_path for entry, place in index.items() if entry.fqn.endswith(".step")}
    assert step_files == {"training__0_0.distcp"}


def test_settings_that_change_only_rounding_may_change_in_a_run(
    finished: Path, finished_copy: Path, tiny_dataset: Path
) -> None:
    shutil.rmtree(finished_copy / folder_of(12))
    changed = {"micro_batch": 8, "activation_checkpointing": "full", "strategy": "ddp", "evaluate_every": 6}
    write_run(finished_copy, tiny_dataset, **changed)
    train(finished_copy)
    assert [row["step"] for row in rows(finished_copy, "start")] == [0, 8]
    for name in ("loss", "grad_norm"):
        assert curve(rows(finished_copy), "step", name) == pytest.approx(curve(rows(finished), "step", name), rel=1e-4)


@pytest.mark.parametrize("name", ["transformer-100b", "transformer-175b"])
def test_a_narrow_block_of_a_model_that_fits_no_device_trains(new_run: NewRun, name: str) -> None:
    narrow = {"n_layer": 1, "n_embd": 64, "n_head": 8, "padded_vocab_size": 320}
    run = new_run(name, model=ModelConfig(name=name, config=narrow, sequence_length=32))
    train(run)
    losses = curve(rows(run), "step", "loss")
    assert losses[12] < losses[1] - 1


def test_a_rank_in_a_world_of_another_size_refuses_to_train(new_run: NewRun) -> None:
    run = new_run("lonely", world_size=2)
    with pytest.raises(UserError, match="one of 1, but the run was submitted for 2"):
        train(run)
    assert not (run / "metrics.jsonl").exists()


def test_a_dataset_that_was_spoilt_or_is_another_runs_is_refused(
    new_run: NewRun, tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied_dataset = Path(shutil.copytree(tiny_dataset, tmp_path / tiny_dataset.name))
    run, manifest = new_run("run", dataset=copied_dataset), open_dataset(str(copied_dataset))
    monkeypatch.setenv("LITGPT_DATASET", str(copied_dataset))  # as the node has brought it
    write_manifest(open_storage(str(copied_dataset)), manifest.model_copy(update={"content_hash": "0123456789"}))
    with pytest.raises(DataError, match=f"0123456789, but this run was made for {manifest.content_hash}"):
        train(run)
    write_manifest(open_storage(str(copied_dataset)), manifest.model_copy(update={"dtype": "O"}))
    with pytest.raises(DataError, match=r"manifest\.json.*dtype"):
        train(run)
    monkeypatch.delenv("LITGPT_DATASET")
    write_manifest(open_storage(str(copied_dataset)), manifest)
    flip_a_bit(copied_dataset / "val.bin")
    with pytest.raises(DataError, match=r"val\.bin has crc32c"):
        train(run)
    assert not (run / "metrics.jsonl").exists()


def test_thirty_steps_are_litgpts_own(new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.litgpt_pretrain import pretrain

    run = new_run(
        "ours", precision="32-true", max_steps=30, warmup_steps=0, learning_rate=0.003, min_learning_rate=0.003,
        weight_decay=0.0, evaluate_every=30, checkpoint_every=30,
    )  # fmt: skip
    train(run)
    monkeypatch.setattr(sys, "argv", ["pretrain"])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # which it sets
        monkeypatch.setenv(name, "")
    # Compiling changes neither side's loss but by rounding, and would take most of a minute.
    monkeypatch.setattr("torch.compile", lambda model: model)
    pretrain(run, tmp_path / "theirs", comparable=True)
    our_losses = curve(rows(run), "step", "loss")
    litgpt_losses = np.genfromtxt(tmp_path / "theirs/logs/csv/version_0/metrics.csv", delimiter=",", names=True)["loss"]
    assert list(our_losses.values()) == pytest.approx(litgpt_losses[~np.isnan(litgpt_losses)].tolist(), rel=2e-5)
    assert len(our_losses) == 30
    assert our_losses[30] < our_losses[1] - 1


def leave_in(step: int, run: Path, micro_batch: int = 4) -> None:
    """Train until the machine is taken away in the middle of `step`, in one of its four micro-batches; both counts
    begin at 1."""
    training, passes = training_of(run), 0

    def sigterm(*_: object) -> None:
        nonlocal passes
        passes += training.model.training
        if passes == 4 * (step - 1) + micro_batch:
            os.kill(os.getpid(), signal.SIGTERM)

    training.model.register_forward_pre_hook(sigterm)
    with pytest.raises(Preempted, match=r"training was stopped; (step \d+ is saved|no step had ended)"):
        fit(training)


def test_an_evaluation_before_a_step_given_up_is_kept(new_run: NewRun, finished: Path) -> None:
    """The checkpoint of the step before has the loss, so the next attempt does not evaluate it again."""
    run = new_run("run", checkpoint_every=12)
    leave_in(5, run, micro_batch=2)
    assert newest(run).validation_loss is not None
    train(run)
    assert [row["step"] for row in rows(run, "evaluation")] == [4, 8, 12]
    alike(run, finished)


def test_a_preempted_training_saves_and_resumes_unchanged(new_run: NewRun, finished: Path) -> None:
    """Its result is that of an undisturbed training."""
    run, saved = new_run("run"), 8
    leave_in(8, run)
    assert newest(run).step == saved
    assert [(row["step"], row["why"]) for row in rows(run, "leave")] == [(saved, "preempted")]
    assert rows(run, "end") == []
    assert [row["step"] for row in rows(run, "evaluation")] == [4], "a machine that is taken away has no time for it"
    train(run)
    assert [row["step"] for row in rows(run, "start")] == [0, saved]
    assert shards(run) == shards(finished)
    # The next attempt evaluates the step before its first one.
    assert told(run) == told(finished)
    assert losses_kept(run) == losses_kept(finished)


@pytest.mark.parametrize(("step", "saved"), [(8, 7), (5, 4), (1, 0)])
def test_a_preempted_training_gives_up_its_step(new_run: NewRun, finished: Path, step: int, saved: int) -> None:
    """It saves the step before unless that is saved, and the next attempt repeats the step."""
    run = new_run("run")
    leave_in(step, run, micro_batch=2)
    assert [manifest.step for manifest in list_complete(open_storage(str(run)))][:1] == ([saved] if saved else [])
    assert [(row["step"], row["why"]) for row in rows(run, "leave")] == [(saved, "preempted")]
    train(run)
    assert [row["step"] for row in rows(run, "start")] == [0, saved]
    assert shards(run) == shards(finished)
    assert losses_kept(run) == losses_kept(finished)


@pytest.mark.parametrize("name", ["two", "sharded"])
def test_ranks_make_up_for_an_evaluation_before_the_first_step(
    elsewhere: dict[str, Path], tmp_path: Path, train_elsewhere: TrainElsewhere, name: str
) -> None:
    run, before = Path(shutil.copytree(elsewhere[name], tmp_path / "run")), losses_kept(elsewhere[name])
    shutil.rmtree(run / folder_of(12))
    commit(open_storage(str(run)), newest(run).model_copy(update={"validation_loss": None}))
    assert train_elsewhere((run, 2, 0)) == [[0, 0]]
    assert [row["step"] for row in rows(run, "evaluation")] == [4, 8, 8, 12]
    assert losses_kept(run) == before


def test_the_profiler_records_its_steps_and_changes_no_bit(new_run: NewRun, finished: Path, bucket: Storage) -> None:
    def recorded(content: bytes) -> set[str]:
        events = json.loads(gzip.decompress(content))["traceEvents"]
        names = {str(event["name"]) for event in events}
        assert {"aten::mm", "Optimizer.step#AdamW.step"} <= names
        return {name for name in names if name.startswith("ProfilerStep")}

    run = new_run("run", profiler={"steps": "7-9"})
    leave_in(8, run)
    assert not (run / PROFILES).exists()  # there was no time for it
    train(run)
    (trace,) = (run / PROFILES).iterdir()
    assert (trace.name, recorded(trace.read_bytes())) == ("steps-9-9-rank-0.json.gz", {"ProfilerStep#9"})
    assert shards(run) == shards(finished)
    fit(training_of(new_run("another", profiler={"steps": "11-20"}), bucket))  # longer than the training
    written = bucket.read(f"{PROFILES}/steps-11-12-rank-0.json.gz")
    assert recorded(written) == {"ProfilerStep#11", "ProfilerStep#12"}


def test_a_training_ends_at_max_time_and_resumes_with_more(new_run: NewRun) -> None:
    settings = {"max_steps": 100_000, "evaluate_every": 100_000, "checkpoint_every": 100_000}
    run = new_run("run", max_time="0.1s", **settings)
    train(run)
    first, spec = newest(run), read_spec(open_storage(str(run)))
    assert reached_end(first, spec)
    assert first.seconds >= 0.1
    assert 0 < first.step < spec.steps
    assert first.validation_loss == rows(run, "evaluation")[-1]["validation_loss"]
    assert [(row["step"], row["why"]) for row in rows(run, "leave")] == [(first.step, "max_time")]
    assert [row["step"] for row in rows(run, "end")] == [first.step]

    train(run)
    assert newest(run) == first

    new_run("run", max_time=first.seconds + 0.1, **settings)
    assert not reached_end(first, read_spec(open_storage(str(run))))
    train(run)
    assert newest(run).step > first.step
    assert newest(run).seconds >= first.seconds + 0.1


def test_a_training_whose_budget_is_spent_stops_and_resumes(
    new_run: NewRun, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt began a minute ago, in an earlier life."""
    run = new_run("run")
    begun = NodeTimer(attempt=3, started_at=time() - 10)
    monkeypatch.setenv(TIMES, json.dumps(asdict(begun)))
    first = {"kind": "start", "step": 0, "attempt": 3, "node_started": time() - 60}
    (run / "metrics.jsonl").write_text(json.dumps(first) + "\n")
    assert seconds_left(open_storage(str(run)), 100) == pytest.approx(40, abs=5)
    spent = r"the budget is spent, and (step \d+ is saved|no step had ended); raise budget\.max_usd and run again"
    with pytest.raises(UserError, match=spent):
        main(["--run", str(run), "--seconds", "50"])
    [leave] = rows(run, "leave")
    assert (leave["step"] < 12, leave["why"]) == (True, "preempted")
    assert rows(run, "end") == []
    train(run)
    assert newest(run).step == 12
    assert shards(run) == shards(finished)


def test_cpu_reports_a_step_before_the_next_begins(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, reported = new_run("run"), list[int]()

    def step(*parts: Any) -> LocalStepStats | None:
        reported.append(len(rows(run, "step")))
        return train_step(*parts)

    monkeypatch.setattr(loop, "train_step", step)
    train(run)
    assert reported == list(range(12))


def test_grace_warning_counts_what_runs_before_a_save() -> None:
    """A step that runs and the one launched behind it; or three micro-batches of it."""
    environ = {"LITGPT_GRACE": "30"}
    assert grace_warning(29.0, 0.5, 1, environ) is None
    assert grace_warning(29.0, 9.0, 1, {}) is None  # started by hand: nobody waits for so long
    assert "platform.grace_period to 91" in str(grace_warning(45.2, 0.1, 1, environ))
    slow = str(grace_warning(12.0, 10.0, 1, environ))
    assert "took 32 s (20 s and 12 s)" in slow
    assert "platform.grace_period to 44" in slow
    assert grace_warning(12.0, 10.0, 2, environ) is None
    assert "took 31 s (15 s and 16 s)" in str(grace_warning(16.0, 10.0, 2, environ))


def test_a_rank_that_waits_for_sums_waits_for_its_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does its own share does not."""
    two: Any = SimpleNamespace(device=torch.device("cpu"), world_size=2)
    work = SimpleNamespace(wait=lambda: os.kill(os.getpid(), signal.SIGUSR1))
    monkeypatch.setattr("torch.distributed.all_reduce", lambda sums, async_op: work)
    exchange, scalar = MetricReducer(two), torch.ones(())
    with Heartbeat(max_silence=60, environ={NODE_DIRECTORY: str(tmp_path)}) as heart:
        heart.beat(1, "training")
        exchange.submit(1, LocalStepStats(scalar, scalar, 0.0), leave=False, time_up=False)
        exchange.collect(max_in_flight=0)
        assert [waits_for_peers(beat) for beat in read_beats(tmp_path)] == [True]
        Ranks(rank=0, world_size=1).run_on_rank_zero(work.wait)  # a share of its own, for which the others wait
        assert [waits_for_peers(beat) for beat in read_beats(tmp_path)] == [False]
