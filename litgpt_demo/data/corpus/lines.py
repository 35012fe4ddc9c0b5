"""Documents in batches; and those of text and JSON lines, which lie behind one another with separators between."""

from __future__ import annotations

import json
import math
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from io import BufferedReader
from typing import TYPE_CHECKING

import psutil

from litgpt_demo.data.corpus.files import CHUNK, Source
from litgpt_demo.errors import DataError, TrainLitgptError, UserError

if TYPE_CHECKING:
    import pyarrow as pa

# The text, its copy as an Arrow array, and what gigatoken 0.10 and numpy take to encode it: measured 5.7 bytes a byte.
_MEMORY_OF_A_BYTE = 8

# Documents and characters at the beginning of a text file that show whether it is one.
_LOOKED_AT, _LOOKED_AT_CHARACTERS = 20, 1 << 16


@dataclass(frozen=True, kw_only=True)
class BadDocument:
    """A document that cannot be read."""

    index: int
    """Its number in its batch; what `read_shard` gives counts from the shard's first, bad and empty ones too."""
    place: str
    """The file's name and the position in it, the same wherever the corpus lies: `part-1.jsonl, line 3`."""
    reason: str
    error: TrainLitgptError
    """To raise where bad documents are not skipped; it names the file's address."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Documents that follow each other, as they lie in the files: a bad one stands as an empty text."""

    texts: pa.LargeStringArray
    """Valid UTF-8 without nulls. May be a slice of a longer array: mind its offset."""
    bad: tuple[BadDocument, ...] = ()

    def slice(self, start: int, end: int) -> Batch:
        """The documents [start, end)."""
        if start == 0 and end == len(self.texts):
            return self
        bad = tuple(replace(one, index=one.index - start) for one in self.bad if start <= one.index < end)
        return Batch(texts=self.texts.slice(start, end - start), bad=bad)


def only_bad(source: Source, place: str, reason: str, error: TrainLitgptError) -> Batch:
    """The batch of one bad document."""
    import pyarrow as pa

    bad = BadDocument(index=0, place=f"{source.name}, {place}", reason=reason, error=error)
    return Batch(texts=pa.array([""], pa.large_string()), bad=(bad,))


def too_long(source: Source, place: str, most: int) -> tuple[str, DataError]:
    """Return the reason and the error of a document with more than `most` bytes."""
    reason = f"has more than {most:,} bytes"
    return reason, DataError(
        f"{source.address}: the document at {place} {reason}, and data.max_document_bytes lets in no more. Is it "
        "damaged, or is there a data.corpus.separator that cuts it? Else raise that setting: making its tokens takes 8 "
        "times as much memory"
    )


def batch_of(values: Sequence[bytes | None], bad_one: Callable[[int, UnicodeDecodeError | None], BadDocument]) -> Batch:
    """The batch of these UTF-8 texts. `bad_one` describes the one at an index that is not UTF-8, or None at all."""
    import pyarrow as pa

    texts = pa.array(values, pa.large_binary()).view(pa.large_string())
    if is_sound(texts):
        return Batch(texts=texts)
    good, bad = list[bytes](), list[BadDocument]()
    for index, value in enumerate(values):
        try:
            if value is None:
                bad.append(bad_one(index, None))
            good.append((value or b"").decode().encode())
        except UnicodeDecodeError as error:
            bad.append(bad_one(index, error))
            good.append(b"")
    return Batch(texts=pa.array(good, pa.large_binary()).view(pa.large_string()), bad=tuple(bad))


def is_sound(texts: pa.LargeStringArray) -> bool:
    """Return True if every text is there and is UTF-8."""
    import pyarrow as pa

    if texts.null_count:
        return False
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


# --- text -------------------------------------------------------------------------------------------------------------


