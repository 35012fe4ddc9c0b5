"""The leftovers of dead runs on their platforms: machines or processes that nobody works with, and somebody pays for.

A run is dead when its last attempt is known to have ended. Of a run that lives, or whose state is not known, nothing is
listed here and nothing removed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from launcher.job import JobId
from launcher.runs.attempts import Attempts, OpenPlatform, recorded_platform
from launcher.runs.index import AttemptRecord, Index
from litgpt_demo.errors import TrainLitgptError

_AT_ONCE = 8  # runs that are looked at side by side: each is a question or two to a platform


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
