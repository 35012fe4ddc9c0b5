"""The speed of training, next to `litgpt pretrain` on the same model, batches and precision.

Every measurement is a process of its own whose lines are timed as they come, one per optimizer step, and which is
killed after the last counted one; the sides take turns. On a GPU each has the first micro-batch of the list that fits.

`python -m bench.training` fills the compiler's cache of a GPU, that of TORCHINDUCTOR_CACHE_DIR: run it beforehand, with
the same variable, and the measurement starts sooner.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from litgpt_demo.config import Filters, ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.data.dataset import DatasetManifest, Split, open_dataset
from litgpt_demo.documents import FileRecord, write_manifest
from litgpt_demo.storage import open_storage

WARM_UP, STEPS, GPU_STEPS = 5, 30, 20  # steps that are not counted, and that are
IDS = 50_254  # of the Pythia models' tokenizer; LitGPT pads their vocabulary to 50,304 rows
# By name: model, length, precision, and the micro-batches to try.
CPU_CASES = {precision: ("pythia-14m", 512, precision, (4,)) for precision in ("bf16-mixed", "32-true")}
GPU_CASES = {
    # 32,768 tokens keep a GPU of 80 GB or more busy; each larger size that does not fit would cost half a minute.
    "pythia-410m": ("pythia-410m", 2048, "bf16-mixed", (16, 8, 4)),
    "pythia-1b": ("pythia-1b", 2048, "bf16-mixed", (16, 8, 4)),
}
GPU_SIDES = {
    "litgpt": {},
    "ours": {"compile": "blocks"},
    "ours without compile": {"compile": "none"},
    "ours in float8": {"compile": "blocks", "float8": True},
}


def watched(*command: str, counted: int) -> dict[str, Any] | None:
    """Seconds to the line of a training's `first` step and of its `counted` ones, as `steps`, the median of those,
    `step`, and the `last` row of ours; None if it failed, as one does that fits no memory."""
    began, times, last, tail = time.perf_counter(), [], {}, deque[str](maxlen=30)
    process = subprocess.Popen(
        [sys.executable, "-m", *command], env=os.environ | {"PYTHONUNBUFFERED": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    for line in process.stdout:
        tail.append(line)
        if '"kind":"step"' in line or "iter time:" in line:  # ours, litgpt's
            times.append(time.perf_counter())
        if '"kind":"step"' in line:
            last = json.loads(line[line.index("{") :])
        if len(times) == WARM_UP + counted:
            process.kill()  # an evaluation and a checkpoint of gigabytes would follow
            break
    process.communicate()
    if len(times) < WARM_UP + counted:
        print("".join(tail)[-3000:], file=sys.stderr)
        return None
    steps = np.diff(times[WARM_UP - 1 :]).tolist()
    return {"first": times[0] - began, "steps": steps, "step": median(steps or [0.0]), "last": last}


def write_run(folder: Path, dataset: Path, *, model: ModelConfig, train: dict[str, Any], **spec: Any) -> TrainingSpec:
    """Write a run's folder as the launcher leaves it before training; `spec` has other fields of the returned one."""
    settings, manifest = TrainConfig.model_validate(train), open_dataset(str(dataset))
    steps = settings.steps(tokens=manifest.train.tokens, sequence_length=model.sequence_length, parameters=0)
    training = TrainingSpec.model_validate({
        "run": folder.name, "dataset": str(dataset), "dataset_hash": manifest.content_hash, "model": model,
        "train": settings, "steps": steps, "world_size": 1, **spec,
    })  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"training": training.model_dump(mode="json")}))
    return training


def train(
    folder: Path, side: str, model: str, length: int, settings: dict[str, Any], *, counted: int = STEPS
) -> dict[str, Any] | None:
    """Train by the `side` on the folder's dataset, in a new run's folder as the launcher leaves it."""
    steps = WARM_UP + counted + 3  # the last ones are followed by an evaluation and a checkpoint
    settings = {"max_steps": steps, "warmup_steps": 2, "evaluation_samples": 4, "checkpoint_every": steps} | settings
    run = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    write_run(run, folder / "dataset", model=ModelConfig(name=model, sequence_length=length), train=settings)
    if side == "litgpt":
        return watched("bench.litgpt_pretrain", str(run), str(run / "litgpt"), counted=counted)
    return watched("litgpt_demo", "train", "--run", str(run), counted=counted)


def fill_compiler_cache() -> None:
    """Train a few steps by each side of a GPU that compiles. Their speed tells nothing if other programs run too."""
    with tempfile.TemporaryDirectory(prefix="bench-training-") as name:
        random_dataset(Path(name, "dataset"), tokens=1_000_000)
        for side, (model, length, precision, (size, *_)) in product(GPU_SIDES, GPU_CASES.values()):
            settings = {"micro_batch": size, "global_batch": size, "precision": precision, **GPU_SIDES[side]}
            if settings.get("compile") != "none":
                train(Path(name), side, model, length, settings, counted=0)


