"""Tiny runs as the launcher leaves them before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from litgpt_demo.config import EvaluationConfig, ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.data.dataset import DatasetManifest, open_dataset

MODEL = ModelConfig(name=None, config={"n_layer": 2, "n_embd": 32, "n_head": 2}, sequence_length=32)
TRAIN: dict[str, Any] = {
    "global_batch": 8, "micro_batch": 2, "max_steps": 12, "warmup_steps": 2, "learning_rate": 0.02,
    "precision": "32-true", "evaluate_every": 4, "evaluation_windows": 7, "checkpoint_every": 4,
}  # fmt: skip


def write_run(
    folder: Path, dataset: Path, *, world_size: int = 1, model: ModelConfig = MODEL,
    evaluation: EvaluationConfig | None = None, **train: Any,
) -> Path:  # fmt: skip
    """A run's folder as the launcher leaves it before training."""
    asked = TrainConfig.model_validate(TRAIN | train)
    manifest: DatasetManifest = open_dataset(str(dataset))
    spec = TrainingSpec(
        run=folder.name,
        dataset=str(dataset),
        dataset_key=manifest.key,
        model=model,
        train=asked,
        evaluation=evaluation,
        steps=asked.steps(tokens=manifest.train.tokens, sequence_length=model.sequence_length),
        world_size=world_size,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"training": spec.model_dump(mode="json")}))
    return folder
