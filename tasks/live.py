"""Artifacts that Prefect shows of work in progress, updated in place."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Self
from uuid import UUID

import httpx
from prefect import get_client, get_run_logger
from prefect.artifacts import acreate_markdown_artifact, acreate_progress_artifact, aupdate_progress_artifact
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.exceptions import PrefectException

from litgpt_demo.errors import words_of

# Seconds between two updates of what the UI shows; it refreshes on focus, so more often would be for nobody.
_UPDATE = 5.0
# Seconds between two lines in the log: a week of work stays readable.
LINE = 60.0
_ANSWER = 10.0  # seconds that Prefect's server has: who waits for it may hold machines that are paid for


async def could_show(update: Coroutine[Any, Any, object], *, otherwise: str) -> bool:
    """Update what Prefect shows; False, with a warning, where its server is away: that must not hold up the work."""
    try:
        await asyncio.wait_for(update, _ANSWER)
    except (TimeoutError, httpx.HTTPError, PrefectException) as error:
        get_run_logger().warning("%s (%s)", otherwise, words_of(error) or "no answer")
        return False
    return True


class Live(ABC):
    """While it is entered, artifacts show how far the work is."""

    def __init__(self) -> None:
        self.news = 0
        """Grows with everything that could be shown."""
        self._shown, self._line_at = 0, time.monotonic()
        self._ended = asyncio.Event()
        self._progress: UUID | None = None
        self._page: UUID | None = None

    async def __aenter__(self) -> Self:
        self._updates = asyncio.create_task(self._update_till_the_end())
        return self

    async def __aexit__(self, *exception: object) -> None:
        # Not cancelled: an update cut in the middle would leave one artifact of two.
        self._ended.set()
        await self._updates

    async def _update_till_the_end(self) -> None:
        """Show what is new, and once more at the end; what a server that is away has missed is in the next update."""
        ended = False
        while not ended:
            ended = self._ended.is_set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _UPDATE)
            news = self.news
            if news != self._shown and await could_show(self.show(), otherwise="the artifacts could not be updated"):
                self._shown = news

    def line_is_due(self, *, anyway: bool = False) -> bool:
        """Return whether the log's last line is long ago, or one is due anyway; if so, it is written now."""
        due = anyway or time.monotonic() > self._line_at + LINE
        if due:
            self._line_at = time.monotonic()
        return due

    @abstractmethod
    async def show(self) -> None:
        """Update the artifacts."""

    async def show_progress(self, percent: float, *, key: str, description: str) -> None:
        if self._progress is None:
            self._progress = await acreate_progress_artifact(percent, key=key, description=description)
        else:
            await aupdate_progress_artifact(self._progress, percent, description=description)

    async def show_page(self, markdown: str, *, key: str, description: str) -> None:
        if self._page is None:
            self._page = await acreate_markdown_artifact(markdown, key=key, description=description)
        else:
            async with get_client() as client:
                await client.update_artifact(self._page, ArtifactUpdate(data=markdown))
