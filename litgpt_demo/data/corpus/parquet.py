"""Parquet files: one column of strings, a row group after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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

_MOST_DOCUMENTS = 64
_LEAST_BOUND = 16 << 30
"""Bytes of text that a row group may always say it has, and above that `_MOST_DOCUMENTS` times the longest document.
Arrow expands a whole page before any of its documents can be measured, so the footer's word is looked at before."""


def parquet_texts(
    path: Path, source: Source, column: str, start: int = 0, end: int | None = None, *, most: int
) -> Iterator[DocumentPiece]:
    """The values of the column in the row groups [start, end)."""
    with _open(path, source) as file:
        _check_column(file.schema_arrow, column, source.address)
        for group in range(start, file.num_row_groups if end is None else end):
            yield from _row_group(file, group, column, source, most)


def row_group_bytes(path: Path, source: Source, column: str) -> list[int]:
    """Bytes that the column takes in each row group as stored; nothing without such a column of strings."""
    with _open(path, source) as file:
        if not _is_text(file.schema_arrow, column):
            return []
        return [_chunk(file, group, column).total_compressed_size for group in range(file.num_row_groups)]


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
        chunks = [_chunk(file, group, column) for group in range(file.num_row_groups)]
        return [
            RowGroup(chunk.num_values, chunk.statistics and chunk.statistics.null_count, chunk.total_uncompressed_size)
            for chunk in chunks
        ]


def _chunk(file: ParquetFile, group: int, column: str) -> Any:
    """Return the footer's facts about a column in a row group. The columns there are the leaves of nested ones too."""
    paths = [file.schema.column(leaf).path for leaf in range(len(file.schema))]
    return file.metadata.row_group(group).column(paths.index(column))


def _open(path: Path, source: Source) -> ParquetFile:
    from pyarrow.parquet import ParquetFile

    with _damage(f"{source.address}, footer"):
        # Without a buffer size, the whole column of a row group is held, compressed.
        return ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True)


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


def _row_group(file: ParquetFile, group: int, column: str, source: Source, most: int) -> Iterator[DocumentPiece]:
    row = 0
    for batch in _batches(file, group, column, f"{source.address}, row group {group}", most):
        texts = batch.column(0)
        piece = _piece(texts, column, source, group, row)
        # Arrow has read them by now: it holds all of a page.
        yield piece if piece.texts.nbytes <= most else _without_long_ones(piece, source, group, row, most)
        row += len(texts)


def _batches(file: ParquetFile, group: int, column: str, where: str, most: int) -> Iterator[Any]:
    chunk = _chunk(file, group, column)
    _require_bounded(chunk.total_uncompressed_size, most, where)
    rows = max(1, min(_MAX_ROWS, chunk.num_values * _PIECE_BYTES // max(1, chunk.total_uncompressed_size)))
    with _damage(where):
        # The workers are parallel themselves: no threads.
        yield from file.iter_batches(batch_size=rows, row_groups=[group], columns=[column], use_threads=False)


def _require_bounded(size: int, most: int, where: str) -> None:
    bound = max(_LEAST_BOUND, _MOST_DOCUMENTS * most)
    if size > bound:
        raise DataError(
            f"{where} says that it has {size:,} bytes of text, and at most {bound:,} are expanded "
            f"({_MOST_DOCUMENTS} times data.max_document_bytes, or {_LEAST_BOUND:,}); write it in smaller row groups"
        )


def _piece(texts: Any, column: str, source: Source, group: int, first: int) -> DocumentPiece:
    """`first` is the row of the group that these begin with."""
    import pyarrow as pa

    texts = texts.cast(pa.large_string())
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
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the machine's trouble; Arrow gives no errno where the data are at fault
        raise DataError(f"{where}: no readable parquet, damaged or cut off: {error}") from error
