"""The five steps on one trained run; what is refused before them is in test_parameters."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from job_handles import begin, handle_of
from pipelines import artifact
from prefect import get_client
from strict_platform import StrictPlatform
from waiting import until

from flows.train_litgpt import train_litgpt
from launcher.checks.plan import plan_of
from launcher.config import RunConfig, overridden, validated
from launcher.errors import ConfigProblem, JobCancelled
from launcher.events import Event, FlowRunStarted, Listener, Note, StepDone
from launcher.images.identity import SBOM, SoftwareIdentity
from launcher.job import JobState
from launcher.provenance.metadata import CROISSANT, MODEL_BILL
from launcher.provenance.statements import PROVENANCE, TEST_RESULT
from launcher.runs.attempts import job_handle
from launcher.runs.index import Index
from launcher.runs.run import RunManifest, plan_run, training_spec, write_config
from litgpt_demo.data.preparation import prepare
from litgpt_demo.documents import read_manifest
from litgpt_demo.runs import read_spec
from tasks.dataset import MapExecutor

pytestmark = pytest.mark.prefect


def reused(events: list[Event]) -> dict[str, bool]:
    """Step to whether it was found done."""
    return {event.step: event.reused for event in events if isinstance(event, StepDone)}


def files_of(root: str) -> dict[str, float]:
    """Every file of the datasets and runs below it and when it was written."""
    found = (path for folder in ("datasets", "runs") for path in Path(root, folder).rglob("*") if path.is_file())
    return {str(path): path.stat().st_mtime for path in found}


def test_pipeline_makes_models_with_card_sbom_and_lineage(trained: Any) -> None:
    first, second, *later = reused(trained.events)
    assert ({first, second}, later) == ({"dataset", "image"}, ["credentials", "training", "checkpoints"])
    assert not any(reused(trained.events).values())
    storage = plan_run(trained.config).storage
    assert {
        "final/litgpt/lit_model.pth", "final/litgpt/model_config.yaml", "final/litgpt/tokenizer.json",
        "final/huggingface/model.safetensors", "final/MODEL_CARD.md", "final/loss.png", "report.html",
    } <= set(storage.list())  # fmt: skip
    manifest = read_manifest(storage, RunManifest)
    assert (manifest.step, manifest.attempts) == (8, 1)
    assert manifest.validation_loss == trained.final.validation_loss
    statements = {f"final/{PROVENANCE}", f"final/{TEST_RESULT}", f"final/{MODEL_BILL}", f"final/{CROISSANT}"}
    assert {"final/litgpt/lit_model.pth", *statements} <= {file.path for file in manifest.files}
    resources = json.loads(storage.read(f"final/{PROVENANCE}"))["predicate"]["runDetails"]["byproducts"]
    digests = {resource["name"]: resource["digest"]["sha256"] for resource in resources}
    assert digests.pop("chain") == trained.final.chain
    assert digests == {name: sha256(storage.read(name)).hexdigest() for name in digests}, "of the last versions"
    assert {"report.html", "metrics.jsonl", SBOM, *statements} - {f"final/{PROVENANCE}"} == digests.keys()
    assert trained.final.huggingface.logits_difference <= trained.final.logits_tolerance
    lineage = json.loads(storage.read("final/lineage.json"))
    assert lineage["config"] == trained.config.model_dump(mode="json")
    bill = {part["name"]: part["version"] for part in json.loads(storage.read(SBOM))["components"]}
    assert bill["torch"] == version("torch")


def test_prefect_shows_dataset_progress_loss_curve_and_report(trained: Any) -> None:
    run = plan_run(trained.config)
    dataset = f"{run.dataset.name}-{run.dataset.content_hash}"
    assert artifact(f"dataset-{dataset}") == artifact(f"progress-{run.name}") == 100
    assert "Training: tokens" in artifact(f"dataset-figures-{dataset}")
    assert "xychart-beta" in artifact(f"dataset-lengths-{dataset}")
    assert "8\N{NO-BREAK SPACE}of\N{NO-BREAK SPACE}8" in artifact(f"training-{run.name}")
    assert all(text in artifact(f"report-{run.name}") for text in ("xychart-beta", "Validation loss"))


def test_prefect_has_states_and_milestone_events_of_a_run(trained: Any) -> None:
    [flow_run] = [event.id for event in trained.events if isinstance(event, FlowRunStarted)]
    run = plan_run(trained.config)
    event_filter = {"resource": {"id": [f"train-litgpt.run.{run.name}"]}, "order": "ASC"}
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(UUID(flow_run))

        def events_of_run() -> list[dict[str, Any]]:
            return client.request("POST", "/events/filter", json={"filter": event_filter, "limit": 50}).json()["events"]

        until(lambda: [entry["event"] for entry in events_of_run()][-1:] == ["train-litgpt.run.finished"])
        events = [
            (entry["event"].removeprefix("train-litgpt."), entry["payload"], entry["related"])
            for entry in events_of_run()
        ]
    assert [state.name for state in states if state.is_running()] == ["Running", "Training", "Collecting"]
    assert states[-1].is_completed()
    assert [event for event, *_ in events] == [
        "run.started", "checkpoint.committed", "checkpoint.committed", "attempt.ended", "run.finished"
    ]  # fmt: skip
    started, first, last, ended, finished = (payload for _, payload, _ in events)
    assert (started, ended["outcome"], ended["again"]) == ({"attempt": 1, "platform": "local"}, "succeeded", False)
    assert ((first["step"], last["step"]), finished["step"]) == ((4, 8), 8)
    assert 0 < last["loss"] < first["loss"]
    related = {entry["prefect.resource.id"] for *_, resources in events[:1] for entry in resources}
    assert {f"prefect.flow-run.{flow_run}", f"train-litgpt.root.{run.root.address()}"} <= related


def test_failed_image_stops_the_dataset_step_in_parallel(
    tiny: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    preparing, stopped, events = threading.Event(), threading.Event(), list[Event]()
    stop = MapExecutor.stop
    monkeypatch.setattr(MapExecutor, "stop", lambda executor: (stop(executor), stopped.set()))

    def prepare_for_hours(*_: Any, **__: Any) -> None:
        preparing.set()
        stopped.wait()
        raise JobCancelled("the preparation was stopped")

    def build(*_: Any, **__: Any) -> None:
        preparing.wait()
        raise ConfigProblem("the registry refuses it")

    monkeypatch.setattr("tasks.preflight.findings_of", lambda *_: [])  # the preflight rehearses a preparation
    monkeypatch.setattr("tasks.dataset.preparation.prepare", prepare_for_hours)
    monkeypatch.setattr("tasks.preflight.prepare_image", build)
    with Listener(events.append), pytest.raises(ConfigProblem, match="the registry refuses it"):
        asyncio.run(train_litgpt(**dict(tiny())))
    shown = [event.what for event in events if isinstance(event, Note) and event.severity == "error"]
    assert shown == ["the image could not be built; the step in parallel is stopped, and its finished work is kept"]
    assert reused(events) == {}


def test_a_second_run_finds_every_step_done_and_writes_nothing(
    trained: Any, run_again: Callable[[RunConfig], Any]
) -> None:
    before = files_of(trained.config.root)
    again = run_again(trained.config)
    assert [step for step, found in reused(again.events).items() if found] == ["dataset", "training", "checkpoints"]
    assert again.final == trained.final
    assert [record.attempt for record in handle_of(trained.config).attempts.records()] == [1]
    assert files_of(trained.config.root) == before


def test_nodes_get_the_address_of_initial_weights_under_the_root(
    trained: Any, run_again: Callable[[RunConfig], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plan_run(trained.config).storage.address("final/litgpt")

    def continued(**changes: Any) -> RunConfig:
        requests = {"name": "continued", "model.init_from": folder, **changes}
        return validated(RunConfig, overridden(trained.config.model_dump(mode="json"), requests), where="it")

    async def refused(handle: Any, **_: Any) -> None:
        handle.reattach_or_create()
        raise JobCancelled("no job is begun here")

    # The preflight compares weights and model in a process, which is looked at below.
    monkeypatch.setattr("tasks.preflight.findings_of", lambda *_: [])
    monkeypatch.setattr("tasks.training.run_job", refused)
    with pytest.raises(JobCancelled, match="no job is begun here"):
        run_again(continued())
    run = plan_run(continued())
    origin, shown = run.origin, read_spec(run.storage.within("attempts/1")).origin
    assert (origin.name, shown.address) == (folder, run.root.address(f"weights/{origin.content_hash}"))
    assert run.id != plan_run(trained.config).id
    wrong = {"data.corpus.max_bytes": 30_000, "model.config.n_head": 4}
    findings = " ".join(finding.what for finding in plan_of(continued(**wrong)).findings)
    assert "data.tokenizer is trained on the corpus, but the weights of model.init_from have" in findings
    assert "n_head 4, but the weights of" in findings


def test_a_plan_shows_where_in_the_samples_a_run_continues(trained: Any, monkeypatch: Any) -> None:
    """With the optimizer's state and the same seed; weights alone start with the first sample."""
    monkeypatch.setattr("launcher.checks.preflight.check_origin", lambda *_, **__: [])
    settings = trained.config.model_dump(mode="json")
    settings["model"] |= {"init_from": plan_run(trained.config).name, "load_optimizer_state": True}

    def found(**changes: Any) -> list[str]:
        config = validated(RunConfig, overridden(settings, changes), where="it")
        found = [finding for finding in plan_of(config).findings if finding.code.startswith("model.init_from")]
        return [f"{finding.severity}: {finding.what}" for finding in found]

    dataset = plan_run(trained.config).dataset.content_hash
    assert found() == [f"info: the training continues dataset {dataset} after the 32 samples that the weights saw"]
    assert found(**{"train.seed": 2}) == found(**{"model.load_optimizer_state": False}) == []
    (problem,) = found(**{"model.sequence_length": 16})
    assert problem.startswith(f"error: with train.seed=1337 the training would continue dataset {dataset} where")
    (problem,) = found(**{"train.seed": 2, "train.optimizer": "muon"})
    assert problem.endswith("is that of adamw, but train.optimizer=muon cannot continue from it")


