"""The result of a sweep: its trials side by side, as a table and as a page with pictures."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter, mul
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import yaml

from launcher.config import Objective
from launcher.curves import summary
from launcher.formatting import duration_text, loss_text, setting_text, share_text, shown
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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a trial so far."""

    trial: Trial
    run: str
    """`<name>-<hash>`."""
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
    """Why there is no model: the diagnosis, or where the trial was pruned."""

    @property
    def score(self) -> float | None:
        """Return the value that trials are ranked by, the smaller the better; None if the trial has no model."""
        loss = self.validation_loss
        if loss is None or math.isnan(loss):
            return None
        first = self.trial.objectives[:1]
        if first[0] == "validation_loss":
            return loss
        values = self.values(first)
        return math.inf if values is None else values[0]

    def values(self, objectives: Sequence[Objective]) -> list[float] | None:
        """Return the trial's objectives in their order, each the smaller the better; None if one is missing."""
        values = [self._value(name) for name in objectives]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        return finite if len(finite) == len(objectives) else None

    def _value(self, objective: Objective) -> float | None:
        if objective == "validation_loss":
            return self.validation_loss
        if objective == "cost":
            return self.usd
        if objective == "tokens_per_second":
            return None if self.tokens_per_second is None else -self.tokens_per_second
        score = self.scores.get(objective)
        if score is None:
            return None
        return -score.value if score.larger_is_better else score.value


def outcome_of(
    trial: Trial, run: Run, times: Sequence[AttemptTimes], *, final: FinalManifest | None = None, ended: str = ""
) -> Outcome:
    """Return the result of a trial from its run's folder; `final` is the manifest of its model."""
    rows = read_metrics(run.storage)
    progress = summary(rows)
    price = read_document(run.storage).price if times else None
    book = ledger(times, rows, price)
    wanted = [name for name in trial.objectives if name.startswith("evaluation.")]
    scores: Mapping[str, Score] = {}
    if final is not None and wanted:
        evaluation = found_scores(run.storage, final, trial.config.evaluation)
        if evaluation is not None:
            scores = evaluation.objectives
            missing = [name for name in wanted if name not in scores]
            if missing:
                ended = f"there is no score {', '.join(missing)}; there are {', '.join(scores)}"
    return Outcome(
        trial=trial,
        run=run.name,
        validation_loss=None if final is None else final.validation_loss,
        ended=ended,
        scores={name: scores[name] for name in wanted if name in scores},
        tokens_per_second=progress.tokens_per_second,
        mfu=progress.mfu,
        usd=None if price is None else book.usd,
        hours=book.process_seconds / 3600,
        seconds=book.wall,
        losses=curve(rows, "evaluation", "validation_loss"),
        link=run.storage.address(REPORT),
    )


def ranked(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes, the best first; those without a score are last, in their order."""
    every = list(outcomes)
    scored = [(outcome.score, outcome) for outcome in every if outcome.score is not None]
    scored.sort(key=itemgetter(0))
    return [outcome for _, outcome in scored] + [outcome for outcome in every if outcome.score is None]


def table(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    return [_row(outcome) for outcome in ranked(outcomes)]


def _row(outcome: Outcome) -> dict[str, Any]:
    scores = [name for name in outcome.trial.objectives if name.startswith("evaluation.")]
    return {
        **{name: setting_text(value) for name, value in outcome.trial.changes.items()},  # best.yaml has all digits
        "validation loss": shown("{:.4f}".format, outcome.validation_loss, ""),
        **{name: str(outcome.scores.get(name, "")) for name in scores},
        "tokens/s": shown("{:,.0f}".format, outcome.tokens_per_second, ""),
        "MFU": shown(share_text, outcome.mfu, ""),
        "cost": shown("${:,.2f}".format, outcome.usd, ""),
        "duration": shown(duration_text, outcome.seconds or None, ""),
        "run": outcome.run,
        "ended": shorten(outcome.ended.partition("\n")[0], 90, placeholder=" …"),  # the run's diagnosis has all of it
    }


def best_yaml(outcomes: Iterable[Outcome]) -> str | None:
    """Return the best trial's whole config, ready for `train-litgpt run`; None if no trial has a usable model."""
    best = next(iter(ranked(outcomes)), None)
    if best is None or best.score is None or best.score == math.inf:
        return None
    scores = "".join(f"{name} {score}, " for name, score in best.scores.items())
    heading = f"# {scores}validation loss {best.validation_loss:.4f}, run {best.run}\n"
    settings = best.trial.config.model_dump(mode="json", exclude={"launch", "budget"})
    return heading + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def html(name: str, outcomes: Sequence[Outcome], search: Search) -> str:
    """Return one page that needs nothing but itself: the table, all curves, and Optuna's pictures of the search."""
    best = ranked(outcomes)
    lines = []
    for number, outcome in enumerate(best):
        if not outcome.losses:
            continue
        line = Line(points=outcome.losses, color="muted", marked=True, faint=True)
        if number < len(_COLORS):  # the others are a background without names
            label = f"{outcome.run.rpartition('-')[2]}  {loss_text(outcome.validation_loss)}"
            line = replace(line, color=_COLORS[number], label=label, faint=False)
        lines.append(line)
    curves = Chart(name="trials", title="Validation loss of all trials", y_text="{:g}".format, lines=lines)
    unbeaten = [search.changes[number] for number in search.pareto_front] if len(search.objectives) > 1 else []
    larger = {"tokens_per_second"}
    for outcome in outcomes:
        larger.update(name for name, score in outcome.scores.items() if score.larger_is_better)
    return template("sweep.html").render(
        title=name,
        rows=table(best),
        links={outcome.run: outcome.link for outcome in outcomes},
        curves=curves if lines else None,
        pictures=pictures(search, larger),
        front=table(outcome for outcome in best if outcome.trial.changes in unbeaten),
    )


def pictures(search: Search, larger: Collection[str]) -> list[tuple[str, str]]:
    """Return Optuna's pictures, each a caption and an SVG element. Larger values of the objectives in `larger` are
    better."""
    study = search.study
    if study is None:
        return []
    import matplotlib.pyplot as plt
    from optuna.importance import PedAnovaImportanceEvaluator
    from optuna.visualization import matplotlib as visualization

    plt.switch_backend("agg")  # there may be no screen, and this may not be the main thread
    names = [name.replace("_", " ") for name in search.objectives]
    signs = [-1.0 if name in larger else 1.0 for name in search.objectives]
    drawings: dict[str, Callable[[], Any]] = {
        "Importance of the settings": lambda: visualization.plot_param_importances(
            study, evaluator=PedAnovaImportanceEvaluator(), target=lambda trial: trial.values[0], target_name=names[0]
        ),
        "All trials, a line each": lambda: visualization.plot_parallel_coordinate(
            study, target=lambda trial: signs[0] * trial.values[0], target_name=names[0]
        ),
    }
    if len(names) > 1:
        drawings["Not beaten in every objective"] = lambda: visualization.plot_pareto_front(
            study, targets=lambda trial: list(map(mul, signs, trial.values)), target_names=names
        )
    pictures = []
    for number, (caption, draw) in enumerate(drawings.items()):
        # Optuna would warn on the terminal that its pictures may change, and how it estimates importances.
        with SETTINGS, plt.rc_context(), warnings.catch_warnings(action="ignore"):
            try:
                draw()
            except (RuntimeError, ValueError):  # too few trials, or all alike
                continue
            plt.gcf().set_size_inches(10, 4.2)
            pictures.append((caption, element(plt.gcf(), name=f"search-{number}", title=caption, bbox_inches="tight")))
            plt.close("all")
    return pictures
