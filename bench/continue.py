"""The measurement of a continued run: a stable run with a decay branch, next to an uninterrupted run.

Both see as many tokens of Python's standard library, with a model of 0.2 M parameters. The branch begins with the
weights and the optimizer of the stable run, and continues its samples. Every seed has other initial weights and another
order of the samples.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from litgpt_demo.config import DataConfig, ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.data.batches import open_samples, sample_ids_for_step
from litgpt_demo.data.dataset import open_dataset, plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.storage import open_storage
from litgpt_demo.training import checkpoints, loop
from litgpt_demo.training.origins import find_initial_weights

STEPS, DECAY = 120, 24
MODEL = ModelConfig(name=None, config={"n_layer": 2, "n_embd": 64, "n_head": 4}, sequence_length=64)
CORPUS = {"kind": "stdlib", "max_bytes": 1_000_000}
DATA = DataConfig.model_validate({
    "corpus": CORPUS, "tokenizer": {"kind": "train", "vocab_size": 512}, "validation_fraction": 0.05,
})  # fmt: skip
TRAIN = {
    "global_batch": 8, "micro_batch": 8, "learning_rate": 4e-3, "warmup_steps": 12, "precision": "32-true",
    "evaluate_every": STEPS, "checkpoint_every": STEPS, "log_every": STEPS,
}  # fmt: skip


def train(folder: Path, dataset: Path, *, init_from: Path | None = None, **settings: Any) -> TrainingSpec:
    """Train a run to its end in this process."""
    train = TrainConfig.model_validate(TRAIN | settings)
    assert train.max_steps is not None
    spec = TrainingSpec(
        run=folder.name, dataset=str(dataset), dataset_hash=open_dataset(str(dataset)).content_hash, model=MODEL,
        train=train, steps=train.max_steps, origin=find_initial_weights(init_from and str(init_from), True, "."),
        world_size=1,
    )  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"training": spec.model_dump(mode="json")}))
    loop.main(["--run", str(folder)])
    return spec


def loss_of(run: Path) -> float:
    loss = checkpoints.list_complete(open_storage(str(run)))[0].validation_loss
    assert loss is not None
    return loss


def samples_of(spec: TrainingSpec) -> list[int]:
    folder = Path(spec.dataset)
    samples = open_samples(spec, folder, open_dataset(spec.dataset), "train")
    return [int(number) for step in range(spec.steps) for number in sample_ids_for_step(spec, samples, step)]


def measure(rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compare the losses of `rounds` seeds, of two or more: their spread is what the difference is compared with."""
    losses: dict[str, list[float]] = {"uninterrupted": [], "continued": []}
    repeated = 0
    torch.set_num_threads(1)  # the model is small, and sums are always added in the same order
    with tempfile.TemporaryDirectory(prefix="bench-continue-") as name:
        root, planned = Path(name), plan_dataset(DATA)
        prepare(planned, open_storage(name))
        for seed in range(max(2, rounds)):
            dataset, runs = root / planned.path, root / f"seed-{seed}"
            wsd = {"schedule": "wsd", "decay_steps": DECAY, "max_steps": STEPS}
            train(runs / "uninterrupted", dataset, seed=seed, **wsd)
            stable = train(runs / "stable", dataset, seed=seed, schedule="constant", max_steps=STEPS - DECAY)
            decay = {"schedule": "linear", "warmup_steps": 0, "max_steps": DECAY}
            branch = train(runs / "branch", dataset, init_from=runs / "stable", seed=seed, **decay)
            seen = samples_of(stable) + samples_of(branch)
            repeated += len(seen) - len(set(seen))
            losses["uninterrupted"].append(loss_of(runs / "uninterrupted"))
            losses["continued"].append(loss_of(runs / "branch"))
    pairs = zip(losses["continued"], losses["uninterrupted"], strict=True)
    difference = max(abs(continued - uninterrupted) for continued, uninterrupted in pairs)
    spread = max(losses["uninterrupted"]) - min(losses["uninterrupted"])
    bars: dict[str, Any] = {
        "largest difference of the losses / spread of the seeds": (difference / spread, "at most", 1),
        "samples seen twice": (repeated, "at most", 0),
    }
    return bars, {"losses": losses, "difference": difference, "spread": spread}
