"""The pages of one column in a row group of a Parquet file, by their own headers.

A footer's sizes are only words, and Arrow takes them as such: what it expands at once depends on the pages. So their
headers are looked at first. See parquet.thrift and the compact protocol of Thrift for the format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

AT_ONCE = 128 << 20
"""Bytes of text that an array may have at worst, but for its longest text and the pages at its ends."""

_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
_OF_DICTIONARY, _OF_PREFIXES = (2, 8), 7
"""Encodings whose values may each be as long as a whole page, however many there are: a number in the dictionary
(PLAIN_DICTIONARY, RLE_DICTIONARY), and a part of the value before (DELTA_BYTE_ARRAY)."""
_DEPTH = 4
_FOOTERS_SLACK = 100
"""Old writers leave the dictionary's header out of a chunk's size; Arrow reads as many bytes more (PARQUET-816)."""


class DamagedPages(ValueError):
    """Headers that no writer makes; says why."""


class Pages(NamedTuple):
    """Bounds for reading the column in a row group."""

    bytes: int
    """The size of all pages, uncompressed and still encoded."""
    rows: int
    """The most that can be read at once without making more than about `AT_ONCE` bytes of them."""


def measure(path: Path, start: int, stored: int, values: int) -> Pages:
    """Measure the pages that begin at a byte of the file, take about so many bytes, and hold exactly these values.

    Raises:
        DamagedPages: they do not.
    """
    size, rows, seen, longest = 0, AT_ONCE, 0, 0
    with path.open("rb") as file:
        while seen < values and stored > 0:
            file.seek(start)
            header = _struct(file)
            kind, expanded, compressed = (_number(header, field) for field in (1, 2, 3))
            start, stored = file.tell() + compressed, stored - (file.tell() - start) - compressed
            if stored < -_FOOTERS_SLACK:
                raise DamagedPages("its pages take more bytes than the footer says")
            size += expanded
            if kind == _DICTIONARY:
                longest = max(longest, expanded)
            elif kind in (_DATA, _DATA_2):
                count, encoding = _described(header, kind)
                rows, seen = min(rows, _rows(count, encoding, expanded, longest)), seen + count
    if seen != values:
        raise DamagedPages(f"its pages have {seen:,} values and the footer says {values:,}")
    return Pages(size, max(1, rows))


def _rows(count: int, encoding: int, expanded: int, longest: int) -> int:
    if encoding in _OF_DICTIONARY:
        return AT_ONCE // max(1, longest)
    return AT_ONCE * (1 if encoding == _OF_PREFIXES else count) // max(1, expanded)


def _described(header: dict[int, Any], kind: int) -> tuple[int, int]:
    """Return how many values a data page has, and their encoding."""
    described = header.get(5 if kind == _DATA else 8)
    if not isinstance(described, dict):
        raise DamagedPages("a page does not say what it holds")
    return _number(described, 1), _number(described, 2 if kind == _DATA else 4)


def _number(fields: dict[int, Any], field: int) -> int:
    number = fields.get(field)
    if not isinstance(number, int) or not 0 <= number < 1 << 31:
        raise DamagedPages(f"a page's header has {number!r} where a size or a kind belongs")
    return number


# --- Thrift's compact protocol ----------------------------------------------------------------------------------------


def _struct(file: BinaryIO, depth: int = 0) -> dict[int, Any]:
    """Read the numbers and structs in a struct by the number of their field. Texts are passed over."""
    if depth > _DEPTH:
        raise DamagedPages("a page's header nests too deep")
    found: dict[int, Any] = {}
    field = 0
    while head := _byte(file):
        field = field + (head >> 4) if head >> 4 else _integer(file)
        kind = head & 15
        if kind in (4, 5, 6):  # integers of 16, 32 and 64 bits
            found[field] = _integer(file)
        elif kind == 12:
            found[field] = _struct(file, depth + 1)
        elif kind in (3, 7, 8):  # a byte, a double, a text
            file.seek({3: 1, 7: 8}.get(kind) or _varint(file), 1)
        elif kind not in (1, 2):  # true and false have no more bytes; no header has a list
            raise DamagedPages(f"a page's header has a field of the kind {kind}")
    return found


def _integer(file: BinaryIO) -> int:
    number = _varint(file)
    return (number >> 1) ^ -(number & 1)


def _varint(file: BinaryIO) -> int:
    number = 0
    for shift in range(0, 63, 7):
        byte = _byte(file)
        number |= (byte & 127) << shift
        if byte < 128:
            return number
    raise DamagedPages("a number in a page's header does not end")


def _byte(file: BinaryIO) -> int:
    if not (read := file.read(1)):
        raise DamagedPages("a page lies behind the end of the file")
    return read[0]
