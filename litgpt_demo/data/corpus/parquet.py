"""Parquet files: one column of strings, a row group after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from litgpt_demo.data.corpus.compression import MOST_RATIO, SLACK
from litgpt_demo.data.corpus.lines import quoted
from litgpt_demo.data.corpus.pieces import DocumentPiece, Flaw, is_sound, piece_of, too_long
from litgpt_demo.data.corpus.source import Source
from litgpt_demo.errors import DataError, UserError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_BUFFER = 1 << 20
"""Bytes read at a time, about a page."""
_PIECE_BYTES = 6_000_000
"""Text held as one Arrow array, about: rows are counted, and taken to be of the row group's average size. Less than a
batch, so that most make one by themselves and need no copying."""
_MAX_ROWS = 4096
"""Rows of one array at most, so that a run of long ones among many short ones stays small."""


def parquet_texts(
    path: Path, source: Source, column: str, start: int = 0, end: int | None = None, *, most: int
) -> Iterator[DocumentPiece]:
    """The values of the column in the row groups [start, end)."""
    with _open(path, source) as file:
        _check_column(file.schema_arrow, column, source.address)
        chunks = _chunks(file, column, path, source)
        for group in range(start, len(chunks) if end is None else end):
            where = f"{source.address}, row group {group}"
            rows, size = file.metadata.row_group(group).num_rows, chunks[group].total_uncompressed_size
            bound = MOST_RATIO * chunks[group].total_compressed_size + SLACK // len(chunks)
            _require_bounded(size, bound, where)
            row = text = 0
            for texts in _batches(file, group, column, min(_MAX_ROWS, rows * _PIECE_BYTES // max(1, size)), where):
                text += texts.nbytes  # empty ones too: their places in it
                _require_bounded(text, bound, where)
                piece = _piece(texts, column, source, group, row)
                # Arrow has read them by now: it holds all of a page.
                yield piece if piece.texts.nbytes <= most else _without_long_ones(piece, source, group, row, most)
                row += len(texts)
            if row != rows:
                raise _damaged(where, f"it has {row:,} rows and the footer says {rows:,}")


def row_group_bytes(path: Path, source: Source, column: str) -> list[int]:
    """Bytes that the column takes in each row group as stored; nothing without such a column of strings."""
    with _open(path, source) as file:
        if not _is_text(file.schema_arrow, column):
            return []
        return [chunk.total_compressed_size for chunk in _chunks(file, column, path, source)]


class RowGroup(NamedTuple):
    """The footer's facts about the column in a row group."""

    rows: int
    nulls: int | None
    """None where the footer does not say."""
    bytes: int
    """The size of the values, roughly: as they are encoded, uncompressed."""


def row_groups(path: Path, source: Source, column: str) -> list[RowGroup]:
    """The file's row groups.

    Raises:
        UserError: the column is not there or holds no text.
        DataError: the footer is damaged.
    """
    with _open(path, source) as file:
        _check_column(file.schema_arrow, column, source.address)
        return [
            RowGroup(chunk.num_values, chunk.statistics and chunk.statistics.null_count, chunk.total_uncompressed_size)
            for chunk in _chunks(file, column, path, source)
        ]


def _chunks(file: ParquetFile, column: str, path: Path, source: Source) -> list[Any]:
    """Return the footer's facts about a column in each row group. The columns there are the leaves of nested ones too.

    Raises:
        DataError: together they take more bytes than the file has, so some would be read again and again.
    """
    with _damage(f"{source.address}, footer"):
        leaf = [file.schema.column(leaf).path for leaf in range(len(file.schema))].index(column)
        chunks = [file.metadata.row_group(group).column(leaf) for group in range(file.num_row_groups)]
    sizes, most = [chunk.total_compressed_size for chunk in chunks], path.stat().st_size
    if min(sizes, default=0) < 0 or sum(sizes) > most:
        raise _damaged(
            f"{source.address}, footer", f"column {column!r} takes {sum(sizes):,} of the file's {most:,} bytes"
        )
    return chunks


def _open(path: Path, source: Source) -> ParquetFile:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    with _damage(f"{source.address}, footer"):
        # Without a buffer size, the whole column of a row group is held, compressed.
        content = pa.OSFile(os.fsencode(path))  # which takes text of UTF-8 alone
        file = ParquetFile(content, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True)
        quoted(file.schema_arrow.names)  # names that are no text are met here
        return file


def _check_column(schema: Any, column: str, address: str) -> None:
    if column not in schema.names:
        raise UserError(f"{address} has no column {column!r}; it has {quoted(schema.names)}. Set data.corpus.column")
    if not _is_text(schema, column):
        kind = schema.field(column).type
        raise UserError(f"{address} has {kind} in column {column!r}, and documents are strings; set data.corpus.column")


def _is_text(schema: Any, column: str) -> bool:
    import pyarrow as pa

    kind = schema.field(column).type if column in schema.names else None
    if isinstance(kind, pa.DictionaryType):  # what pandas writes for categories
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def _batches(file: ParquetFile, group: int, column: str, rows: int, where: str) -> Iterator[Any]:
    with _damage(where):
        # The workers are parallel themselves: no threads.
        batches = file.iter_batches(batch_size=max(1, rows), row_groups=[group], columns=[column], use_threads=False)
        yield from (batch.column(0).cast("large_string") for batch in batches)


def _require_bounded(size: int, bound: int, where: str) -> None:
    if size > bound:
        raise DataError(
            f"{where} holds {size:,} bytes of text or more, and at most {bound:,} are expanded, over {MOST_RATIO:,} "
            "times its size: no corpus is like that. Remove it, or write it anew without dictionary and compression"
        )


def _piece(texts: Any, column: str, source: Source, group: int, first: int) -> DocumentPiece:
    """`first` is the row of the group that these begin with."""
    import pyarrow as pa

    if is_sound(texts):
        return DocumentPiece(texts=texts)

    def flaw(row: int, error: UnicodeDecodeError | None) -> Flaw:
        place = f"row group {group}, row {first + row}"
        reason, advice = (
            (f"has null in column {column!r}", ", and a document is a string; repair or drop the row")
            if error is None
            else (f"is not UTF-8 in column {column!r} ({error})", "; write the file anew from valid text")
        )
        return Flaw(
            row=row,
            place=f"{source.name}, {place}",
            reason=reason,
            error=DataError(f"{source.address}, {place} {reason}{advice}"),
        )

    return piece_of(texts.view(pa.large_binary()).to_pylist(), flaw)


def _without_long_ones(piece: DocumentPiece, source: Source, group: int, first: int, most: int) -> DocumentPiece:
    import pyarrow as pa
    import pyarrow.compute as pc

    long = pc.greater(pc.binary_length(piece.texts), most)
    flaws = [
        too_long(row, source, f"row group {group}, row {first + row}", most)
        for row in pc.indices_nonzero(long).to_pylist()
    ]
    texts = pc.if_else(long, pa.scalar("", pa.large_string()), piece.texts)
    return DocumentPiece(texts=texts, flaws=tuple(sorted((*piece.flaws, *flaws), key=lambda flaw: flaw.row)))


@contextmanager
def _damage(where: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except MemoryError as error:
        raise DataError(
            f"{where}: a page of it needs more memory than there is ({error}): the file is damaged or made with huge "
            "pages; write it anew with smaller row groups, or read it on a machine with more memory"
        ) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the machine's trouble; Arrow gives no errno where the data are at fault
        raise _damaged(where, error) from error


def _damaged(where: str, why: object) -> DataError:
    return DataError(f"{where}: no readable parquet, damaged or cut off: {why}; write or fetch it anew")
