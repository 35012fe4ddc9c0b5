"""The outcomes of a sweep's trials: which is better, their table, their Pareto front, and the best one's config."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import yaml
from pydantic import ConfigDict, JsonValue, TypeAdapter
from pydantic.dataclasses import dataclass

from launcher.errors import ConfigProblem
from launcher.formatting import duration_text, share_text
from launcher.runs.trials import Trial
from launcher.sweep_settings import COST, GPU_HOURS, TOKENS_PER_SECOND, VALIDATION_LOSS
from litgpt_demo.documents import parse_json
from litgpt_demo.evaluation import Score

TrialEnd: TypeAlias = Literal["done", "pruned", "failed", "stopped"]
"""The end of a trial. One that was stopped goes on when the sweep is started again."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(arbitrary_types_allowed=True))
class Outcome:
    """The result of a trial."""

    trial: Any
    """The Trial."""
    run: str
    """`<name>-<key>`, or '' where the trial did not get that far."""
    validation_loss: float | None
    """Nats per token; of a trial that was pruned or stopped the last one."""
    tokens_per_second: float | None
    score: Score | None = None
    """The score that ranks it, where the sweep has an objective."""
    scores: tuple[Score, ...] = ()
    """The scores that are objectives."""
    error: str = ""
    """The verdict on a trial that failed, or the reason why it was pruned or stopped."""
    ended: TrialEnd | None = None
    """None says what the others do: a trial without an error is done."""
    step: int | None = None
    """The last step that it trained."""
    mfu: float | None = None
    dollars: float | None = None
    """Its cost at list price; None where no price is known."""
    gpu_hours: float | None = None
    seconds: float | None = None
    """The wall time of its attempts."""
    flow_run: str = ""
    """The id of its flow run in Prefect."""

    @property
    def state(self) -> TrialEnd:
        """Return how it ended."""
        return self.ended or ("failed" if self.error else "done")

    def figure(self, objective: str = "") -> tuple[float | None, bool]:
        """Return the figure of an objective, None where it has none, and whether more of it is better.

        A score of which nobody says which way is better is better higher.
        """
        measured = {
            VALIDATION_LOSS: (self.validation_loss, False),
            COST: (self.dollars, False),
            GPU_HOURS: (self.gpu_hours, False),
            TOKENS_PER_SECOND: (self.tokens_per_second, True),
        }
        score = {score.name: score for score in self.scores}.get(objective, self.score)
        if objective in measured or (not objective and self.score is None):
            return measured[objective or VALIDATION_LOSS]
        return (None, True) if score is None else (score.value, score.higher_is_better is not False)

    def worth(self, objective: str = "") -> float | None:
        """Return the figure of an objective so that less is better; None where it has none."""
        value, higher_is_better = self.figure(objective)
        if value is None or math.isnan(value):
            return None
        return -value if higher_is_better else value

    def rank(self, objective: str = "") -> tuple[int, float]:
        """Return the sort key of a trial: first those that came to their end, the smaller their figure the better."""
        worth = self.worth(objective)
        if self.state in {"pruned", "stopped"}:
            return 1, math.inf if self.validation_loss is None else self.validation_loss
        return (2, math.inf) if worth is None or self.state == "failed" else (0, worth)


_OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)


def stored(outcome: Outcome) -> dict[str, JsonValue]:
    """Return an outcome as JSON has it, without its trial."""
    made: dict[str, JsonValue] = _OUTCOME.dump_python(outcome, mode="json", exclude={"trial"})
    return made


def read_outcome(trial: Trial, document: bytes, *, where: str) -> Outcome:
    """Return the outcome that `stored` made this JSON of.

    Raises:
        DataError: it is none of this version.
    """
    values = parse_json(document, dict[str, Any], where=where, fix="a new sweep takes its place")
    return replace(_OUTCOME.validate_python({**values, "trial": None}), trial=trial)


def objective_of(scores: Sequence[Score], objective: str | None) -> Score | None:
    """Return the score that is a sweep's objective; None where it has none.

    Raises:
        ConfigProblem: the evaluation makes no such score.
    """
    if objective is None:
        return None
    found = {score.name: score for score in scores}
    if objective not in found:
        raise ConfigProblem(f"sweep.objective={objective} is no score of the evaluation; it makes {', '.join(found)}")
    return found[objective]


def best_first(outcomes: Iterable[Outcome], objective: str = "") -> list[Outcome]:
    """Return the outcomes in the order of the table."""
    return sorted(outcomes, key=lambda outcome: outcome.rank(objective))


def pareto_front(outcomes: Iterable[Outcome], objectives: Sequence[str]) -> list[Outcome]:
    """Return the finished trials than which no other is better in one objective and as good in all others."""
    rated: list[tuple[Outcome, list[float]]] = []
    for outcome in outcomes:
        worths = [worth for name in objectives if (worth := outcome.worth(name)) is not None]
        if outcome.state == "done" and len(worths) == len(objectives):
            rated.append((outcome, worths))
    return [
        outcome
        for outcome, mine in rated
        if not any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for _, other in rated)
    ]


# Columns that are there only where some trial has a figure for them.
_MEASURED = ("on the front", "MFU", "cost", "GPU hours", "time", "report")


def ranking(
    outcomes: Iterable[Outcome], objectives: Sequence[str] = (), *, numbered: bool = False, runs: str = ""
) -> list[dict[str, Any]]:
    """Return the sweep's table, best trial first.

    Args:
        objectives: the first one ranks; of several the Pareto front is marked.
        numbered: show the trials' numbers.
        runs: the address of the folder that has the runs' folders.
    """
    every, counted = best_first(outcomes, next(iter(objectives), "")), GPU_HOURS in objectives
    front = [outcome.trial for outcome in pareto_front(every, objectives)] if len(objectives) > 1 else []
    table = [
        {
            **({"trial": str(outcome.trial.number)} if numbered else {}),
            **{name: str(value) for name, value in outcome.trial.changes.items()},
            "validation loss": "" if outcome.validation_loss is None else f"{outcome.validation_loss:.4f}",
            **{score.name: str(score) for score in (outcome.scores or filter(None, [outcome.score]))},
            "on the front": "yes" if outcome.trial in front else "",
            "tokens/s": "" if outcome.tokens_per_second is None else f"{outcome.tokens_per_second:,.0f}",
            "MFU": "" if outcome.mfu is None else share_text(outcome.mfu),
            "cost": "" if outcome.dollars is None else f"${outcome.dollars:,.2f}",
            "GPU hours": "" if outcome.gpu_hours is None or not counted else f"{outcome.gpu_hours:.3g}",
            "time": "" if outcome.seconds is None else duration_text(outcome.seconds),
            "run": outcome.run,
            "report": f"{runs}/{outcome.run}" if runs and outcome.run else "",
            "error": outcome.error.splitlines()[0] if outcome.error else "",
        }
        for outcome in every
    ]
    empty = {name for name in _MEASURED if not any(row[name] for row in table)}
    return [{name: value for name, value in row.items() if name not in empty} for row in table]


def best_yaml(outcomes: Iterable[Outcome], objective: str = "") -> str | None:
    """Return the best trial's whole config, ready for `train-litgpt run`; None where none succeeded."""
    every = best_first(outcomes, objective)
    if not every or every[0].rank(objective) >= (0, math.inf):
        return None
    best = every[0]
    score = "" if best.score is None else f"{best.score.name} {best.score}, "
    heading = f"# {score}validation loss {best.validation_loss:.4f}, run {best.run}\n"
    settings = best.trial.config.model_dump(mode="json", exclude={"start"})
    return heading + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
