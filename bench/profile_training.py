"""The time of a training step by its parts: torch.profiler over a few steps, as a table of operators.

    python -m bench.profile_training [--model pythia-14m] [--sequence 512] [train.micro_batch=4 …]

Settings of `train` may follow; `--trace FILE` also writes a timeline for chrome://tracing or Perfetto.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.training import Bench, random_dataset
from litgpt_demo.config import ModelConfig
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training.feed import open_data
from litgpt_demo.training.setup import Training, open_fabric, set_up
from litgpt_demo.training.step import train_step


def prepared(folder: Path, args: argparse.Namespace) -> Training:
    """Return the state of a rank before the first step of the training that the arguments describe."""
    bench = Bench(folder=folder, dataset=random_dataset(folder / "dataset", tokens=2_000_000))
    settings = {"micro_batch": 4, "global_batch": 4}
    settings |= dict(setting.removeprefix("train.").split("=", 1) for setting in args.settings)
    run = bench.run("profiled", model=ModelConfig(name=args.model, sequence_length=args.sequence), **settings)
    spec = read_spec(open_storage(str(run)))
    data = open_data(spec, Path(spec.dataset))
    return set_up(spec, data, open_fabric(spec.train), open_storage(str(run)), folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pythia-14m")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("settings", nargs="*", metavar="train.NAME=VALUE")
    args = parser.parse_args()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        training = prepared(Path(folder), args)
        for step in range(2):
            train_step(training, step)
        with profile(activities=kinds, profile_memory=True) as seen:
            for step in range(2, 2 + args.steps):
                with record_function("train_step"):
                    train_step(training, step)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=by, row_limit=args.rows, max_name_column_width=50))
    if args.trace is not None:
        seen.export_chrome_trace(str(args.trace))


if __name__ == "__main__":
    main()
