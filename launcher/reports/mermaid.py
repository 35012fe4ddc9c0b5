"""Charts as fenced mermaid, which Prefect's pages draw: they show no embedded images."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from launcher.curves import smoothed

_GRID = 129  # positions along a chart, 5 pixels each
_PLOTTABLE = 1e100  # beyond it the arithmetic of an axis overflows
_UNITS = ((1_000_000, "million steps"), (1_000, "thousand steps"), (0, "step"))
_INK, _PALE = "#e5e7eb", "#9ca3af"
# Prefect draws a chart inside a code block, which is dark in its light theme and in its dark one: light ink on no
# ground of our own, or the block would be a frame around the chart.
_SETTINGS: dict[str, Any] = {
    "themeVariables": {
        "xyChart": {
            "backgroundColor": "transparent",
            "plotColorPalette": "#60a5fa, #fbbf24",
            **dict.fromkeys(("titleColor", "legendTextColor"), _INK),
            **{f"{axis}Axis{part}Color": _INK for axis in "xy" for part in ("Label", "Title")},
            **{f"{axis}Axis{part}Color": _PALE for axis in "xy" for part in ("Tick", "Line")},
        }
    },
    "xyChart": {"width": 760, "height": 320},
}


def lines(title: str, curves: Mapping[str, Mapping[int, float]], *, y_label: str, from_zero: bool = False) -> str:
    """Return a chart of curves over the steps of a training, each by its name in the legend, where "" keeps it out of
    that; empty where fewer than two steps can be drawn."""
    import numpy as np

    drawn = {
        name: {step: points[step] for step in sorted(points) if abs(points[step]) < _PLOTTABLE}
        for name, points in curves.items()
    }
    drawn = {name: points for name, points in drawn.items() if points}
    steps = {step for points in drawn.values() for step in points}
    if len(steps) < 2:
        return ""
    first, last = min(steps), max(steps)
    values = [value for points in drawn.values() for value in points.values()]
    low, high = min(values), max(values)
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0  # around a flat curve too, whose range would be empty
    low, high = min(low - air, 0.0) if from_zero else low - air, high + air
    # Four digits of the range: an exponent, which other formats would give, is not in mermaid's grammar.
    decimals = max(0, 4 - math.floor(math.log10(high - low)))
    # In thousands or millions where they are many: mermaid writes a tick out in full, over its neighbours.
    unit, name = next((unit, name) for unit, name in _UNITS if last >= 10 * unit)
    span = f"{first / unit:.6f} --> {last / unit:.6f}" if unit else f"{first} --> {last}"
    statements = [f'title "{_plain(title)}"', f'x-axis "{name}" {span}']
    statements.append(f'y-axis "{_plain(y_label)}" {low:.{decimals}f} --> {high:.{decimals}f}')
    style = ""
    grid = np.linspace(first, last, _GRID)  # mermaid knows no other spacing on a numeric axis
    for number, (name, points) in enumerate(drawn.items()):
        means = smoothed(points)
        heights = ", ".join(f"{value:.{decimals}f}" for value in np.interp(grid, list(means), list(means.values())))
        legend = f'"{_plain(name)}" ' if name else ""
        statements.append(f"line {legend}[{heights}]")
        # Hidden before its own first point: mermaid draws every line over the whole axis. The margin of the other sides
        # lets the width of the line be seen.
        if share := (min(points) - first) / (last - first):
            style += f".line-plot-{number} path{{clip-path:inset(-9px -9px -9px {100 * share:.2f}%)}}"
    return _fenced({"themeCSS": style}, *statements)


def bars(title: str, heights: Mapping[str, float], *, x_label: str, y_label: str) -> str:
    """Return a chart of named bars, empty where there are none."""
    if not heights:
        return ""
    names = ", ".join(f'"{_plain(name)}"' for name in heights)
    return _fenced(
        {},
        f'title "{_plain(title)}"',
        f'x-axis "{_plain(x_label)}" [{names}]',
        f'y-axis "{_plain(y_label)}" 0 --> {1.05 * max(heights.values()):.2f}',
        f"bar [{', '.join(f'{value:.2f}' for value in heights.values())}]",
    )


def _fenced(settings: Mapping[str, Any], *statements: str) -> str:
    directive = "%%{init: " + json.dumps({**_SETTINGS, **settings}) + "}%%"
    return "\n    ".join([f"```mermaid\n{directive}\nxychart-beta", *statements]) + "\n```"


def _plain(text: str) -> str:
    """Text that cannot end the quoted string it stands in, nor start a directive or an entity."""
    return " ".join(re.sub(r"[^\w\s.,:()/+-]", " ", text).split()) or " "
