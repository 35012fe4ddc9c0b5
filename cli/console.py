"""The view of a pipeline in a terminal: steps with their results, a progress bar during training, what to read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from launcher import events
from launcher.curves import summary
from launcher.events import Event, Step
from launcher.formatting import duration_text

_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}

_QUICK = 3.0  # seconds that nobody minds

_REMEMBERED = 200  # metrics rows: more than the pace and the time left are taken from


class Measured(ProgressColumn):
    """A bar and a count, for what has a known end; nothing for what has none."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = BarColumn(bar_width=28)

    def render(self, task: Task) -> Table:
        shown = Table.grid(padding=(0, 1))
        if task.total is not None:
            shown.add_row(self._bar.render(task), f"{task.completed:.0f}/{task.total:.0f}")
        return shown


class Elapsed(ProgressColumn):
    """The seconds that have passed, for work without a known end; nothing while it is quick."""

    def render(self, task: Task) -> Text:
        slow = task.total is None and (task.elapsed or 0.0) >= _QUICK
        return Text(f"({duration_text(task.elapsed)})" if slow else "", style="dim")


class Watch:
    """Listens to a pipeline's events while it is entered, and prints them for a person.

    On a terminal the running step is a live line; elsewhere (a file, CI) every tenth of the training is a line.
    """

    def __init__(self, console: Console, *, output: bool = False) -> None:
        """`output`: also print the lines that jobs print."""
        self._console, self._output = console, output
        self._rows: list[Mapping[str, Any]] = []
        self._started: dict[str, float] = {}
        self._line: TaskID | None = None
        self._percent_shown = 0
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            Measured(),
            TextColumn("{task.fields[what]}"),
            Elapsed(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._listener = events.Listener(self._receive)

    def __enter__(self) -> Self:
        self._listener.__enter__()
        self._progress.start()
        self._begin("", "starting")  # importing Prefect takes seconds
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.__exit__()
        with suppress(OSError):
            self._progress.stop()

    def waiting(self, what: str) -> None:
        """Say what is waited for before the first step."""
        self._begin("", what)
        if not self._console.is_terminal:
            self._console.print(f"  [dim]{escape(what)}[/]", soft_wrap=True)

    def _receive(self, event: Event) -> None:
        """Show an event. A terminal that is gone must not end the pipeline."""
        with suppress(OSError):
            match event:
                case events.StepStarted():
                    self._rows, self._percent_shown = [], 0
                    self._started[event.step] = time.monotonic()
                    self._begin(f"{event.step.place} {event.step}", event.what)
                case events.StepProgress(fraction=None):
                    self._live(f"{event.step.place} {event.step}", event.what)
                case events.StepProgress(fraction=float() | int() as fraction):
                    percent = int(100 * fraction)
                    self._live(f"{event.step.place} {event.step}", event.what, done=percent, total=100)
                    if percent < 100:  # then the step's own line follows
                        self._tenth(percent, f"{percent} %  {escape(event.what)}")
                case events.MetricsRow():
                    self._rows.append(event.row)
                    if len(self._rows) > 2 * _REMEMBERED:  # the start and the newest say it all
                        self._rows = [self._rows[0], *self._rows[-_REMEMBERED:]]
                    if event.row.get("kind") in {"step", "start"}:
                        seen = summary(self._rows)
                        what = "  ".join(seen.facts)
                        self._live(f"{Step.TRAINING.place} {Step.TRAINING}", what, done=seen.step, total=seen.steps)
                        self._tenth(int(seen.percent), f"step {seen.step}/{seen.steps}  {what}")
                case events.MetricsKnown(rows=[first, *others]):
                    self._rows = [first, *others[-_REMEMBERED:]]
                case events.StepDone():
                    self._clear()
                    seconds = time.monotonic() - self._started.get(event.step, time.monotonic())
                    how = "found done" if event.reused else duration_text(seconds)
                    step = f"[green]✓[/] {event.step.place} [bold]{event.step:<12}[/]"
                    self._console.print(f"{step} {escape(event.what)} [dim]({how})[/]", soft_wrap=True)
                case events.Note():
                    self._console.print(f"  [{_STYLES[event.severity]}]{escape(event.what)}[/]", soft_wrap=True)
                case events.Output() if self._output:
                    self._console.print(f"  [dim]{escape(event.line)}[/]", soft_wrap=True)

    def _tenth(self, percent: int, line: str) -> None:
        """Print the line where no terminal shows a live one, if another tenth is done since the last time."""
        if not self._console.is_terminal and percent // 10 > self._percent_shown // 10:
            self._percent_shown = percent
            self._console.print(f"  {line}", soft_wrap=True)

    def _begin(self, description: str, what: str) -> None:
        """Show a live line whose time begins now."""
        self._clear()
        self._live(description, what)

    def _clear(self) -> None:
        if self._line is not None:
            self._progress.remove_task(self._line)
            self._line = None

    def _live(self, description: str, what: str, *, done: int = 0, total: int | None = None) -> None:
        if self._line is None:
            self._line = self._progress.add_task(description, total=total, what=escape(what))
        self._progress.update(
            self._line, description=description, what=escape(what), completed=done, total=total, visible=True
        )
