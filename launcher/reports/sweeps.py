"""The result of a sweep: its trials beside each other, as a table and as a page with pictures."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import yaml

from launcher.config import Objective
from launcher.curves import summary
from launcher.formatting import duration_text, loss_text, setting_text, share_text
from launcher.reports.charts import SETTINGS, Chart, Line, element
from launcher.reports.goodput import AttemptTimes, ledger
from launcher.reports.report import template
from launcher.runs.run import Run
from launcher.runs.sweeps import Trial
from litgpt_demo.export import FinalManifest
from litgpt_demo.export.evaluation import Score, found_scores
from litgpt_demo.metrics import curve
from litgpt_demo.runs import REPORT, read_document, read_metrics

if TYPE_CHECKING:
    from launcher.runs.search import Search

_COLORS = ("blue", "orange", "green", "violet")
_THEIRS = {"#e5e5e5": "none", "#ffffff": "var(--line)", "#555555": "var(--muted)", "#000000": "var(--muted)"}
"""The colours of Optuna's pictures: grounds, frames, words, axes."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a trial, as far as it came."""

    trial: Trial
    run: str
    """`<name>-<key>`."""
    validation_loss: float | None = None
    """Of the collected model, in nats per token; None where the trial has none."""
    tokens_per_second: float | None = None
    mfu: float | None = None
    usd: float | None = None
    """At list price; None where none is known."""
    hours: float = 0.0
    """Of a GPU, or of a process where there are no GPUs."""
    seconds: float = 0.0
    """Wall time over all attempts."""
    scores: Mapping[str, Score] = field(default_factory=dict)
    """Of its model, those that are objectives."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """Step to the validation loss at it."""
    link: str = ""
    """The address of the run's report."""
    ended: str = ""
    """Why there is no model: the verdict, or where the trial was pruned."""

    @property
    def rank(self) -> tuple[bool, float]:
        """The sort key of a trial: first those with a loss, an infinite one too, by the first objective."""
        loss, first = self.validation_loss, self.trial.objectives[:1]
        if loss is None or math.isnan(loss):
            return True, math.inf
        return False, loss if first[0] == "validation_loss" else (self.values(first) or [math.inf])[0]

    def values(self, objectives: Sequence[Objective]) -> list[float] | None:
        """Return the trial's objectives in their order, None where it has not all of them. What is better the larger it
        is has the other sign."""
        by_name = {name: -one.value if one.larger_is_better else one.value for name, one in self.scores.items()} | {
            "validation_loss": self.validation_loss, "cost": self.usd,
            "tokens_per_second": None if self.tokens_per_second is None else -self.tokens_per_second,
        }  # fmt: skip
        found = [value for name in objectives if (value := by_name.get(name)) is not None and math.isfinite(value)]
        return found if len(found) == len(objectives) else None


def outcome_of(
    trial: Trial, run: Run, times: Sequence[AttemptTimes], *, final: FinalManifest | None = None, ended: str = ""
) -> Outcome:
    """Return the result of a trial from its run's folder.

    Args:
        times: of the run's attempts.
        final: the manifest of its model.
    """
    rows = read_metrics(run.storage)
    far, price = summary(rows), read_document(run.storage).price if times else None
    book = ledger(times, rows, price)
    asked = [name for name in trial.objectives if name.startswith("evaluation.")]
    made = None if final is None or not asked else found_scores(run.storage, final, trial.config.evaluation)
    there = {} if made is None else made.objectives
    if made is not None and (missing := [name for name in asked if name not in there]):
        ended = f"there is no score {', '.join(missing)}; there are {', '.join(there)}"
    return Outcome(
        trial=trial, run=run.name, validation_loss=None if final is None else final.validation_loss, ended=ended,
        scores={name: there[name] for name in asked if name in there},
        tokens_per_second=far.tokens_per_second, mfu=far.mfu,
        usd=None if price is None else book.usd, hours=book.process_seconds / 3600,
        seconds=book.wall, losses=curve(rows, "evaluation", "validation_loss"), link=run.storage.address(REPORT),
    )  # fmt: skip


