"""Runs side by side: their curves in one chart, the settings in which they differ, and their results.

Pure: results in, rows, charts and a page out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from pydantic import JsonValue

from launcher.formatting import NOTHING, count_text, duration_text, loss_text, rate_text, share_text
from launcher.reports.charts import Chart, Line
from launcher.reports.curves import smoothed, summary
from launcher.reports.page import page
from launcher.runs.results import RunResult
from launcher.runs.run import trained_seconds
from litgpt_demo.metrics import Row, curve

# As many as a legend has room for, and colours and strokes tell apart.
_COLORS = ("blue", "orange", "green", "violet")
_STYLES = ("-", "--", ":")
MOST_DRAWN = len(_COLORS) * len(_STYLES)
"""Runs whose curves are drawn; of more, those with the lowest losses."""

_NOT_COMPARED = ("start",)  # how a run was started is no property of it


def settings_table(results: Sequence[RunResult]) -> list[dict[str, str]]:
    """Return a row for each setting in which the runs differ: its dotted name, and its value in each of them.

    Values are JSON, which YAML reads; a dash where a run has no such setting.
    """
    flat = [dict(_flattened(result.config)) for result in results]
    names = dict.fromkeys(name for one in flat for name in one)
    rows = []
    for name in names:
        values = [json.dumps(one[name], ensure_ascii=False) if name in one else NOTHING for one in flat]
        if len(set(values)) > 1:
            named = dict(zip((result.name for result in results), values, strict=True))
            rows.append({"setting": name, **named})
    return rows


def _flattened(section: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for name, value in section.items():
        dotted = f"{prefix}{name}"
        if dotted in _NOT_COMPARED:
            continue
        if isinstance(value, dict) and value:
            yield from _flattened(value, f"{dotted}.")
        else:
            yield dotted, value


def figures(result: RunResult) -> dict[str, float | int | None]:
    """Return a run's figures for programs: losses in nats per token, seconds, shares; None for what is not known."""
    progress = summary(result.rows)
    pace, used = (list(curve(result.rows, "step", name).values()) for name in ("tokens_per_second", "mfu"))
    values: dict[str, float | int | None] = {
        "step": progress.step,
        "steps": progress.steps,
        "validation_loss": progress.validation_loss,
        "loss": progress.loss,
        "tokens": progress.tokens,
        "tokens_per_second": median(pace) if pace else None,
        "mfu": median(used) if used else None,
        "seconds": trained_seconds(result.rows),
    }
    return {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}


def results_table(results: Sequence[RunResult]) -> list[dict[str, str]]:
    """Return a row for each run: how far it is, its losses, its pace and its scores."""
    scores = dict.fromkeys(score.name for result in results for score in result.scores)
    rows = []
    for result in results:
        progress, known = summary(result.rows), figures(result)
        own = {score.name: str(score) for score in result.scores}
        rows.append({
            "run": result.name,
            "step": f"{progress.step:,}" + (f" of {progress.steps:,}" if progress.steps else ""),
            "validation loss": loss_text(progress.validation_loss),
            "training loss": loss_text(progress.loss),
            "tokens": count_text(progress.tokens) if progress.tokens else NOTHING,
            "throughput": rate_text(known["tokens_per_second"]),
            "MFU": share_text(known["mfu"]),
            "training time": duration_text(known["seconds"]),
            **{name: own.get(name, NOTHING) for name in scores},
        })  # fmt: skip
    return rows


def as_json(results: Sequence[RunResult]) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "runs": [
            {
                "run": result.name,
                **figures(result),
                "scores": {score.name: score.value for score in result.scores},
            }
            for result in results
        ],
        "settings": settings_table(results),
    }


# --- curves -----------------------------------------------------------------------------------------------------------


def charts(results: Sequence[RunResult]) -> dict[str, Chart]:
    """Return the charts by name, as far as there are curves: the training loss, the validation loss, the pace.

    They run over steps; over tokens where the runs' steps have different numbers of them.
    """
    drawn = _drawn(results)
    by_tokens = len({_tokens_per_step(result.rows) for result in drawn}) > 1
    left_out = f"; the best {len(drawn)} of {len(results)} runs" if len(drawn) < len(results) else ""
    asked = (
        ("loss", "Training loss, nats per token, smoothed", "step", "loss", True),
        ("validation", "Validation loss, nats per token", "evaluation", "validation_loss", False),
        ("pace", "Throughput, tokens per second, smoothed", "step", "tokens_per_second", True),
    )
    made = {}
    for name, title, kind, column, smooth in asked:
        lines = []
        for number, result in enumerate(drawn):
            points = curve(result.rows, kind, column)
            if by_tokens:
                points = {step * _tokens_per_step(result.rows): value for step, value in points.items()}
            if any(map(math.isfinite, points.values())):
                lines.append(_line(result.name, smoothed(points) if smooth else points, number))
        if lines:
            made[name] = Chart(
                name=name,
                title=title + left_out,
                lines=lines,
                y_text=_short,
                from_zero=name == "pace",
                x_label="tokens" if by_tokens else "step",
                x_text=count_text if by_tokens else "{:,.0f}".format,
            )
    return made


def _drawn(results: Sequence[RunResult]) -> list[RunResult]:
    """Return the runs whose curves are drawn, in their order: those with the lowest losses where they are many."""
    begun = [result for result in results if curve(result.rows, "step", "loss")]
    best = sorted(begun, key=_rank)[:MOST_DRAWN]
    return [result for result in begun if result in best]


def _rank(result: RunResult) -> float:
    progress = summary(result.rows)
    loss = progress.loss if progress.validation_loss is None else progress.validation_loss
    return math.inf if loss is None or math.isnan(loss) else loss


def _tokens_per_step(rows: Sequence[Row]) -> int:
    return next((int(row["tokens_per_step"]) for row in rows if row.get("tokens_per_step")), 1)


def _line(name: str, points: Mapping[int, float], number: int) -> Line:
    style = _STYLES[number // len(_COLORS)]
    return Line(points=points, color=_COLORS[number % len(_COLORS)], label=name, style=style, marked=len(points) <= 40)


def _short(value: float) -> str:
    return count_text(value) if abs(value) >= 1e6 else f"{value:,g}"


# --- the page ---------------------------------------------------------------------------------------------------------


def html(results: Sequence[RunResult], *, root: str) -> str:
    """Return one page that needs nothing but itself.

    Args:
        root: the address that the runs are under.
    """
    return page(
        "compare.html",
        title=f"{len(results)} runs compared",
        root=root,
        charts=charts(results),
        results=results_table(results),
        settings=settings_table(results),
    )
