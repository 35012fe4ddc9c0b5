"""Scores while a model is trained: the same as those of the finished model, on any ranks, and told once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from states import training_of
from test_layouts_of_ranks import LLAMA, two_nodes_of_two
from tiny_runs import write_run

from litgpt_demo.config import EvaluationConfig
from litgpt_demo.errors import UserError
from litgpt_demo.evaluation import score_model
from litgpt_demo.metrics import curve, rows_of, score_curves
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import folder_of
from litgpt_demo.training.loop import main
from litgpt_demo.training.scoring import as_sample, log_likelihoods

NewRun: TypeAlias = Callable[..., Path]

TASK = """
task: endings
dataset_path: json
dataset_kwargs: {data_files: {test: endings.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{start}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITTEN = """
task: written
dataset_path: json
dataset_kwargs: {data_files: {test: endings.json}}
test_split: test
output_type: generate_until
doc_to_text: "{{start}}"
doc_to_target: "{{choices[right]}}"
generation_kwargs: {until: ["."]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def task_files(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Tasks on sentences of the corpus: which word comes next."""
    folder, words = tmp_path_factory.mktemp("tasks"), corpus.read_text().split()[:400]
    (folder / "endings.yaml").write_text(TASK)
    (folder / "written.yaml").write_text(WRITTEN)
    questions = [
        {"start": " ".join(words[at : at + 4]), "choices": [f" {words[at + 4]}", f" {words[at + 5]}"], "right": 0}
        for at in range(0, 120, 6)
    ]
    (folder / "endings.json").write_text("\n".join(map(json.dumps, questions)))
    return folder


@pytest.fixture(scope="module")
def settings(task_files: Path) -> EvaluationConfig:
    return EvaluationConfig(tasks=("endings",), task_files=str(task_files), validation_windows=5, every_checkpoints=2)


def rows(run: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in rows_of((run / "metrics.jsonl").read_bytes()) if row["kind"] == kind]


def told(run: Path) -> list[dict[int, float]]:
    """Losses, gradients and validation losses of a run, by step."""
    all_rows = rows_of((run / "metrics.jsonl").read_bytes())
    names = (("step", "loss"), ("step", "grad_norm"), ("evaluation", "validation_loss"))
    return [curve(all_rows, kind, name) for kind, name in names]


@pytest.fixture(scope="module")
def scored(
    tiny_dataset: Path, one_thread: None, settings: EvaluationConfig, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The training of `finished`, scored at every fourth step; tests that change it copy it."""
    folder = tmp_path_factory.mktemp("scored") / "scored"
    run = write_run(folder, tiny_dataset, evaluation=settings, checkpoint_every=2)
    assert main(["--run", str(run)]) == 0
    return run


@pytest.mark.long
def test_a_training_that_is_scored_is_the_same_training(scored: Path, finished: Path) -> None:
    assert [row["step"] for row in rows(scored, "scores")] == [4, 8, 12]
    assert told(scored) == told(finished)


@pytest.mark.long
def test_the_last_scores_of_a_training_are_those_of_its_model(
    scored: Path, scored_run: Path, settings: EvaluationConfig
) -> None:
    found = {name: points[12] for name, points in score_curves(rows(scored, "scores")).items()}
    afterwards = {score.name: score.value for score in score_model(open_storage(str(scored_run)), settings).scores}
    assert found == pytest.approx(afterwards, rel=1e-4)
    assert list(found) == ["validation/bits_per_byte", "validation/perplexity", "endings/acc"]


@pytest.mark.long
def test_what_a_kill_left_out_is_scored_when_the_run_goes_on_and_nothing_twice(scored: Path, tmp_path: Path) -> None:
    before = rows(scored, "scores")
    unscored = Path(shutil.copytree(scored, tmp_path / "unscored"))  # killed after its last save
    lines = (unscored / "metrics.jsonl").read_text().splitlines(keepends=True)
    (unscored / "metrics.jsonl").write_text(
        "".join(line for line in lines if not ('"kind":"scores"' in line and '"step":12,' in line))
    )
    unsaved = Path(shutil.copytree(scored, tmp_path / "unsaved"))  # killed before it
    for step in (12, 10):
        shutil.rmtree(unsaved / folder_of(step), ignore_errors=True)
    for run in (unscored, unsaved):
        assert main(["--run", str(run)]) == 0
        again = rows(run, "scores")
        assert [(row["step"], row["names"], row["values"]) for row in again] == [
            (row["step"], row["names"], row["values"]) for row in before
        ]


def test_log_likelihoods_are_those_of_the_models_logits(new_run: NewRun, tiny_dataset: Path) -> None:
    training = training_of(new_run("asked"))
    questions = [((5, 9, 20), (7,)), ((3,), (4, 8, 15)), (tuple(range(40)), (1, 2))]  # the last is cut to 32 tokens
    expected = []
    for context, answer in questions:
        tokens = torch.tensor([[*context, *answer][-33:]])
        with torch.no_grad():
            logits = training.model.module(tokens[:, :-1]).log_softmax(-1)[0, -len(answer) :]
        expected.append(float(logits.gather(1, torch.tensor(answer)[:, None]).sum()))
    assert log_likelihoods(training, questions, lambda: None) == pytest.approx(expected, rel=1e-4)
    assert not training.model.module.masked
    assert training.model.training


def test_of_an_answer_that_is_longer_than_a_sample_its_end_is_asked() -> None:
    inputs, targets = as_sample((1, 2), (3, 4, 5, 6), length=3)
    assert (inputs.tolist(), targets.tolist()) == ([[3, 4, 5]], [[4, 5, 6]])
    inputs, targets = as_sample((1, 2), (3,), length=4)
    assert (inputs.tolist(), targets.tolist()) == ([[1, 2, 0, 0]], [[-1, 3, -1, -1]])


def test_a_task_that_writes_is_refused_before_the_first_step(new_run: NewRun, settings: EvaluationConfig) -> None:
    run = new_run("writing", evaluation=settings.model_copy(update={"tasks": ("written",)}))
    with pytest.raises(UserError, match=r"evaluation\.tasks names written, .* leave every_checkpoints empty"):
        main(["--run", str(run)])
    assert rows(run, "step") == []


RANK = """
import sys
from litgpt_demo.__main__ import main

sys.exit(main(["train", "--run", sys.argv[1]]))
"""


@pytest.mark.long
@pytest.mark.training
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param({"kind": "fsdp", "tensor": 2, "context": 2}, id="both"),
        pytest.param({"kind": "hybrid"}, id="hybrid", marks=pytest.mark.drill),
        pytest.param("ddp", id="ddp", marks=pytest.mark.drill),
    ],
)
def test_four_ranks_find_the_scores_that_one_does(
    tmp_path: Path, tiny_dataset: Path, settings: EvaluationConfig, one_thread: None, strategy: object
) -> None:
    asked: dict[str, Any] = {
        "evaluation": settings,
        "model": LLAMA,
        "micro_batch": 1,
        "max_steps": 4,
        "warmup_steps": 1,
    }
    asked["checkpoint_every"] = 2
    alone = write_run(tmp_path / "alone", tiny_dataset, **asked)
    assert main(["--run", str(alone)]) == 0
    divided = write_run(tmp_path / "divided", tiny_dataset, world_size=4, strategy=strategy, **asked)
    (program := tmp_path / "rank.py").write_text(RANK)
    two_nodes_of_two(str(program), str(divided))
    (expected,) = rows(alone, "scores")
    (found,) = rows(divided, "scores")
    assert found["names"] == expected["names"]
    assert found["values"] == pytest.approx(expected["values"], rel=1e-4)
