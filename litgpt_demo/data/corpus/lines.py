"""Text and JSON lines: documents that lie behind one another with a separator between them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import accumulate
from typing import Any, BinaryIO

import psutil

from litgpt_demo.data.corpus.compression import CHUNK
from litgpt_demo.data.corpus.pieces import DocumentPiece, Flaw, piece_of
from litgpt_demo.data.corpus.source import Source
from litgpt_demo.errors import DataError, TrainLitgptError, UserError

# The text, its copy as an Arrow array, and what gigatoken 0.10 and numpy take to encode it: measured 5.7 bytes a byte.
_MEMORY_OF_A_BYTE = 8


def whole_text(stream: BinaryIO, source: Source) -> Iterator[DocumentPiece]:
    """The file as one document.

    Raises:
        DataError: there is not the memory for it; the tokenizer or the system would end the process without a word.
    """
    needed, free = _MEMORY_OF_A_BYTE * source.size, psutil.virtual_memory().available
    if needed > free:
        raise DataError(
            f"{source.address} is one document of {source.size / 1e9:.1f} GB, and its tokens take about "
            f"{needed / 1e9:.0f} GB of memory to make, of which {free / 1e9:.0f} GB are free; "
            "set data.corpus.separator to what stands between its documents, or cut the file into several"
        )
    yield _text_piece([stream.read()], [0], source)


def separated_texts(
    stream: BinaryIO, source: Source, separator: bytes, start: int = 0, end: int | None = None
) -> Iterator[DocumentPiece]:
    """The text between separators. UTF-8 keeps characters apart, so the bytes of the separator occur only where the
    separator does."""
    for texts in _runs(stream, separator, start, end):
        starts = list(accumulate((len(text) + len(separator) for text in texts), initial=start))
        yield _text_piece(texts, starts, source)
        start = starts[-1]


def json_lines(
    stream: BinaryIO, source: Source, column: str, start: int = 0, end: int | None = None
) -> Iterator[DocumentPiece]:
    """The string in one field of each line; lines of white space are none."""

    @cache
    def lines_before() -> int:
        """The line's number in this part: counted only where a line has to be named."""
        if not start:
            return 0  # and a compressed stream cannot be rewound
        here = stream.tell()
        stream.seek(0)
        count = sum(stream.read(min(CHUNK, start - byte)).count(b"\n") for byte in range(0, start, CHUNK))
        stream.seek(here)
        return count

    done = 0
    for lines in _runs(stream, b"\n", start, end):

        def number(row: int, done: int = done) -> int:
            return lines_before() + done + row + 1

        yield _json_piece(lines, source, column, number)
        done += len(lines)


# --- cutting ----------------------------------------------------------------------------------------------------------


def _runs(stream: BinaryIO, separator: bytes, start: int, end: int | None) -> Iterator[list[bytes]]:
    """bytes.split over bytes [start, end) of a stream, a chunk's pieces at a time.

    With an `end`, which lies behind a separator, nothing follows that one.
    """
    if start:
        stream.seek(start)
    left = math.inf if end is None else end - start
    rest = b""
    # At least as much again as was in vain: so the work stays linear, however many chunks a piece spans.
    while chunk := stream.read(int(min(left, max(CHUNK, len(rest))))):
        left -= len(chunk)
        *pieces, rest = (rest + chunk).split(separator)
        if pieces:
            yield pieces
    if end is None or rest:
        yield [rest]


# --- text -------------------------------------------------------------------------------------------------------------


def _text_piece(texts: list[bytes], starts: list[int], source: Source) -> DocumentPiece:
    """`starts` say at which byte of the file's text each begins."""

    def flaw(row: int, error: UnicodeDecodeError | None) -> Flaw:
        assert error is not None
        byte = starts[row] + error.start
        what = _not_utf8(error)
        return Flaw(
            row=row,
            place=f"{source.name}, byte {byte}",
            reason=f"not UTF-8 ({what})",
            error=DataError(f"{source.address} is not UTF-8 at byte {byte} ({what}); {_CONVERT}"),
        )

    return piece_of(texts, flaw)


_CONVERT = "convert it, for example with iconv -f latin1 -t utf-8"


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"0x{error.object[error.start]:02x}, {error.reason}"


# --- JSON lines -------------------------------------------------------------------------------------------------------


def _json_piece(lines: list[bytes], source: Source, column: str, number: Callable[[int], int]) -> DocumentPiece:
    """`number` says which line of the file the one at an index is."""
    import pyarrow as pa
    from pydantic_core import from_json  # two to three times as fast as json, and as strict

    try:
        texts = [from_json(line, cache_strings=False)[column] for line in lines if line and not line.isspace()]
        found = pa.array(texts, pa.large_string())
    except (ValueError, LookupError, TypeError, pa.ArrowException):
        found = None
    if found is not None and not found.null_count:
        return DocumentPiece(texts=found)
    return _checked_json_piece(lines, source, column, number)


def _checked_json_piece(lines: list[bytes], source: Source, column: str, number: Callable[[int], int]) -> DocumentPiece:
    """Line by line, to find what is wrong with which."""
    import pyarrow as pa

    texts: list[str] = []
    flaws: list[Flaw] = []
    for row, line in enumerate(lines):
        if not line or line.isspace():
            continue
        try:
            texts.append(_json_text(line, column))
        except _BadLine as bad:
            place = f"line {number(row)}"
            error = bad.kind(f"{source.address}, {place} {bad.reason}{bad.advice}")
            flaws.append(Flaw(row=len(texts), place=f"{source.name}, {place}", reason=bad.reason, error=error))
            texts.append("")
    return DocumentPiece(texts=pa.array(texts, pa.large_string()), flaws=tuple(flaws))


class _BadLine(Exception):
    def __init__(self, reason: str, advice: str = "", kind: type[TrainLitgptError] = DataError) -> None:
        self.reason, self.advice, self.kind = reason, advice, kind


def _json_text(line: bytes, column: str) -> str:
    try:
        record = _parsed(line)
    except UnicodeDecodeError as error:
        raise _BadLine(f"is not UTF-8 at byte {error.start} ({_not_utf8(error)})", f"; {_CONVERT}") from error
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise _BadLine(f"is no JSON object but {_shown(record)}", f'; a line reads {{{json.dumps(column)}: "…"}}')
    if column not in record:
        raise _BadLine(f"has no field {column!r}; it has {quoted(record)}", ". Set data.corpus.column", UserError)
    text = record[column]
    if not isinstance(text, str):
        raise _BadLine(f"has {_shown(text)} as {column!r}", ", and a document is a string; repair or drop the line")
    if b"\\u" in line and not _encodes(text):
        raise _BadLine(f"has half a surrogate pair in {column!r}", ", which no UTF-8 text can hold; repair the line")
    return text


def _parsed(line: bytes) -> Any:
    """Read a line with the parser of the quick way, so that it means the same in any company; json explains, in a few
    more: half surrogates in other fields, and nesting beyond 200."""
    from pydantic_core import from_json

    try:
        return from_json(line, cache_strings=False)
    except ValueError:
        return json.loads(line.decode())


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    return json.dumps(value)[:60]


def quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
