"""A corpus cut into pieces of work, by nothing but the corpus, the same ones for one worker and for seven; and their
documents in batches."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, BinaryIO

from litgpt_demo.config import MAX_DOCUMENT_BYTES, Corpus, OpenWebTextCorpus
from litgpt_demo.data.corpus.fetching import local_copy
from litgpt_demo.data.corpus.files import CHUNK, HEAD, Layout, Source, compression_of, foreign, opened, seekable
from litgpt_demo.data.corpus.lines import (
    BadDocument,
    Batch,
    json_lines,
    only_bad,
    require_text,
    separated_texts,
    whole_text,
)
from litgpt_demo.data.corpus.parquet import parquet_texts, row_groups
from litgpt_demo.errors import DataError, TrainLitgptError, UserError

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
    cuts: list[tuple[int, int]] = []
    if source.size > target and source.file is not None:
        with suppress(DataError, UserError, FileNotFoundError):  # its reader says so, and where
            cuts = _cuts(source, source.file, layout, target)
    start = begin = 0
    for end, finish in cuts:
        yield Part(source=source, start=start, end=end), finish - begin
        start, begin = end, finish
    yield Part(source=source, start=start), source.size - begin


def _cuts(source: Source, path: Path, layout: Layout, target: int) -> list[tuple[int, int]]:
    """The places where a local file is cut: each a row group or byte, and the number of stored bytes before it."""
    cuts, begin, separator = list[tuple[int, int]](), 0, layout.separator_of(source)
    if compression_of(path, source) is not None:
        return []
    if layout.format_of(source.name) == "parquet":
        total = 0
        for number, group in enumerate(row_groups(path, source, layout.column)):
            if total > begin and total + group.stored - begin > target:
                cuts.append((number, total))
                begin = total
            total += group.stored
        return cuts
    with path.open("rb") as file:
        if separator is None or foreign(file.read(HEAD)):
            return []
        while begin + target < source.size:
            file.seek(max(0, begin + target - len(separator) + 1))
            cut = _behind_next(separator, file, begin + target)
            if cut is None or cut >= source.size:
                break
            cuts.append((cut, cut))
            begin = cut
    return cuts


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


# --- reading ----------------------------------------------------------------------------------------------------------


def read_shard(
    corpus: Corpus, shard: Shard, *, scratch: Path, skip_bad: bool, most: int = MAX_DOCUMENT_BYTES
) -> Iterator[Batch]:
    """The documents of a shard in their order, the same ones at each reading, until one reaches the shard's limit.

    Holds a few times BATCH_BYTES and the largest document. What is fetched stays in `scratch` for the next reading.

    Args:
        skip_bad: put an empty text for a document that is null, too long, not UTF-8 or no JSON, instead of raising.
        most: bytes that a document may have.

    Raises:
        UserError: the column is not there or holds no text.
        DataError: a file is damaged, or not what the shard says it is; or a document is bad and none is to be skipped.
        NetworkError: the Hub or the bucket went away while a file was fetched.
    """
    import pyarrow as pa

    done = 0
    for batches in _gathered(_up_to_limit(corpus, shard, scratch, most), skip_bad=skip_bad):
        texts = batches[0].texts if len(batches) == 1 else pa.concat_arrays([batch.texts for batch in batches])
        bad = list[BadDocument]()
        for batch in batches:
            bad += (replace(one, index=done + one.index) for one in batch.bad)
            done += len(batch.texts)
        yield Batch(texts=texts, bad=tuple(bad))
        del batches, batch, texts  # or they would stay until the next ones are there


def documents(
    corpus: Corpus,
    sources: Sequence[Source],
    *,
    scratch: Path,
    skip_bad: bool = False,
    most: int = MAX_DOCUMENT_BYTES,
    skipped: list[BadDocument] | None = None,
) -> Iterator[str]:
    """Every document of `sources` in their order, empty ones left out, until one reaches the corpus's `max_bytes`.

    Args:
        skipped: takes the bad ones; their `index` counts from their file's first.
    """
    left = None if isinstance(corpus, OpenWebTextCorpus) else corpus.max_bytes
    for number, source in enumerate(sources):
        shard = Shard(number=number, parts=(Part(source=source),), limit=left)
        for batch in read_shard(corpus, shard, scratch=scratch, skip_bad=skip_bad, most=most):
            if skipped is not None:
                skipped += batch.bad
            yield from filter(None, batch.texts.to_pylist())
            if left is not None:
                left -= _reaching(batch.texts, left)[1]
        if left is not None and left <= 0:
            return


def _gathered(batches: Iterable[Batch], *, skip_bad: bool) -> Iterator[list[Batch]]:
    """Yield as many documents at a time as fit BATCH_BYTES, or a single larger one. Raises after the last good one."""
    held, size = list[Batch](), 0
    for batch in batches:
        good = batch.bad[0].index if batch.bad and not skip_bad else len(batch.texts)
        start = 0
        while start < good:  # cut behind the documents that reach BATCH_BYTES
            rest = batch.texts.slice(start, good - start)
            count, more = len(rest), rest.nbytes
            if more > BATCH_BYTES:
                count, more = _reaching(rest, BATCH_BYTES)
            if held and size + more > BATCH_BYTES:
                yield held
                held, size = [], 0
            held.append(batch.slice(start, start + count))
            size += more
            start += count
        if good < len(batch.texts):
            if held:
                yield held
            raise batch.bad[0].error
    if held:
        yield held


def _up_to_limit(corpus: Corpus, shard: Shard, scratch: Path, most: int) -> Iterator[Batch]:
    """Up to the document that reaches the limit; nothing is read after it."""
    layout, left = Layout.of(corpus), math.inf if shard.limit is None else shard.limit
    for part in shard.parts:
        with local_copy(part.source, scratch) as path:
            for batch in _read(path, part, layout, scratch, most):
                count, size = len(batch.texts), 0
                if shard.limit is not None:
                    count, size = _reaching(batch.texts, left)
                yield batch.slice(0, count)
                left -= size
                if left <= 0:
                    break
        if left <= 0:
            return


def _reaching(texts: pa.LargeStringArray, limit: float) -> tuple[int, int]:
    """Return how many of the texts have `limit` bytes in total, or all of them, and how many bytes those have."""
    import numpy as np
    import pyarrow.compute as pc

    if not len(texts):
        return 0, 0
    ends = np.cumsum(pc.binary_length(texts).to_numpy(), dtype=np.int64)
    count = min(int(np.searchsorted(ends, limit)) + 1, len(ends))
    return count, int(ends[count - 1])


def _read(path: Path, part: Part, layout: Layout, scratch: Path, most: int) -> Iterator[Batch]:
    source, form, separator = part.source, layout.format_of(part.source.name), layout.separator_of(part.source)
    if form == "parquet":
        with seekable(path, source, scratch) as plain:
            yield from parquet_texts(plain, source, layout.column, part.start, part.end, most=most)
        return
    with opened(path, source) as stream:
        if not part.start and (what := foreign(stream.peek(HEAD))):
            yield only_bad(source, "byte 0", f"is {what}", DataError(f"{source.address} is {what}"))
            return
        if form == "jsonl":
            yield from json_lines(stream, source, layout.column, part.start, part.end, most=most)
        else:
            batches = (
                whole_text(stream, source, most=most)
                if separator is None
                else separated_texts(stream, source, separator, part.start, part.end, most=most)
            )
            yield from require_text(batches, source) if layout.format == "auto" and not part.start else batches


def unseen_separator(corpus: Corpus, sources: Sequence[Source]) -> tuple[str, str] | None:
    """Return what is wrong, and what to do, where the separator is nowhere in the start of a corpus of text files.

    Looks at the first LOOKED_AT bytes, up to the first file that is not on this machine and has more.
    """
    layout, texts, left = Layout.of(corpus), list[bytes](), LOOKED_AT
    if (separator := layout.separator) is None:
        return None
    with TemporaryDirectory(prefix="train-litgpt-") as scratch, suppress(TrainLitgptError, OSError):  # its reader tells
        for source in (source for source in sources if layout.format_of(source.name) == "text"):
            if left <= 0 or (source.is_remote and source.size > left):
                break
            there = nullcontext(source.file) if source.file is not None else local_copy(source, Path(scratch))
            with there as path, opened(path, source) as stream:
                texts.append(stream.read(left))
            left -= len(texts[-1])
    if not any(texts) or any(separator.encode() in text for text in texts):
        return None
    what = (
        f"data.corpus.separator={json.dumps(separator)} is nowhere in the first {LOOKED_AT - left:,} bytes of text, "
        "so that each file is one document"
    )
    # As a shell hands on what is typed there, and as Windows and Unix end lines.
    typed = separator.replace("\\r", "\r").replace("\\n", "\n").replace("\\t", "\t")
    unix = typed.replace("\r\n", "\n")
    for other in (typed, unix, unix.replace("\n", "\r\n")):
        if any(other.encode() in text for text in texts):
            found = json.dumps(other)
            return (
                f"{what}; found was {found}",
                f"set data.corpus.separator={found}, in a shell all of it in quotes: '…'",
            )
    return what, "look at what stands between the documents there, or leave it out if each file is one"


def documents_by_footer(corpus: Corpus, shard: Shard, *, scratch: Path) -> tuple[int, int] | None:
    """Return the documents of a shard, empty ones included, and about their bytes, from its parquet files' footers.

    None where nothing but reading tells: other formats, compressed files, nulls, a limit.
    """
    layout = Layout.of(corpus)
    if shard.limit is not None or any(layout.format_of(part.source.name) != "parquet" for part in shard.parts):
        return None
    documents = size = 0
    for part in shard.parts:
        with local_copy(part.source, scratch) as path:
            if compression_of(path, part.source) is not None:
                return None
            groups = row_groups(path, part.source, layout.column)[part.start : part.end]
        if any(group.nulls != 0 for group in groups):
            return None
        documents += sum(group.rows for group in groups)
        size += sum(group.bytes for group in groups)
    return documents, size
