"""A run that starts from weights: its model, its key, and what a plan says of them before anything is spent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml

from launcher.checks.arithmetic import arithmetic, needs
from launcher.checks.plan import findings_of, steps_of
from launcher.config import RunConfig, overridden, validated
from launcher.errors import ConfigProblem
from launcher.job import JobId
from launcher.runs.index import AttemptRecord, Index
from launcher.runs.run import plan_run
from launcher.runs.targets import _same_training
from litgpt_demo.data.settings import TrainedTokenizer
from litgpt_demo.data.tokens import train_tokenizer
from litgpt_demo.errors import UserError
from litgpt_demo.models.catalogue import config_of

Started: TypeAlias = Callable[..., RunConfig]

FIELDS: dict[str, Any] = {"name": "custom", "n_layer": 1, "n_embd": 32, "n_head": 2, "padded_vocab_size": 320}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A LitGPT folder as far as a plan looks at it."""
    folder = tmp_path / "before"
    folder.mkdir()
    (folder / "lit_model.pth").write_bytes(b"weights")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(asdict(config_of(FIELDS | {"block_size": 64}))))
    text = [f"{number} bottles on the wall, {number} of them fall" for number in range(200)]
    (tmp_path / "poem.txt").write_text("\n\n".join(text))
    for name, content in train_tokenizer(TrainedTokenizer(kind="train", vocab_size=300), text).files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def started(weights: Path, tmp_path: Path) -> Started:
    """Makes configs of a run that starts from them: `started({"train.seed": 7})`."""
    document = {
        "name": "tiny",
        "root": str(tmp_path / "out"),
        "data": {
            "corpus": {"kind": "files", "paths": [str(tmp_path / "poem.txt")], "separator": "\n\n"},
            "tokenizer": {"kind": "litgpt", "path": str(weights)},
            "validation_fraction": 0.05,
        },
        "model": {"from": str(weights), "sequence_length": 32},
        "train": {"global_batch": 4, "micro_batch": 4, "max_steps": 8, "warmup_steps": 1, "precision": "32-true"},
    }
    return lambda changes=None: validated(RunConfig, overridden(document, changes or {}), where="tiny")


def errors(config: RunConfig) -> list[str]:
    return [str(finding) for finding in findings_of(config) if finding.severity == "error"]


def test_the_model_is_that_of_the_weights(started: Started, weights: Path) -> None:
    run = plan_run(started())
    assert run.model.config["n_embd"] == 32
    assert run.weights_path is not None
    assert run.weights_path.startswith("weights/before-")
    assert errors(started()) == []
    (training,) = (row["would"] for row in steps_of(started()) if row["step"] == "training")
    assert training.startswith(f"train 8 steps from the weights of {weights}")


def test_the_key_is_of_the_weights_content_and_not_of_their_place(started: Started, weights: Path) -> None:
    key = plan_run(started()).key
    moved = Path(shutil.copytree(weights, weights.with_name("moved")))
    assert plan_run(started({"model.from": str(moved)})).key == key
    (weights / "lit_model.pth").write_bytes(b"others!")
    assert plan_run(started()).key != key
    fields = {
        name: value for name, value in asdict(config_of(FIELDS | {"block_size": 64})).items() if value is not None
    }
    without = started({"model.from": None, "model.config": fields})
    assert plan_run(without).key != key


def test_a_run_to_start_from_is_named_as_long_as_one_run_has_the_name(
    started: Started, weights: Path, tmp_path: Path
) -> None:
    by_path = plan_run(started()).key
    index = Index.of(str(tmp_path / "out"))
    for run in ("before-0123456789", "before-also-0123456789"):
        index.create(attempt_of(run))
    shutil.copytree(weights, tmp_path / "out/runs/before-0123456789")
    for name in ("before", "before-0123456789"):
        named = plan_run(started({"model.from": name}))
        assert named.key == by_path
        assert named.weights is not None
        assert named.weights.address == str(tmp_path / "out/runs/before-0123456789")
        assert errors(started({"model.from": name})) == []
    with pytest.raises(UserError, match=r"model\.from='befor' is neither a run under the root"):
        plan_run(started({"model.from": "befor"}))
    index.create(attempt_of("before-abcdef0123"))
    with pytest.raises(UserError, match=r"the name of 2 runs .*: before-0123456789, before-abcdef0123"):
        plan_run(started({"model.from": "before"}))


def attempt_of(run: str) -> AttemptRecord:
    return AttemptRecord(
        run=run, name=run.rpartition("-")[0], key=run.rpartition("-")[2], attempt=1, config={},
        platform={"kind": "local"}, job_id=JobId(run), directory=f"runs/{run}/attempts/1", user="ada", host="laptop",
        machine="laptop", created=1.0,
    )  # fmt: skip


def test_a_config_means_the_run_that_it_started(started: Started) -> None:
    config = started()
    recorded: Any = type("Record", (), {"config": config.model_dump(mode="json")})
    assert _same_training(recorded, config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.name": "pythia-14m"}, "has n_embd=32, and the model 128"),
        ({"model.config": {"padded_vocab_size": 256}}, "has 320 embeddings, and the model 256"),
        ({"data.tokenizer": {"kind": "train", "vocab_size": 290}}, "makes another tokenizer than that of model.from"),
    ],
)
def test_what_does_not_fit_is_named_with_what_would_do(started: Started, changes: dict[str, Any], words: str) -> None:
    found = errors(started(changes))
    assert any(words in error and "-> set " in error for error in found), found


def test_adapters_need_weights_and_are_told_of_in_the_plan(started: Started) -> None:
    with pytest.raises(ConfigProblem, match=r"there are none to start from; set model\.from"):
        started({"model.from": None, "model.name": "pythia-14m", "train.lora": {"rank": 4}})
    full, adapted = (plan_run(started(changes)).resolved for changes in ({}, {"train.lora": {"rank": 4}}))
    (trained,) = (row for row in arithmetic(adapted, vocab_size=300) if row["what"] == "trained")
    assert trained == {"what": "trained", "figure": "512", "arithmetic": "adapters of rank 4 for query, value"}
    all_of_it, least = (needs(config, vocab_size=300) for config in (full, adapted))
    assert all_of_it is not None
    assert least is not None
    assert least.certain < all_of_it.certain / 3
