"""The speed of training: next to `litgpt pretrain` on the same model, batches and precision, and on two nodes.

    make bench-training            with QUICK=1 one round, within 4 minutes

Every measurement is a process of its own whose lines are timed as they come, one per optimizer step; the sides take
turns. LitGPT's is `litgpt.pretrain.setup` itself (bench/litgpt_pretrain.py). Two nodes are two torchrun agents on this
machine, one thread each; what they spend on each other is what their step takes longer than those of two trainings that
run at the same time and know nothing of each other. Figures, spread and machine go to
bench/results/training-<machine>.json; the exit code is 1 if a bar is missed.

With a GPU the models of GPU_MODELS are measured instead, each side with the largest micro-batch that fits it.
"""

from __future__ import annotations

import json
import os
import socket
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

from bench.figures import Bar, arguments, conclude
from litgpt_demo.config import Filters, ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.data.dataset import DatasetManifest, Split
from litgpt_demo.manifests import FileRecord, write_manifest
from litgpt_demo.node.torchrun import Rendezvous, torchrun_command
from litgpt_demo.storage import open_storage

# DESIGN section 6.
CPU_BAR, GPU_BAR, START_BAR = 2.0, 1.2, 0.3
WARM_UP, STEPS = 5, 30  # steps that are not counted, and that are
IDS = 50_254  # of the Pythia models' tokenizer; LitGPT pads their vocabulary to 50,304 rows
GPU_MODELS = {"pythia-410m": (64, 48, 32, 24, 16, 8), "pythia-1b": (48, 32, 24, 16, 8, 4)}

OURS, THEIRS = '"kind":"step"', "iter time:"  # what stands in the line of a step


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
    mfu: float | None = None

    @property
    def step(self) -> float:
        return median(self.steps)


# --- one training -----------------------------------------------------------------------------------------------------


def watched(command: Sequence[str], mark: str, environment: Mapping[str, str]) -> Seen | None:
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
        if mark in line:
            times.append(time.perf_counter())
            seconds, held = _usage(process.pid)
            used.append(seconds)
            memory = max(memory, held)
            mfu = _number(line, "mfu") or mfu
    if process.wait() or len(times) <= WARM_UP + STEPS:
        print("".join(tail)[-3000:], file=sys.stderr)
        return None
    counted = slice(WARM_UP - 1, WARM_UP + STEPS)
    steps = np.diff(times[counted]).tolist()
    cpu = (used[counted][-1] - used[counted][0]) / STEPS
    return Seen(first=times[0] - began, steps=steps, cpu=cpu, memory=memory, mfu=mfu)


def _usage(pid: int) -> tuple[float, int]:
    """Processor seconds of a process and its children, and the most bytes that one of them held."""
    family = [psutil.Process(pid)]
    family += family[0].children(recursive=True)
    times = [one.cpu_times() for one in family]
    peaks = [_peak(one.pid) for one in family]
    return sum(one.user + one.system for one in times), max(peaks)


def _peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _number(line: str, name: str) -> float | None:
    if (start := line.find("{")) < 0 or line[0] != "@":
        return None
    value = json.loads(line[start:]).get(name)
    return float(value) if value is not None else None


