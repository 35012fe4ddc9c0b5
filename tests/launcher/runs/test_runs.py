from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import RunConfig, ScriptConfig, overridden, validated
from launcher.runs.run import Run, plan_run, plan_script, script_job, trained_seconds, training_job, write_config
from litgpt_demo.config import TrainConfig, TrainingSpec
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.runs import CONFIG, read_spec
from litgpt_demo.storage import open_storage


def document(folder: Path) -> dict[str, Any]:
    text = folder / "corpus.txt"
    if not text.exists():
        text.write_text("one\ntwo\nthree\n")
    return {
        "name": "mine",
        "root": str(folder / "out"),
        "data": {"corpus": {"kind": "files", "paths": [str(text)], "separator": "\n"}},
        "train": {"global_batch": 16, "micro_batch": 4, "max_steps": 200},
    }


def run(folder: Path, overrides: dict[str, Any] | None = None) -> Run:
    return plan_run(validated(RunConfig, overridden(document(folder), overrides or {}), where="test"))


# --- what a run's key depends on --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {"root": "gs://bucket/prefix"},
        {"name": "another"},
        {"platform": {"kind": "local", "nodes": 2, "processes": 2, "port": 4000}},
        {"image": {"kind": "prebuilt", "reference": "example.test/image@sha256:" + "0" * 64}},
        {"train.checkpoint_every": 7},
        {"train.keep_last": 9},
        {"train.keep_best": 9},
        {"train.log_every": 7},
        {"train.max_restarts": 7},
        {"train.tensorboard": True},
        {"train.wandb": {"project": "pages"}},
    ],
    ids=str,
)
def test_the_key_does_not_depend_on_where_and_how_a_run_is_made(tmp_path: Path, overrides: dict[str, Any]) -> None:
    assert run(tmp_path, overrides).key == run(tmp_path).key


@pytest.mark.parametrize(
    "overrides",
    [
        {"train.learning_rate": 1e-5},
        {"train.global_batch": 32},
        {"train.seed": 1},
        {"train.max_steps": 201},
        {"train.precision": "32-true"},
        {"model.name": "pythia-31m"},
        {"model.config.n_layer": 2},
        {"model.sequence_length": 256},
        {"data.split_seed": 1},
        {"data.tokenizer.kind": "train", "data.tokenizer.vocab_size": 300},
        {"data.corpus.max_bytes": 4},
    ],
    ids=str,
)
def test_the_key_depends_on_what_decides_the_model(tmp_path: Path, overrides: dict[str, Any]) -> None:
    assert run(tmp_path, overrides).key != run(tmp_path).key


def test_every_training_setting_is_in_the_key_but_those_that_only_say_when_to_write() -> None:
    assert set(TrainConfig().outcome()) == set(TrainConfig.model_fields) - TrainConfig.NOT_IN_KEY
    assert set(TrainConfig.model_fields) > TrainConfig.NOT_IN_KEY


