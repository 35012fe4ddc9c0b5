"""The way to a terminal: what nodes, platforms and files say is text there, and does nothing else.

Into a pipe or a file everything goes as it is, as with `kubectl logs` and `git log`.
"""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Iterator

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from launcher.formatting import harmless

# What our own lines are drawn with, in ASCII.
_MARKS = dict(zip("✓✗→·×–…━╸╺\u00a0", "+x>-x-.==- ", strict=True))
_MARKS |= dict.fromkeys(map(chr, range(0x2800, 0x2900)), "*")  # the dots of a spinner


def accept_any_text() -> None:
    """Have what a terminal or a pipe has no letters for written in ASCII: our marks as others, the rest escaped."""
    codecs.register_error("marks", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="marks")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    return "".join(_MARKS.get(one) or one.encode("ascii", "backslashreplace").decode() for one in letters), error.end


class Screen(Console):
    """A console whose texts cannot steer the terminal that they are shown on."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of a renderable; the movements of the cursor in them are rich's own."""
        for segment in super().render(renderable, options):
            if segment.control or not self.is_terminal:
                yield segment
            else:
                yield Segment(harmless(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Go on in silence where nobody reads any more: rich would end the program, and the pipeline with it."""
        self.quiet = True


def show_text(text: str, *, end: str = "\n") -> None:
    """Print text that somebody else wrote, a node or a model; a terminal obeys none of it."""
    typer.echo(f"{harmless(text) if sys.stdout.isatty() else text}{end}", nl=False)
