"""Waiting for a job and following its logs, once for all platforms."""

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

# The clock of all waiting, which a test sets forward.
now, sleep = time.monotonic, asyncio.sleep


async def pause(seconds: float, *, look: Callable[[], object], every: float = 2.0) -> None:
    """Wait, and call `look` every few seconds. Its error ends the wait, unless a storage does not answer."""
    end = now() + seconds
    while now() < end:
        with suppress(NetworkError):
            await asyncio.to_thread(look)
        await sleep(max(0.0, min(end - now(), every)))


_REPORTED_SILENCE = 30.0
"""Seconds of silence that are reported: a connection that is opened again takes less."""


async def retry_until_reachable(
    query: Callable[[], T],
    *,
    about: str,
    on_silence: Callable[[PlatformUnreachable | LoginProblem], None],
    transient: tuple[type[PlatformUnreachable | LoginProblem], ...] = (PlatformUnreachable,),
    pauses: tuple[float, float] = (1.0, 15.0),
) -> T:
    """Return the answer of a platform, which is queried again for timeouts.PLATFORM while it raises one of the
    `transient` errors. `on_silence` is called once, when the credentials were refused or half a minute has passed.
    `pauses` are the first and the longest."""
    started, is_reported, wait = now(), False, pauses[0]
    while True:
        try:
            return await asyncio.to_thread(query)
        except transient as error:
            if is_marked_no_retry(error):
                raise
            seconds = now() - started
            if seconds > timeouts.PLATFORM:
                raise type(error)(
                    f"{about}: no answer for {seconds:.0f} s ({error}); the job may still be running: "
                    "run the same command again to reattach to it",
                    no_retry=True,
                ) from error
            if not is_reported and (isinstance(error, LoginProblem) or seconds > _REPORTED_SILENCE):
                is_reported = True
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
    """Pass every new log line of a job to `on_lines` until the job has ended, and return its last status. `on_status`
    is called before the lines that came with it, `on_position` after them. `recorded` returns the end that another
    orchestrator has recorded: it removes an ended job before it starts the next one."""
    last_seen = now()

    def query() -> tuple[JobStatus, LogPage]:
        # The status comes first, so that the page has all lines of a job that has ended.
        status = platform.status(job_id)
        if status.state in {JobState.ABSENT, JobState.CANCELLED}:
            status = recorded() or status
        return status, platform.logs(job_id, position)

    while True:
        status, page = await retry_until_reachable(
            query,
            about=f"{job_id} on {platform.name}",
            on_silence=on_silence,
            transient=(PlatformUnreachable, LoginProblem),
            pauses=(poll, poll),
        )
        on_status(status)
        on_lines(page.lines)
        position = page.position
        if page.lines:
            await asyncio.to_thread(on_position, position)
        if page.more or status.state is not JobState.ABSENT:
            last_seen = now()
        elif now() - last_seen > timeouts.PLATFORM:
            what = f"platform {platform.name} has had no job {job_id} for {now() - last_seen:.0f} s"
            raise PlatformUnreachable(what, fix="check whether another person removed it", no_retry=True)
        if page.more:
            continue
        if status.state.is_final:
            return status
        await sleep(poll)


async def read_logs(platform: Platform, job_id: JobId, *, on_lines: Callable[[Iterable[LogLine]], None]) -> None:
    page = LogPage((), "", more=True)
    while page.more:
        page = await asyncio.to_thread(platform.logs, job_id, page.position)
        on_lines(page.lines)
