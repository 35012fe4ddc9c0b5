"""Charts as inline SVG: one file holds the whole report, and its colours follow the page's light or dark mode."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from io import BytesIO
from threading import Lock
from typing import TYPE_CHECKING, Literal, TypeAlias

from launcher.reports.curves import downsample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# matplotlib draws a page's charts in these; the page's stylesheet says what they are.
_COLORS = {
    "ink": "#010101",
    "muted": "#020202",
    "line": "#030303",
    "blue": "#040404",
    "orange": "#050505",
    "green": "#060606",
    "violet": "#070707",
    "paper": "#080808",
}

_ROUND = (1, 2, 2.5, 5, 10)  # distances between ticks, to a power of ten: those that people count in
_NAMED = 14  # bars whose names have room next to each other in the smallest chart; of more, every second is named
_POINTS = 600  # more than there are pixels to tell them apart

# matplotlib's settings belong to the whole process, and sweeps write reports in threads.
_settings = Lock()


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve of a chart."""

    points: Mapping[int, float]
    color: str
    label: str = ""
    """The label in the legend; empty keeps it out."""
    faint: bool = False
    marked: bool = False
    """Show each point: where they are few."""
    style: str = "-"
    """The style of the stroke, as matplotlib writes it: more lines can be told apart than there are colours."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over the steps or the tokens of trainings."""

    name: str
    """Distinguishes this chart's ids from those of the page's other charts."""
    title: str
    """Caption; also what a screen reader says of it."""
    lines: Sequence[Line]
    y_text: Callable[[float], str]
    """The label of a tick."""
    from_zero: bool = False
    restarts: Sequence[int] = ()
    """Steps that an attempt resumed from, shown as dotted lines."""
    x_label: str = "step"
    x_text: Callable[[float], str] = "{:,.0f}".format
    """The label of a tick."""
    top: float | None = None
    """The largest value that is shown; empty shows all."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Named values side by side."""

    name: str
    title: str
    """Both as a Chart's."""
    bars: Mapping[str, float]
    """The label under a bar, to its height."""
    x_label: str
    y_text: Callable[[float], str]
    """The label of a tick."""
    sideways: bool = False
    """Draw the bars from left to right, with their names beside them."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One upright axis of parallel coordinates."""

    name: str
    ticks: Mapping[str, float]
    """The label of each tick, to its height between 0 and 1."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """One line through all axes."""

    heights: Sequence[float]
    """The height at which it crosses each axis, between 0 and 1."""
    color: str
    faint: bool = False
    label: str = ""
    """The label in the legend; empty keeps it out."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Parallel coordinates: what several things have in common, and where they end."""

    name: str
    title: str
    """Both as a Chart's."""
    axes: Sequence[Axis]
    paths: Sequence[Path]
    """The last is drawn on top."""


@dataclass(frozen=True, kw_only=True)
class Dots:
    """Points of one kind in a plane."""

    points: Sequence[tuple[float, float]]
    color: str
    label: str
    """The label in the legend."""
    joined: bool = False
    """Join them by steps, from left to right."""


@dataclass(frozen=True, kw_only=True)
class Plane:
    """Points in a plane."""

    name: str
    title: str
    """Both as a Chart's."""
    dots: Sequence[Dots]
    x_label: str
    y_label: str
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]
    """The labels of ticks."""


AnyChart: TypeAlias = Chart | Bars | Parallel | Plane


def svg(chart: AnyChart, *, width: int, height: int) -> str:
    """The chart as an `<svg>` element that scales with its container; the same chart gives the same text.

    `width` and `height` are in pixels at the size where its labels are as tall as small print.
    """
    with _drawn(chart, width=width, height=height, colors=_COLORS) as figure:
        figure.savefig(buffer := BytesIO(), format="svg", transparent=True, metadata={"Date": None})
    return _for_page(buffer.getvalue().decode(), chart)


