"""Training that starts from weights: all of them, or adapters; on text, or on conversations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from litgpt_demo.config import LoraConfig, ModelConfig, TrainingSpec
from litgpt_demo.data.dataset import plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.data.settings import DataConfig
from litgpt_demo.data.verification import require_sound
from litgpt_demo.export import export
from litgpt_demo.models.estimates import adapters
from litgpt_demo.models.model import decay_groups, litgpt_config
from litgpt_demo.pretrained.staging import stage_weights
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training.loop import main
from litgpt_demo.training.loss import loss_model

NewRun: TypeAlias = Callable[..., Path]

LORA = {"rank": 4, "alpha": 8, "dropout": 0.1, "targets": ["query", "value", "projection", "mlp"]}


@pytest.fixture(scope="module")
def before(finished: Path, tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run with its final model, and the settings of a run that starts from it."""
    root = tmp_path_factory.mktemp("before")
    run = Path(shutil.copytree(finished, root / "runs/before"))
    export(open_storage(str(run)))
    asked = ModelConfig.model_validate({"from": str(run), "sequence_length": 32})
    manifest = stage_weights(asked, open_storage(str(root)), open_storage(str(tiny_dataset)))
    (folder,) = (path.parent for path in root.glob("weights/*/manifest.json"))
    return run, {"model": manifest.model.model_copy(update={"pretrained": None}), "weights": str(folder)}


def started_from(run: Path, start: dict[str, Any]) -> Path:
    """The same run, starting from weights."""
    spec: TrainingSpec = read_spec(open_storage(str(run))).model_copy(update=start)
    (run / "config.json").write_text(json.dumps({"training": spec.model_dump(mode="json")}))
    return run


def losses(run: Path, kind: str = "step", column: str = "loss") -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[column] for row in rows if row["kind"] == kind}


def test_training_goes_on_from_the_weights_it_is_given(new_run: NewRun, before: tuple[Path, dict[str, Any]]) -> None:
    run = started_from(new_run("after", learning_rate=1e-9, weight_decay=0.0, max_steps=4), before[1])
    assert main(["--run", str(run)]) == 0
    first = losses(before[0], "evaluation", "validation_loss")[12]
    assert losses(run, "evaluation", "validation_loss")[4] == pytest.approx(first, abs=1e-5)
    lineage = {"address": str(before[0]), "kind": "litgpt"}
    export(open_storage(str(run)))
    found = json.loads((run / "final/lineage.json").read_text())["weights"]
    assert found.items() >= lineage.items()
    assert {source["name"] for source in found["sources"]} == {"lit_model.pth", "model_config.yaml"}


def test_adapters_alone_are_trained_go_on_where_they_were_and_are_merged(
    new_run: NewRun, before: tuple[Path, dict[str, Any]]
) -> None:
    run = started_from(new_run("adapted", lora=LORA, max_steps=6, checkpoint_every=3), before[1])
    assert main(["--run", str(run)]) == 0
    after = losses(run, "evaluation", "validation_loss")[6]
    assert after < losses(before[0], "evaluation", "validation_loss")[12]
    final = export(open_storage(str(run)))
    assert final.huggingface is not None
    assert max(final.logits_difference, final.huggingface.logits_difference) <= 1e-5
    assert final.validation_loss == pytest.approx(after, abs=1e-4)
    parted = started_from(new_run("parted", lora=LORA, max_steps=6, checkpoint_every=3), before[1])
    shutil.copytree(run / "checkpoints/step-00000003", parted / "checkpoints/step-00000003")
    assert main(["--run", str(parted)]) == 0
    assert losses(parted) == {step: loss for step, loss in losses(run).items() if step > 3}
    names = torch.load(run / "final/litgpt/lit_model.pth", weights_only=True).keys()
    assert names == torch.load(before[0] / "final/litgpt/lit_model.pth", weights_only=True).keys()


def test_the_optimizer_holds_the_adapters_as_they_are_counted() -> None:
    chosen = LoraConfig.model_validate(LORA | {"targets": ["query", "key", "value", "projection", "mlp"]})
    for changes in ({}, {"n_query_groups": 1, "mlp_class_name": "LLaMAMLP", "intermediate_size": 48}):
        model = ModelConfig(name=None, config={"n_layer": 2, "n_embd": 32, "n_head": 2, **changes}, sequence_length=32)
        made = loss_model(litgpt_config(model, vocab_size=300, adapters=chosen))
        held = [weight for group in decay_groups(made, 0.1) for weight in group["params"]]  # type: ignore[attr-defined]
        assert sum(weight.numel() for weight in held) == adapters(made.config, chosen)


def test_only_responses_are_learned_however_the_batch_is_shared(
    new_run: NewRun, before: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    lines = (json.dumps({"prompt": f"{number}? ", "response": f"{number + 1}."}) for number in range(300))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    data = DataConfig.model_validate(
        {
            "corpus": {"kind": "instructions", "paths": [str(tmp_path / "pairs.jsonl")]},
            "tokenizer": {"kind": "litgpt", "path": str(before[0] / "final/litgpt")},
            "validation_fraction": 0.1,
        }
    )
    planned = plan_dataset(data)
    manifest = prepare(planned, open_storage(str(tmp_path)))
    dataset = tmp_path / planned.path
    assert require_sound(str(dataset)).masked
    assert manifest.dtype == "<u4"
    runs = [
        started_from(new_run(f"shared-{size}", dataset=dataset, micro_batch=size, max_steps=4), before[1])
        for size in (1, 8)
    ]
    for run in runs:
        assert main(["--run", str(run)]) == 0
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), abs=1e-4)
    final = export(open_storage(str(runs[0])))
    assert final.validation_loss == pytest.approx(losses(runs[0], "evaluation", "validation_loss")[4], abs=1e-4)
