"""Scores of a trained model by the harness itself, on a task that needs no network."""

import asyncio
import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from litgpt import LLM
from pipelines import artifact

from flows.evaluate import evaluate
from launcher.checks.plan import plan_of
from launcher.config import RunConfig, overridden, validated
from launcher.errors import ConfigProblem
from launcher.events import Event, Listener, Note, StepDone
from launcher.runs.run import RunManifest, plan_run
from litgpt_demo.documents import read_manifest
from litgpt_demo.export.evaluation import evaluations
from litgpt_demo.training.checkpoints import list_complete
from tasks.evaluation import CheckpointScores

TEXTS = [("The first", " of them"), ("She said", " that it was"), ("A house", " and a tree")]

needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="pip install '.[evaluate]'")


def with_task(config: RunConfig, folder: Path, **more: Any) -> RunConfig:
    """The same config, and a task of its own in `folder`."""
    (folder / "words.jsonl").write_text("".join(json.dumps({"text": a, "goes_on": b}) + "\n" for a, b in TEXTS))
    task = {
        "task": "words", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "words.jsonl"}},
        "test_split": "test", "output_type": "loglikelihood", "doc_to_text": "{{text}}", "target_delimiter": "",
        "doc_to_target": "{{goes_on}}", "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    }  # fmt: skip
    (folder / "words.yaml").write_text(yaml.safe_dump(task))
    requests = {"evaluation": {"tasks": ["words"], "task_folder": str(folder), **more}}
    return validated(RunConfig, overridden(config.model_dump(mode="json"), requests), where="it")


@needs_harness
@pytest.mark.prefect
def test_model_is_scored_once_by_a_task_of_the_user(
    trained: Any, run_again: Callable[[RunConfig], Any], tmp_path: Path
) -> None:
    """The scores are the model's log likelihoods."""
    config, storage = with_task(trained.config, tmp_path), plan_run(trained.config).storage
    assert plan_run(config).id == plan_run(trained.config).id
    assert [row["step"] for row in plan_of(config).steps][-1] == "evaluation"
    done = run_again(config)
    [made] = evaluations(storage, done.final.step)
    scores = {score.metric: score for score in made.scores}
    assert scores["acc"].samples == 3
    assert scores["perplexity"].error is not None
    llm, nats = LLM.load(str(storage.local_path("final/litgpt")), distribute=None), list[float]()
    llm.distribute(accelerator="cpu", devices=1, precision="32-true")
    for text, goes_on in TEXTS:
        known, complete = (llm.preprocessor.tokenizer.encode(entry).long() for entry in (text, text + goes_on))
        with torch.no_grad():
            logits = llm.model(complete[None]).float().log_softmax(-1)[0]
        nats.append(-sum(float(logits[at - 1, complete[at]]) for at in range(len(known), len(complete))))
    assert math.log(scores["perplexity"].value) == pytest.approx(sum(nats) / len(nats), abs=1e-4)
    shown = f"{scores['perplexity'].value:.4f}"
    assert all(shown in storage.read(file).decode() for file in ("final/MODEL_CARD.md", "report.html"))
    assert json.loads(artifact(f"scores-{done.final.run}"))[0]["value"] == scores["perplexity"].value
    manifest = read_manifest(storage, RunManifest)
    assert {("final/" + file.path, file.crc32c) for file in done.final.files} <= {
        (file.path, file.crc32c) for file in manifest.files
    }
    events, card = list[Event](), storage.read("final/MODEL_CARD.md")
    with Listener(events.append):
        asyncio.run(evaluate(done.final.run, config.evaluation, root=config.root))
    assert [event.reused for event in events if isinstance(event, StepDone)] == [True]
    assert storage.read("final/MODEL_CARD.md") == card


@pytest.mark.prefect
def test_checkpoint_is_scored_in_parallel_to_its_training(
    trained: Any, run_again: Callable[[RunConfig], Any], tmp_path: Path
) -> None:
    """A checkpoint that cannot be scored is a warning."""
    config = with_task(trained.config, tmp_path, every_checkpoints=1)
    run, every, notes = plan_run(config), config.train.checkpoint_every, list[Event]()
    last, *before = [entry.step for entry in list_complete(run.storage)]

    async def follow() -> None:
        async with CheckpointScores(run) as scores:
            scores.follow({"kind": "start", "step": 0, "steps": last})
            for step in (*before, 1000 * every, 1000 * every + 1, last):
                scores.follow({"kind": "checkpoint", "step": step})

    with Listener(notes.append):
        asyncio.run(follow())
    *reported, warned = [entry for entry in notes if isinstance(entry, Note)]
    assert warned.severity == "warning"
    assert f"the checkpoint of step {1000 * every} has no scores" in warned.what
    if find_spec("lm_eval") is None:
        return
    assert [entry.what.partition(": words, ")[0] for entry in reported] == [f"step {step}" for step in before]
    assert {entry.step for entry in evaluations(run.storage)} >= {*before}
    run_again(config)
    [score] = [entry for entry in evaluations(run.storage, before[0])[0].scores if entry.metric == "acc"]
    assert f"{score} at step {before[0]}; " in run.storage.read("report.html").decode()


def test_evaluation_reports_missing_parts_before_it_begins(tiny: Callable[..., RunConfig]) -> None:
    reported = {
        entry.code: entry for entry in plan_of(tiny({"evaluation": {"tasks": ["words"], "task_folder": "no"}})).findings
    }
    assert "task_folder=no is not a folder" in reported["evaluation.task_folder"].what
    if find_spec("lm_eval") is None:
        assert ".[evaluate]" in str(reported["evaluation.missing"].fix)
    with pytest.raises(ConfigProblem, match=r"evaluation\.tasks"):
        tiny({"evaluation": {"tasks": []}})
    with pytest.raises(ConfigProblem, match=r"evaluation\.tasks: is required"):
        tiny({"evaluation.every_checkpoints": 2})
