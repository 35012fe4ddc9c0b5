"""Run ids, the jobs of runs, the trials of a sweep, and which was the best."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.config import RunConfig, ScriptConfig, SweepConfig, overridden, validated
from launcher.errors import ConfigProblem
from launcher.reports.sweeps import Outcome, best_yaml, table
from launcher.runs import run as module
from launcher.runs.attempts import job_handle
from launcher.runs.run import Run, plan_script, run_of, training_spec
from launcher.runs.sweeps import Trial, trials
from litgpt_demo.data.dataset import DatasetManifest, Ingredient, Mixture, plan_dataset
from litgpt_demo.documents import FileRecord
from litgpt_demo.errors import UserError
from litgpt_demo.training import checkpoints


def run(folder: Path, overrides: dict[str, Any] | None = None, text: str = "one\ntwo\nthree\n") -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "corpus.txt").write_text(text)
    document = {
        "name": "mine",
        "root": str(folder / "out"),
        "data": {"corpus": {"kind": "files", "paths": [str(folder / "corpus.txt")], "separator": "\n"}},
        "train": {"global_batch": 16, "micro_batch": 4, "max_steps": 200},
    }
    config = validated(RunConfig, overridden(document, overrides or {}), where="test")
    return run_of(config, plan_dataset(config.data))


def test_documents_without_ends_are_refused_with_a_fix(dataset: tuple[DatasetManifest, Path], tmp_path: Path) -> None:
    """Token ids of another program need not have any. In a mixture, each source must have some."""
    manifest, causal = dataset[0], run(tmp_path, {"model.sequence_length": 8, "train.warmup_steps": 0})
    within = run(tmp_path, {"model.sequence_length": 8, "train.warmup_steps": 0, "train.attention": "documents"})
    assert within.id != causal.id
    assert within.dataset.content_hash == causal.dataset.content_hash
    assert training_spec(within, manifest).train.attention == "documents"
    endless = manifest.model_copy(update={"train": manifest.train.model_copy(update={"documents": 0})})
    sources = [Ingredient(name=name, dataset="x", train=99, validation=99, documents=9 - number)
               for name, number in (("prose", 0), ("ids", 9))]  # fmt: skip
    mixed = manifest.model_copy(update={"mixture": Mixture(sources=tuple(sources), schedule=())})
    for broken, where in ((endless, "the training split"), (mixed, "ids, of data.mixture,")):
        training_spec(causal, broken)
        with pytest.raises(UserError) as refused:
            training_spec(within, broken)
        assert f"{where} never has the id {manifest.end_of_text}" in str(refused.value)
        assert "set train.attention=causal" in str(refused.value)
    older = [source.model_copy(update={"documents": None}) for source in sources]
    training_spec(within, mixed.model_copy(update={"mixture": Mixture(sources=tuple(older), schedule=())}))


def test_run_id_does_not_depend_on_root_or_platform(tmp_path: Path) -> None:
    elsewhere = {
        "root": "gs://bucket/prefix",
        "name": "another",
        "platform": {"kind": "local", "nodes": 2, "processes_per_node": 2, "port": 4000},
        "image": {"kind": "prebuilt", "reference": "example.test/image@sha256:" + "0" * 64},
        "train.checkpoint_every": 7,
        "train.micro_batch": 2,
        "train.activation_checkpointing": "full",
        "train.wandb": {"project": "pages"},
        "train.profiler": {"steps": "20-25", "ranks": [0, 3]},
    }
    assert run(tmp_path, elsewhere).id == run(tmp_path).id
    assert run(tmp_path / "there").id == run(tmp_path).id


@pytest.mark.parametrize(
    "overrides",
    [
        {"train.learning_rate": 1e-5},
        {"train.schedule": "linear"},
        {"train.schedule": "wsd", "train.decay_steps": 0.1},
        {"model.name": "pythia-31m"},
        {"model.config.n_layer": 2},
        {"model.sequence_length": 256},
        {"data.tokenizer.kind": "train", "data.tokenizer.vocab_size": 300},
    ],
    ids=str,
)
def test_run_id_depends_on_dataset_model_and_training(tmp_path: Path, overrides: dict[str, Any]) -> None:
    assert run(tmp_path, overrides).id != run(tmp_path).id
    assert run(tmp_path, text="one\nfour\n").id != run(tmp_path).id


def test_same_script_arguments_and_environment_are_one_job(tmp_path: Path) -> None:
    config = ScriptConfig(name="pi", root=str(tmp_path), script="pi.py", args=("--steps", "9"), env={"A": "1"})

    def names(*changes: dict[str, Any]) -> set[str]:
        return {plan_script(config.model_copy(update=change)).name for change in ({}, *changes)}

    elsewhere = config.platform.model_copy(update={"nodes": 8})
    assert len(names({"root": "elsewhere"}, {"max_restarts": 5}, {"platform": elsewhere})) == 1
    assert len(names({"script": "tau.py"}, {"args": ("--steps 9",)}, {"env": {"A": "2"}}, {"name": "tau"})) == 5


def test_a_job_names_the_secrets_of_its_settings(tmp_path: Path) -> None:
    def secrets(wandb: dict[str, Any] | None) -> tuple[str, ...]:
        return run(tmp_path, {"train.wandb": wandb}).job(attempt=1, image=None).secrets

    assert secrets({"project": "pages"}) == ("WANDB_API_KEY",)
    assert secrets({"project": "pages", "secret": "OURS"}) == ("OURS",)
    assert secrets({"project": "pages", "secret": None}) == secrets(None) == ()


def test_checkpoint_too_small_for_the_model_is_no_progress(tmp_path: Path) -> None:
    training, folder = run(tmp_path), checkpoints.folder_of(8)
    stored = [training.storage.write(f"{folder}/{name}", b"x") for name in (checkpoints.INDEX, "__0_0.distcp")]
    manifest = checkpoints.CheckpointManifest(
        format=2, run=training.name, step=8, tokens=0, dataset_hash="k", validation_loss=None, world_size=1,
        versions={}, files=tuple(FileRecord.of(path, relative_to=folder) for path in stored),
    )  # fmt: skip
    checkpoints.commit(training.storage, manifest)
    assert (checkpoints.newest_step(training.storage), job_handle(training).progress()) == (8, 0)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.integers(0, 19))
def test_repeated_steps_and_pauses_count_once(seconds: list[float], back_to: int) -> None:
    rows = [{"kind": "step", "step": number, "step_seconds": took} for number, took in enumerate(seconds, start=1)]
    pauses = [{"kind": "evaluation", "step": 1, "seconds": 5.0}, {"kind": "checkpoint", "step": 1, "seconds": 1.0}]
    assert module.trained_seconds(rows + rows[back_to:] + pauses) == pytest.approx(sum(seconds) + 6)
    sparse = [{"kind": "step", "step": 10 * row["step"], "step_seconds": row["step_seconds"]} for row in rows]
    assert module.trained_seconds(sparse) == pytest.approx(10 * sum(seconds)), "a row tells of the steps before it too"


BASE = {"train": {"global_batch": 16, "micro_batch": 4, "max_steps": 200}}


def sweep(grid: dict[str, list[Any]], **settings: Any) -> SweepConfig:
    return validated(SweepConfig, {**BASE, **settings, "sweep": {"grid": grid}}, where="test")


def outcome(name: str, loss: float | None) -> Outcome:
    trial = Trial(changes={"train.seed": name}, config=RunConfig(name=name))
    return Outcome(trial=trial, run=f"{name}-id", validation_loss=loss, tokens_per_second=100.0)


def test_trials_are_all_combinations_in_the_written_order() -> None:
    made = trials(sweep({"train.learning_rate": [1e-3, 3e-4], "model.sequence_length": [128, 256]}, name="mine"))
    wanted = [(1e-3, 128), (1e-3, 256), (3e-4, 128), (3e-4, 256)]
    assert [tuple(trial.changes.values()) for trial in made] == wanted
    configs = [trial.config for trial in made]
    assert [(config.train.learning_rate, config.model.sequence_length) for config in configs] == wanted
    assert {(type(config), config.name, config.train.max_steps) for config in configs} == {(RunConfig, "mine", 200)}
    assert [trial.changes for trial in trials(sweep({}))] == [{}]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"train.seed": [1], "train.micro_batch": [4, 5]}, "trial train.seed=1, train.micro_batch=5 cannot be used"),
        ({"train.lr": [1e-3]}, "train.lr: unknown setting"),
        ({"train.learning_rate": [1e-3, "1e-3"]}, "two of its trials are the same training"),
        ({"train.checkpoint_every": [10, 20]}, "two of its trials are the same training"),
        ({"train.micro_batch": [2, 4]}, "run the config once for each value with a name of its own"),
    ],
)
def test_grid_with_an_invalid_or_duplicate_trial_is_refused(grid: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(ConfigProblem) as caught:
        trials(sweep(grid))
    assert message in str(caught.value)


@given(st.lists(st.none() | st.floats(), max_size=8))
@example([None, math.inf])
@example([math.nan])
@example([math.nan, 2.0, 1.0])
def test_the_ranking_is_by_loss_and_best_yaml_is_its_first(losses: list[float | None]) -> None:
    outcomes = [outcome(f"t{number}", loss) for number, loss in enumerate(losses)]
    rows = table(outcomes)
    real = sorted(loss for loss in losses if loss is not None and not math.isnan(loss))
    assert [row["validation loss"] for row in rows[: len(real)]] == [f"{loss:.4f}" for loss in real]
    best = best_yaml(outcomes)
    if not real or real[0] == math.inf:
        assert best is None
    else:
        assert f"name: {rows[0]['train.seed']}\n" in best
