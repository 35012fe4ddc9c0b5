"""The form of the pages that are written from the code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def page(title: str, source: str, *parts: str) -> str:
    """Return a page; each part is a heading, a paragraph or a table."""
    note = f"Generated from {source} by docs/reference.py. Do not edit; change the source and run `make docs`."
    return "\n\n".join((f"<!-- {note} -->", f"# {title}", *filter(None, parts))) + "\n"


def table(*columns: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Each cell becomes one line, and a | in it does not end it."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def sentence(text: str) -> str:
    """Return a text with a capital and a full stop."""
    text = " ".join(text.split())
    if not text:
        return ""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '?')) else '.'}"
