"""Text and JSON lines: documents that lie behind one another with a separator between them."""

from __future__ import annotations

import json
import math
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from io import BufferedReader
from typing import Any

import psutil

from litgpt_demo.data.corpus.compression import CHUNK
from litgpt_demo.data.corpus.pieces import DocumentPiece, Flaw, piece_of, too_long
from litgpt_demo.data.corpus.source import Source
from litgpt_demo.errors import DataError, TrainLitgptError, UserError

# The text, its copy as an Arrow array, and what gigatoken 0.10 and numpy take to encode it: measured 5.7 bytes a byte.
_MEMORY_OF_A_BYTE = 8

# Documents and characters at the beginning of a text file that show whether it is one.
_LOOKED_AT, _LOOKED_AT_CHARACTERS = 20, 1 << 16


def whole_text(stream: BufferedReader, source: Source, *, most: int) -> Iterator[DocumentPiece]:
    """The file as one document, of at most `most` bytes.

    Raises:
        DataError: there is not the memory for it; the tokenizer or the system would end the process without a word.
    """
    free = psutil.virtual_memory().available
    limit = min(most, free // _MEMORY_OF_A_BYTE)
    # A compressed file does not say how long its text is.
    start = _skip_mark(stream)
    text = stream.read(limit + 1) if source.size <= limit else None
    if text is not None and len(text) <= limit:
        yield _text_piece([text], start, 0, source)
    elif limit == most:
        yield _too_long(source, "byte 0", most)
    else:
        size = max(source.size, limit)
        raise DataError(
            f"{source.address} is one document of {size / 1e9:.1f} GB or more, and its tokens take about "
            f"{_MEMORY_OF_A_BYTE * size / 1e9:.0f} GB of memory to make, of which {free / 1e9:.0f} GB are free; "
            "set data.corpus.separator to what stands between its documents, or cut the file into several"
        )


def separated_texts(
    stream: BufferedReader, source: Source, separator: bytes, start: int = 0, end: int | None = None, *, most: int
) -> Iterator[DocumentPiece]:
    """The text between separators. UTF-8 keeps characters apart, so the bytes of the separator occur only where the
    separator does."""
    for byte, texts in _runs(stream, separator, start, end, most):
        if texts is None:
            yield _too_long(source, f"byte {byte}", most)
        else:
            yield _text_piece(texts, byte, len(separator), source)


def require_text(pieces: Iterator[DocumentPiece], source: Source) -> Iterator[DocumentPiece]:
    """The pieces of a file that is taken for text by its name, unless all that it begins with is JSON objects.

    Raises:
        UserError: its lines are objects; the model would be trained on braces and field names.
    """
    for number, piece in enumerate(pieces):
        if number == 0 and (fields := _fields_of_lines("\n".join(piece.texts.slice(0, _LOOKED_AT).to_pylist()))):
            column = "text" if "text" in fields else fields[0]
            raise UserError(
                f"{source.address} would be read as text, and its lines are JSON objects with the fields "
                f"{quoted(fields)}; set data.corpus.format=jsonl and data.corpus.column={column}, or "
                "data.corpus.format=text to train on the lines as they stand"
            )
        yield piece


def _fields_of_lines(text: str) -> list[str]:
    """Return the fields of the first line, if each line that is there whole is a JSON object; else none."""
    head = text[:_LOOKED_AT_CHARACTERS]
    lines = (head.rpartition("\n")[0] if len(head) < len(text) else head).splitlines()
    records = []
    for line in (line for line in lines if line.strip()):
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):
            return []
    return list(records[0]) if records and all(isinstance(record, dict) for record in records) else []


def json_lines(
    stream: BufferedReader, source: Source, column: str, start: int = 0, end: int | None = None, *, most: int
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
    for _, lines in _runs(stream, b"\n", start, end, most):

        def number(row: int, done: int = done) -> int:
            return lines_before() + done + row + 1

        if lines is None:
            yield _too_long(source, f"line {number(0)}", most)
        else:
            yield _json_piece(lines, source, column, number)
        done += 1 if lines is None else len(lines)


# --- cutting ----------------------------------------------------------------------------------------------------------


def _runs(
    stream: BufferedReader, separator: bytes, start: int, end: int | None, most: int
) -> Iterator[tuple[int, list[bytes] | None]]:
    """bytes.split over bytes [start, end) of a stream, a chunk's pieces at a time, each time with where they begin.

    With an `end`, which lies behind a separator, nothing follows that one. None stands for one piece that has more than
    `most` bytes: it is told of when so many are read, and never held as a whole.
    """
    start = stream.seek(start) if start else _skip_mark(stream)
    left = math.inf if end is None else end - start
    rest, skipping = b"", False
    unsure = len(separator) - 1  # bytes at the end of `rest` that may be the beginning of a separator
    # At least as much again as was in vain: so the work stays linear, however many chunks a piece spans.
    while chunk := stream.read(int(min(left, max(CHUNK, min(len(rest), most + unsure + 1 - len(rest)))))):
        left -= len(chunk)
        *pieces, rest = (rest + chunk).split(separator)
        if skipping and pieces:
            start += len(pieces.pop(0)) + len(separator)
            skipping = False
        if pieces:
            yield from _bounded(pieces, start, len(separator), most)
            start += sum(map(len, pieces)) + len(separator) * len(pieces)
        if len(rest) > most + unsure and not skipping:
            yield start, None
            skipping = True
        if skipping:
            dropped = max(0, len(rest) - unsure)
            start, rest = start + dropped, rest[dropped:]
    if not skipping and (end is None or rest):
        yield from _bounded([rest], start, len(separator), most)


def _skip_mark(stream: BufferedReader) -> int:
    """Pass over the mark that says UTF-8 at the beginning of a file; return how many bytes those are."""
    return len(stream.read(len(BOM_UTF8))) if stream.peek(len(BOM_UTF8)).startswith(BOM_UTF8) else 0


def _bounded(pieces: list[bytes], start: int, between: int, most: int) -> Iterator[tuple[int, list[bytes] | None]]:
    """Yield the pieces with where they begin, and None for each that is too long."""
    if most >= CHUNK and len(pieces[0]) <= most:  # all others came within one chunk
        yield start, pieces
        return
    for piece in pieces:
        yield start, [piece] if len(piece) <= most else None
        start += len(piece) + between


def _too_long(source: Source, place: str, most: int) -> DocumentPiece:
    import pyarrow as pa

    return DocumentPiece(texts=pa.array([""], pa.large_string()), flaws=(too_long(0, source, place, most),))


# --- text -------------------------------------------------------------------------------------------------------------


def _text_piece(texts: list[bytes], start: int, between: int, source: Source) -> DocumentPiece:
    """The first text begins at byte `start` of the file's text, and there are `between` bytes from one to the next."""

    def flaw(row: int, error: UnicodeDecodeError | None) -> Flaw:
        assert error is not None
        byte = start + sum(len(text) + between for text in texts[:row]) + error.start
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
    if b"\\u" in line and re.search("[\ud800-\udfff]", text):
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


def _shown(value: object) -> str:
    return json.dumps(value)[:60]


def quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
