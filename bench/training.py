"""The speed of training, next to `litgpt pretrain` on the same model, batches and precision.

    make bench-training            with QUICK=1 one round, within 4 minutes

Every measurement is a process of its own whose lines are timed as they come, one per optimizer step; the sides take
turns. LitGPT's is `litgpt.pretrain.setup` itself (bench/litgpt_pretrain.py).

With a GPU the models of GPU_CASES are measured instead, each side with the largest micro-batch that fits it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from bench.common import Bar, arguments, at_least, at_most, conclude, median_ratio, peak_memory
from litgpt_demo.config import Filters, ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.data.dataset import DatasetManifest, Split
from litgpt_demo.manifests import FileRecord, write_manifest
from litgpt_demo.storage import open_storage

# DESIGN section 6.
CPU_BAR, GPU_BAR, START_BAR = 2.0, 1.2, 0.3
WARM_UP, STEPS = 5, 30  # steps that are not counted, and that are
IDS = 50_254  # of the Pythia models' tokenizer; LitGPT pads their vocabulary to 50,304 rows
# Name, settings, micro-batches to try.
Case = tuple[str, dict[str, Any], tuple[int, ...]]
CPU_CASES: list[Case] = [
    (precision, {"model": "pythia-14m", "length": 512, "precision": precision}, (4,))
    for precision in ("bf16-mixed", "32-true")
]
GPU_CASES: list[Case] = [
    (model, {"model": model, "length": 2048, "precision": "bf16-mixed"}, sizes)
    for model, sizes in (("pythia-410m", (64, 48, 32, 24, 16, 8)), ("pythia-1b", (48, 32, 24, 16, 8, 4)))
]
SIDES: dict[str, dict[str, Any]] = {  # and what each is set to on a GPU
    "ours": {"compile": "blocks"}, "litgpt": {}, "ours in float8": {"compile": "blocks", "float8": True},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One training, watched from outside."""

    first: float
    """Seconds from the start of the process to the line of its first step."""
    steps: list[float]
    """Seconds of each counted step."""
    cpu: float
    """Seconds of processor time per counted step, which other work on the machine changes less."""
    memory: int
    """Most bytes that any of its processes held."""
    mfu: float | None

    @property
    def step(self) -> float:
        return median(self.steps)


Results = dict[str, list[Seen]]


def watched(*command: str) -> Seen | None:
    """Run a training, its lines timed; None if it failed, as one does that fits no memory."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", *command], env=os.environ | {"PYTHONUNBUFFERED": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    times, used, tail, memory, mfu = [], [], [""] * 30, 0, None
    for line in process.stdout:
        tail = [*tail[1:], line]
        if '"kind":"step"' in line or "iter time:" in line:  # ours, litgpt's
            times.append(time.perf_counter())
            family = [psutil.Process(process.pid)]
            family += family[0].children(recursive=True)
            used.append(sum(sum(one.cpu_times()[:2]) for one in family))
            memory = max(memory, *(peak_memory(one.pid) for one in family))
            if line.startswith("@"):
                mfu = json.loads(line[line.index("{") :]).get("mfu") or mfu
    if process.wait() or len(times) <= WARM_UP + STEPS:
        print("".join(tail)[-3000:], file=sys.stderr)
        return None
    counted = slice(WARM_UP - 1, WARM_UP + STEPS)
    steps = np.diff(times[counted]).tolist()
    cpu = (used[counted][-1] - used[counted][0]) / STEPS
    return Seen(first=times[0] - began, steps=steps, cpu=cpu, memory=memory, mfu=mfu)


class Trainings:
    """A folder with a dataset, in which runs are made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.dataset = folder, random_dataset(folder / "dataset", tokens=10_000_000)

    def run(self, side: str, *, model: str, length: int, **train: Any) -> Seen | None:
        """Train by the `side`, in a new run's folder as the launcher leaves it."""
        steps = WARM_UP + STEPS + 3  # the last ones are followed by an evaluation and a checkpoint
        spec = TrainingSpec(
            run="bench",
            dataset=str(self.dataset),
            dataset_key="random",
            model=ModelConfig(name=model, sequence_length=length),
            train=TrainConfig.model_validate(
                {"max_steps": steps, "warmup_steps": 2, "evaluation_windows": 4, "checkpoint_every": steps} | train
            ),
            steps=steps,
            world_size=1,
        )
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))
        (folder / "config.json").write_text(json.dumps({"training": spec.model_dump(mode="json")}))
        if side == "litgpt":
            return watched("bench.litgpt_pretrain", str(folder), str(folder / "litgpt"))
        return watched("litgpt_demo", "train", "--run", str(folder))