def test_resumed_flow_run_follows_its_live_job_without_corpus(
    tiny: Callable[..., RunConfig], tmp_path: Path, corpus: Path, platform: StrictPlatform, monkeypatch: Any
) -> None:
    own = Path(shutil.copy(corpus, tmp_path / "corpus.txt"))
    config = tiny({"data.corpus.paths": [str(own)]})
    run = plan_run(config)
    dataset = prepare(run.dataset, run.root)
    write_config(run, training_spec(run, dataset), SoftwareIdentity(image=None, commit="abc", dirty=False))
    handle = replace(job_handle(run), flow_runs=["its-id"])
    job_id = begin(handle)
    own.unlink()
    platform.followed[job_id] = JobState.CANCELLED
    monkeypatch.setattr(platform, "check_access", partial(pytest.fail, "access is no matter of a job that runs"))
    monkeypatch.setattr(StrictPlatform, "poll_seconds", 0.01)
    monkeypatch.setattr("flows.training.flow_runs", lambda: ["its-id"])
    with pytest.raises(JobCancelled, match=f"{run.name}-.* was cancelled"):
        asyncio.run(train_litgpt(**dict(config)))
    assert [record.attempt for record in handle.attempts.records()] == [1]
    assert Index.of(config.root).runs() == [run.name]
