"""Charts as inline SVG: one file holds the whole report, and its colours follow the page's light or dark mode."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from threading import Lock
from typing import TYPE_CHECKING, Any

from launcher.curves import downsample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# matplotlib draws in these; the page's stylesheet says what they are.
_COLORS = {
    name: "#" + 3 * f"{number:02d}"
    for number, name in enumerate(("ink", "muted", "line", "blue", "orange", "green", "violet"), 1)
}

_ROUND = (1, 2, 2.5, 5, 10)  # distances between ticks, to a power of ten: those that people count in
_NAMED = 14  # bars whose names have room next to each other in the smallest chart; of more, every second is named
_POINTS = 600  # more than the pixels of a chart can show

SETTINGS = Lock()
"""matplotlib's settings belong to the whole process, and sweeps write reports in threads."""


@dataclass(frozen=True, kw_only=True)
class Line:
    points: Mapping[int, float]
    color: str
    label: str = ""
    """In the legend; empty keeps it out."""
    faint: bool = False
    marked: bool = False
    """Show each point: where they are few."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over the steps of one training, or named values side by side."""

    name: str
    """Distinguishes this chart's ids from those of the page's other charts."""
    title: str
    """Caption; also what a screen reader says of it."""
    y_text: Callable[[float], str]
    x_label: str = "step"
    lines: Sequence[Line] = ()
    from_zero: bool = False
    restarts: Sequence[int] = ()
    """Steps that an attempt resumed from, shown as dotted lines."""
    bars: Mapping[str, float] = field(default_factory=dict)
    """The label under a bar, to its height."""


def svg(chart: Chart, *, width: int, height: int) -> str:
    """Return the chart as an `<svg>` element that scales with its container. Pixels are those at which its labels are
    as tall as small print."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    with SETTINGS, matplotlib.rc_context():
        matplotlib.rcdefaults()
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        axes = figure.add_subplot()
        if chart.bars:
            axes.bar(list(chart.bars), list(chart.bars.values()), color=_COLORS["blue"], width=0.8)
            axes.set_xticks(range(0, len(chart.bars), 1 + len(chart.bars) // _NAMED))
        else:
            for line in chart.lines:
                points = downsample(line.points, _POINTS)
                style: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.35} if line.faint else {"linewidth": 2.0}
                style |= {"marker": "o", "markersize": 4} if line.marked else {}
                x, y = list(points), list(points.values())
                axes.plot(x, y, color=_COLORS[line.color], label=line.label or "_", **style)
            for step in chart.restarts:
                axes.axvline(step, color=_COLORS["muted"], linewidth=1, linestyle=":")
            if chart.from_zero:
                axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=_ROUND))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
        axes.yaxis.set_major_locator(MaxNLocator(8, steps=_ROUND))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: chart.y_text(value)))
        axes.set_xlabel(chart.x_label, fontsize=11, color=_COLORS["muted"])
        axes.tick_params(labelsize=11, labelcolor=_COLORS["muted"], color=_COLORS["line"], length=0)
        axes.grid(axis="y", color=_COLORS["line"], linewidth=1)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_COLORS["line"])
        if any(line.label for line in chart.lines):
            axes.legend(frameon=False, fontsize=11, labelcolor=_COLORS["ink"], loc="upper right")
        return element(figure, name=chart.name, title=chart.title)


def element(figure: Figure, *, name: str, title: str, **options: Any) -> str:
    """A figure as an element of a page: no prologue, no fixed size, the page's fonts and colours, ids of its own."""
    from io import StringIO

    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    # Text stays text (the page's font, searchable); the salt makes ids depend only on the content.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "train-litgpt"})
    buffer = StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None}, **options)
    _, _, text = buffer.getvalue().partition('viewBox="')
    box, _, text = text.partition('"')
    text = f'<svg viewBox="{box}" role="img" aria-label="{escape(title)}">' + text.partition(">")[2]
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r" font-family: [^;\"]*;?", "", text)
    text = re.sub(r"<g id=\"[^\"]*\"", "<g", text)
    text = re.sub(r"(\bid=\"|href=\"#|url\(#)", rf"\g<1>{name}-", text).replace("xlink:href", "href")
    for color, sentinel in _COLORS.items():
        text = text.replace(sentinel, f"var(--{color})")
    return text.strip()
