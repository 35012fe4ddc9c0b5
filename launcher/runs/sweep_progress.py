"""The state of a whole sweep: what its process writes down while it goes on, and what `status` makes of it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import Field

from launcher.config import SweepConfig
from launcher.formatting import duration_text
from launcher.runs.outcomes import Outcome, TrialEnd, best_first
from launcher.sweep_settings import SweepBudget
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError
from litgpt_demo.settings import Settings
from litgpt_demo.storage import Storage

SWEEP_PAGE = "sweep.html"
"""The report of a sweep, in its folder."""
_PROGRESS = "progress.json"
_ENDS: tuple[TrialEnd, ...] = ("done", "pruned", "failed", "stopped")
_SILENT = 120.0  # seconds without news of the sweep's process, which writes every 30 s, that are worth a word


class EndedTrial(Settings):
    """A trial that has come to an end, of whichever kind."""

    trial: int
    """Its number."""
    title: str
    """Its changes in short."""
    run: str
    """`<name>-<key>`, or '' where it did not get that far."""
    state: TrialEnd
    figure: float | None
    """The figure of the objective that ranks; None where it has none that is finite."""


class SweepProgress(Settings):
    """A sweep as its own process knows it."""

    trials: int
    """The number of trials that it is to have."""
    objective: str
    budget: SweepBudget
    gpu_hours: float
    """GPU hours that all trials have taken so far, those that run included."""
    dollars: float | None
    """The same at list price; None where no price is known."""
    ended: tuple[EndedTrial, ...]
    """The trials that have ended, best first."""
    written: float = Field(default_factory=time.time)
    """The time of writing, in seconds since the epoch."""

    @property
    def best(self) -> EndedTrial | None:
        """Return the best trial that came to its end; None where none has one with a figure."""
        first = next(iter(self.ended), None)
        return first if first is not None and first.state == "done" and first.figure is not None else None


def progress_of_trials(
    sweep: SweepConfig, outcomes: Iterable[Outcome], *, trials: int, gpu_hours: float, dollars: float | None
) -> SweepProgress:
    """Return the progress of a sweep with these outcomes.

    Args:
        trials: the number of trials that it is to have.
        gpu_hours: what all trials have taken so far.
        dollars: the same at list price.
    """
    aim = sweep.sweep.aims[0]
    ended = []
    for one in best_first(outcomes, aim):
        value = one.figure(aim)[0]
        finite = value if value is not None and math.isfinite(value) else None
        title = one.trial.title
        ended.append(EndedTrial(trial=one.trial.number, title=title, run=one.run, state=one.state, figure=finite))
    return SweepProgress(
        trials=trials,
        objective=aim,
        budget=sweep.sweep.budget,
        gpu_hours=gpu_hours,
        dollars=dollars,
        ended=tuple(ended),
    )


def write_progress(folder: Storage, progress: SweepProgress) -> None:
    """Leave the progress of a sweep in its folder."""
    folder.write(_PROGRESS, progress.model_dump_json(indent=1).encode())


def read_progress(folder: Storage) -> SweepProgress | None:
    """Return the progress of the sweep with this folder; None where nothing tells."""
    try:
        content = folder.read(_PROGRESS)
        return parse_json(content, SweepProgress, where=folder.address(_PROGRESS), fix="the sweep writes it anew")
    except (FileNotFoundError, DataError):
        return None


def read_endings(folder: Storage) -> dict[str, TrialEnd]:
    """Return how the trials of a sweep have ended, by their runs; none where nothing tells."""
    progress = read_progress(folder)
    return {} if progress is None else {one.run: one.state for one in progress.ended if one.run}


# --- what `status` shows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    """A sweep in figures."""

    sweep: str
    trials: int
    done: int
    pruned: int
    failed: int
    stopped: int
    """Trials that go on when the sweep is started again."""
    running: int
    waiting: int
    """Trials that have not begun."""
    objective: str
    best: EndedTrial | None
    gpu_hours: float
    dollars: float | None
    budget: SweepBudget
    page: str | None
    """The address of sweep.html; None while there is none."""
    written: float
    """The time of the newest word from the sweep's process, in seconds since the epoch."""

    def as_json(self) -> dict[str, Any]:
        """Return the same for a program."""
        best = None if self.best is None else self.best.model_dump(mode="json")
        return {**asdict(self), "best": best, "budget": self.budget.model_dump(mode="json")}

    def lines(self, *, now: float) -> list[str]:
        """Return the same for a person."""
        counts = {name: getattr(self, name) for name in (*_ENDS, "running", "waiting")}
        told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        best = "none has come to its end"
        if self.best is not None:
            run = f", run {self.best.run}" if self.best.run else ""
            objective = self.objective.replace("_", " ")
            best = f"trial {self.best.trial} ({self.best.title}), {objective} {self.best.figure:.4f}{run}"
        silence = now - self.written
        late = self.waiting + self.running + self.stopped and silence > _SILENT
        return [
            f"{self.sweep}: {self.trials} trials: {told}",
            f"best so far: {best}",
            f"taken: {_taken(self.gpu_hours, self.dollars, self.budget)}",
            *([f"report: {self.page}"] if self.page is not None else []),
            *([f"nobody has written this for {duration_text(silence)}: is its process gone?"] if late else []),
        ]


def _taken(gpu_hours: float, dollars: float | None, budget: SweepBudget) -> str:
    """Return what was taken of what may be."""
    hours = f"{gpu_hours:.3g}" + ("" if budget.gpu_hours is None else f" of {budget.gpu_hours:g}") + " GPU hours"
    if dollars is None:
        return hours
    return f"{hours}, ${dollars:,.2f}" + ("" if budget.dollars is None else f" of ${budget.dollars:,.2f}")


def summary_of(sweep: str, folder: Storage, live: Collection[str]) -> SweepSummary | None:
    """Return the summary of a sweep; None where its process has written nothing yet.

    Args:
        live: the runs of its trials whose jobs live.
    """
    if (progress := read_progress(folder)) is None:
        return None
    over = {one.run for one in progress.ended if one.state != "stopped"}
    running = set(live) - over
    ends = {end: sum(one.state == end and one.run not in running for one in progress.ended) for end in _ENDS}
    return SweepSummary(
        sweep=sweep,
        trials=max(progress.trials, sum(ends.values()) + len(running)),
        **ends,
        running=len(running),
        waiting=max(0, progress.trials - sum(ends.values()) - len(running)),
        objective=progress.objective,
        best=progress.best,
        gpu_hours=progress.gpu_hours,
        dollars=progress.dollars,
        budget=progress.budget,
        page=(folder.browse_url(SWEEP_PAGE) or folder.address(SWEEP_PAGE)) if folder.exists(SWEEP_PAGE) else None,
        written=progress.written,
    )
