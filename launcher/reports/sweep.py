"""The report of a sweep: one table, the curves of all trials, what mattered, and the config of the best.

Pure: outcomes and rows of metrics in, a page and markdown out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.config import SweepConfig
from launcher.formatting import NOTHING, cut_text, duration_text
from launcher.reports import mermaid
from launcher.reports.charts import AnyChart, Axis, Bars, Chart, Dots, Line, Parallel, Path, Plane
from launcher.reports.markdown import grid, joined
from launcher.reports.page import page, printable
from launcher.reports.report import short
from launcher.runs.outcomes import Outcome, TrialEnd, best_first, pareto_front, ranking
from launcher.runs.studies import ENOUGH_FOR_IMPORTANCE
from launcher.runs.trials import sweep_name
from launcher.sweep_settings import COST, GPU_HOURS, TOKENS_PER_SECOND, VALIDATION_LOSS, Dimension
from litgpt_demo.metrics import Row, curve
from litgpt_demo.runs import REPORT

NAMES: Mapping[str, str] = {
    VALIDATION_LOSS: "validation loss",
    TOKENS_PER_SECOND: "tokens per second",
    COST: "dollars",
    GPU_HOURS: "GPU hours",
}
"""The objectives in words; a score has its own name."""

_MOST_CURVES = 200  # more than an eye can follow; the best are drawn
_KINDS: Mapping[TrialEnd, tuple[str, str]] = {
    "failed": ("violet", "failed"),
    "pruned": ("orange", "pruned"),
    "stopped": ("green", "stopped, goes on with a larger budget"),
    "done": ("ink", "to the end"),
}


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """All that is known of a sweep whose trials have ended, or some of them."""

    config: SweepConfig
    outcomes: Sequence[Outcome]
    rows: Mapping[str, Sequence[Row]]
    """The metrics of each run by its name."""
    importance: Mapping[str, float]
    """The share of each setting; empty where it is not known."""
    best: str | None
    """The config of the best trial, as YAML."""

    @property
    def aim(self) -> str:
        """Return the objective that ranks."""
        return self.config.sweep.aims[0]

    @property
    def ranked(self) -> list[Outcome]:
        """Return the outcomes, best first."""
        return best_first(self.outcomes, self.aim)

    @property
    def winner(self) -> Outcome | None:
        """Return the best trial; None where none came to its end."""
        first = next(iter(self.ranked), None)
        return first if first is not None and first.rank(self.aim) < (0, math.inf) else None

    @property
    def curves(self) -> Mapping[int, Mapping[int, float]]:
        """Return the losses of each trial by step: of the validation split, or of the training where trials have been
        evaluated only once."""
        for kind, name in (("evaluation", "validation_loss"), ("step", "loss")):
            found = {one.trial.number: curve(self.rows.get(one.run, ()), kind, name) for one in self.outcomes}
            finite = {
                number: {step: value for step, value in points.items() if math.isfinite(value)}
                for number, points in found.items()
            }
            if any(len(points) > 1 for points in finite.values()):
                return {number: points for number, points in finite.items() if points}
        return {}

    @property
    def top(self) -> float:
        """Return the largest loss that is shown: a trial that diverged would leave the others no room."""
        firsts = [next(iter(points.values())) for points in self.curves.values()]
        return 1.5 * median(firsts) if firsts else math.inf


def wording(objective: str) -> str:
    """Return an objective in words."""
    return NAMES.get(objective, objective)


# --- charts -----------------------------------------------------------------------------------------------------------


def curves_chart(report: SweepReport, name: str) -> Chart | None:
    """Return the learning curves of all trials in one picture, the best on top; None where there are none."""
    lines, told, curves = [], set[str](), report.curves
    for outcome in reversed(report.ranked[:_MOST_CURVES]):
        points = curves.get(outcome.trial.number, {})
        if not points:
            continue
        color, kind = _KINDS[outcome.state]
        best = outcome is report.winner
        label = f"the best, {_title(outcome)}" if best else "" if kind in told else kind
        marked = len(points) == 1  # else it would not be seen
        lines.append(Line(points=points, color="blue" if best else color, faint=not best, label=label, marked=marked))
        told |= set() if best else {kind}
    if not lines:
        return None
    worst = max(value for points in curves.values() for value in points.values())
    top = report.top if worst > report.top else None
    return Chart(name=name, title="Loss of every trial, nats per token", lines=lines, y_text=short, top=top)


def parallel_chart(report: SweepReport) -> Parallel | None:
    """Return each trial as a line through its settings to its figure; None where no two trials have one."""
    rated = [(one, value) for one in report.ranked if (value := one.figure(report.aim)[0]) is not None]
    rated = [(one, value) for one, value in rated if math.isfinite(value)]
    if len(rated) < 2:
        return None
    low, high = min(value for _, value in rated), max(value for _, value in rated)
    high = max(low, min(high, report.top)) if report.aim == VALIDATION_LOSS else high
    if low == high:
        low, high = low - 0.5, high + 0.5
    dimensions = report.config.sweep.dimensions
    brief = _short_names(report)
    axes = [Axis(name=brief.get(name, name), ticks=_ticks(one)) for name, one in dimensions.items()]
    ticks = {f"{low + share * (high - low):.4g}": share for share in (0.0, 0.25, 0.5, 0.75, 1.0)}
    paths, told = [], set[str]()
    for outcome, value in reversed(rated):
        color, kind = _KINDS[outcome.state]
        best = outcome is report.winner
        heights = [_height(one, outcome.trial.changes[name]) for name, one in dimensions.items()]
        heights.append(min(1.0, max(0.0, (value - low) / (high - low))))
        label = f"the best, {_title(outcome)}" if best else "" if kind in told else kind
        paths.append(Path(heights=heights, color="blue" if best else color, faint=not best, label=label))
        told |= set() if best else {kind}
    return Parallel(
        name="parallel",
        title=f"Settings of each trial, and its {wording(report.aim)}",
        axes=[*axes, Axis(name=wording(report.aim), ticks=ticks)],
        paths=paths,
    )


def _height(dimension: Dimension, value: object) -> float:
    """Return where a value is on the axis of its setting."""
    if dimension.choice is not None:
        places = max(1, len(dimension.choice) - 1)
        return dimension.choice.index(value) / places if len(dimension.choice) > 1 else 0.5
    assert isinstance(value, int | float)
    if dimension.log_uniform is not None:
        low, high = map(math.log, dimension.log_uniform)
        return (math.log(value) - low) / (high - low)
    bounds = dimension.uniform or dimension.integer or (0, 1)
    return (value - bounds[0]) / (bounds[1] - bounds[0])


def _ticks(dimension: Dimension) -> dict[str, float]:
    if dimension.choice is not None:
        return {_brief(value): _height(dimension, value) for value in dimension.choice}
    if dimension.log_uniform is not None:
        low, high = dimension.log_uniform
        decades = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
        return {f"{value:.4g}": _height(dimension, value) for value in dict.fromkeys((low, *decades, high))}
    first, last = dimension.uniform or dimension.integer or (0, 1)
    middle = (first + last) / 2
    values = (first, last) if dimension.integer is not None else (first, middle, last)
    return {f"{value:.4g}": _height(dimension, value) for value in values}


def _brief(value: object) -> str:
    return cut_text(str(value), 24)


UNKNOWN_IMPORTANCE = (
    f"Which settings mattered is shown once {ENOUGH_FOR_IMPORTANCE} trials with different results came to their end."
)


def importance_chart(report: SweepReport) -> Bars | None:
    """Return the share of each setting in how far the trials differ; None where it is not known."""
    if not report.importance:
        return None
    brief = _short_names(report)
    return Bars(
        name="importance",
        title=f"What mattered for {wording(report.aim)}",
        bars={brief.get(name, name): share for name, share in report.importance.items()},
        x_label="share of the difference among the trials",
        y_text=lambda share: f"{100 * share:.0f} %",
        sideways=True,
    )


def front_charts(report: SweepReport) -> list[Plane]:
    """Return the first objective against each other one, with the Pareto front."""
    first, *others = report.config.sweep.aims
    front = pareto_front(report.outcomes, report.config.sweep.aims) if others else []
    made = []
    for number, other in enumerate(others):
        points = {
            id(one): (y, x)
            for one in report.outcomes
            if one.state == "done"
            and (x := one.figure(first)[0]) is not None
            and (y := one.figure(other)[0]) is not None
            and not (first == VALIDATION_LOSS and x > report.top)
        }
        best = [points[id(one)] for one in front if id(one) in points]
        rest = [point for one, point in points.items() if one not in {id(best) for best in front}]
        if not best:
            continue
        dots = [Dots(points=best, color="blue", label="Pareto front", joined=len(others) == 1)]
        dots += [Dots(points=rest, color="muted", label="other trials")] if rest else []
        made.append(
            Plane(
                name=f"front{number}",
                title=f"{wording(first).capitalize()} and {wording(other)}",
                dots=dots,
                x_label=wording(other),
                y_label=wording(first),
                x_text=short,
                y_text=short,
            )
        )
    return made


def _title(outcome: Outcome) -> str:
    return f"trial {outcome.trial.number}"


# --- words ------------------------------------------------------------------------------------------------------------


def lead(report: SweepReport) -> str:
    """Return the sweep in a sentence."""
    ends = {state: sum(one.state == state for one in report.outcomes) for state in _KINDS}
    words: dict[TrialEnd, tuple[str, str]] = {
        "done": ("came to its end", "came to their end"),
        "pruned": ("was pruned", "were pruned"),
        "stopped": ("was stopped", "were stopped"),
        "failed": ("failed", "failed"),
    }
    parts = [f"{ends[state]} {words[state][ends[state] > 1]}" for state in words if ends[state]]
    return f"{len(report.outcomes)} trials: {', '.join(parts)}." if parts else "No trial has ended yet."


def tiles(report: SweepReport) -> list[tuple[str, str]]:
    """Return the key figures."""
    best, outcomes = report.winner, {one.run: one for one in report.outcomes if one.run}.values()
    value = None if best is None else best.figure(report.aim)[0]
    dollars = [one.dollars for one in outcomes if one.dollars is not None]
    steps = sum(one.step or 0 for one in outcomes)
    return [
        (f"Best {wording(report.aim)}", NOTHING if value is None else f"{value:,.4g}"),
        *([] if dollars else [("Steps of all trials", f"{steps:,}")]),
        ("Time of all trials", duration_text(sum(one.seconds or 0.0 for one in outcomes))),
        *([("Cost of all trials", f"${sum(dollars):,.2f}")] if dollars else []),
    ]


def table(report: SweepReport) -> list[dict[str, str]]:
    """Return the table of all trials, best first, with short names of settings and of ends."""
    brief = _short_names(report)
    rows = ranking(report.outcomes, report.config.sweep.aims, numbered=True)
    return [
        {"trial": row["trial"], "end": _end(outcome)}
        | {brief.get(name, name): printable(value) for name, value in row.items() if name not in {"trial", "error"}}
        for outcome, row in zip(report.ranked, rows, strict=True)
    ]


def _short_names(report: SweepReport) -> dict[str, str]:
    """Return the last word of each setting by its whole name; none where two settings have the same last word."""
    names = {*report.config.sweep.dimensions, *report.importance}
    brief = {name: name.rpartition(".")[2] for name in names}
    return brief if len(set(brief.values())) == len(brief) else {}


def _end(outcome: Outcome) -> str:
    if outcome.state == "pruned":
        return outcome.error.partition(":")[0]
    return "" if outcome.state == "done" else outcome.state


def verdicts(report: SweepReport) -> list[str]:
    """Return why trials failed or were stopped, a line each."""
    return [
        f"{_title(one)}: {one.error.splitlines()[0]}"
        for one in report.outcomes
        if one.state in {"failed", "stopped"} and one.error
    ]


def sweep_page(report: SweepReport) -> str:
    """Return one page that needs nothing but itself; its links lead to the runs' own reports."""
    charts: list[AnyChart] = [*front_charts(report)]
    charts += [bars] if (bars := importance_chart(report)) is not None else []
    winner = report.winner
    return page(
        "sweep.html",
        title=sweep_name(report.config),
        good=winner is not None,
        outcome="no trial came to its end" if winner is None else f"the best is {_title(winner)}, {winner.trial.title}",
        lead=lead(report),
        tiles=tiles(report),
        curves=[(one, kind) for kind in ("wide", "narrow") if (one := curves_chart(report, kind)) is not None],
        parallel=parallel_chart(report),
        charts=charts,
        note="" if report.importance or not report.config.sweep.has_study else UNKNOWN_IMPORTANCE,
        table=table(report),
        links={one.run: f"../../runs/{one.run}/{REPORT}" for one in report.outcomes if one.state == "done"},
        verdicts=verdicts(report),
        best=report.best,
    )


def sweep_markdown(report: SweepReport) -> str:
    """Return the report as a markdown artifact."""
    known = report.curves
    shown = [one for one in report.ranked if len(known.get(one.trial.number, {})) > 1][:2]
    curves = {_title(one): known[one.trial.number] for one in shown}
    rows = table(report)
    brief = _short_names(report)
    shares = {brief.get(name, name): 100 * share for name, share in report.importance.items()}
    parts = [
        f"**{lead(report)}**",
        grid(rows) if rows else "",
        mermaid.lines("Loss of the two best trials", curves, y_label="nats per token"),
        mermaid.bars("What mattered", shares, x_label="setting", y_label="per cent"),
    ]
    return joined(parts)
