from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from typer.testing import CliRunner

from cli.main import app
from launcher.config import RunConfig
from launcher.errors import ConfigProblem
from launcher.events import Event, Step, StepDone
from launcher.images.sbom import SBOM
from launcher.runs.attempts import claim_of
from launcher.runs.run import RunManifest, plan_run
from litgpt_demo.manifests import read_manifest

pytestmark = [pytest.mark.prefect, pytest.mark.training, pytest.mark.timeout(600)]


def reused(events: list[Event]) -> dict[str, bool]:
    """Step to whether it was found done."""
    return {event.step: event.reused for event in events if isinstance(event, StepDone)}


def files_of(root: Path) -> dict[str, float]:
    """Every file below it and when it was written."""
    return {str(path): path.stat().st_mtime for path in root.rglob("*") if path.is_file()}


def artifacts_of(run: str) -> dict[str, Any]:
    """Kind (progress, training, …) to the data of the run's artifacts in Prefect."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts()
    return {str(one.key).removesuffix(f"-{run}"): one.data for one in found if str(one.key).endswith(run)}


def test_each_of_the_five_steps_is_a_task_that_is_tried_again_at_one_level(trained: Any) -> None:
    """A job that ended badly is tried again by its run's restarts, and never by its step's task."""
    with get_client(sync_client=True) as client:
        [flow_run] = [run for run in client.read_flow_runs() if run.name == trained.config.name][:1]
        of_it = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
        tries = {run.name: run.empirical_policy.retries for run in client.read_task_runs(flow_run_filter=of_it)}
    assert {step.task: tries.get(step.task) for step in Step} == {
        step.task: 0 if step is Step.TRAINING else 3 for step in Step
    }


def test_five_steps_lead_from_text_to_a_model(trained: Any) -> None:
    assert list(reused(trained.events)) == ["dataset", "image", "credentials", "training", "checkpoints"]
    assert not any(reused(trained.events).values())
    storage = plan_run(trained.config).storage
    assert {"lit_model.pth", "model_config.yaml", "tokenizer.json"} <= {Path(path).name for path in storage.list()}
    manifest = read_manifest(storage, RunManifest)
    assert manifest is not None
    assert (manifest.step, manifest.attempts) == (8, 1)
    assert manifest.validation_loss == trained.final.validation_loss


def test_step_five_leaves_models_for_litgpt_and_hugging_face_with_a_card_and_their_lineage(trained: Any) -> None:
    storage = plan_run(trained.config).storage
    assert {
        "final/litgpt/lit_model.pth", "final/huggingface/model.safetensors", "final/MODEL_CARD.md", "final/loss.png",
        "final/lineage.json", "final/manifest.json",
    } <= set(storage.list())  # fmt: skip
    lineage = json.loads(storage.read("final/lineage.json"))
    assert lineage["config"] == trained.config.model_dump(mode="json")
    assert "torch" in lineage["software"]["packages"]
    assert trained.final.huggingface.logits_difference <= trained.final.logits_tolerance
    manifest = read_manifest(storage, RunManifest)
    assert manifest is not None
    assert {"final/litgpt/lit_model.pth", "final/MODEL_CARD.md"} <= {file.path for file in manifest.files}


def test_the_collect_verb_takes_any_run_by_its_address(trained: Any, tmp_path: Path) -> None:
    source = Path(plan_run(trained.config).storage.address())
    run = Path(shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("final")))
    done = CliRunner().invoke(app, ["collect", str(run), "--newest"])
    assert done.exit_code == 0, done.output
    assert f"step {trained.final.step}, " in done.stdout
    assert "GPTNeoXForCausalLM: opens, logits differ by" in done.stdout
    assert (run / "final/huggingface/model.safetensors").read_bytes() == (
        source / "final/huggingface/model.safetensors"
    ).read_bytes()


def test_prefect_shows_progress_the_loss_curve_and_the_report(trained: Any) -> None:
    shown = artifacts_of(plan_run(trained.config).name)
    assert shown["progress"] == 100
    assert "xychart-beta" in shown["training"]
    assert "8\N{NO-BREAK SPACE}of\N{NO-BREAK SPACE}8" in shown["training"]
    assert "xychart-beta" in shown["report"]
    assert trained.config.root in shown["report"]
    assert "Validation loss" in shown["figures"]


def test_a_second_run_finds_every_step_done(trained: Any, run_again: Callable[[RunConfig], Any]) -> None:
    before = files_of(Path(trained.config.root) / "datasets") | files_of(Path(trained.config.root) / "runs")
    again = run_again(trained.config)
    assert reused(again.events) == {
        "dataset": True, "image": False, "credentials": False, "training": True, "checkpoints": True,
    }  # fmt: skip
    assert again.final == trained.final
    assert [record.attempt for record in claim_of(trained.config).attempts.records()] == [1]
    after = files_of(Path(trained.config.root) / "datasets") | files_of(Path(trained.config.root) / "runs")
    assert after == before, "a report that is there is not drawn again"


def test_the_bill_of_materials_lies_beside_the_run(trained: Any) -> None:
    bill = json.loads(plan_run(trained.config).storage.read(SBOM))
    assert {part["name"]: part["version"] for part in bill["components"]}["torch"] == version("torch")


def test_a_report_that_was_removed_is_drawn_again(trained: Any, run_again: Callable[[RunConfig], Any]) -> None:
    report = Path(plan_run(trained.config).storage.address("report.html"))
    before = report.read_bytes()
    report.unlink()
    run_again(trained.config)
    assert report.read_bytes() == before


@pytest.mark.long
def test_another_learning_rate_trains_and_collects_anew_on_the_same_dataset(trained: Any, trained_faster: Any) -> None:
    assert reused(trained_faster.events) == {
        "dataset": True, "image": False, "credentials": False, "training": False, "checkpoints": False,
    }  # fmt: skip
    root = Path(trained.config.root)
    assert len(list((root / "datasets").iterdir())) == 1
    names = {plan_run(done.config).name for done in (trained, trained_faster)}
    assert len(names & {folder.name for folder in (root / "runs").iterdir()}) == 2
    assert trained_faster.final.validation_loss != trained.final.validation_loss


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model.config.padded_vocab_size": 64}, "model.vocabulary"),
        ({"root": "ftp://nowhere"}, "ftp://nowhere"),
        ({"data.corpus.paths": ["/there/is/no/such.txt"]}, "such.txt"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    changes: dict[str, Any], named: str, tiny: Callable[..., RunConfig], run_again: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=named) as refused:
        run_again(tiny(changes))
    assert "Traceback" not in str(refused.value)
    assert not files_of(tmp_path)


def test_overrides_win_over_groups(tiny: Callable[..., RunConfig]) -> None:
    import asyncio

    from flows.train_litgpt import train_litgpt

    config = tiny()
    groups = {name: getattr(config, name) for name in RunConfig.model_fields}
    with pytest.raises(ConfigProblem, match=r"model\.vocabulary"):
        asyncio.run(train_litgpt(**groups, overrides={"model.config.padded_vocab_size": 64}))
