"""Markdown for Prefect's pages, in which whatever a corpus, a node or a config says stays text. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from launcher.reports.page import printable

_URL = "/:?&=#;%@+,~"
"""The signs that stay in an address; brackets, which would end a link, do not."""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose cells are text."""
    return _lines(header, [[inline(cell) for cell in row] for row in rows])


def grid(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table of rows by their columns, which all of them have."""
    return markdown_table(tuple(rows[0]), [tuple(row.values()) for row in rows])


def linked(header: Sequence[str], rows: Sequence[tuple[str, str, str | None]]) -> str:
    """Return a table of names, texts and what each text leads to; a text that leads nowhere is code, to be copied."""
    return _lines(header, [(inline(name), _code(text) if url is None else link(text, url)) for name, text, url in rows])


def link(text: str, url: str) -> str:
    """Return a link that nothing in its text or its address can end."""
    return f"[{inline(text)}]({quote(url, safe=_URL)})"


def inline(text: str) -> str:
    """Text that stays text, on its line and in its table cell."""
    line = re.sub(r"[^\S\N{NO-BREAK SPACE}]+", " ", printable(text)).strip()
    return re.sub(r"([\\`*_\[\]<>|~&#])", r"\\\1", line)


def fenced(text: str, language: str = "text") -> str:
    """A code block that nothing in the text can close."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{printable(text)}\n{fence}"


def joined(parts: Sequence[str]) -> str:
    """Return the parts of a page that are not empty, one below the other."""
    return "\n\n".join(part for part in parts if part) + "\n"


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


def _code(text: str) -> str:
    """Return code in a cell; text that would end it, or the cell, is text."""
    return inline(text) if re.search(r"[`|\\\n]", text) else f"`{printable(text)}`"