def whole_text(stream: BufferedReader, source: Source, *, most: int) -> Iterator[Batch]:
    """The file as one document, of at most `most` bytes.

    Without the memory for it, the tokenizer or the system would end the process without a word: that is a DataError.
    """
    free = psutil.virtual_memory().available
    limit = min(most, free // _MEMORY_OF_A_BYTE)
    # A compressed file does not say how long its text is.
    start = _skip_mark(stream)
    text = stream.read(limit + 1) if source.size <= limit else None
    if text is not None and len(text) <= limit:
        yield _text_batch([text], start, 0, source)
    elif limit == most:
        yield only_bad(source, "byte 0", *too_long(source, "byte 0", most))
    else:
        size = max(source.size, limit)
        raise DataError(
            f"{source.address} is one document of {size / 1e9:.1f} GB or more, and its tokens take about "
            f"{_MEMORY_OF_A_BYTE * size / 1e9:.0f} GB of memory to make, of which {free / 1e9:.0f} GB are free; "
            "set data.corpus.separator to what stands between its documents, or cut the file into several"
        )


def separated_texts(
    stream: BufferedReader, source: Source, separator: bytes, start: int = 0, end: int | None = None, *, most: int
) -> Iterator[Batch]:
    """The text between separators. UTF-8 keeps characters apart, so the bytes of the separator occur only where the
    separator does."""
    for byte, texts in _runs(stream, separator, start, end, most):
        if texts is None:
            yield only_bad(source, f"byte {byte}", *too_long(source, f"byte {byte}", most))
        else:
            yield _text_batch(texts, byte, len(separator), source)


def require_text(batches: Iterator[Batch], source: Source) -> Iterator[Batch]:
    """The documents of a file that is taken for text by its name, unless all that it begins with is JSON objects.

    The model would be trained on braces and field names: that is a UserError.
    """
    for number, batch in enumerate(batches):
        if number == 0 and (fields := _fields_of_lines("\n".join(batch.texts.slice(0, _LOOKED_AT).to_pylist()))):
            column = "text" if "text" in fields else fields[0]
            raise UserError(
                f"{source.address} would be read as text, and its lines are JSON objects with the fields "
                f"{quoted(fields)}; set data.corpus.format=jsonl and data.corpus.column={column}, or "
                "data.corpus.format=text to train on the lines as they stand"
            )
        yield batch


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


def _text_batch(texts: list[bytes], start: int, between: int, source: Source) -> Batch:
    """The first text begins at byte `start` of the file's text, and there are `between` bytes from one to the next."""

    def bad_one(index: int, error: UnicodeDecodeError | None) -> BadDocument:
        assert error is not None
        byte = start + sum(len(text) + between for text in texts[:index]) + error.start
        what = _not_utf8(error)
        return BadDocument(
            index=index,
            place=f"{source.name}, byte {byte}",
            reason=f"not UTF-8 ({what})",
            error=DataError(f"{source.address} is not UTF-8 at byte {byte} ({what}); {_CONVERT}"),
        )

    return batch_of(texts, bad_one)


_CONVERT = "convert it, for example with iconv -f latin1 -t utf-8"


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"0x{error.object[error.start]:02x}, {error.reason}"


# --- JSON lines -------------------------------------------------------------------------------------------------------


def json_lines(
    stream: BufferedReader, source: Source, column: str, start: int = 0, end: int | None = None, *, most: int
) -> Iterator[Batch]:
    """The string in one field of each line; lines of white space are none."""

    @cache
    def lines_before() -> int:
        """Counted only where a line has to be named."""
        if not start:
            return 0  # and a compressed stream cannot be rewound
        here = stream.tell()
        stream.seek(0)
        count = sum(stream.read(min(CHUNK, start - byte)).count(b"\n") for byte in range(0, start, CHUNK))
        stream.seek(here)
        return count

    done = 0
    for _, lines in _runs(stream, b"\n", start, end, most):

        def place(row: int, done: int = done) -> str:
            return f"line {lines_before() + done + row + 1}"

        if lines is None:
            yield only_bad(source, place(0), *too_long(source, place(0), most))
        else:
            yield _json_batch(lines, source, column, place)
        done += 1 if lines is None else len(lines)


def _json_batch(lines: list[bytes], source: Source, column: str, place: Callable[[int], str]) -> Batch:
    """`place` says which line of the file the one at an index is."""
    import pyarrow as pa
    from pydantic_core import from_json  # two to three times as fast as json, and as strict

    texts, bad = list[str](), list[BadDocument]()
    try:
        texts = [from_json(line, cache_strings=False)[column] for line in lines if line and not line.isspace()]
        found = pa.array(texts, pa.large_string())
        if not found.null_count:
            return Batch(texts=found)
    except (ValueError, LookupError, TypeError, pa.ArrowException):
        pass  # one of them is bad: which?
    texts = []
    for row, line in enumerate(lines):
        if not line or line.isspace():
            continue
        try:
            texts.append(_json_text(line, column))
        except _BadLine as found_bad:
            reason, advice, kind = found_bad.args
            error = kind(f"{source.address}, {place(row)} {reason}{advice}")
            bad.append(BadDocument(index=len(texts), place=f"{source.name}, {place(row)}", reason=reason, error=error))
            texts.append("")
    return Batch(texts=pa.array(texts, pa.large_string()), bad=tuple(bad))


class _BadLine(Exception):
    def __init__(self, reason: str, advice: str = "", kind: type[TrainLitgptError] = DataError) -> None:
        super().__init__(reason, advice, kind)


def _json_text(line: bytes, column: str) -> str:
    from pydantic_core import from_json

    try:
        try:
            record = from_json(line, cache_strings=False)  # as in the quick way: it means the same in any company
        except ValueError:
            # It explains, in a few more: half surrogates in other fields, and nesting beyond 200.
            record = json.loads(line.decode())
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


def _shown(value: object) -> str:
    return json.dumps(value)[:60]


def quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
