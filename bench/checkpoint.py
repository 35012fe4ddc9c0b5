"""The measurement of saves: how long a training waits, and how fast checkpoints are written and read.

One process trains pythia-31m on made-up ids; its weights and AdamW's state are 366 MB. Each round saves all by
torch.save, as `litgpt pretrain` does; by our Saver, with the training waiting for it; by our Saver in parallel with the
steps; and loads that into the model, verified. The disk is flushed between them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.training import random_dataset, write_run
from litgpt_demo.config import ModelConfig
from litgpt_demo.storage import open_storage
from litgpt_demo.training import checkpoints
from litgpt_demo.training.loop import scratch_of
from litgpt_demo.training.resuming import resume
from litgpt_demo.training.saving import Saver, SaveResult
from litgpt_demo.training.setup import open_data, open_fabric, set_up
from litgpt_demo.training.step import train_step

MODEL = ModelConfig(name="pythia-31m", sequence_length=512)
BATCH = {"global_batch": 4, "micro_batch": 4, "max_steps": 100_000}
TRAIN = BATCH | {"precision": "32-true", "keep_last": 1, "keep_best": 0}


def measure(rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
        run, full_state = open_storage(f"{folder}/run"), f"{folder}/full-state"
        dataset = random_dataset(Path(folder, "dataset"), tokens=2**19)
        spec = write_run(Path(folder, "run"), dataset, model=MODEL, train=TRAIN)
        training = set_up(spec, open_data(spec, dataset), open_fabric(spec.train), run, scratch_of(run, 0))
        model, optimizer = training.model.module, training.optimizer.optimizer
        results: list[SaveResult] = []
        beside, alone = Saver(training, on_result=results.append), Saver(training, on_result=lambda saved: None)
        seen, steps = defaultdict[str, list[float]](list), 0

        def step() -> None:
            nonlocal steps
            train_step(training, steps)
            steps += 1

        def take(name: str, action: Callable[[], object]) -> None:
            step()  # a checkpoint of its own for every save
            os.sync()
            began = time.perf_counter()
            action()
            seen[name].append(time.perf_counter() - began)

        def save_and_wait() -> None:
            alone.save(steps, None)
            alone.finish()

        def save_beside() -> None:
            saves = len(results)
            beside.save(steps, None)
            while len(results) == saves:
                step()

        for _ in range(rounds + 1):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}
            take("torch.save", lambda state=state: torch.save(state, full_state))  # as fabric.save does in one process
            take("waiting", save_and_wait)
            take("beside", save_beside)
            take("load", lambda: resume(training, on_warning=print))
        size = checkpoints.list_complete(training.run)[0].size
    # The first round is the one in which the memory for the copy is to be had.
    first, *stalls = (saved.stall for saved in results)
    seen = {name: seconds[1:] for name, seconds in seen.items()}
    bars: dict[str, Any] = {
        f"stall of a step / {what}": (median(map(truediv, stalls, seen[name])), "at most", 0.01)
        for what, name in (("torch.save of the whole state", "torch.save"), ("our own save, waited for", "waiting"))
    }
    for name in ("torch.save", "waiting", "load"):
        bars[f"{name}, GB/s"] = (size / median(seen[name]) / 1e9,)
    return bars, {"megabytes": size / 1e6, "seen": seen, "stalls": stalls, "first_stall": first}
