"""The quality of models for the same tokens: a setting against the default, on a small model and real text.

The text is Python's standard library, in 4,096 token ids. Each side trains from the same seeds, on the same batches.
"""

from __future__ import annotations

import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import mean
from typing import Any

from litgpt_demo.config import DataConfig, ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.data.dataset import open_dataset, plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.storage import open_storage
from litgpt_demo.training.loop import main as train

SEEDS, STEPS, QUICK_STEPS = (1, 2, 3), 300, 100
DATA = {"corpus": {"kind": "stdlib", "max_bytes": 20_000_000}, "validation_fraction": 0.02}
# 3.3 million parameters, half of them in the blocks.
MODEL = ModelConfig(name=None, config={"n_layer": 4, "n_embd": 192, "n_head": 6}, sequence_length=128)
TRAIN = {
    "global_batch": 8, "micro_batch": 8, "warmup_steps": 0.1, "precision": "bf16-mixed", "evaluation_samples": 64,
    "checkpoint_every": STEPS,
}  # fmt: skip
# docs/howto/optimizer.md has the learning rates that were compared. 4e-3 is the best one for AdamW.
ADAMW = {"learning_rate": 4e-3}
MUON = {"learning_rate": 8e-3, "optimizer": "muon"}


def small_dataset(root: Path) -> Path:
    planned = plan_dataset(DataConfig.model_validate(DATA))
    prepare(planned, open_storage(str(root)))
    return root / planned.path


def validation_losses(dataset: Path, *, steps: int, seed: int, **settings: Any) -> dict[int, float]:
    """Train, and return the validation loss after each 20th of the steps, by its step."""
    values = {**TRAIN, "max_steps": steps, "evaluate_every": steps // 20, "seed": seed, **settings}
    spec = TrainingSpec(
        run="bench", dataset=str(dataset), dataset_hash=open_dataset(str(dataset)).content_hash, steps=steps,
        world_size=1, model=MODEL, train=TrainConfig.model_validate(values),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="run-") as name:
        run = Path(name)
        (run / "config.json").write_text(spec.model_dump_json().join(('{"training":', "}")))
        with redirect_stdout(StringIO()):
            train(["--run", name])
        return curve(rows_of((run / "metrics.jsonl").read_text()), "evaluation", "validation_loss")


def steps_to(loss: float, losses: dict[int, float]) -> float:
    """Return the step at which the curve first falls to `loss`, between two evaluations on the line through both."""
    before, loss_before = 0, None
    for step, reached in losses.items():
        if reached <= loss:
            part = 1.0 if loss_before is None else (loss_before - loss) / (loss_before - reached)
            return before + part * (step - before)
        before, loss_before = step, reached
    return float("inf")


def measure(rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    steps, ratios, seen = STEPS if rounds > 1 else QUICK_STEPS, [], []
    with tempfile.TemporaryDirectory(prefix="bench-model-") as name:
        dataset = small_dataset(Path(name))
        for seed in SEEDS[:rounds]:
            sides = [validation_losses(dataset, steps=steps, seed=seed, **side) for side in (ADAMW, MUON)]
            ratios.append(steps_to(sides[0][steps], sides[1]) / steps)
            seen.append({"seed": seed, "steps": steps, "adamw": sides[0][steps], "muon": sides[1][steps]})
            print(f"seed {seed}: {ratios[-1]:.3f} of the steps; final losses {seen[-1]}", flush=True)
    bars = {"steps to AdamW's final validation loss with Muon": (mean(ratios), "at most", 0.75)}
    return bars, {"seen": seen, "ratios": ratios}
