"""Output to a terminal: foreign text of nodes, platforms and files cannot control it.

A pipe or a file gets the text unchanged, as with `kubectl logs` and `git log`.
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

# The symbols of our own lines, in ASCII.
_MARKS = dict(zip("✓✗→·×–…━╸╺\u00a0", "+x>-x-.==- ", strict=True))
_MARKS |= dict.fromkeys(map(chr, range(0x2800, 0x2900)), "*")  # the dots of a spinner


def accept_any_text() -> None:
    """Write characters that a terminal or pipe cannot encode in ASCII: our symbols replaced, the rest escaped."""
    codecs.register_error("marks", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="marks")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(_MARKS.get(mark) or mark.encode("ascii", "backslashreplace").decode() for mark in text), error.end


class Screen(Console):
    """A console whose texts cannot control the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of a renderable; the movements of the cursor in them are rich's own."""
        for segment in super().render(renderable, options):
            if segment.control or not self.is_terminal:
                yield segment
            else:
                yield Segment(harmless(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Continue silently without a reader; rich would end the program, and the pipeline with it."""
        self.quiet = True


def show_text(text: str, *, end: str = "\n") -> None:
    """Print foreign text, of a node or a model; it cannot control a terminal."""
    typer.echo(f"{harmless(text) if sys.stdout.isatty() else text}{end}", nl=False)
