"""Filters of documents: by length, by their share of letters, and because they were there before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from litgpt_demo.config import Filters

Mask = npt.NDArray[np.bool_]

DIGEST_BYTES = 16
"""Bits of a hash that must agree for documents to count as the same: among 10^12, two different ones do so with
a probability below 10^-14."""

_AT_ONCE = 4_000_000  # digests compared at a time, in about 300 MB


def passing(texts: Any, filters: Filters) -> tuple[Mask, Counter[str]]:
    """Return which documents pass, and how many were dropped for which reason (the first one that applies).

    Args:
        texts: a LargeStringArray of pyarrow, without nulls.
    """
    import pyarrow.compute as pc

    kept, dropped = np.ones(len(texts), dtype=bool), Counter[str]()

    def drop(reason: str, which: Mask) -> None:
        dropped[reason] += int((kept & which).sum())
        kept[which] = False

    drop("empty", byte_lengths(texts) == 0)
    if filters.min_characters or filters.max_characters:
        characters = _numbers(pc.utf8_length(texts))
        drop("too short", characters < (filters.min_characters or 0))
        if filters.max_characters:
            drop("too long", characters > filters.max_characters)
    if filters.min_letter_ratio:
        drop("too few letters", letter_ratios(texts) < filters.min_letter_ratio)
    return kept, +dropped


def byte_lengths(texts: Any) -> npt.NDArray[np.int64]:
    """UTF-8 bytes of each document."""
    import pyarrow.compute as pc

    return _numbers(pc.binary_length(texts))


def chosen(texts: Any, mask: Mask) -> Any:
    """The documents that the mask says, copied only where it leaves some out."""
    return texts if mask.all() else texts.filter(mask)


def _numbers(array: Any) -> npt.NDArray[np.int64]:
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.int64)


def letter_ratios(texts: Any) -> npt.NDArray[np.float64]:
    """Return, for each document, the share of letters and their marks, in any script, among what is not white space.

    A document of white space alone has 0.
    """
    import pyarrow.compute as pc

    ends = np.cumsum(_numbers(pc.utf8_length(texts))).tolist()
    characters = np.frombuffer("".join(texts.to_pylist()).encode("utf-32-le"), dtype="<u4")
    letters, spaces = (table[characters] for table in _letters_and_spaces())
    ratios = np.zeros(len(texts))
    for document, (start, end) in enumerate(pairwise([0, *ends])):
        visible = end - start - np.count_nonzero(spaces[start:end])
        if visible:
            ratios[document] = np.count_nonzero(letters[start:end]) / visible
    return ratios


@cache
def _letters_and_spaces() -> tuple[Mask, Mask]:
    """A table by code point: is it a letter or a mark on one, and is it white space?"""
    import sys
    import unicodedata

    every = [chr(point) for point in range(sys.maxunicode + 1)]
    letters = np.fromiter((unicodedata.category(character)[0] in "LM" for character in every), dtype=bool)
    return letters, np.fromiter((character.isspace() for character in every), dtype=bool)


def digests_of(texts: Any) -> bytes:
    """DIGEST_BYTES of each document, behind one another."""
    _, offsets, content = texts.buffers()
    edges = np.frombuffer(offsets, dtype="<i8")[texts.offset : texts.offset + len(texts) + 1].tolist()
    view = memoryview(content) if content is not None else memoryview(b"")
    return b"".join(blake2b(view[start:end], digest_size=DIGEST_BYTES).digest() for start, end in pairwise(edges))


def first_of_each(counts: Sequence[int], of_shard: Callable[[int], bytes]) -> list[Mask]:
    """Return, for every document, whether it is the first with its text, shard by shard in the corpus' order.

    Args:
        counts: documents of each shard.
        of_shard: the digests of one shard's documents; asked once for every `_AT_ONCE` documents there are in all,
            so that memory is bounded by that and by a byte per document.
    """
    first = np.zeros(sum(counts), dtype=bool)
    groups = -(-len(first) // _AT_ONCE) or 1
    starts = np.concatenate([[0], np.cumsum(counts)])
    for group in range(groups):
        # The digests that fall into the group, as pairs of numbers, and the numbers of their documents.
        every_number, every_key = [np.empty(0, np.int64)], [np.empty((0, 2), np.uint64)]
        for shard, start in enumerate(starts[:-1]):
            found = np.frombuffer(of_shard(shard), dtype="<u8").reshape(-1, 2)
            mine = np.flatnonzero(found[:, 0] % np.uint64(groups) == group)
            every_number.append(mine + start)
            every_key.append(found[mine])
        numbers, keys = np.concatenate(every_number), np.concatenate(every_key)
        order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: of equal digests the lowest number comes first
        ordered = keys[order]
        leads = np.ones(len(ordered), dtype=bool)
        leads[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        first[numbers[order[leads]]] = True
    return np.split(first, starts[1:-1]) if len(counts) else []
