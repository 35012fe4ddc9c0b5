"""The measurement of saves: how long a training waits, and how fast checkpoints are written and read.

    make bench-checkpoint            with QUICK=1 one round, within 4 minutes

One process trains pythia-31m on made-up ids; its weights and AdamW's state are 366 MB. Each round takes, in turn: some
steps alone; the whole state by torch.save, as `litgpt pretrain` saves; our checkpoint with the training waiting for all
of it; our checkpoint as training saves it, with the steps until it is committed; reading it, verified, into the model;
and `cp` of its files. The disk is flushed between them. Figures, spread and machine go to
bench/results/checkpoint-<machine>.json; the exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch

from bench.figures import Bar, arguments, conclude
from bench.training import random_dataset
from litgpt_demo.config import ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.storage import open_storage
from litgpt_demo.training import checkpoints
from litgpt_demo.training.feed import open_data
from litgpt_demo.training.resuming import resume
from litgpt_demo.training.saving import Saved, Saver
from litgpt_demo.training.setup import Training, open_fabric, set_up
from litgpt_demo.training.step import train_step

STALL = 0.02  # DESIGN section 6: of what the synchronous full save costs

MODEL = ModelConfig(name="pythia-31m", sequence_length=512)
TRAIN = TrainConfig(global_batch=4, micro_batch=4, max_steps=100_000, precision="bf16-mixed", keep_last=1, keep_best=0)


# --- a training -------------------------------------------------------------------------------------------------------


def training_in(folder: Path) -> Training:
    dataset = random_dataset(folder / "dataset", tokens=2**19)
    spec = TrainingSpec(
        run="run",
        dataset=str(dataset),
        dataset_key="random",
        model=MODEL,
        train=TRAIN,
        steps=100_000,
        world_size=1,
    )
    scratch = folder / "run" / ".scratch" / "rank-0"
    scratch.mkdir(parents=True)
    run = open_storage(str(folder / "run"))
    return set_up(spec, open_data(spec, dataset), open_fabric(TRAIN), run, scratch)


# --- the sides --------------------------------------------------------------------------------------------------------


class Bench:
    """A training, and what was seen of it: seconds by name, one per round."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.training = folder, training_in(folder)
        self.seen: dict[str, list[float]] = {}
        self.told: list[Saved] = []
        self.saver = Saver(self.training, tell=self.told.append)
        self.alone = Saver(self.training, tell=lambda saved: None)
        self.steps = 0

    def take(self, name: str, action: Callable[[], object]) -> None:
        os.sync()
        began = time.perf_counter()
        action()
        self.seen.setdefault(name, []).append(time.perf_counter() - began)

    def step(self) -> None:
        train_step(self.training, self.steps)
        self.steps += 1

    def whole(self) -> None:
        """Save as fabric.save does in one process."""
        model, optimizer = self.training.model.module, self.training.optimizer.optimizer
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": self.steps}
        torch.save(state, self.folder / "whole.pth")

    def waiting(self) -> None:
        """Our own, with nothing next to it."""
        self.alone.save(self.steps, None)
        self.alone.finish()

    def beside(self) -> None:
        """Our own, with the steps next to it."""
        told, before = len(self.told), self.steps
        self.saver.save(self.steps, None)
        while len(self.told) == told:
            self.step()
        self.seen.setdefault("steps beside", []).append(float(self.steps - before))

    def copy(self) -> None:
        [folder] = (self.folder / "run" / "checkpoints").iterdir()
        subprocess.run(["cp", "-r", str(folder), str(self.folder / "copy")], check=True)

    def round(self) -> None:
        self.take("step", self.step)
        self.take("step", self.step)
        self.take("torch.save", self.whole)
        self.step()  # a checkpoint of its own for every save
        self.take("waiting", self.waiting)
        self.step()
        self.take("beside", self.beside)
        self.take("load", lambda: resume(self.training, tell=print))
        self.take("cp", self.copy)
        (self.folder / "whole.pth").unlink()
        shutil.rmtree(self.folder / "copy")


# --- the whole --------------------------------------------------------------------------------------------------------


def bars(bench: Bench) -> Iterator[Bar]:
    stalls = [saved.stall for saved in bench.told]
    for name, against in [("torch.save of the whole state", "torch.save"), ("our own save, waited for", "waiting")]:
        ratio = median(stall / seconds for stall, seconds in zip(stalls, bench.seen[against], strict=True))
        yield Bar(f"stall of a step / {name}", ratio, f"at most {STALL}", ratio <= STALL)


def rates(bench: Bench, size: int) -> dict[str, float]:
    """GB/s."""
    return {name: size / median(bench.seen[name]) / 1e9 for name in ("torch.save", "waiting", "load", "cp")}


def lost(bench: Bench) -> float:
    """Seconds that a save costs the training in all: what the steps next to it took more than those alone."""
    alone = median(bench.seen["step"])
    pairs = zip(bench.seen["beside"], bench.seen["steps beside"], strict=True)
    return median(seconds - steps * alone for seconds, steps in pairs)


def main() -> int:
    args = arguments(__doc__, rounds=7).parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
        bench = Bench(Path(folder))
        bench.round()
        first = bench.told[0].stall  # with the memory for the copy to be had
        bench.seen.clear(), bench.told.clear()
        for _ in range(args.rounds):
            bench.round()
        size = checkpoints.committed(bench.training.run)[0].size
    print(", ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates(bench, size).items()))
    stall = median(saved.stall for saved in bench.told)
    print(f"stall {stall * 1e3:.1f} ms (the first {first * 1e3:.1f}), training lost {lost(bench):.2f} s in all")
    seen = {
        "megabytes": size / 1e6,
        "seen": bench.seen,
        "stalls": [saved.stall for saved in bench.told],
        "first_stall": first,
        "seconds_lost_to_a_save": lost(bench),
        "gigabytes_per_second": rates(bench, size),
    }
    return conclude("checkpoint", bars(bench), seen)


if __name__ == "__main__":
    sys.exit(main())
