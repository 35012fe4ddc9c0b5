"""The five steps on one trained run; what is refused before them is in test_parameters."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from claims import begin
from prefect import get_client
from prefect.client.schemas.sorting import ArtifactSort
from strict_platform import StrictPlatform

from flows.train_litgpt import train_litgpt
from launcher.config import RunConfig
from launcher.errors import JobCancelled
from launcher.events import Event, StepDone
from launcher.images.identity import SBOM, SoftwareIdentity
from launcher.job import JobState
from launcher.runs.attempts import claim_at, claim_of
from launcher.runs.index import Index
from launcher.runs.run import RunManifest, plan_run, training_spec, write_config
from litgpt_demo.data.preparation import prepare
from litgpt_demo.documents import read_manifest

pytestmark = pytest.mark.prefect


def reused(events: list[Event]) -> dict[str, bool]:
    """Step to whether it was found done."""
    return {event.step: event.reused for event in events if isinstance(event, StepDone)}


def files_of(root: str) -> dict[str, float]:
    """Every file of the datasets and runs below it and when it was written."""
    found = (path for folder in ("datasets", "runs") for path in Path(root, folder).rglob("*") if path.is_file())
    return {str(path): path.stat().st_mtime for path in found}


def test_five_steps_lead_from_text_to_models_with_a_card_a_bill_of_materials_and_their_lineage(trained: Any) -> None:
    assert [*reused(trained.events)] == ["dataset", "image", "credentials", "training", "checkpoints"]
    assert not any(reused(trained.events).values())
    storage = plan_run(trained.config).storage
    assert {
        "final/litgpt/lit_model.pth", "final/litgpt/model_config.yaml", "final/litgpt/tokenizer.json",
        "final/huggingface/model.safetensors", "final/MODEL_CARD.md", "final/loss.png", "report.html",
    } <= set(storage.list())  # fmt: skip
    manifest = read_manifest(storage, RunManifest)
    assert manifest is not None
    assert (manifest.step, manifest.attempts) == (8, 1)
    assert manifest.validation_loss == trained.final.validation_loss
    assert {"final/litgpt/lit_model.pth", "final/MODEL_CARD.md"} <= {file.path for file in manifest.files}
    assert trained.final.huggingface.logits_difference <= trained.final.logits_tolerance
    lineage = json.loads(storage.read("final/lineage.json"))
    assert lineage["config"] == trained.config.model_dump(mode="json")
    bill = {part["name"]: part["version"] for part in json.loads(storage.read(SBOM))["components"]}
    assert bill["torch"] == version("torch")


def test_prefect_shows_the_dataset_the_progress_the_loss_curve_and_the_report(trained: Any) -> None:
    run = plan_run(trained.config)
    with get_client(sync_client=True) as client:
        newest_last = reversed(client.read_artifacts(sort=ArtifactSort.CREATED_DESC))  # other tests have this dataset
        found: dict[str, Any] = {str(one.key): one.data for one in newest_last}
    dataset = f"{run.dataset.name}-{run.dataset.key}"
    assert found[f"dataset-{dataset}"] == found[f"progress-{run.name}"] == 100
    assert "Training: tokens" in found[f"dataset-figures-{dataset}"]
    assert "xychart-beta" in found[f"dataset-lengths-{dataset}"]
    assert "8\N{NO-BREAK SPACE}of\N{NO-BREAK SPACE}8" in found[f"training-{run.name}"]
    assert all(words in found[f"report-{run.name}"] for words in ("xychart-beta", "Validation loss"))


def test_a_second_run_finds_every_step_done_and_writes_nothing(
    trained: Any, run_again: Callable[[RunConfig], Any]
) -> None:
    before = files_of(trained.config.root)
    again = run_again(trained.config)
    assert [step for step, found in reused(again.events).items() if found] == ["dataset", "training", "checkpoints"]
    assert again.final == trained.final
    assert [record.attempt for record in claim_of(trained.config).attempts.records()] == [1]
    assert files_of(trained.config.root) == before


def test_a_resumed_flow_run_follows_its_live_job_whatever_has_become_of_corpus_image_and_access(
    tiny: Callable[..., RunConfig], tmp_path: Path, corpus: Path, platform: StrictPlatform, monkeypatch: Any
) -> None:
    own = Path(shutil.copy(corpus, tmp_path / "corpus.txt"))
    config = tiny({"data.corpus.paths": [str(own)]})
    run = plan_run(config)
    dataset = prepare(run.dataset, run.root)
    write_config(run, training_spec(run, dataset), SoftwareIdentity(image=None, commit="abc", dirty=False))
    claim = replace(claim_at(run), flow_runs=["its-id"])
    job_id = begin(claim)
    own.unlink()
    platform.followed[job_id] = JobState.CANCELLED
    monkeypatch.setattr(platform, "check_access", partial(pytest.fail, "access is no matter of a job that runs"))
    monkeypatch.setattr(StrictPlatform, "poll_seconds", 0.01)
    monkeypatch.setattr("flows.train_litgpt.flow_runs", lambda: ["its-id"])
    with pytest.raises(JobCancelled, match=f"{run.name}-.* was cancelled"):
        asyncio.run(train_litgpt(**dict(config)))
    assert [record.attempt for record in claim.attempts.records()] == [1]
    assert Index.of(config.root).runs() == [run.name]
