"""Filters: which documents are left out, which of equal ones is kept, and how each is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.config import Filters
from litgpt_demo.data.preparation.filters import (
    digests_of,
    first_of_each,
    passing,
)


def array(texts: Sequence[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


@pytest.mark.parametrize(
    ("filters", "left_out"),
    [
        (Filters(), {"": "empty"}),
        (
            Filters(min_characters=2, max_characters=3),
            {"": "empty", " ": "too short", "é": "too short", "नमस्ते": "too long", "Дождь": "too long"},
        ),
        (
            Filters(min_characters=2, min_letter_ratio=0.9),
            {"": "empty", " ": "too short", "é": "too short", "|--|": "too few letters", "٣٫١٤": "too few letters"},
        ),
    ],
)
def test_a_document_is_left_out_for_the_first_reason_there_is(filters: Filters, left_out: dict[str, str]) -> None:
    texts = ["", " ", "é", "日本", "Дождь", "नमस्ते", "|--|", "٣٫١٤"]
    if filters.max_characters is not None:
        left_out = {**left_out, "|--|": "too long", "٣٫١٤": "too long"}
    kept, dropped = passing(array(texts), filters)
    assert kept.tolist() == [text not in left_out for text in texts]
    assert dropped == Counter(left_out.values())


@given(
    shards=st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=6),
    at_once=st.sampled_from([1, 2, 5, 4_000_000]),
)
def test_of_equal_documents_the_first_of_the_corpus_is_kept_however_few_are_compared_at_a_time(
    shards: list[list[int]], at_once: int
) -> None:
    written = [digests_of(array([str(number) for number in shard])) for shard in shards]
    masks = first_of_each([len(shard) for shard in shards], written.__getitem__, at_once=at_once)
    seen = [number for shard in shards for number in shard]
    first = [number not in seen[:place] for place, number in enumerate(seen)]
    edges = [0, *accumulate(len(shard) for shard in shards)]
    assert [mask.tolist() for mask in masks] == [first[start:end] for start, end in pairwise(edges)]
