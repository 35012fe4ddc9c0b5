"""The documents of shards, in batches, and their number where the files tell it without being read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from litgpt_demo.config import MAX_DOCUMENT_BYTES, Corpus, OpenWebTextCorpus
from litgpt_demo.data.corpus.compression import HEAD, compression_of, foreign, opened, seekable
from litgpt_demo.data.corpus.fetching import local_copy
from litgpt_demo.data.corpus.layout import Layout
from litgpt_demo.data.corpus.lines import json_lines, require_text, separated_texts, whole_text
from litgpt_demo.data.corpus.parquet import parquet_texts, row_groups
from litgpt_demo.data.corpus.pieces import DocumentPiece, Flaw
from litgpt_demo.data.corpus.shards import Part, Shard
from litgpt_demo.data.corpus.source import Source
from litgpt_demo.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = 8_000_000
"""Text in a batch, about."""


@dataclass(frozen=True, kw_only=True)
class BadDocument:
    """A document that was skipped."""

    index: int
    """Within the shard, counting every document, bad and empty ones too."""
    place: str
    """The file's name and the position in it: `part-1.jsonl, line 3`."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Documents that follow each other, as they lie in the files: a bad one stands as an empty text."""

    texts: pa.LargeStringArray
    """Valid UTF-8 without nulls. May be a slice of a longer array: mind its offset."""
    bad: tuple[BadDocument, ...]


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
    done = 0
    for pieces in _gathered(_pieces(corpus, shard, scratch, most), skip_bad=skip_bad):
        batch = _batch(pieces, done)
        done += len(batch.texts)
        yield batch
        del pieces, batch  # or they would stay until the next ones are there


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

    Raises:
        As `read_shard`, which reads one file after the other.
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


def _gathered(pieces: Iterable[DocumentPiece], *, skip_bad: bool) -> Iterator[list[DocumentPiece]]:
    """Yield batches of as many documents as fit BATCH_BYTES, or a single larger one. Raises after the last good one."""
    held: list[DocumentPiece] = []
    size = 0
    for piece in pieces:
        good = piece.flaws[0].row if piece.flaws and not skip_bad else len(piece.texts)
        for run, run_size in _runs(piece.slice(0, good)):
            if held and size + run_size > BATCH_BYTES:
                yield held
                held, size = [], 0
            held.append(run)
            size += run_size
        if good < len(piece.texts):
            if held:
                yield held
            raise piece.flaws[0].error
    if held:
        yield held


def _batch(pieces: Sequence[DocumentPiece], first: int) -> Batch:
    """`first` is the number in the shard of the first document."""
    import pyarrow as pa

    texts = pieces[0].texts if len(pieces) == 1 else pa.concat_arrays([piece.texts for piece in pieces])
    starts = accumulate((len(piece.texts) for piece in pieces), initial=first)
    bad = tuple(
        BadDocument(index=start + flaw.row, place=flaw.place, reason=flaw.reason)
        for start, piece in zip(starts, pieces, strict=False)
        for flaw in piece.flaws
    )
    return Batch(texts=texts, bad=bad)


def _runs(piece: DocumentPiece) -> Iterator[tuple[DocumentPiece, int]]:
    """The piece cut behind the documents that reach BATCH_BYTES, and about the bytes in each run."""
    while piece.texts.nbytes > BATCH_BYTES:
        count, size = _reaching(piece.texts, BATCH_BYTES)
        yield piece.slice(0, count), size
        piece = piece.slice(count, len(piece.texts))
    if len(piece.texts):
        yield piece, piece.texts.nbytes


def _pieces(corpus: Corpus, shard: Shard, scratch: Path, most: int) -> Iterator[DocumentPiece]:
    """Up to the document that reaches the limit; nothing is read after it."""
    layout, left = Layout.of(corpus), shard.limit
    for part in shard.parts:
        with local_copy(part.source, scratch) as path:
            for piece in _read(path, part, layout, scratch, most):
                if left is None:
                    yield piece
                    continue
                count, size = _reaching(piece.texts, left)
                yield piece.slice(0, count)
                left -= size
                if left <= 0:
                    break
        if left is not None and left <= 0:
            return


def _reaching(texts: pa.LargeStringArray, limit: int) -> tuple[int, int]:
    """Return how many of the texts have `limit` bytes in total, or all of them, and how many bytes those have."""
    import numpy as np
    import pyarrow.compute as pc

    if not len(texts):
        return 0, 0
    ends = np.cumsum(pc.binary_length(texts).to_numpy(), dtype=np.int64)
    count = min(int(np.searchsorted(ends, limit)) + 1, len(ends))
    return count, int(ends[count - 1])


def _read(path: Path, part: Part, layout: Layout, scratch: Path, most: int) -> Iterator[DocumentPiece]:
    source, form, separator = part.source, layout.format_of(part.source.name), layout.separator_of(part.source)
    if form == "parquet":
        with seekable(path, source, scratch) as plain:
            yield from parquet_texts(plain, source, layout.column, part.start, part.end, most=most)
        return
    with opened(path, source) as stream:
        if not part.start and (what := foreign(stream.peek(HEAD))):
            yield _bad_file(source, f"is {what}")
            return
        if form == "jsonl":
            yield from json_lines(stream, source, layout.column, part.start, part.end, most=most)
        else:
            pieces = (
                whole_text(stream, source, most=most)
                if separator is None
                else separated_texts(stream, source, separator, part.start, part.end, most=most)
            )
            yield from require_text(pieces, source) if layout.format == "auto" and not part.start else pieces


def _bad_file(source: Source, reason: str) -> DocumentPiece:
    import pyarrow as pa

    place, error = f"{source.name}, byte 0", DataError(f"{source.address} {reason}")
    flaw = Flaw(row=0, place=place, reason=reason, error=error)
    return DocumentPiece(texts=pa.array([""], pa.large_string()), flaws=(flaw,))


def documents_by_footer(corpus: Corpus, shard: Shard, *, scratch: Path) -> tuple[int, int] | None:
    """Return the documents of a shard, empty ones included, and about their bytes, from its parquet files' footers.

    None where nothing but reading tells: other formats, compressed files, nulls, a limit.

    Raises:
        As `read_shard`.
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
