"""A corpus cut into pieces of work, by nothing but the corpus, the same ones for one worker and for seven; and their
documents in batches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from litgpt_demo.config import Corpus, DataConfig
from litgpt_demo.data.fetching import local_copy
from litgpt_demo.data.reading import (
    BadDocument,
    Batch,
    FileFormat,
    Source,
    compression_of,
    opened,
    read,
    row_groups,
    split_points,
)
from litgpt_demo.errors import DataError, Finding, TrainLitgptError, UserError

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = 8_000_000
"""Text in a batch, about."""
LOOKED_AT = 4_000_000
"""Bytes of text in which a separator is looked for."""
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
    layout, shards, room = FileFormat.of(corpus), list[list[Part]](), 0
    for source in sources:
        ends: list[tuple[int | None, int]] = [(None, source.size)]
        if source.size > wanted and source.file is not None:
            with suppress(DataError, UserError, FileNotFoundError):  # its reader says so, and where
                ends = [*split_points(source.file, source, layout, wanted), *ends]
        start = begin = 0
        for end, finish in ends:
            if not shards or finish - begin > room:
                shards.append([])
                room = wanted
            shards[-1].append(Part(source=source, start=start, end=end))
            room -= finish - begin
            start, begin = end or 0, finish
    return [Shard(number=number, parts=tuple(parts)) for number, parts in enumerate(shards)]


def read_shard(data: DataConfig, shard: Shard, scratch: Path) -> Iterator[Batch]:
    """The documents of a shard in their order, the same ones at each reading, until one reaches the shard's limit.

    Holds a few times BATCH_BYTES and the largest document. What is fetched stays in `scratch` for the next reading.
    A document that is null, too long, not UTF-8 or no JSON is raised, or an empty text if such ones are skipped.
    """
    import pyarrow as pa

    def gathered() -> Batch:
        texts = held[0].texts if len(held) == 1 else pa.concat_arrays([one.texts for one in held])
        starts = accumulate((len(one.texts) for one in held), initial=0)
        bad = (
            replace(bad, index=start + bad.index) for start, one in zip(starts, held, strict=False) for bad in one.bad
        )
        return Batch(texts=texts, bad=tuple(bad))

    # As many documents at a time as fit BATCH_BYTES, or a single larger one.
    layout, most, left = FileFormat.of(data.corpus), data.max_document_bytes, shard.limit
    held, size = list[Batch](), 0
    for part in shard.parts:
        with local_copy(part.source, scratch) as path:
            for batch in read(path, part.source, layout, part.start, part.end, scratch=scratch, most=most):
                if left is not None:
                    end, text = take_until_bytes(batch.texts, left)
                    batch, left = batch.slice(0, end), left - text
                if batch.bad and data.on_bad_document == "fail":
                    raise batch.bad[0].error
                start = 0
                while start < len(batch.texts):
                    count, more = take_until_bytes(batch.texts.slice(start), BATCH_BYTES)
                    if held and size + more > BATCH_BYTES:
                        yield gathered()
                        held, size = [], 0
                    held.append(batch.slice(start, start + count))
                    size += more
                    start += count
                if left is not None and left <= 0:
                    break
        if left is not None and left <= 0:
            break
    if held:
        yield gathered()


def take_until_bytes(texts: pa.LargeStringArray, limit: int) -> tuple[int, int]:
    """Return how many of the texts have `limit` bytes in total, or all of them, and how many bytes those have."""
    import numpy as np
    import pyarrow.compute as pc

    if not len(texts):
        return 0, 0
    ends = np.cumsum(pc.binary_length(texts).to_numpy(), dtype=np.int64)
    count = min(int(np.searchsorted(ends, limit)) + 1, len(ends))
    return count, int(ends[count - 1])


def documents(
    data: DataConfig, sources: Sequence[Source], scratch: Path, skipped: list[BadDocument] | None = None
) -> Iterator[str]:
    """Every document of `sources` in their order, empty ones left out, until one reaches the corpus's `max_bytes`.
    Bad ones go to `skipped`; no source is fetched before it is wanted."""
    left = data.corpus.max_bytes
    for number, source in enumerate(sources):
        shard = Shard(number=number, parts=(Part(source=source),), limit=left)
        for batch in read_shard(data, shard, scratch):
            if skipped is not None:
                skipped += batch.bad
            yield from filter(None, batch.texts.to_pylist())
            if left is not None and (left := left - take_until_bytes(batch.texts, left)[1]) <= 0:
                return


def documents_by_footer(corpus: Corpus, shard: Shard, *, scratch: Path) -> tuple[int, int] | None:
    """Return the documents of a shard, empty ones included, and about their bytes, from its parquet files' footers.

    None where nothing but reading tells: other formats, compressed files, nulls, a limit.
    """
    layout = FileFormat.of(corpus)
    if shard.limit is not None or any(layout.format_of(part.source.name) != "parquet" for part in shard.parts):
        return None
    documents = size = 0
    for part in shard.parts:
        with local_copy(part.source, scratch) as path:
            if compression_of(path, part.source) is not None:
                return None
            with row_groups(path, part.source, layout.column) as (_, groups):
                for group in groups[part.start : part.end]:
                    if group.statistics is None or group.statistics.null_count != 0:
                        return None
                    documents += group.num_values
                    size += group.total_uncompressed_size  # as they are encoded
    return documents, size


def unseen_separator(corpus: Corpus, sources: Sequence[Source]) -> Iterator[Finding]:
    """Yield a warning where the separator is nowhere in the start of a corpus of text files.

    Looks at the first LOOKED_AT bytes, up to the first file that is not on this machine and has more.
    """
    layout, texts, left = FileFormat.of(corpus), list[bytes](), LOOKED_AT
    if (separator := layout.separator) is None:
        return
    with TemporaryDirectory(prefix="train-litgpt-") as scratch, suppress(TrainLitgptError, OSError):  # its reader tells
        for source in (source for source in sources if layout.format_of(source.name) == "text"):
            if left <= 0 or (source.file is None and source.size > left):
                break
            there = nullcontext(source.file) if source.file is not None else local_copy(source, Path(scratch))
            with there as path, opened(path, source) as stream:
                texts.append(stream.read(left))
            left -= len(texts[-1])
    if not any(texts) or any(separator.encode() in text for text in texts):
        return
    what = f"data.corpus.separator={json.dumps(separator)} is nowhere in the first {LOOKED_AT - left:,} bytes of text"
    fix = "look at what stands between the documents there, or leave it out if each file is one"
    # As a shell hands on what is typed there, and as Windows and Unix end lines.
    typed = separator.replace("\\r", "\r").replace("\\n", "\n").replace("\\t", "\t")
    unix = typed.replace("\r\n", "\n")
    for other in (typed, unix, unix.replace("\n", "\r\n")):
        if any(other.encode() in text for text in texts):
            what += f"; found was {json.dumps(other)}"
            fix = f"set data.corpus.separator={json.dumps(other)}, in a shell all of it in quotes: '…'"
            break
    yield Finding("warning", "data.separator", what, fix)