def table(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Return a row for each trial, the best first."""
    return [
        {
            **{name: setting_text(value) for name, value in one.trial.changes.items()},  # best.yaml has all digits
            "validation loss": "" if one.validation_loss is None else f"{one.validation_loss:.4f}",
            **{name: str(one.scores.get(name, "")) for name in one.trial.objectives if name.startswith("evaluation.")},
            "tokens/s": "" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}",
            "MFU": "" if one.mfu is None else share_text(one.mfu),
            "cost": "" if one.usd is None else f"${one.usd:,.2f}",
            "duration": duration_text(one.seconds) if one.seconds else "",
            "run": one.run,
            "ended": shorten(one.ended.partition("\n")[0], 90, placeholder=" …"),  # the run's verdict has all of it
        }
        for one in sorted(outcomes, key=lambda one: one.rank)
    ]


def best_yaml(outcomes: Iterable[Outcome]) -> str | None:
    """Return the best trial's whole config, ready for `train-litgpt run`; None where none has a model."""
    best = min(outcomes, key=lambda one: one.rank, default=None)
    if best is None or best.rank >= (False, math.inf):
        return None
    scores = "".join(f"{name} {score}, " for name, score in best.scores.items())
    heading = f"# {scores}validation loss {best.validation_loss:.4f}, run {best.run}\n"
    settings = best.trial.config.model_dump(mode="json", exclude={"start"})
    return heading + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def html(name: str, outcomes: Sequence[Outcome], search: Search) -> str:
    """Return one page that needs nothing but itself: the table, all curves, and Optuna's pictures of the search."""
    best = sorted(outcomes, key=lambda one: one.rank)
    lines = [
        Line(points=one.losses, color=(*_COLORS, "muted")[min(number, 4)], marked=True, faint=number > 3,
             label=f"{one.run.rpartition('-')[2]}  {loss_text(one.validation_loss)}" if number < 4 else "")
        for number, one in enumerate(best) if one.losses
    ]  # fmt: skip
    curves = Chart(name="trials", title="Validation loss of all trials", y_text="{:g}".format, lines=lines)
    unbeaten = [search.changes[number] for number in search.front] if len(search.objectives) > 1 else []
    scores = [pair for one in outcomes for pair in one.scores.items()]
    larger = {"tokens_per_second", *(name for name, score in scores if score.larger_is_better)}
    return template("sweep.html").render(
        title=name,
        rows=table(best),
        links={one.run: one.link for one in outcomes},
        curves=curves if lines else None,
        pictures=pictures(search, larger),
        front=table(one for one in best if one.trial.changes in unbeaten),
    )


def pictures(search: Search, larger: Collection[str]) -> list[tuple[str, str]]:
    """Return Optuna's pictures, each a caption and an SVG element; those that need more trials are left out. The
    objectives in `larger` are better the larger they are."""
    if (study := search.study) is None:
        return []
    import matplotlib.pyplot as plt
    from matplotlib.colors import LinearSegmentedColormap
    from optuna.importance import PedAnovaImportanceEvaluator
    from optuna.visualization import matplotlib as drawn

    plt.switch_backend("agg")  # there may be no screen, and this may not be the main thread
    names = [name.replace("_", " ") for name in search.objectives]
    signs = [-1.0 if name in larger else 1.0 for name in search.objectives]
    wanted: dict[str, Callable[[], Any]] = {
        "Importance of the settings": lambda: drawn.plot_param_importances(
            study, evaluator=PedAnovaImportanceEvaluator(), target=lambda trial: trial.values[0], target_name=names[0]
        ).set(xlabel=f"share in what changes the {names[0]}", ylabel=""),
        "All trials, a line each": lambda: drawn.plot_parallel_coordinate(
            study, target=lambda trial: signs[0] * trial.values[0], target_name=names[0]
        ),
    }
    if len(names) > 1:
        wanted["Not beaten in every objective"] = lambda: drawn.plot_pareto_front(
            study, targets=lambda trial: list(map(mul, signs, trial.values)), target_names=names
        ).yaxis.set_major_formatter("{x:,.10g}")
    made, scale = [], LinearSegmentedColormap.from_list("trials", ["#2563eb", "#d97706"])
    for number, (caption, draw) in enumerate(wanted.items()):
        # That its pictures may change, and what its importances mean, Optuna would tell on the terminal.
        with SETTINGS, plt.rc_context(), warnings.catch_warnings(action="ignore"):
            try:
                draw()
            except (RuntimeError, ValueError):  # too few trials, or all alike
                continue
            figure = plt.gcf()
            figure.set_size_inches(10, 4.2)
            for axes in figure.axes:
                axes.grid(visible=False)
                for place in ("left", "center"):  # the caption says it
                    axes.set_title("", loc=place)
                for lines in axes.collections:
                    lines.set_cmap(scale)  # both ends are seen on white and on black
            text = element(figure, name=f"search-{number}", title=caption, bbox_inches="tight")
            plt.close("all")
        for theirs, ours in _THEIRS.items():
            text = text.replace(theirs, ours)
        for setting in next(iter(search.changes.values())):
            text = text.replace(f">{setting}<", f">{setting.rpartition('.')[2]}<")
        made.append((caption, text))
    return made
