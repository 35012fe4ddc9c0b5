"""The way to a terminal: what nodes, platforms and files say is text there, and does nothing else.

Into a pipe or a file everything goes as it is, as with `kubectl logs` and `git log`. NO_COLOR takes the colours out, of
what others wrote too (https://no-color.org).
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from launcher.formatting import harmless
from litgpt_demo.findings import Finding

_COLOR = re.compile(r"\x1b\[[0-9;:]*m")


class Screen(Console):
    """A console whose texts cannot steer the terminal that they are shown on."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of a renderable; the movements of the cursor in them are rich's own."""
        for segment in super().render(renderable, options):
            if segment.control or not self.is_terminal:
                yield segment
            else:
                yield Segment(shown_as_text(segment.text), segment.style)

    def print_table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print rows of the same columns; nothing where there are none."""
        if not rows:
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in rows[0]:
            table.add_column(escape(name), overflow="fold")  # an address that is cut short is of no use
        for row in rows:
            table.add_row(*(escape(str(value)) for value in row.values()))
        self.print(table)


# Into a file or a pipe every row and message is one line, so that it can be searched and cut. Output of jobs has colons
# that are no emoji.
console = Screen(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 10_000)
stderr = Screen(stderr=True, highlight=False, emoji=False)


def shown_as_text(text: str) -> str:
    """Return what others wrote as a terminal may have it: colours stay, unless the user wants none."""
    shown = harmless(text)
    return _COLOR.sub("", shown) if os.environ.get("NO_COLOR") else shown


def show_line(line: str) -> None:
    """Print a line that somebody else wrote."""
    typer.echo(shown_as_text(line) if sys.stdout.isatty() else line)


def print_json(value: Any) -> None:
    """Print a value for programs, as one JSON document in ASCII."""
    typer.echo(json_text(value, indent=1))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value for programs as JSON in ASCII. What is no finite number is null: JSON has no other word for it."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """Return a value of JSON's kinds with null in the place of every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def print_findings(findings: Iterable[Finding]) -> None:
    """Print each finding on a line, and what to do about it on the next."""
    signs = {"error": "[bold red]✗[/]", "unknown": "[cyan]?[/]", "warning": "[yellow]![/]", "info": "[green]✓[/]"}
    for finding in findings:
        # What could be done about it is news, though neither good nor bad.
        sign = "[dim]·[/]" if finding.severity == "info" and finding.fix else signs[finding.severity]
        fix = f"\n    [dim]→ {escape(finding.fix)}[/]" if finding.fix else ""
        console.print(f"{sign} {escape(finding.what)} [dim]{finding.code}[/]{fix}", soft_wrap=True)


def print_notes(*notes: str, to: Screen = console) -> None:
    """Print what is worth knowing and no error; an empty note is none."""
    for note in filter(None, notes):
        to.print(f"[yellow]![/] {escape(note)}", soft_wrap=True)
