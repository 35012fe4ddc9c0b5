"""The bars of the trainer's own features, on small models that learn Python's standard library: one table.

- Muon and AdamW train 3.3 million parameters from the same seeds, on the same batches.
- A stable run with a decay branch and an uninterrupted run see as many tokens. The branch begins with the weights and
  the optimizer of the stable run, and continues its samples.
- A run with all new states is killed and resumed, and ends as one that was not.
- `bench.step_time` has the times of steps.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import redirect_stdout
from io import StringIO
from operator import sub
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from bench import step_time
from bench.training import write_run
from litgpt_demo.config import DataConfig, ModelConfig, TrainingSpec
from litgpt_demo.data.batches import open_samples, sample_ids_for_step
from litgpt_demo.data.dataset import open_dataset, plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.export.weights import Weights
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.storage import open_storage
from litgpt_demo.training import loop
from litgpt_demo.training.checkpoint_reader import AVERAGE, MODEL
from litgpt_demo.training.checkpoints import folder_of
from litgpt_demo.training.origins import find_initial_weights

STEPS, QUICK_STEPS, SMALL_STEPS, DECAY = 300, 100, 120, 24
DATA = {"corpus": {"kind": "stdlib", "max_bytes": 20_000_000}, "validation_fraction": 0.02}
# 3.3 million parameters, half of them in the blocks.
MEDIUM = ModelConfig(name=None, config={"n_layer": 4, "n_embd": 192, "n_head": 6}, sequence_length=128)
BATCH: dict[str, Any] = {"global_batch": 8, "micro_batch": 8}
TRAIN = BATCH | {"warmup_steps": 0.1, "precision": "bf16-mixed", "evaluation_samples": 64, "checkpoint_every": STEPS}
# docs/howto/optimizer.md has the learning rates that were compared. 4e-3 is the best one for AdamW.
ADAMW, MUON = {"learning_rate": 4e-3}, {"learning_rate": 8e-3, "optimizer": "muon"}

CORPUS, TOKENIZER = {"kind": "stdlib", "max_bytes": 1_000_000}, {"kind": "train", "vocab_size": 512}
SMALL_DATA = {"corpus": CORPUS, "tokenizer": TOKENIZER, "validation_fraction": 0.05}
SMALL = ModelConfig(name=None, config={"n_layer": 2, "n_embd": 64, "n_head": 4}, sequence_length=64)
SMALL_TRAIN = BATCH | {
    "learning_rate": 4e-3, "warmup_steps": 12, "precision": "32-true", "evaluate_every": SMALL_STEPS,
    "checkpoint_every": SMALL_STEPS, "log_every": 1,
}  # fmt: skip
STATES = {
    "optimizer": "muon", "weight_average": 0.9, "global_batch": [{"batch": 8}, {"batch": 16, "after": 60}],
    "attention": "documents", "max_steps": SMALL_STEPS, "checkpoint_every": SMALL_STEPS // 3,
}  # fmt: skip


def prepared(root: Path, data: dict[str, Any]) -> Path:
    planned = plan_dataset(DataConfig.model_validate(data))
    prepare(planned, open_storage(str(root)))
    return root / planned.path


def train(run: Path) -> dict[int, float]:
    """Train a run to its end in this process; return its validation losses by step."""
    with redirect_stdout(StringIO()):
        loop.main(["--run", str(run)])
    return curve(rows_of((run / "metrics.jsonl").read_text()), "evaluation", "validation_loss")


def steps_to(loss: float, losses: dict[int, float]) -> float:
    """Return the step at which the curve first falls to `loss`, between two evaluations on the line through both."""
    before, loss_before = 0, None
    for step, reached in losses.items():
        if reached <= loss:
            part = 1.0 if loss_before is None else (loss_before - loss) / (loss_before - reached)
            return before + part * (step - before)
        before, loss_before = step, reached
    return math.inf


def compare_optimizers(root: Path, rounds: int) -> tuple[float, list[dict[str, Any]]]:
    """Return the share of AdamW's steps in which Muon has its last validation loss: the mean of `rounds` seeds."""
    dataset, steps, seen = prepared(root, DATA), STEPS if rounds > 1 else QUICK_STEPS, []
    for seed in range(1, rounds + 1):
        settings, runs = TRAIN | {"max_steps": steps, "evaluate_every": steps // 20, "seed": seed}, []
        for side in (ADAMW, MUON):
            runs.append(Path(tempfile.mkdtemp(dir=root)))
            write_run(runs[-1], dataset, model=MEDIUM, train=settings | side)
        adamw, muon = map(train, runs)
        ratio = steps_to(adamw[steps], muon) / steps
        seen.append({"seed": seed, "steps": steps, "adamw": adamw[steps], "muon": muon[steps], "ratio": ratio})
    return mean(row["ratio"] for row in seen), seen


def compare_continued(root: Path, dataset: Path, seeds: int) -> tuple[float, dict[str, Any]]:
    """Return the largest difference of the losses by the spread of the seeds; infinite if a sample is seen twice."""
    losses, repeated = defaultdict[str, list[float]](list), 0

    def trained(name: str, *, init_from: Path | None = None, **settings: Any) -> TrainingSpec:
        run, origin = root / f"{name}-{seed}", find_initial_weights(init_from and str(init_from), True, ".")
        spec = write_run(run, dataset, model=SMALL, train=SMALL_TRAIN | {"seed": seed, **settings}, origin=origin)
        losses[name].append(train(run)[spec.steps])
        return spec

    for seed in range(seeds):
        trained("uninterrupted", schedule="wsd", decay_steps=DECAY, max_steps=SMALL_STEPS)
        stable = trained("stable", schedule="constant", max_steps=SMALL_STEPS - DECAY)
        place, samples = root / f"stable-{seed}", list[int]()
        branch = trained("branch", init_from=place, schedule="linear", warmup_steps=0, max_steps=DECAY)
        for spec in (stable, branch):
            opened = open_samples(spec, dataset, open_dataset(str(dataset)), "train")
            for step in range(spec.steps):
                samples += sample_ids_for_step(spec, opened, step).tolist()
        repeated += len(samples) - len(set(samples))
    difference = max(map(abs, map(sub, losses["uninterrupted"], losses["branch"])))
    spread = max(losses["uninterrupted"]) - min(losses["uninterrupted"])
    found = {"losses": losses, "repeated": repeated, "difference": difference, "spread": spread}
    return math.inf if repeated else difference / spread, found


def compare_resumed(root: Path, dataset: Path) -> float:
    """Return the largest difference of weights, averages and losses that a kill and a resume make."""
    finished, killed = root / "finished", root / "killed"
    for run in (finished, killed):
        write_run(run, dataset, model=SMALL, train=SMALL_TRAIN | STATES)
    train(finished)
    command, env = ["-m", "litgpt_demo", "train", "--run", str(killed)], os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, *command], env=env, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if '"kind":"checkpoint"' in line:
                process.kill()
    if process.returncode != -signal.SIGKILL:
        raise SystemExit("the run was not killed")
    train(killed)
    losses = [curve(rows_of((run / "metrics.jsonl").read_text()), "step", "loss") for run in (finished, killed)]
    differences = [abs(loss - losses[1][step]) for step, loss in losses[0].items()]
    for kind in (MODEL, AVERAGE):
        stored = [Weights(run / folder_of(SMALL_STEPS), kind=kind) for run in (finished, killed)]
        first, second = (weights.read([*weights.forms]) for weights in stored)
        differences += [(first[name] - second[name]).abs().max().item() for name in first]
    return max(differences)


def measure(rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    times, measured = step_time.measure(rounds)
    with tempfile.TemporaryDirectory(prefix="bench-model-") as name:
        root = Path(name)
        muon, optimizers = compare_optimizers(root, rounds)
        torch.set_num_threads(1)  # the model is small, and sums are always added in the same order
        dataset = prepared(root, SMALL_DATA)
        continued, losses = compare_continued(root, dataset, max(2, rounds))  # their spread needs two
        bars: dict[str, Any] = {
            "steps to AdamW's final validation loss with Muon": (muon, "at most", 0.75),
            "loss of a continued run, difference / spread of the seeds": (continued, "at most", 1),
            **times,
            "largest difference after a resume": (compare_resumed(root, dataset), "at most", 0),
        }
    return bars, {**measured, "optimizers": optimizers, "continued": losses}
