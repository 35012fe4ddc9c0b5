"""A corpus cut into pieces of work, by nothing but the corpus: the same ones for one worker and for seven."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from litgpt_demo.config import Corpus
from litgpt_demo.data.corpus.compression import CHUNK, HEAD, compression_of, foreign
from litgpt_demo.data.corpus.layout import Layout
from litgpt_demo.data.corpus.parquet import row_group_bytes
from litgpt_demo.data.corpus.source import Source
from litgpt_demo.errors import DataError

_SHARDS = 400
"""About how many a large corpus has: one that has to be done again is 0.25 % of the work."""
_SMALLEST, _LARGEST = 4 << 20, 64 << 20
"""Bytes as stored."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A file, or the piece [start, end) of it: row groups of a parquet file, bytes of others."""

    source: Source
    start: int = 0
    end: int | None = None
    """None is the file's end."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Documents that are read in one go."""

    number: int
    """Its place in the corpus's order, from 0."""
    parts: tuple[Part, ...]
    limit: int | None = None
    """Stop after the document that reaches this many bytes of text."""


def plan_shards(corpus: Corpus, sources: Sequence[Source], target: int | None = None) -> list[Shard]:
    """The corpus in shards of about `target` stored bytes, in its order; by default a 400th of it, 4 to 64 MiB.

    Small files share a shard. Large local ones are cut, if they are not compressed, between row groups or documents.
    """
    wanted = target or min(_LARGEST, max(_SMALLEST, sum(source.size for source in sources) // _SHARDS))
    layout = Layout.of(corpus)
    shards: list[tuple[Part, ...]] = []
    room = 0
    for part, size in (sized for source in sources for sized in _parts(source, layout, wanted)):
        if shards and size <= room:
            shards[-1] += (part,)
        else:
            shards.append((part,))
            room = wanted
        room -= size
    return [Shard(number=number, parts=parts) for number, parts in enumerate(shards)]


def _parts(source: Source, layout: Layout, target: int) -> Iterator[tuple[Part, int]]:
    """The parts of a file, and their stored bytes."""
    if source.size <= target or source.file is None:
        yield Part(source=source), source.size
        return
    try:
        cuts = _cuts(source, source.file, layout, target)
    except (DataError, FileNotFoundError):
        cuts = []  # it is damaged or gone: its reader says so, and where
    start = begin = 0
    for end, finish in cuts:
        yield Part(source=source, start=start, end=end), finish - begin
        start, begin = end, finish
    yield Part(source=source, start=start), source.size - begin


def _cuts(source: Source, path: Path, layout: Layout, target: int) -> list[tuple[int, int]]:
    """A place where a local file can be cut: its row group or byte, and the number of stored bytes before it."""
    separator = layout.separator_of(source)
    if compression_of(path, source) is not None:
        return []
    if layout.format_of(source.name) == "parquet":
        return _cuts_between(row_group_bytes(path, source, layout.column), target)
    with path.open("rb") as file:
        if separator is None or foreign(file.read(HEAD)):
            return []
    return [(cut, cut) for cut in _cuts_behind(separator, path, source.size, target)]


def _cuts_between(sizes: Sequence[int], target: int) -> list[tuple[int, int]]:
    """Cuts before the row groups that would make a part larger than `target`."""
    cuts: list[tuple[int, int]] = []
    begin = total = 0
    for group, size in enumerate(sizes):
        if total > begin and total + size - begin > target:
            cuts.append((group, total))
            begin = total
        total += size
    return cuts


def _cuts_behind(separator: bytes, path: Path, size: int, target: int) -> Iterator[int]:
    """Bytes behind separators, each the first that is at least `target` bytes from the one before."""
    position = target
    with path.open("rb") as file:
        while position < size:
            file.seek(max(0, position - len(separator) + 1))
            cut = _behind_next(separator, file, position)
            if cut is None or cut >= size:
                return
            yield cut
            position = cut + target


def _behind_next(separator: bytes, file: BinaryIO, position: int) -> int | None:
    """The end of the first separator at or after `position` that a scan from the file's start is sure to find.

    One that can overlap itself is found wherever no other begins less than its length before: in `a\\n\\n\\n\\n` a scan
    for `\\n\\n` finds the first and the third, and one that comes upon the second would go astray. The file has been
    read up to that distance before `position`.
    """
    length, base, window = len(separator), file.tell(), b""
    previous = base - length
    while chunk := file.read(CHUNK):
        window += chunk
        at = window.find(separator)
        while at >= 0:
            if base + at >= position and base + at - previous >= length:
                return base + at + length
            previous = base + at
            at = window.find(separator, at + 1)
        seen = max(0, len(window) - length + 1)
        base, window = base + seen, window[seen:]
    return None
