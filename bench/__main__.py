"""The benchmarks, each with its baseline: `make bench-dataset`, and so on for every module of this package.

A module's `measure(rounds)` returns its bars and its raw figures. A bar is a name with a figure and, if it has a target
(DESIGN section 6), `at least` or `at most` with the target.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import import_module
from pathlib import Path

ROUNDS = {"dataset": 5, "training": 5, "model": 3, "step_time": 3, "checkpoint": 7, "pipeline": 3, "diagnosis": 1}


def machine_name(device: str) -> str:
    """Return the part of a result's name that says where it was measured."""
    machine = f"{platform.system()}-{platform.machine()}-{os.cpu_count()}cores-{device}"
    return machine.lower().replace(" ", "-").strip("-")


def main() -> int:
    """Print the bars, and write all figures to bench/results/<name>-<machine>.json; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ROUNDS)
    parser.add_argument("--rounds", type=int, help="number of measurements of each side")
    parser.add_argument("--quick", action="store_true", help="one round, within 7 minutes on two cores")
    args = parser.parse_args()
    load = os.getloadavg()  # of other programs: a time is that of a quiet machine, or worth little
    bars, seen = import_module(f"bench.{args.name}").measure(1 if args.quick else args.rounds or ROUNDS[args.name])
    missed = []
    print("| what | measured | target | |\n|---|---|---|---|")
    for bar, (figure, *target) in bars.items():
        relation, limit = target or ("reported", None)
        if (relation == "at least" and figure < limit) or (relation == "at most" and figure > limit):
            missed.append(bar)
        shown = f"{figure:,.0f}" if figure >= 1000 else f"{figure:.3g}"
        goal = " ".join(map(str, target)) or relation
        print(f"| {bar} | {shown} | {goal} | {'MISSED' if bar in missed else 'ok'} |")
    machine = machine_name(seen.get("device", ""))
    target = Path("bench/results") / f"{args.name}-{machine}.json"
    target.write_text(
        json.dumps({"machine": machine, "load": load, **seen, "bars": bars, "missed": missed}, indent=1) + "\n"
    )
    print(f"figures: {target}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
