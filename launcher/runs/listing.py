"""The runs of a root as rows: what `train-litgpt runs` and `status` show."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from launcher.formatting import NOTHING, duration_text, loss_text
from launcher.job import JobState
from launcher.reports.curves import summary
from launcher.runs.attempts import Attempts, OpenPlatform, recorded_platform
from launcher.runs.index import AttemptRecord, DamagedRecords, Index
from launcher.runs.run import RunManifest
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.manifests import read_manifest
from litgpt_demo.runs import read_metrics

DONE = "done"
"""The state of a run that was trained, collected and reported."""

_AT_ONCE = 8  # runs looked at side by side: each is a few small reads and perhaps a question to a platform


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run as it is now."""

    run: str
    sweep: str | None
    state: str
    """A JobState of its last attempt, or DONE."""
    step: int | None
    steps: int | None
    loss: float | None
    """Nats per token: of the validation split if it is known, else of the newest step."""
    started: float
    """The start of the last attempt, in seconds since the epoch."""
    platform: str
    attempts: int
    flow_run: str | None
    """The Prefect flow run that started the last attempt."""
    flow_runs: tuple[str, ...]
    """Every flow run that started that attempt or took it up."""
    user: str
    note: str = ""
    """The reason why the state is not known, or what contradicts it."""

    @property
    def live(self) -> bool:
        """Return whether a job runs, as far as is known."""
        return self.state in {JobState.PENDING.value, JobState.RUNNING.value, JobState.UNKNOWN.value}

    def table_row(self, *, now: float) -> dict[str, str]:
        """Return what the terminal shows of it."""
        step = NOTHING if self.step is None else f"{self.step:,}" + (f"/{self.steps:,}" if self.steps else "")
        return {
            "run": self.run,
            "state": self.state,
            "step": step,
            "loss": loss_text(self.loss),
            "age": duration_text(now - self.started),
            "platform": self.platform,
            "attempts": str(self.attempts),
            "flow run": (self.flow_run or NOTHING)[:8],
        }

    def as_json(self) -> dict[str, Any]:
        """Return the same for a program."""
        return asdict(self)


def run_rows(
    index: Index,
    runs: Sequence[str] | None = None,
    *,
    bad: DamagedRecords | None = None,
    open: OpenPlatform = recorded_platform,
) -> list[RunRow]:
    """Return a row for each run of an index, or for `runs` alone, the newest first.

    A platform that does not answer makes that run's state unknown, with the reason.

    Args:
        bad: counts runs that have no row, because their records are damaged; without it one raises.
    """
    newest = [record for record in index.newest(bad) if runs is None or record.run in runs]
    followers = index.followers()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(
            pool.map(lambda record: _row(index, record, followers.get((record.run, record.attempt), ()), open), newest)
        )


def _row(index: Index, record: AttemptRecord, flow_runs: tuple[str, ...], open: OpenPlatform) -> RunRow:
    folder, note = index.root.within(f"runs/{record.run}"), ""
    step, steps, loss = None, None, None
    try:
        manifest = read_manifest(folder, RunManifest)
        last = None if manifest else Attempts(index=index, run=record.run, open=open).last()
        state = DONE if last is None else last.status.state.value
        if manifest:
            step, steps, loss = manifest.step, manifest.step, manifest.validation_loss
        elif rows := read_metrics(folder):
            seen = summary(rows)
            step, steps = seen.step, seen.steps
            loss = seen.loss if seen.validation_loss is None else seen.validation_loss
    except TrainLitgptError as error:
        state, note = JobState.UNKNOWN.value, str(error)
    return RunRow(
        run=record.run,
        sweep=record.sweep,
        state=state,
        step=step,
        steps=steps,
        loss=loss,
        started=record.created,
        platform=str(record.platform.get("kind")),
        attempts=record.attempt,
        flow_run=record.flow_run,
        flow_runs=flow_runs,
        user=record.user,
        note=note,
    )


def table_of(rows: Sequence[RunRow]) -> list[dict[str, str]]:
    """Return the rows as a table."""
    now = time.time()
    return [row.table_row(now=now) for row in rows]
