"""A corpus in shards, which depend on it only and not on the number of workers, and their documents in batches."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from litgpt_demo.config import Corpus, DataConfig
from litgpt_demo.data import readers
from litgpt_demo.data.fetching import local_copy
from litgpt_demo.data.readers import BadDocument, Batch, FileFormat, Source
from litgpt_demo.errors import DataError, Finding, TrainLitgptError, UserError

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = 8_000_000
LOOKED_AT = 4_000_000
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


@dataclass(frozen=True, kw_only=True)
class Shard:
    number: int
    parts: tuple[Part, ...]
    limit: int | None = None
    """Stop after the document that reaches this many bytes of text."""


def plan_shards(corpus: Corpus, sources: Sequence[Source], target: int | None = None) -> list[Shard]:
    """Return the corpus in shards of about `target` stored bytes, in its order; by default a 400th, 4 to 64 MiB."""
    if target is None:
        target = min(_LARGEST, max(_SMALLEST, sum(source.size for source in sources) // _SHARDS))
    layout, shards, room = FileFormat.of(corpus), list[list[Part]](), 0
    for source in sources:
        ends: list[tuple[int | None, int]] = [(None, source.size)]
        if source.size > target and source.file is not None:
            with suppress(DataError, UserError, FileNotFoundError):  # reading it raises the same, with the position
                ends = [*readers.split_points(source.file, source, layout, target), *ends]
        start = first_byte = 0
        for end, end_byte in ends:
            size = end_byte - first_byte
            if not shards or size > room:
                shards.append([])
                room = target
            shards[-1].append(Part(source=source, start=start, end=end))
            room -= size
            start, first_byte = end or 0, end_byte
    return [Shard(number=number, parts=tuple(parts)) for number, parts in enumerate(shards)]


def read_shard(data: DataConfig, shard: Shard, scratch: Path) -> Iterator[Batch]:
    """Yield the documents of a shard in their order, the same at each reading, until one reaches the shard's limit.

    Holds a few times BATCH_BYTES and the largest document. Fetched files stay in `scratch` for the next reading.
    A document that is null, too long, not UTF-8 or not JSON is raised, or an empty text if such ones are skipped.
    """
    # As many documents at a time as fit BATCH_BYTES, or a single larger one.
    pending, size = list[Batch](), 0
    for batch in _read_parts(data, shard, scratch):
        start = 0
        while start < len(batch.texts):
            count, added = take_until_bytes(batch.texts.slice(start), BATCH_BYTES)
            if pending and size + added > BATCH_BYTES:
                yield _concatenated(pending)
                pending, size = [], 0
            pending.append(batch.slice(start, start + count))
            size += added
            start += count
    if pending:
        yield _concatenated(pending)


def _read_parts(data: DataConfig, shard: Shard, scratch: Path) -> Iterator[Batch]:
    layout, remaining = FileFormat.of(data.corpus), math.inf if shard.limit is None else shard.limit
    for part in shard.parts:
        with local_copy(part.source, scratch) as path:
            most = data.max_document_bytes
            for found in readers.read(path, part.source, layout, part.start, part.end, scratch=scratch, most=most):
                count, size = take_until_bytes(found.texts, remaining)
                batch = found.slice(0, count)
                if batch.bad and data.on_bad_document == "fail":
                    raise batch.bad[0].error
                yield batch
                remaining -= size
                if remaining <= 0:
                    break
        if remaining <= 0:
            return


def _concatenated(batches: Sequence[Batch]) -> Batch:
    import pyarrow as pa

    if len(batches) == 1:
        return batches[0]
    bad, start = list[BadDocument](), 0
    for batch in batches:
        bad += [replace(document, index=start + document.index) for document in batch.bad]
        start += len(batch.texts)
    return Batch(texts=pa.concat_arrays([batch.texts for batch in batches]), bad=tuple(bad))


def take_until_bytes(texts: pa.LargeStringArray, limit: float) -> tuple[int, int]:
    """Return how many of the texts have `limit` bytes in total, or all of them, and how many bytes those have."""
    edges = readers.text_edges(texts)
    count = min(int(edges[1:].searchsorted(edges[0] + limit)) + 1, len(texts))
    return count, int(edges[count] - edges[0])


def documents(
    data: DataConfig, sources: Sequence[Source], scratch: Path, skipped: list[BadDocument] | None = None
) -> Iterator[str]:
    """Yield every document that is not empty, until one reaches the corpus's `max_bytes`; bad ones go to `skipped`."""
    shard = Shard(number=0, parts=tuple(Part(source=source) for source in sources), limit=data.corpus.max_bytes)
    for batch in _read_parts(data, shard, scratch):
        if skipped is not None:
            skipped += batch.bad
        yield from filter(None, batch.texts.to_pylist())


def count_documents(data: DataConfig, shard: Shard, scratch: Path) -> tuple[int, int] | None:
    """Return a shard's documents, perhaps with empty ones, and about their bytes; None if it must be read."""
    layout, counts = FileFormat.of(data.corpus), list[tuple[int, int]]()
    for part in shard.parts:
        with local_copy(part.source, scratch) as path:
            most = data.max_document_bytes
            count = readers.count_documents(path, part.source, layout, part.start, part.end, most=most)
        if count is None:
            return None
        counts.append(count)
    return sum(documents for documents, _ in counts), sum(size for _, size in counts)


def has_local_footers(data: DataConfig, shard: Shard) -> bool:
    """Return whether the shard is of Parquet files on this machine, which are counted by their footers."""
    layout = FileFormat.of(data.corpus)
    return all(part.source.file is not None and layout.format_of(part.source.name) == "parquet" for part in shard.parts)


def unseen_separator(corpus: Corpus, sources: Sequence[Source]) -> Iterator[Finding]:
    layout = FileFormat.of(corpus)
    separator = layout.separator
    if separator is None:
        return
    texts = [source for source in sources if layout.format_of(source.name) == "text"]
    heads = _read_heads(texts)
    if not any(heads) or any(separator.encode() in head for head in heads):
        return
    read = sum(map(len, heads))
    what = f"data.corpus.separator={json.dumps(separator)} is nowhere in the first {read:,} bytes of text"
    fix = "set it to the text between the documents, or remove it if each file is one document"
    # As a shell hands on what is typed there, and as Windows and Unix end lines.
    typed = separator.replace("\\r", "\r").replace("\\n", "\n").replace("\\t", "\t")
    unix = typed.replace("\r\n", "\n")
    for variant in (typed, unix, unix.replace("\n", "\r\n")):
        if any(variant.encode() in head for head in heads):
            what += f", but {json.dumps(variant)} is"
            fix = f"set data.corpus.separator={json.dumps(variant)} (in a shell, put all of it in quotes: '…')"
            break
    yield Finding("warning", "data.separator", what, fix)


def _read_heads(sources: Sequence[Source]) -> list[bytes]:
    heads, remaining = list[bytes](), LOOKED_AT
    with (
        TemporaryDirectory(prefix="train-litgpt-") as scratch,
        suppress(TrainLitgptError, OSError),
    ):  # its reader raises
        for source in sources:
            if remaining <= 0 or (source.file is None and source.size > remaining):
                break
            # The checksum of a local file is not compared: that would read all of it.
            local = nullcontext(source.file) if source.file is not None else local_copy(source, Path(scratch))
            with local as path, readers.opened(path, source) as stream:
                heads.append(stream.read(remaining))
            remaining -= len(heads[-1])
    return heads