PICTURES = ("png", "svg", "pdf")
"""The formats of a chart as a file of its own."""


def picture(chart: AnyChart, *, width: int, height: int, kind: str) -> bytes:
    """Return the chart as a file of its own, on paper in the colours of the light page.

    Args:
        kind: one of PICTURES.
    """
    colors = _light_colors()
    with _drawn(chart, width=width, height=height, colors=colors) as figure:
        figure.suptitle(chart.title, fontsize=12, color=colors["ink"])
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        figure.savefig(buffer := BytesIO(), format=kind, dpi=144, facecolor=colors["paper"], metadata=metadata)
    return buffer.getvalue()


@cache
def _light_colors() -> Mapping[str, str]:
    """Return the colours of the light page by name: the first ones that the stylesheet gives."""
    style = files("launcher").joinpath("reports/templates/style.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", style.partition("}")[0]))


@contextmanager
def _drawn(chart: AnyChart, *, width: int, height: int, colors: Mapping[str, str]) -> Iterator[Figure]:
    """Draw the chart; while entered, matplotlib's settings are those that it is to be saved with."""
    import matplotlib
    from matplotlib.figure import Figure

    with _settings, matplotlib.rc_context():
        matplotlib.rcdefaults()
        # Text stays text (the page's font, searchable); the salt makes ids depend on the content alone.
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "train-litgpt"})
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        axes = figure.add_subplot()
        match chart:
            case Bars():
                _draw_bars(axes, chart, colors)
            case Parallel():
                _draw_parallel(axes, chart, colors)
            case Plane():
                _draw_plane(axes, chart, colors)
            case Chart():
                _draw(axes, chart, colors)
        yield figure


def load_matplotlib() -> None:
    """Import what charts are drawn with, which takes half a second."""
    import matplotlib.backends.backend_svg
    import matplotlib.figure
    import matplotlib.ticker  # noqa: F401


def _draw(axes: Axes, chart: Chart, colors: Mapping[str, str]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for line in chart.lines:
        points = downsample(line.points, _POINTS)
        axes.plot(
            list(points),
            list(points.values()),
            color=colors[line.color],
            label=line.label or "_",
            linewidth=1.0 if line.faint else 2.0,
            alpha=0.35 if line.faint else 1.0,
            marker="o" if line.marked else "",
            markersize=4,
            linestyle=line.style,
        )
    for step in chart.restarts:
        axes.axvline(step, color=colors["muted"], linewidth=1, linestyle=":")
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if chart.top is not None:
        low = min(value for line in chart.lines for value in line.points.values())
        axes.set_ylim(low - 0.05 * (chart.top - low), chart.top)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=_ROUND))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: chart.x_text(step)))
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=_ROUND))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: chart.y_text(value)))
    _style(axes, colors, x_label=chart.x_label, legend=any(line.label for line in chart.lines))


