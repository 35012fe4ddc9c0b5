"""Parquet files: one column of strings, a row group after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from litgpt_demo.data.corpus.files import MOST_RATIO, SLACK, Source
from litgpt_demo.data.corpus.lines import BadDocument, Batch, batch_of, is_sound, quoted, too_long
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
) -> Iterator[Batch]:
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
            for texts in _columns(file, group, column, min(_MAX_ROWS, rows * _PIECE_BYTES // max(1, size)), where):
                text += texts.nbytes  # empty ones too: their places in it
                _require_bounded(text, bound, where)
                # Arrow has read what is too long by now: it holds all of a page.
                yield _batch(texts, column, source, f"row group {group}, row ", row, most)
                row += len(texts)
            if row != rows:
                raise _damaged(where, f"it has {row:,} rows and the footer says {rows:,}")


class RowGroup(NamedTuple):
    """A footer's facts about a column in one row group."""

    rows: int
    nulls: int | None
    """None where the footer does not say."""
    bytes: int
    """The size of the values, roughly: as they are encoded, uncompressed."""
    stored: int


def row_groups(path: Path, source: Source, column: str) -> list[RowGroup]:
    """The row groups of a file."""
    with _open(path, source) as file:
        _check_column(file.schema_arrow, column, source.address)
        return [
            RowGroup(
                chunk.num_values,
                chunk.statistics and chunk.statistics.null_count,
                chunk.total_uncompressed_size,
                chunk.total_compressed_size,
            )
            for chunk in _chunks(file, column, path, source)
        ]


def _chunks(file: ParquetFile, column: str, path: Path, source: Source) -> list[Any]:
    """Return the footer's facts about a column in each row group."""
    with _damage(f"{source.address}, footer"):
        # The columns there are the leaves of nested ones too.
        leaf = [file.schema.column(leaf).path for leaf in range(len(file.schema))].index(column)
        chunks = [file.metadata.row_group(group).column(leaf) for group in range(file.num_row_groups)]
    sizes, most = [chunk.total_compressed_size for chunk in chunks], path.stat().st_size
    if min(sizes, default=0) < 0 or sum(sizes) > most:  # some would be read again and again
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
    import pyarrow as pa

    if column not in schema.names:
        raise UserError(f"{address} has no column {column!r}; it has {quoted(schema.names)}. Set data.corpus.column")
    kind = schema.field(column).type
    text = kind.value_type if isinstance(kind, pa.DictionaryType) else kind  # what pandas writes for categories
    if text not in (pa.string(), pa.large_string(), pa.string_view()):
        raise UserError(f"{address} has {kind} in column {column!r}, and documents are strings; set data.corpus.column")


def _columns(file: ParquetFile, group: int, column: str, rows: int, where: str) -> Iterator[Any]:
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


def _batch(texts: Any, column: str, source: Source, place: str, first: int, most: int) -> Batch:
    """`first` is the row of the group that these begin with."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def bad_one(index: int, reason: str, error: DataError) -> BadDocument:
        return BadDocument(index=index, place=f"{source.name}, {place}{first + index}", reason=reason, error=error)

    def no_text(index: int, error: UnicodeDecodeError | None) -> BadDocument:
        reason, advice = (
            (f"has null in column {column!r}", ", and a document is a string; repair or drop the row")
            if error is None
            else (f"is not UTF-8 in column {column!r} ({error})", "; write the file anew from valid text")
        )
        return bad_one(index, reason, DataError(f"{source.address}, {place}{first + index} {reason}{advice}"))

    batch = Batch(texts=texts) if is_sound(texts) else batch_of(texts.view(pa.large_binary()).to_pylist(), no_text)
    if batch.texts.nbytes <= most:
        return batch
    long = pc.greater(pc.binary_length(batch.texts), most)
    bad = [
        bad_one(index, *too_long(source, f"{place}{first + index}", most))
        for index in pc.indices_nonzero(long).to_pylist()
    ]
    texts = pc.if_else(long, pa.scalar("", pa.large_string()), batch.texts)
    return Batch(texts=texts, bad=tuple(sorted((*batch.bad, *bad), key=lambda one: one.index)))


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