def test_the_key_depends_on_the_text_and_not_on_where_it_lies(tmp_path: Path) -> None:
    for name, text in {"here": "a\nb\n", "there": "a\nb\n", "other": "a\nc\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "corpus.txt").write_text(text)
    here, there, other = (run(tmp_path / name).key for name in ("here", "there", "other"))
    assert here == there != other


def test_naming_a_model_or_spelling_its_fields_out_is_the_same_model_only_if_they_agree(tmp_path: Path) -> None:
    assert run(tmp_path, {"model.config": {"n_layer": 6}}).key == run(tmp_path, {"model.name": "pythia-14m"}).key
    assert run(tmp_path, {"model.config": {"n_layer": 5}}).key != run(tmp_path, {"model.name": "pythia-14m"}).key


def test_a_run_without_its_corpus_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.txt"):
        run(tmp_path, {"data.corpus.paths": [str(tmp_path / "gone.txt")]})


# --- its job ----------------------------------------------------------------------------------------------------------


def test_a_job_holds_all_that_a_platform_needs(tmp_path: Path) -> None:
    planned = run(tmp_path, {"platform": {"kind": "local", "nodes": 2, "processes": 2}})
    job = training_job(planned, attempt=3, image="example.test/i@sha256:1", labels={"who": "me"})
    folder = f"{tmp_path}/out/runs/mine-{planned.key}"
    assert (job.name, job.attempt_name, job.world_size) == (f"mine-{planned.key}", f"mine-{planned.key}-3", 4)
    assert job.program == ("-m", "litgpt_demo", "train", "--run", folder)
    assert job.directory == f"{folder}/attempts/3"
    assert job.stage == (f"{tmp_path}/out/{planned.dataset.path}",)
    assert (job.image, dict(job.labels), dict(job.env)) == ("example.test/i@sha256:1", {"who": "me"}, {})


def test_a_job_names_the_secrets_of_its_settings(tmp_path: Path) -> None:
    def secrets(wandb: dict[str, Any]) -> tuple[str, ...]:
        return training_job(run(tmp_path, {"train.wandb": wandb}), attempt=1, image=None).secrets

    assert training_job(run(tmp_path), attempt=1, image=None).secrets == ()
    assert secrets({"project": "pages"}) == ("WANDB_API_KEY",)
    assert secrets({"project": "pages", "secret": "OURS"}) == ("OURS",)
    assert secrets({"project": "pages", "secret": None}) == ()


def test_a_run_in_a_bucket_has_its_addresses_there(tmp_path: Path) -> None:
    planned = run(tmp_path, {"root": "gs://bucket/prefix/"})
    job = training_job(planned, attempt=1, image=None)
    assert job.directory == f"gs://bucket/prefix/runs/mine-{planned.key}/attempts/1"
    assert job.stage == (f"gs://bucket/prefix/{planned.dataset.path}",)


def test_what_the_nodes_are_told_can_be_read_back(tmp_path: Path) -> None:
    planned = run(tmp_path)
    spec = TrainingSpec(
        run=planned.name,
        dataset="gs://bucket/datasets/d",
        dataset_key="0123456789",
        model=planned.config.model,
        train=planned.config.train,
        steps=200,
        world_size=1,
    )
    write_config(planned, spec, {"commit": "70af7e1"})
    assert read_spec(planned.storage) == spec
    written = json.loads((tmp_path / "out" / "runs" / planned.name / CONFIG).read_text())
    assert RunConfig.model_validate(written["run"]) == planned.config
    assert written["software"] == {"commit": "70af7e1"}
    assert written["price"] is None


@pytest.mark.parametrize("content", [None, b"{", b"{}", b'{"training": {"run": 1}}'])
def test_a_config_that_the_nodes_cannot_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / CONFIG).write_bytes(content)
    with pytest.raises(DataError, match=r"config\.json is not"):
        read_spec(open_storage(str(tmp_path)))


# --- scripts ----------------------------------------------------------------------------------------------------------


def test_the_same_script_arguments_and_environment_are_the_same_job(tmp_path: Path) -> None:
    config = ScriptConfig(name="pi", root=str(tmp_path), script="pi.py", args=("--steps", "9"), env={"A": "1"})
    changed = [
        config.model_copy(update={"script": "tau.py"}),
        config.model_copy(update={"args": ("--steps", "10")}),
        config.model_copy(update={"args": ("--steps 9",)}),
        config.model_copy(update={"env": {"A": "2"}}),
        config.model_copy(update={"name": "tau"}),
    ]
    same = [
        config.model_copy(update={"root": "elsewhere"}),
        config.model_copy(update={"max_restarts": 5}),
        config.model_copy(update={"platform": config.platform.model_copy(update={"nodes": 8})}),
    ]
    assert {plan_script(one).name for one in same} == {plan_script(config).name}
    assert len({plan_script(one).name for one in (config, *changed)}) == 1 + len(changed)


def test_a_scripts_job_runs_the_script(tmp_path: Path) -> None:
    config = ScriptConfig(name="pi", root=str(tmp_path), script="-m mine.pi", args=("9",), env={"A": "1"})
    job = script_job(plan_script(config), attempt=2, image=None)
    assert job.program == ("-m", "mine.pi", "9")
    assert job.directory == f"{tmp_path}/runs/{plan_script(config).name}/attempts/2"
    assert dict(job.env) == {"A": "1"}
    assert job.stage == ()


# --- the time it took -------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.integers(0, 19))
def test_steps_that_were_repeated_after_a_restart_count_once(seconds: list[float], back_to: int) -> None:
    rows = [{"kind": "step", "step": number, "step_seconds": took} for number, took in enumerate(seconds, start=1)]
    assert trained_seconds(rows + rows[back_to:]) == pytest.approx(sum(seconds))


def test_pauses_count_and_steps_between_two_lines_take_as_long_as_the_one_that_was_logged() -> None:
    rows = [
        {"kind": "start", "steps": 20},
        {"kind": "step", "step": 10, "step_seconds": 2.0},
        {"kind": "evaluation", "step": 10, "seconds": 5.0},
        {"kind": "checkpoint", "step": 10, "seconds": 1.0},
        {"kind": "step", "step": 20, "step_seconds": 3.0},
    ]
    assert trained_seconds(rows) == 10 * 2.0 + 10 * 3.0 + 5.0 + 1.0
    assert trained_seconds([]) == 0