def _draw_bars(axes: Axes, chart: Bars, colors: Mapping[str, str]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    long, named = (axes.xaxis, axes.yaxis) if chart.sideways else (axes.yaxis, axes.xaxis)
    bars = axes.barh if chart.sideways else axes.bar
    bars(list(chart.bars), list(chart.bars.values()), 0.8, color=colors["blue"])
    named.set_ticks(range(0, len(chart.bars), 1 + len(chart.bars) // _NAMED))
    if chart.sideways:
        axes.invert_yaxis()  # the first on top
    long.set_major_locator(MaxNLocator(8, steps=_ROUND))
    long.set_major_formatter(FuncFormatter(lambda value, _: chart.y_text(value)))
    _style(axes, colors, x_label=chart.x_label, legend=False, grid="x" if chart.sideways else "y")


def _draw_parallel(axes: Axes, chart: Parallel, colors: Mapping[str, str]) -> None:
    places = range(len(chart.axes))
    for path in chart.paths:
        axes.plot(
            places, list(path.heights), color=colors[path.color], label=path.label or "_",
            linewidth=1.0 if path.faint else 2.0, alpha=0.5 if path.faint else 1.0,
        )  # fmt: skip
    for place, axis in zip(places, chart.axes, strict=True):
        axes.axvline(place, color=colors["muted"], linewidth=1, zorder=0.5)
        last = place == len(chart.axes) - 1
        for label, height in axis.ticks.items():
            axes.annotate(
                label, (place, height), xytext=(-5 if last else 5, 0), textcoords="offset points", fontsize=10,
                color=colors["muted"], va="center", ha="right" if last else "left",
                bbox={"facecolor": colors["paper"], "edgecolor": "none", "pad": 1.0, "alpha": 0.8},
            )  # fmt: skip
    _style(axes, colors, x_label="", legend=any(path.label for path in chart.paths), grid="")
    axes.set_xticks(list(places), [axis.name for axis in chart.axes], color=colors["ink"])
    axes.get_xticklabels()[0].set_horizontalalignment("left")
    axes.get_xticklabels()[-1].set_horizontalalignment("right")
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_ylim(-0.05, 1.05)
    if (legend := axes.get_legend()) is not None:
        _legend_above(axes, len(legend.get_texts()), colors)


def _draw_plane(axes: Axes, chart: Plane, colors: Mapping[str, str]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for dots in chart.dots:
        points = sorted(dots.points)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(
            xs, ys, color=colors[dots.color], label=dots.label, marker="o", markersize=6 if dots.joined else 4,
            linewidth=1.5 if dots.joined else 0, drawstyle="steps-post",
        )  # fmt: skip
    for ticks, text in ((axes.xaxis, chart.x_text), (axes.yaxis, chart.y_text)):
        ticks.set_major_locator(MaxNLocator(6, steps=_ROUND))
        ticks.set_major_formatter(FuncFormatter(lambda value, _, text=text: text(value)))
    _style(axes, colors, x_label=chart.x_label, legend=True)
    axes.set_ylabel(chart.y_label, fontsize=11, color=colors["muted"])
    axes.margins(x=0.05, y=0.08)
    _legend_above(axes, len(chart.dots), colors)


def _legend_above(axes: Axes, columns: int, colors: Mapping[str, str]) -> None:
    """Put the legend above the drawing, where it hides nothing."""
    axes.legend(
        frameon=False, fontsize=11, labelcolor=colors["ink"], loc="lower right", bbox_to_anchor=(1, 1), ncols=columns
    )


def _style(
    axes: Axes, colors: Mapping[str, str], *, x_label: str, legend: bool, grid: Literal["x", "y", ""] = "y"
) -> None:
    axes.set_xlabel(x_label, fontsize=11, color=colors["muted"])
    axes.tick_params(labelsize=11, labelcolor=colors["muted"], color=colors["line"], length=0)
    if grid:
        axes.grid(axis=grid, color=colors["line"], linewidth=1)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(colors["line"])
    if legend:
        shown = axes.legend(frameon=False, fontsize=11, labelcolor=colors["ink"], loc="upper right")
        for text in shown.get_texts():
            text.set_parse_math(False)  # a name is a name, dollars and all


def _for_page(text: str, chart: AnyChart) -> str:
    """A matplotlib file as an element of a page: no prologue, no fixed size, the page's fonts and colours, own ids."""
    _, _, text = text.partition('viewBox="')
    box, _, text = text.partition('"')
    text = f'<svg viewBox="{box}" role="img" aria-label="{escape(chart.title)}">' + text.partition(">")[2]
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r" font-family: [^;]*;", "", text)
    text = re.sub(r"<g id=\"[^\"]*\"", "<g", text)
    text = re.sub(r"(\bid=\"|href=\"#|url\(#)", rf"\g<1>{chart.name}-", text).replace("xlink:href", "href")
    for name, sentinel in _COLORS.items():
        text = text.replace(sentinel, f"var(--{name})")
    return text.strip()
