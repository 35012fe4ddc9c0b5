"""Waiting for a job and tailing its logs, once for all platforms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from launcher.errors import LoginProblem, PlatformUnreachable
from launcher.job import JobId, JobState, JobStatus, LogLine, LogPage
from launcher.platforms.base import Platform
from litgpt_demo import timeouts
from litgpt_demo.errors import NetworkError, is_marked_no_retry

T = TypeVar("T")


# The one clock of all waiting, which a test sets forward.
now, sleep = time.monotonic, asyncio.sleep


async def pause(seconds: float, *, look: Callable[[], object], every: float = 2.0) -> None:
    """Wait, and look every few seconds for a reason not to: what `look` raises ends the wait.

    A storage that does not answer is no reason: the next look asks it again.
    """
    end = now() + seconds
    while (left := end - now()) > 0:
        with suppress(NetworkError):
            await asyncio.to_thread(look)
        await sleep(min(left, every))


_NOTICED = 30.0
"""Seconds of silence that are worth a word: a connection that is opened anew takes less."""


async def asked(
    ask: Callable[[], T],
    *,
    about: str,
    on_silence: Callable[[PlatformUnreachable | LoginProblem], None],
    bears: tuple[type[PlatformUnreachable | LoginProblem], ...] = (PlatformUnreachable,),
    pauses: tuple[float, float] = (1.0, 15.0),
) -> T:
    """Return the answer of a platform, which is asked again while it does not answer: what it `bears` is raised when it
    has lasted longer than timeouts.PLATFORM, or where it cannot be asked from here.

    Args:
        about: the job or run that it is asked about, and the platform, for the message.
        on_silence: called once when it has refused the credentials, or has not answered for half a minute.
        pauses: seconds before it is asked again, at first and at the most.
    """
    begun, told, wait = now(), False, pauses[0]
    while True:
        try:
            return await asyncio.to_thread(ask)
        except bears as error:
            if is_marked_no_retry(error):
                raise
            if (seconds := now() - begun) > timeouts.PLATFORM:
                raise type(error)(
                    f"{about}: no answer for {seconds:.0f} s ({error}); the job may well be running: "
                    "run the same command again to take up where this left off",
                    no_retry=True,
                ) from error
            if not told and (isinstance(error, LoginProblem) or seconds > _NOTICED):
                told = True
                on_silence(error)
        await sleep(wait)
        wait = min(2 * wait, pauses[1])


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
    recorded: Callable[[], JobStatus | None] = lambda: None,
) -> JobStatus:
    """Hand every new log line to `on_lines` until the job has ended; returns how. Every line of the job is delivered.

    Args:
        poll: seconds between two looks.
        on_status: told of every look, before the lines that were found with it.
        on_silence: as `asked` calls it, for each silence; waiting goes on.
        position: where to begin in the logs; the beginning, if it is not said.
        on_position: told of the place behind the lines that were handed on, whenever some were.
        recorded: how the job ended for another orchestrator, which removes a job that has ended before it starts the
            next one. It is asked for a job that was removed.
    """
    known = now()

    def look() -> tuple[JobStatus, LogPage]:
        # Status first: what the job wrote before it ended is then surely in the page that follows.
        status = platform.status(job_id)
        if status.state in {JobState.ABSENT, JobState.CANCELLED}:
            status = recorded() or status
        return status, platform.logs(job_id, position)

    while True:
        status, page = await asked(
            look,
            about=f"{job_id} on {platform.name}",
            on_silence=on_silence,
            bears=(PlatformUnreachable, LoginProblem),
            pauses=(poll, poll),
        )
        on_status(status)
        on_lines(page.lines)
        position = page.position
        if page.lines:
            await asyncio.to_thread(on_position, position)
        if page.more or status.state is not JobState.ABSENT:
            known = now()
        elif (seconds := now() - known) > timeouts.PLATFORM:
            raise PlatformUnreachable(
                f"{platform.name} has not known {job_id} for {seconds:.0f} s; was it removed by hand?", no_retry=True
            )
        if page.more:
            continue  # to what is there already, without a pause
        if status.state.is_final:
            return status
        await sleep(poll)


async def read_logs(platform: Platform, job_id: JobId, *, on_lines: Callable[[Iterable[LogLine]], None]) -> None:
    """Hand every line that is there to `on_lines`, page by page."""
    page = LogPage((), "", more=True)
    while page.more:
        page = await asyncio.to_thread(platform.logs, job_id, page.position)
        on_lines(page.lines)
