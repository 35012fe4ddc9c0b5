"""The benchmarks, each with its baseline: `make bench` for all, `make bench-dataset` and so on for one.

A module's `measure(rounds)` returns its bars and its raw figures. A bar is a name with a figure and, if it has a target
(DESIGN section 6), `at least` or `at most` with the target.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

RESULTS = Path("bench/results")
ROUNDS = {
    "dataset": 5,
    "training": 5,
    "model": 3,
    "step_time": 3,
    "checkpoint": 7,
    "pipeline": 3,
    "commands": 7,
    "diagnosis": 1,
}
# Of all of them together, within 25 minutes on two cores.
TOGETHER = {"dataset": 3, "training": 3, "model": 1, "checkpoint": 5, "pipeline": 3, "commands": 5, "diagnosis": 1}


def machine_name(device: str) -> str:
    """Return the part of a result's name that says where it was measured."""
    machine = f"{platform.system()}-{platform.machine()}-{os.cpu_count()}cores-{device}"
    return machine.lower().replace(" ", "-").strip("-")


def processor() -> str:
    import torch

    from litgpt_demo.training.reporting import device_name

    return device_name(torch.device("cpu"))


def is_missed(figure: float, relation: str = "reported", limit: float = 0) -> bool:
    """Say whether a figure misses its target, as one that is not a number does."""
    return (relation == "at least" and not figure >= limit) or (relation == "at most" and not figure <= limit)


def print_table(bars: Mapping[str, list[Any]]) -> None:
    print("| what | measured | target | |\n|---|---|---|---|")
    for bar, (figure, *target) in bars.items():
        shown = f"{figure:,.0f}" if figure >= 1000 else f"{figure:.3g}"
        goal = " ".join(map(str, target)) or "reported"
        print(f"| {bar} | {shown} | {goal} | {'MISSED' if is_missed(figure, *target) else 'ok'} |")


def measure(name: str, rounds: int) -> Path:
    """Write all figures of a benchmark to bench/results/<name>-<machine>.json; return that path."""
    load = os.getloadavg()  # of other programs: a time is that of a quiet machine, or worth little
    bars, seen = import_module(f"bench.{name}").measure(rounds)
    machine = machine_name(seen.get("device", ""))
    path = RESULTS / f"{name}-{machine}.json"
    about = {"machine": machine, "processor": processor(), "rounds": rounds, "load": load}
    path.write_text(json.dumps({**about, **seen, "bars": bars}, indent=1) + "\n")
    return path


def measure_all(rounds: Mapping[str, int]) -> dict[str, list[Any]]:
    """Return the bars of all benchmarks, each measured in a process of its own."""
    bars, began = dict[str, list[Any]](), time.time()
    for name, number in rounds.items():
        print(f"{name}, {number} rounds, after {(time.time() - began) / 60:.1f} min", flush=True)
        command = [sys.executable, "-m", "bench", name, "--rounds", str(number)]
        done = subprocess.run(command, capture_output=True, text=True)
        paths = [path for path in RESULTS.glob(f"{name}-*.json") if path.stat().st_mtime >= began]
        if not paths:
            raise SystemExit(f"bench-{name} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        bars |= json.loads(max(paths, key=lambda path: path.stat().st_mtime).read_text())["bars"]
    return bars


def main() -> int:
    """Print the bars; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ROUNDS, nargs="?", help="one of them; without a name, all")
    parser.add_argument("--rounds", type=int, help="number of measurements of each side")
    parser.add_argument("--quick", action="store_true", help="one round of each")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    if args.name is None:
        bars = measure_all({name: rounds or number for name, number in TOGETHER.items()})
    else:
        path = measure(args.name, rounds or ROUNDS[args.name])
        bars = json.loads(path.read_text())["bars"]
        print(f"figures: {path}")
    print(f"{processor()}, {os.cpu_count()} cores")
    print_table(bars)
    return int(any(is_missed(*bar) for bar in bars.values()))


if __name__ == "__main__":
    sys.exit(main())