def random_dataset(folder: Path, *, tokens: int) -> Path:
    """A finished dataset of random ids: what they are changes no step's time."""
    generator, storage = np.random.default_rng(0), open_storage(str(folder))

    def split(name: str, size: int) -> Split:
        content = generator.integers(IDS, size=size, dtype=np.uint16).tobytes()
        return Split(documents=1, tokens=size, files=(FileRecord.of(storage.write(name, content)),))

    manifest = DatasetManifest(
        format=2, name="random", key="random", corpus=None, filters=Filters(), dropped={}, bad_documents=0,
        bad_places=(), document_lengths=(), tokenizer_hash="", vocab_size=IDS, end_of_text=0, dtype="<u2",
        validation_fraction=0.01, split_seed=0, text_bytes=0, train=split("train.bin", tokens),
        validation=split("val.bin", 20_000), tokenizer=(),
    )  # fmt: skip
    write_manifest(storage, manifest)
    return folder


# --- what is measured -------------------------------------------------------------------------------------------------


def measured(trainings: Trainings, rounds: int, *, gpu: bool) -> tuple[Results, dict[str, int]]:
    """Every side of every case, with the largest micro-batch that fits it; returns those too."""
    seen: Results = {}
    batches: dict[str, int] = {}
    for _ in range(rounds):
        for (case, settings, sizes), side in product(
            GPU_CASES if gpu else CPU_CASES, SIDES if gpu else ("ours", "litgpt")
        ):
            name, result = f"{side}, {case}", None
            for size in [batches[name]] if name in batches else sizes:
                train = {"micro_batch": size, "global_batch": size, **settings, **(SIDES[side] if gpu else {})}
                if result := trainings.run(side, **train):
                    batches[name] = size
                    seen.setdefault(name, []).append(result)
                    print(f"{name}: {result.step * 1e3:.0f} ms a step, first after {result.first:.1f} s", flush=True)
                    break
            if result is None and "float8" not in name:  # which not every GPU has
                raise SystemExit(f"{name} failed; its last lines are above")
    return seen, batches


def bars_of(seen: Results, batches: Mapping[str, int], *, gpu: bool) -> Iterator[Bar]:
    def ratio(above: str, below: str, what: str) -> float:
        return median_ratio(*([getattr(one, what) for one in seen[side]] for side in (above, below)))

    for case, *_ in GPU_CASES if gpu else CPU_CASES:
        us, them, eighth = (f"{side}, {case}" for side in SIDES)
        name, faster = f"tokens/s / litgpt pretrain, {case}", ratio(them, us, "step") * batches[us] / batches[them]
        yield Bar(name, faster) if case == "32-true" else at_least(name, faster, GPU_BAR if gpu else CPU_BAR)
        if gpu:
            yield Bar(f"tokens/s, {case}", median(batches[us] * 2048 / one.step for one in seen[us]))
            if utilised := [one.mfu for one in seen[us] if one.mfu is not None]:
                yield Bar(f"MFU, {case}", median(utilised))
            if eighth in seen:
                yield Bar(f"float8 / bf16, {case}", ratio(us, eighth, "step") * batches[eighth] / batches[us])
        else:
            yield Bar(f"the same by processor time, {case}", ratio(them, us, "cpu"))
            yield at_most(f"start to first step / litgpt pretrain, {case}", ratio(us, them, "first"), START_BAR)
            yield Bar(f"peak memory / litgpt pretrain, {case}", ratio(us, them, "memory"))


def main() -> int:
    args = arguments(__doc__, rounds=5).parse_args()
    import torch

    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="bench-training-") as folder:
        # Its compiler's cache, empty at first: a first start is cold, the later ones find what the first one made.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        seen, batches = measured(Trainings(Path(folder)), args.rounds, gpu=gpu)
    words = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    processor = next((line.split(": ")[1] for line in words.splitlines() if line.startswith("model name")), "unknown")
    result = {
        "processor": processor,
        # on which bfloat16's speed depends
        "multiplies_in": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag} " in words],
        "torch": torch.__version__,
        "load": os.getloadavg(),
        "micro_batches": batches,
        "seen": {name: [asdict(one) for one in several] for name, several in seen.items()},
    }
    bars = list(bars_of(seen, batches, gpu=gpu))
    return conclude("training", bars, result, device=torch.cuda.get_device_name() if gpu else "")


if __name__ == "__main__":
    sys.exit(main())
