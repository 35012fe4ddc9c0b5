"""The measurement of saves: how long a training waits, and how fast checkpoints are written and read.

    make bench-checkpoint            with QUICK=1 one round, within 4 minutes

One process trains pythia-31m on made-up ids; its weights and AdamW's state are 366 MB. Each round takes, in turn: some
steps alone; the whole state by torch.save, as `litgpt pretrain` saves; our checkpoint with the training waiting for all
of it; our checkpoint as training saves it, with the steps until it is committed; reading it, verified, into the model;
and `cp` of its files. The disk is flushed between them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from bench.common import arguments, at_most, conclude, median_ratio
from bench.training import random_dataset
from litgpt_demo.config import ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.storage import open_storage
from litgpt_demo.training import checkpoints
from litgpt_demo.training.saving import Saved, Saver, resume
from litgpt_demo.training.setup import open_data, open_fabric, set_up
from litgpt_demo.training.step import train_step

STALL = 0.02  # DESIGN section 6: of what the synchronous full save costs

MODEL = ModelConfig(name="pythia-31m", sequence_length=512)
TRAIN = TrainConfig(global_batch=4, micro_batch=4, max_steps=100_000, precision="bf16-mixed", keep_last=1, keep_best=0)


class Bench:
    """A training, and what was seen of it: seconds by name, one per round."""

    def __init__(self, folder: Path) -> None:
        dataset = random_dataset(folder / "dataset", tokens=2**19)
        spec = TrainingSpec(
            run="run", dataset=str(dataset), dataset_key="random", model=MODEL, train=TRAIN, steps=100_000, world_size=1
        )
        scratch = folder / "run" / ".scratch" / "rank-0"
        scratch.mkdir(parents=True)
        run = open_storage(str(folder / "run"))
        self.folder = folder
        self.training = set_up(spec, open_data(spec, dataset), open_fabric(TRAIN), run, scratch)
        self.seen: dict[str, list[float]] = defaultdict(list)
        self.told: list[Saved] = []
        self.saver = Saver(self.training, tell=self.told.append)
        self.alone = Saver(self.training, tell=lambda saved: None)
        self.steps = 0

    def take(self, name: str, action: Callable[[], object]) -> None:
        os.sync()
        began = time.perf_counter()
        action()
        self.seen[name].append(time.perf_counter() - began)

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
        self.seen["steps beside"].append(float(self.steps - before))

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
    seen, stalls = bench.seen, [saved.stall for saved in bench.told]
    rates = {name: size / median(seen[name]) / 1e9 for name in ("torch.save", "waiting", "load", "cp")}
    # What the steps next to a save took more than those alone.
    alone, pairs = median(seen["step"]), zip(seen["beside"], seen["steps beside"], strict=True)
    lost = median(seconds - steps * alone for seconds, steps in pairs)
    print(", ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items()))
    print(f"stall {median(stalls) * 1e3:.1f} ms (the first {first * 1e3:.1f}), training lost {lost:.2f} s in all")
    bars = [
        at_most("stall of a step / torch.save of the whole state", median_ratio(stalls, seen["torch.save"]), STALL),
        at_most("stall of a step / our own save, waited for", median_ratio(stalls, seen["waiting"]), STALL),
    ]
    figures = {
        "megabytes": size / 1e6,
        "seen": seen,
        "stalls": stalls,
        "first_stall": first,
        "seconds_lost_to_a_save": lost,
        "gigabytes_per_second": rates,
    }
    return conclude("checkpoint", bars, figures)


if __name__ == "__main__":
    sys.exit(main())
