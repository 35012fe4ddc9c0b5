"""The runs of a root as rows, and what dead ones have left on their platforms.

Leftovers are machines or processes that nobody works with, and somebody pays for. A run is dead when its last attempt
is known to have ended. Of a run that lives, or whose state is not known, nothing is listed and nothing removed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from launcher.curves import summary
from launcher.formatting import NOTHING, duration_text, loss_text
from launcher.job import JobId, JobState
from launcher.runs.attempts import Attempts, OpenPlatform, recorded_platform
from launcher.runs.index import AttemptRecord, DamagedRecords, Index
from launcher.runs.run import RunManifest
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.manifests import read_manifest
from litgpt_demo.runs import read_metrics

DONE = "done"
"""The state of a run that was trained, collected and reported."""

_AT_ONCE = 8  # runs looked at side by side: each is a few small reads and perhaps a question or two to a platform


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
    followers = index.followers()

    def row(record: AttemptRecord) -> RunRow:
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
            flow_runs=followers.get((record.run, record.attempt), ()),
            user=record.user,
            note=note,
        )

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(row, [one for one in index.newest(bad) if runs is None or one.run in runs]))


def table_of(rows: Sequence[RunRow]) -> list[dict[str, str]]:
    """Return the rows as the terminal shows them."""
    now = time.time()
    return [
        {
            "run": row.run,
            "state": row.state,
            "step": NOTHING if row.step is None else f"{row.step:,}" + (f"/{row.steps:,}" if row.steps else ""),
            "loss": loss_text(row.loss),
            "age": duration_text(now - row.started),
            "platform": row.platform,
            "attempts": str(row.attempts),
            "flow run": (row.flow_run or NOTHING)[:8],
        }
        for row in rows
    ]


# --- leftovers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """The things that are left of one attempt that has ended."""

    run: str
    record: AttemptRecord
    what: tuple[str, ...]

    @property
    def job_id(self) -> JobId:
        return self.record.job_id

    def __str__(self) -> str:
        return (
            f"{self.run}, attempt {self.record.attempt}, on {self.record.platform.get('kind')}: {', '.join(self.what)}"
        )


@dataclass(frozen=True, kw_only=True)
class Untold:
    """A run of which it cannot be known whether something is left; nothing of it is touched."""

    run: str
    why: str

    def __str__(self) -> str:
        return f"{self.run} is left alone, for its state is not known: {self.why}"


def leftovers(index: Index, *, open: OpenPlatform = recorded_platform) -> list[Leftover | Untold]:
    """Return what every dead run of an index has left, by run and attempt.

    A job of another machine, which that one alone can ask for, is passed over.
    """

    def of(run: str) -> list[Leftover | Untold]:
        attempts, found = Attempts(index=index, run=run, open=open), list[Leftover | Untold]()
        try:
            for record in attempts.records() if _is_dead(attempts) else ():
                if attempts.is_out_of_reach(record):
                    continue
                if what := attempts.platform_of(record).left(record.job_id):
                    found.append(Leftover(run=run, record=record, what=what))
        except TrainLitgptError as error:
            return [Untold(run=run, why=str(error))]
        return found

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [found for some in pool.map(of, index.runs()) for found in some]


def remove_leftover(index: Index, leftover: Leftover, *, open: OpenPlatform = recorded_platform) -> bool:
    """Remove it, and prove by listing that it is gone; False if the run has come to life since, and was left alone.

    Raises:
        PlatformUnreachable, PlatformRefused: something of it does not go.
    """
    attempts = Attempts(index=index, run=leftover.run, open=open)
    if not _is_dead(attempts):
        return False
    attempts.platform_of(leftover.record).cancel(leftover.job_id)
    return True


def _is_dead(attempts: Attempts) -> bool:
    """Return whether the run's last attempt is known to have ended."""
    last = attempts.last()
    return last is not None and last.status.state.final
