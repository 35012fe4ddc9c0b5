"""The end of every benchmark: its bars on the terminal, its figures in bench/results."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Bar(NamedTuple):
    """One figure besides what was asked of it."""

    bar: str
    figure: float
    asked: str
    met: bool


def arguments(about: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of what every benchmark takes: how many rounds, or one alone within 4 minutes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="how often every side is measured")
    quick = "one round, within 4 minutes on two cores; what has no bar may be left out"
    parser.add_argument("--quick", action="store_const", const=1, dest="rounds", help=quick)
    return parser


def conclude(name: str, bars: Iterable[Bar], seen: Mapping[str, Any], *, device: str = "") -> int:
    """Print the bars and write them with what was seen to bench/results/<name>-<machine>.json; 1 if one is missed."""
    found = list(bars)
    for bar in found:
        figure = f"{bar.figure:,.0f}" if bar.figure >= 1000 else f"{bar.figure:.3g}"
        print(f"{bar.bar}: {figure} asked {bar.asked} {'ok' if bar.met else 'MISSED'}")
    machine = f"{platform.system()}-{platform.machine()}-{os.cpu_count()}cores{device and '-' + device}"
    machine = machine.lower().replace(" ", "-")
    target = Path("bench/results") / f"{name}-{machine}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine, **seen, "bars": [bar._asdict() for bar in found]}
    target.write_text(json.dumps(content, indent=1) + "\n")
    print(f"figures: {target}")
    return int(not all(bar.met for bar in found))
