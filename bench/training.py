"""The speed of training: next to `litgpt pretrain` on the same model, batches and precision, and on two nodes.

    make bench-training            with QUICK=1 one round, within 4 minutes

Every measurement is a process of its own whose lines are timed as they come, one per optimizer step; the sides take
turns. LitGPT's is `litgpt.pretrain.setup` itself (bench/litgpt_pretrain.py). Two nodes are two torchrun agents on this
machine, one thread each; what they spend on each other is what their step takes longer than those of two trainings that
run at the same time and know nothing of each other.

With a GPU the models of GPU_MODELS are measured instead, each side with the largest micro-batch that fits it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from bench.common import Bar, arguments, at_least, at_most, conclude, free_port, median_ratio, peak_memory, torchrun_of
from litgpt_demo.config import Filters, ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.data.dataset import DatasetManifest, Split
from litgpt_demo.manifests import FileRecord, write_manifest
from litgpt_demo.storage import open_storage

# DESIGN section 6.
CPU_BAR, GPU_BAR, START_BAR = 2.0, 1.2, 0.3
WARM_UP, STEPS = 5, 30  # steps that are not counted, and that are
IDS = 50_254  # of the Pythia models' tokenizer; LitGPT pads their vocabulary to 50,304 rows
PRECISIONS = ("bf16-mixed", "32-true")
SMALL: dict[str, Any] = {"model": "pythia-14m", "length": 512}
GPU_MODELS = {"pythia-410m": (64, 48, 32, 24, 16, 8), "pythia-1b": (48, 32, 24, 16, 8, 4)}
GPU_SIDES: dict[str, dict[str, Any]] = {
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


def watched(command: Sequence[str], **environment: str) -> Seen | None:
    """Run a training, its lines timed; None if it failed, as one does that fits no memory."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"}, text=True,
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


def on_one_thread(command: Sequence[str], other: Sequence[str]) -> Seen | None:
    """Watch a training on one thread, while another runs on another."""
    threads = {"OMP_NUM_THREADS": "1"}
    beside = subprocess.Popen(other, env=os.environ | threads, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return watched(command, **threads)
    finally:
        beside.wait(60)


class Trainings:
    """A folder with a dataset, in which runs are made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.dataset = folder, random_dataset(folder / "dataset", tokens=10_000_000)

    def run(self, *, model: str, length: int, nodes: int = 1, **train: Any) -> str:
        """A new run's folder, as the launcher leaves it."""
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
            world_size=nodes,
        )
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))
        (folder / "config.json").write_text(json.dumps({"training": spec.model_dump(mode="json")}))
        return str(folder)

    def theirs(self, run: str) -> Seen | None:
        out = tempfile.mkdtemp(prefix="litgpt-", dir=self.folder)
        return watched([sys.executable, "-m", "bench.litgpt_pretrain", run, out])


def ours(run: str) -> list[str]:
    return [sys.executable, "-m", "litgpt_demo", "train", "--run", run]


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
    cases: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
        f"{side}, {precision}": (SMALL | {"precision": precision}, (4,))
        for precision in PRECISIONS
        for side in ("ours", "litgpt")
    }
    if gpu:
        cases = {
            f"{side}, {model}": ({"model": model, "length": 2048, "precision": "bf16-mixed", **settings}, sizes)
            for model, sizes in GPU_MODELS.items()
            for side, settings in GPU_SIDES.items()
        }
    seen: Results = {}
    batches: dict[str, int] = {}

    def see(name: str, result: Seen | None) -> None:
        if result is None:
            raise SystemExit(f"{name} failed; its last lines are above")
        seen.setdefault(name, []).append(result)
        print(f"{name}: {result.step * 1e3:.0f} ms a step, first after {result.first:.1f} s", flush=True)

    for _ in range(rounds):
        for name, (settings, sizes) in cases.items():
            result = None
            for size in [batches[name]] if name in batches else sizes:
                run = trainings.run(micro_batch=size, global_batch=size, **settings)
                if result := trainings.theirs(run) if name.startswith("litgpt") else watched(ours(run)):
                    batches[name] = size
                    break
            if result is not None or "float8" not in name:  # which not every GPU has
                see(name, result)
        if gpu or rounds == 1:  # what follows has no bar
            continue
        one, mine, other = (
            ours(trainings.run(micro_batch=4, global_batch=4, precision="32-true", **SMALL)) for _ in range(3)
        )
        see("1 node, one thread", watched(one, OMP_NUM_THREADS="1"))
        see("1 node, one thread, beside another", on_one_thread(mine, other))
        both = trainings.run(micro_batch=4, global_batch=8, precision="32-true", nodes=2, **SMALL)
        port = free_port()
        first, second = (torchrun_of(rank, ours(both)[1:], Path(both, "logs"), port=port) for rank in range(2))
        see("2 nodes, one thread each", on_one_thread(first, second))
    return seen, batches


def bars_of(seen: Results, batches: Mapping[str, int], *, gpu: bool) -> Iterator[Bar]:
    def ratio(above: str, below: str, what: str) -> float:
        return median_ratio(*([getattr(one, what) for one in seen[side]] for side in (above, below)))

    for case in GPU_MODELS if gpu else PRECISIONS:
        us, them, eighth = (f"{side}, {case}" for side in GPU_SIDES)
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
    if (both := "2 nodes, one thread each") in seen:
        yield Bar("tokens/s of 2 nodes / 1 node", 2 * ratio("1 node, one thread", both, "step"))
        apart = ratio("1 node, one thread, beside another", both, "step")
        yield Bar("share of communication on 2 nodes", 1 - apart)


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
