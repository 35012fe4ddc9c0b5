"""Filters: which documents are left out, which of equal ones is kept, and how each is counted."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise

import pyarrow as pa
from corpora import DOCUMENTS, FILTERS, reason_to_drop
from hypothesis import example, given
from hypothesis import strategies as st

from litgpt_demo.config import Filters
from litgpt_demo.data.preparation.filters import digests_of, first_of_each, passing

SCRIPTS = ["", " ", "é", "日本", "Дождь", "नमस्ते", "|--|", "٣٫١٤"]


@given(texts=st.lists(DOCUMENTS | st.sampled_from(SCRIPTS), max_size=6), filters=FILTERS)
@example(texts=SCRIPTS, filters=Filters(min_characters=2, max_characters=5))
@example(texts=SCRIPTS, filters=Filters(min_letter_ratio=0.9))
def test_a_document_is_left_out_for_the_first_reason_there_is(texts: list[str], filters: Filters) -> None:
    filters = filters.model_copy(update={"drop_duplicates": False})  # it is dropped when all documents are known
    kept, dropped = passing(pa.array(texts, pa.large_string()), filters)
    reasons = [reason_to_drop(text, filters, []) for text in texts]
    assert kept.tolist() == [reason is None for reason in reasons]
    assert dropped == Counter(reason for reason in reasons if reason)


@given(
    shards=st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=6),
    at_once=st.sampled_from([1, 2, 5, 4_000_000]),
)
def test_of_equal_documents_the_first_of_the_corpus_is_kept_however_few_are_compared_at_a_time(
    shards: list[list[int]], at_once: int
) -> None:
    written = [digests_of(pa.array([str(number) for number in shard], pa.large_string())) for shard in shards]
    masks = first_of_each([len(shard) for shard in shards], written.__getitem__, at_once=at_once)
    seen = [number for shard in shards for number in shard]
    first = [number not in seen[:place] for place, number in enumerate(seen)]
    edges = [0, *accumulate(len(shard) for shard in shards)]
    assert [mask.tolist() for mask in masks] == [first[start:end] for start, end in pairwise(edges)]