def random_dataset(folder: Path, *, tokens: int) -> Path:
    """A finished dataset of random ids in documents of random lengths: what they are changes no step's time."""
    generator, storage = np.random.default_rng(0), open_storage(str(folder))

    def split(name: str, size: int) -> Split:
        content = generator.integers(1, IDS, size=size, dtype=np.uint16)
        ends = np.cumsum(generator.lognormal(np.log(400), 1.0, size).astype(int) + 1)  # as web pages have them, about
        content[ends[ends < size]] = 0
        return Split(documents=1, tokens=size, files=(FileRecord.of(storage.write(name, content.tobytes())),))

    manifest = DatasetManifest(
        format=2, name="random", content_hash="random", corpus=None, filters=Filters(), dropped={}, bad_documents=0,
        bad_places=(), document_lengths=(), tokenizer_hash="", vocab_size=IDS, end_of_text=0, dtype="<u2",
        validation_fraction=0.01, split_seed=0, text_bytes=0, train=split("train.bin", tokens),
        validation=split("val.bin", 20_000), tokenizer=(),
    )  # fmt: skip
    write_manifest(storage, manifest)
    return folder


def bars_of_starts(case: str, results: list[dict[str, Any]], litgpts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios of the seconds to the first step: without compiled code, and with that of an earlier start."""
    cold, *warm = (us["first"] / them["first"] for us, them in zip(results, litgpts, strict=True))
    bars: dict[str, Any] = {f"first start to first step / litgpt pretrain, {case}": (cold, "at most", 0.15)}
    if warm:
        bars[f"later start to first step / litgpt pretrain with its compiled code, {case}"] = (median(warm),)
    return bars


def measure(rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    gpu, bf16 = torch.cuda.is_available(), torch.ops.mkldnn._is_mkldnn_bf16_supported()  # else a step takes a minute
    cases = GPU_CASES if gpu else {name: case for name, case in CPU_CASES.items() if bf16 or name == "32-true"}
    sides = GPU_SIDES if gpu else {"ours": {}, "litgpt": {}}
    seen, batches, bars = defaultdict[str, list[dict[str, Any]]](list), {}, {}
    with tempfile.TemporaryDirectory(prefix="bench-training-") as name:
        folder = Path(name)
        random_dataset(folder / "dataset", tokens=10_000_000)
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        for _, case, side in product(range(rounds), cases, sides):
            # Empty at first: a first start is cold, and the later ones find what the first one made.
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache or f"{folder}/inductor-{case}"
            name, (model, length, precision, sizes) = f"{side}, {case}", cases[case]
            for size in [batches[name]] if seen[name] else sizes:  # the largest that fits
                batch = {"micro_batch": size, "global_batch": size, "precision": precision}
                steps = GPU_STEPS if gpu else STEPS
                result = train(folder, side, model, length, {**batch, **sides[side]}, counted=steps)
                if result is not None:
                    seen[name].append(result)
                    batches[name] = size
                    print(f"{name}: {result['step'] * 1e3:.0f} ms a step", flush=True)
                    break
            if not seen[name] and not gpu:  # whose time is dear: the other sides are measured all the same
                raise SystemExit(f"{name} failed; its last lines are above")

    def ratio(above: str, below: str, what: str) -> float:
        return median(high[what] / low[what] for high, low in zip(seen[above], seen[below], strict=True))

    def rows_and_steps(name: str) -> list[tuple[dict[str, Any], float]]:
        return [(result["last"], result["step"]) for result in seen[name]]

    for case in cases:  # DESIGN section 6
        us, them, plain, eighth = (
            f"{side}, {case}" for side in ("ours", "litgpt", "ours without compile", "ours in float8")
        )
        target = ("at least", 1.2 if gpu else {"32-true": 1.8}.get(case, 2.0))
        if seen[us] and seen[them]:
            bars[f"tokens/s / litgpt pretrain, {case}"] = ratio(them, us, "step") * batches[us] / batches[them], *target
        if not gpu:
            bars |= bars_of_starts(case, seen[us], seen[them])
            continue
        for name in filter(seen.get, (us, plain, eighth, them)):
            bars[f"tokens/s, {name}"] = (median(batches[name] * 2048 / result["step"] for result in seen[name]),)
        for name in filter(seen.get, (us, plain, eighth)):  # 0 where no peak is known
            target = ("at least", 0.55) if name == "ours, pythia-1b" else ()
            shares = (row.get("mfu", 0.0) * row["step_seconds"] / step for row, step in rows_and_steps(name))
            bars[f"MFU, {name}"] = median(shares), *target
    software = {"torch": torch.__version__, "multiplies_in": torch.backends.cpu.get_cpu_capability(), "seen": seen}
    return bars, {"device": torch.cuda.get_device_name() if gpu else "", "micro_batches": batches, **software}


if __name__ == "__main__":
    fill_compiler_cache()
