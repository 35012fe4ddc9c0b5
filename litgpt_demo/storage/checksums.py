"""Checksums: crc32c as buckets keep it, written as 8 lower-case hex digits, and sha256."""

from __future__ import annotations

from functools import cache
from hashlib import file_digest
from pathlib import Path
from typing import BinaryIO

import google_crc32c

EMPTY = "00000000"
"""The crc32c of no bytes."""

_BLOCK = 1 << 20
_POLYNOMIAL = 0x82F63B78  # RFC 3720 B.4, reflected: bit 31 is the coefficient of x^0


def crc32c_of(path: Path) -> str:
    with path.open("rb") as file:
        return copy_with_crc(file)[1]


def sha256_of(path: Path) -> str:
    """64 lower-case hex digits."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def copy_with_crc(source: BinaryIO, sink: BinaryIO | None = None, *, limit: int | None = None) -> tuple[int, str]:
    """Read `source` to its end or for `limit` bytes, into `sink` if there is one: how many it was, and their crc32c."""
    size, crc32c = 0, 0
    while block := source.read(_BLOCK if limit is None else min(_BLOCK, limit - size)):
        if sink is not None:
            sink.write(block)
        crc32c = google_crc32c.extend(crc32c, block)
        size += len(block)
    return size, f"{crc32c:08x}"


def combined_crc32c(first: str, second: str, size: int) -> str:
    """The crc32c of a text from those of its two halves, the second being `size` bytes long.

    A crc is a remainder of polynomials over GF(2): to put `size` bytes behind the first half is to multiply its
    remainder by x^(8 size), and the second half's is added, which is xor.
    """
    return f"{_product(_shift(size), int(first, 16)) ^ int(second, 16):08x}"


@cache
def _shift(size: int) -> int:
    """x^(8 size) modulo the polynomial, by squaring."""
    shift, square = 1 << 31, 1 << 23  # x^0 and x^8
    while size:
        if size & 1:
            shift = _product(square, shift)
        square = _product(square, square)
        size >>= 1
    return shift


def _product(one: int, other: int) -> int:
    """`one` times `other` modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)  # times x
    return product
