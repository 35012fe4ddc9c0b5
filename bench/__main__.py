"""The measurements, each beside what it is compared with: `make bench-dataset`, and so on for every module here.

A module's `measure(rounds)` returns its bars and what was seen. A bar is a name with a figure, and `at least` or
`at most` what was asked of it (DESIGN section 6), if anything was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import import_module
from pathlib import Path

ROUNDS = {"dataset": 5, "training": 5, "checkpoint": 7, "pipeline": 3, "verdict": 1}


def main() -> int:
    """Print the bars, and write them with what was seen to bench/results/<name>-<machine>.json; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ROUNDS)
    parser.add_argument("--rounds", type=int, help="how often every side is measured")
    parser.add_argument("--quick", action="store_true", help="one round, within 4 minutes on two cores")
    args = parser.parse_args()
    bars, seen = import_module(f"bench.{args.name}").measure(1 if args.quick else args.rounds or ROUNDS[args.name])
    missed = []
    for bar, (figure, *asked) in bars.items():
        words, most = asked or ("reported", None)
        if (words == "at least" and figure < most) or (words == "at most" and figure > most):
            missed.append(bar)
        shown = f"{figure:,.0f}" if figure >= 1000 else f"{figure:.3g}"
        print(f"{bar}: {shown} asked {' '.join(map(str, asked)) or words} {'MISSED' if bar in missed else 'ok'}")
    machine = f"{platform.system()}-{platform.machine()}-{os.cpu_count()}cores-{seen.get('device', '')}"
    machine = machine.lower().replace(" ", "-").strip("-")
    target = Path("bench/results") / f"{args.name}-{machine}.json"
    target.write_text(json.dumps({"machine": machine, **seen, "bars": bars, "missed": missed}, indent=1) + "\n")
    print(f"figures: {target}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
