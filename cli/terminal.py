"""The way to a terminal: what nodes, platforms and files say is text there, and does nothing else.

Into a pipe or a file everything goes as it is, as with `kubectl logs` and `git log`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from launcher.formatting import harmless


class Screen(Console):
    """A console whose texts cannot steer the terminal that they are shown on."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of a renderable; the movements of the cursor in them are rich's own."""
        for segment in super().render(renderable, options):
            if segment.control or not self.is_terminal:
                yield segment
            else:
                yield Segment(harmless(segment.text), segment.style)


def show_line(line: str) -> None:
    """Print a line that somebody else wrote."""
    typer.echo(harmless(line) if sys.stdout.isatty() else line)
