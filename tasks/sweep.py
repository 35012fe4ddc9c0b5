"""The page of a sweep while it goes on, and its table and curves in Prefect, as trials end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prefect import get_run_logger
from prefect.artifacts import acreate_link_artifact

from launcher.config import SweepConfig
from launcher.reports.sweep import SweepReport, sweep_markdown, sweep_page
from launcher.runs.index import Index
from launcher.runs.outcomes import Outcome, best_yaml, ranking
from launcher.runs.studies import importance, storage_of
from launcher.runs.sweep_progress import SWEEP_PAGE
from launcher.runs.trials import sweep_name
from litgpt_demo.metrics import damaged_lines
from litgpt_demo.runs import read_metrics
from tasks.live import Live

_EVERY = 30.0  # seconds: a page of many trials takes a second to draw


class LiveSweep(Live):
    """The page of a sweep under its root, and its table and curves as artifacts, as far as trials have ended."""

    def __init__(self, config: SweepConfig, *, every: float = _EVERY) -> None:
        """Begin with no trial; `every` is the seconds between two updates."""
        super().__init__(every=every)
        self._config = config
        self._outcomes: list[Outcome] = []
        self._made: SweepReport | None = None
        self._linked = False

    def have(self, outcomes: Iterable[Outcome]) -> None:
        """Take the outcomes of all trials that have ended so far."""
        if (those := list(outcomes)) != self._outcomes:
            self._outcomes, self._made = those, None
            self.news += 1

    async def show(self) -> None:
        """Write the page and update the artifacts. A root that is away must not end the trials."""
        try:
            made = await self.write_page()
        except OSError as error:
            get_run_logger().warning("%s could not be written (%s); the trials go on", SWEEP_PAGE, error)
            return
        settings, name = self._config.sweep, sweep_name(self._config)
        table = ranking(self._outcomes, settings.aims, numbered=settings.has_study)
        await self.show_table(table, key=f"sweep-{name}", description="Trials, best first")
        await self.show_page(sweep_markdown(made), key=f"trials-{name}", description="Table and curves")
        storage = storage_of(self._config)
        if not self._linked and (link := storage.browse_url(SWEEP_PAGE)) is not None:
            text = storage.address(SWEEP_PAGE)
            await acreate_link_artifact(link, link_text=text, key=f"page-{name}", description="Its pictures")
            self._linked = True

    async def write_page(self) -> SweepReport:
        """Write sweep.html unless it is there with these outcomes, and return what is in it."""
        if self._made is not None:
            return self._made
        outcomes = self._outcomes
        made = await asyncio.to_thread(_report, self._config, outcomes)
        page = await asyncio.to_thread(sweep_page, made)
        await asyncio.to_thread(storage_of(self._config).write, SWEEP_PAGE, page.encode())
        if outcomes is self._outcomes:  # else another trial has ended in the meantime
            self._made = made
        return made


def _report(config: SweepConfig, outcomes: list[Outcome]) -> SweepReport:
    runs = Index.of(config.root).root.within("runs")
    aim = config.sweep.aims[0]
    return SweepReport(
        config=config,
        outcomes=outcomes,
        rows={one.run: read_metrics(runs.within(one.run), damaged_lines()) for one in outcomes if one.run},
        importance=importance(outcomes, config.sweep.dimensions, aim),
        best=best_yaml(outcomes, aim),
    )
