"""Waiting for a job and tailing its logs, written once for all platforms. Time is a parameter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from launcher.errors import LoginProblem, PlatformUnreachable
from launcher.job import JobId, JobState, JobStatus, LogLine, LogPage
from launcher.platforms.base import Platform
from litgpt_demo.errors import NetworkError, was_given_up

T = TypeVar("T")


class Clock:
    """Seconds, and waiting for some to pass."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def pause(seconds: float, *, look: Callable[[], object], every: float = 2.0, clock: Clock | None = None) -> None:
    """Wait, and look every few seconds for a reason not to: what `look` raises ends the wait.

    A storage that does not answer is no reason: the next look asks it again.
    """
    clock = clock or Clock()
    end = clock.now() + seconds
    while (left := end - clock.now()) > 0:
        with suppress(NetworkError):
            await asyncio.to_thread(look)
        await clock.sleep(min(left, every))


PATIENCE = 900.0
"""Seconds for which a platform may be silent before waiting for it is given up."""
_NOTICED = 30.0
"""Seconds of silence that are worth a word: a connection that is opened anew takes less."""


async def follow(
    platform: Platform,
    job_id: JobId,
    *,
    on_lines: Callable[[Iterable[LogLine]], None],
    poll: float,
    on_status: Callable[[JobStatus], None] = lambda _: None,
    on_silence: Callable[[PlatformUnreachable | LoginProblem], None] = lambda _: None,
    position: str = "",
    on_position: Callable[[str], None] = lambda _: None,
    patience: float = PATIENCE,
    clock: Clock | None = None,
) -> JobStatus:
    """Hand every new log line to `on_lines` until the job has ended; returns how. Every line of the job is delivered.

    Args:
        poll: seconds between two looks.
        on_status: told of every look, before the lines that were found with it.
        on_silence: called once whenever the platform has begun to refuse the credentials, or has not answered for half
            a minute: waiting goes on.
        position: where to begin in the logs; the beginning, if it is not said.
        on_position: told of the place behind the lines that were handed on, whenever some were.
        patience: seconds a platform may stay silent, refuse the credentials, or not know the job, before waiting is
            given up. The job itself is not touched: a new call takes up again.

    Raises:
        PlatformUnreachable: silent for longer than that.
        LoginProblem: the credentials were refused for longer than that.
    """
    clock = clock or Clock()
    silence = _Silence(platform=platform.name, about=job_id, patience=patience, clock=clock, on_silence=on_silence)
    while True:
        try:
            # Status first: what the job wrote before it ended is then surely in the page that follows.
            status = await asyncio.to_thread(platform.status, job_id)
            page = await asyncio.to_thread(platform.logs, job_id, position)
        except (PlatformUnreachable, LoginProblem) as error:
            silence.lasts(error)
        else:
            on_status(status)
            on_lines(page.lines)
            position = page.position
            if page.lines:
                await asyncio.to_thread(on_position, position)
            silence.ends(known=page.more or status.state is not JobState.ABSENT)
            if page.more:
                continue  # to what is there already, without a pause
            if status.state.final:
                return status
        await clock.sleep(poll)


async def asked(
    ask: Callable[[], T],
    *,
    platform: str,
    about: str,
    on_silence: Callable[[PlatformUnreachable | LoginProblem], None],
    patience: float = PATIENCE,
    clock: Clock | None = None,
) -> T:
    """Return the answer of a platform, which is asked again while it does not answer.

    Args:
        about: the job or run that it is asked about, for the message.

    Raises:
        PlatformUnreachable: it was silent for longer than `patience` seconds, or cannot be asked from here.
    """
    clock = clock or Clock()
    silence = _Silence(platform=platform, about=about, patience=patience, clock=clock, on_silence=on_silence)
    wait = 1.0
    while True:
        try:
            return await asyncio.to_thread(ask)
        except PlatformUnreachable as error:
            if was_given_up(error):
                raise
            silence.lasts(error)
        await clock.sleep(wait)
        wait = min(2 * wait, 15.0)


@dataclass(kw_only=True)
class _Silence:
    """The time for which a platform has said nothing of a job, and what follows from it."""

    platform: str
    about: str
    """The job or run that it is asked about, for the message."""
    patience: float
    clock: Clock
    on_silence: Callable[[PlatformUnreachable | LoginProblem], None]
    told: bool = False

    def __post_init__(self) -> None:
        self.heard = self.clock.now()

    def lasts(self, error: PlatformUnreachable | LoginProblem) -> None:
        """Give up after a platform that has not answered for too long; tell of one that has begun not to."""
        seconds = self.clock.now() - self.heard
        if seconds > self.patience:
            raise type(error)(
                f"{self.about} on {self.platform}: no answer for {seconds:.0f} s ({error}); the job may well be "
                "running: run the same command again to take up where this left off",
                given_up=True,
            ) from error
        if not self.told and (isinstance(error, LoginProblem) or seconds > _NOTICED):
            self.told = True
            self.on_silence(error)

    def ends(self, *, known: bool) -> None:
        """Begin anew after an answer, unless it is that there is no such job, and has been for too long."""
        now, self.told = self.clock.now(), False
        if known:
            self.heard = now
        elif now - self.heard > self.patience:
            raise PlatformUnreachable(
                f"{self.platform} has not known {self.about} for {now - self.heard:.0f} s; was it removed by hand?",
                given_up=True,
            )


async def read_logs(platform: Platform, job_id: JobId, *, on_lines: Callable[[Iterable[LogLine]], None]) -> None:
    """Hand every line that is there to `on_lines`, page by page."""
    page = LogPage((), "", more=True)
    while page.more:
        page = await asyncio.to_thread(platform.logs, job_id, page.position)
        on_lines(page.lines)