# --- the sides --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The place of the measurement."""

    folder: Path
    dataset: Path

    def run(self, name: str, *, model: ModelConfig, nodes: int = 1, **train: Any) -> Path:
        """A new run's folder, as the launcher leaves it."""
        steps = WARM_UP + STEPS + 3  # the last ones are followed by an evaluation and a checkpoint
        asked = TrainConfig.model_validate(
            {"max_steps": steps, "warmup_steps": 2, "evaluation_windows": 4, "checkpoint_every": steps} | train
        )
        spec = TrainingSpec(
            run=name,
            dataset=str(self.dataset),
            dataset_key="random",
            model=model,
            train=asked,
            steps=steps,
            world_size=nodes,
        )
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
        (folder / "config.json").write_text(json.dumps({"training": spec.model_dump(mode="json")}))
        return folder

    def ours(self, run: Path, **environment: str) -> Seen | None:
        return watched([sys.executable, "-m", "litgpt_demo", "train", "--run", str(run)], OURS, environment)

    def theirs(self, run: Path) -> Seen | None:
        out = tempfile.mkdtemp(prefix="litgpt-", dir=self.folder)
        return watched([sys.executable, "-m", "bench.litgpt_pretrain", str(run), out], THEIRS, {})

    def two_nodes(self, run: Path) -> Seen | None:
        """Our training on two torchrun agents of one process each."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        program = ["-m", "litgpt_demo", "train", "--run", str(run)]
        first, second = (
            torchrun_command(
                Rendezvous(nodes=2, node_rank=rank, host="127.0.0.1", port=port, run_id="bench"),
                processes=1,
                program=program,
                log_dir=str(run / f"logs-{rank}"),
            )
            for rank in range(2)
        )
        environment = {"OMP_NUM_THREADS": "1"}
        other = subprocess.Popen(second, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
        try:
            return watched(first, OURS, environment)
        finally:
            other.wait(60)

    def apart(self, run: Path, other: Path) -> Seen | None:
        """Our training on one thread, while another one runs on another."""
        command = [sys.executable, "-m", "litgpt_demo", "train", "--run", str(other)]
        beside = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            return self.ours(run, OMP_NUM_THREADS="1")
        finally:
            beside.wait()


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

Results = dict[str, list[Seen]]


def cpu_rounds(bench: Bench, rounds: int) -> Results:
    seen: Results = {}
    small = {"model": ModelConfig(name="pythia-14m", sequence_length=512), "micro_batch": 4, "global_batch": 4}

    def see(name: str, result: Seen | None) -> None:
        if result is None:
            raise SystemExit(f"{name} failed; its last lines are above")
        seen.setdefault(name, []).append(result)
        print(f"{name}: {result.step * 1e3:.0f} ms a step, first after {result.first:.1f} s", flush=True)

    for _ in range(rounds):
        for precision in ("bf16-mixed", "32-true"):
            see(f"ours, {precision}", bench.ours(bench.run("ours", precision=precision, **small)))
            see(f"litgpt, {precision}", bench.theirs(bench.run("theirs", precision=precision, **small)))
        if rounds == 1:  # what follows has no bar
            break
        one = bench.run("one", precision="32-true", **small)
        see("1 node, one thread", bench.ours(one, OMP_NUM_THREADS="1"))
        mine, other = (bench.run("apart", precision="32-true", **small) for _ in range(2))
        see("1 node, one thread, beside another", bench.apart(mine, other))
        both = bench.run("two", precision="32-true", nodes=2, **(small | {"global_batch": 8}))
        see("2 nodes, one thread each", bench.two_nodes(both))
    return seen


def cpu_bars(seen: Results) -> Iterator[Bar]:
    for precision, asked in (("bf16-mixed", CPU_BAR), ("32-true", None)):
        faster = ratio(seen, f"litgpt, {precision}", f"ours, {precision}", "step")
        met = asked is None or faster >= asked
        yield Bar(f"tokens/s / litgpt pretrain, {precision}", faster, str(asked or "reported"), met)
        less = ratio(seen, f"litgpt, {precision}", f"ours, {precision}", "cpu")
        yield Bar(f"the same by processor time, {precision}", less, "reported", True)
        start = ratio(seen, f"ours, {precision}", f"litgpt, {precision}", "first")
        yield Bar(
            f"start to first step / litgpt pretrain, {precision}", start, f"at most {START_BAR}", start <= START_BAR
        )
        memory = ratio(seen, f"ours, {precision}", f"litgpt, {precision}", "memory")
        yield Bar(f"peak memory / litgpt pretrain, {precision}", memory, "reported", True)
    both, apart = "2 nodes, one thread each", "1 node, one thread, beside another"
    if both not in seen:
        return
    yield Bar("tokens/s of 2 nodes / 1 node", 2 * ratio(seen, "1 node, one thread", both, "step"), "reported", True)
    share = 1 - ratio(seen, apart, both, "step")
    yield Bar("share of communication on 2 nodes", share, "reported", True)


def ratio(seen: Results, above: str, below: str, what: str) -> float:
    """Median over the rounds of the one's figure over the other's."""
    pairs = zip(seen[above], seen[below], strict=True)
    return median(getattr(one, what) / getattr(other, what) for one, other in pairs)


def gpu_rounds(bench: Bench, rounds: int) -> tuple[Results, dict[str, int]]:
    """Every model by each side, with the largest micro-batch that fits it; returns those too."""
    seen: Results = {}
    batches: dict[str, int] = {}
    for _ in range(rounds):
        for model, sizes in GPU_MODELS.items():
            for side, settings in _gpu_sides().items():
                name = f"{side}, {model}"
                for size in [batches[name]] if name in batches else sizes:
                    named = ModelConfig(name=model, sequence_length=2048)
                    run = bench.run("gpu", model=named, micro_batch=size, global_batch=size, **settings)
                    result = bench.theirs(run) if side == "litgpt" else bench.ours(run)
                    if result is not None:
                        batches[name] = size
                        seen.setdefault(name, []).append(result)
                        print(f"{name}: {size * 2048 / result.step:,.0f} tokens/s, micro-batch {size}", flush=True)
                        break
    return seen, batches


def _gpu_sides() -> dict[str, dict[str, Any]]:
    plain = {"precision": "bf16-mixed", "compile": "blocks"}
    return {"ours": plain, "litgpt": {"precision": "bf16-mixed"}, "ours in float8": plain | {"float8": True}}


def gpu_bars(seen: Results, batches: Mapping[str, int]) -> Iterator[Bar]:
    def rate(name: str) -> float:
        return median(batches[name] * 2048 / one.step for one in seen[name])

    for model in GPU_MODELS:
        ours, theirs, eighth = (f"{side}, {model}" for side in ("ours", "litgpt", "ours in float8"))
        faster = rate(ours) / rate(theirs)
        yield Bar(f"tokens/s / litgpt pretrain, {model}", faster, str(GPU_BAR), faster >= GPU_BAR)
        yield Bar(f"tokens/s, {model}", rate(ours), "reported", True)
        if utilised := [one.mfu for one in seen[ours] if one.mfu is not None]:
            yield Bar(f"MFU, {model}", median(utilised), "reported", True)
        if eighth in seen:
            yield Bar(f"float8 / bf16, {model}", rate(eighth) / rate(ours), "reported", True)


# --- the whole --------------------------------------------------------------------------------------------------------


def main() -> int:
    args = arguments(__doc__, rounds=5).parse_args()
    import torch

    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="bench-training-") as folder:
        # Its compiler's cache, empty at first: a first start is cold, the later ones find what the first one made.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        dataset = random_dataset(Path(folder, "dataset"), tokens=10_000_000)
        bench = Bench(folder=Path(folder), dataset=dataset)
        seen, batches = gpu_rounds(bench, args.rounds) if gpu else (cpu_rounds(bench, args.rounds), {})
    result = {
        "processor": _processor(),
        "torch": torch.__version__,
        "load": os.getloadavg(),
        "micro_batches": batches,
        "seen": {name: [asdict(one) for one in several] for name, several in seen.items()},
    }
    bars = gpu_bars(seen, batches) if gpu else cpu_bars(seen)
    return conclude("training", bars, result, device=torch.cuda.get_device_name() if gpu else "")


def _processor() -> str:
    """The processor's name and what it can multiply in, on which bfloat16's speed depends."""
    words = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next((line.split(": ")[1] for line in words.splitlines() if line.startswith("model name")), "unknown")
    able = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag} " in words]
    return f"{name} ({', '.join(able)})"


if __name__ == "__main__":
    sys.exit(main())
