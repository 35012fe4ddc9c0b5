"""What the benchmarks share: their arguments, and their bars and figures at the end."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple


class Bar(NamedTuple):
    """One figure besides what was asked of it."""

    bar: str
    figure: float
    asked: str = "reported"
    met: bool = True


def at_least(bar: str, figure: float, asked: float, note: str = "") -> Bar:
    return Bar(bar, figure, f"at least {asked:g}{note}", figure >= asked)


def at_most(bar: str, figure: float, asked: float) -> Bar:
    return Bar(bar, figure, f"at most {asked:g}", figure <= asked)


def median_ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """The median over the rounds of the one's figure over the other's."""
    return median(one / other for one, other in zip(above, below, strict=True))


def peak_memory(process: int | str = "self") -> int:
    """Bytes; not getrusage's, which begins with the peak of the process that started this one. 0 if it is gone."""
    status = Path(f"/proc/{process}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def arguments(about: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of what every benchmark takes: how many rounds, or one alone within 4 minutes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="how often every side is measured")
    quick = "one round, within 4 minutes on two cores; what has no bar may be left out"
    parser.add_argument("--quick", action="store_const", const=1, dest="rounds", help=quick)
    return parser


def conclude(name: str, bars: Sequence[Bar], seen: Mapping[str, Any], *, device: str = "") -> int:
    """Print the bars and write them with what was seen to bench/results/<name>-<machine>.json; 1 if one is missed."""
    for bar in bars:
        figure = f"{bar.figure:,.0f}" if bar.figure >= 1000 else f"{bar.figure:.3g}"
        print(f"{bar.bar}: {figure} asked {bar.asked} {'ok' if bar.met else 'MISSED'}")
    machine = f"{platform.system()}-{platform.machine()}-{os.cpu_count()}cores{device and '-' + device}"
    machine = machine.lower().replace(" ", "-")
    target = Path("bench/results") / f"{name}-{machine}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine, **seen, "bars": [bar._asdict() for bar in bars]}
    target.write_text(json.dumps(content, indent=1) + "\n")
    print(f"figures: {target}")
    return int(not all(bar.met for bar in bars))
