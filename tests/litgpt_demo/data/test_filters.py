"""Filters: which documents are left out, which of equal ones is kept, and how each is counted."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from corpora import SEPARATOR, cut_into, large_vocabulary, prepared
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from litgpt_demo.config import Filters
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.data.preparation.filters import (
    digests_of,
    first_of_each,
    letter_ratios,
    passing,
)


def array(texts: Sequence[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


TEXTS = st.lists(st.text(max_size=12), max_size=12)


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


@given(texts=TEXTS, start=st.integers(0, 5))
def test_the_ratio_is_of_each_document_alone(texts: list[str], start: int) -> None:
    def ratio(text: str) -> float:
        visible = [character for character in text if not character.isspace()]
        letters = [character for character in visible if unicodedata.category(character)[0] in "LM"]
        return len(letters) / len(visible) if visible else 0.0

    assert letter_ratios(array(texts).slice(start)).tolist() == [ratio(text) for text in texts[start:]]


# --- duplicates -------------------------------------------------------------------------------------------------------


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


# --- in a dataset -----------------------------------------------------------------------------------------------------


def kept_of(manifest: DatasetManifest, folder: Path) -> list[str]:
    """The training documents."""
    ids = np.memmap(folder / "train.bin", dtype=manifest.dtype, mode="r")
    decoder = HfTokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    pieces = np.split(ids, np.flatnonzero(ids == manifest.end_of_text) + 1)[:-1]
    return [decoder.decode(piece[:-1].tolist()) for piece in pieces]


@pytest.mark.parametrize("shard", [1, 60, 10_000])
def test_the_manifest_says_what_each_filter_dropped_and_of_duplicates_the_first_stays_across_files_and_shards(
    tmp_path: Path, shard: int
) -> None:
    files = {
        "a.txt": ["one of a kind", "said before", "", "no"],
        "b.txt": ["12 + 12 = 24 = 24", "said before", "two of a kind", "no"],
        "c.txt": ["said before", "a document that goes on for longer than anyone would read it", "three of a kind"],
    }
    (tmp_path / "corpus").mkdir()
    for name, texts in files.items():
        (tmp_path / "corpus" / name).write_text(SEPARATOR.join(texts))
    with cut_into(shard):
        manifest, folder = prepared(
            tmp_path / "corpus",
            tmp_path / "root",
            tokenizer={"kind": "file", "path": str(large_vocabulary(tmp_path / "tokenizer", 300))},
            filters=Filters(min_characters=3, max_characters=40, min_letter_ratio=0.6, drop_duplicates=True),
            validation_fraction=0.0001,
        )
    assert manifest.dropped == {"duplicate": 2, "empty": 1, "too few letters": 1, "too long": 1, "too short": 2}
    # numpy's default_rng(2357).permutation(4) begins with 3.
    assert np.random.default_rng(2357).permutation(4)[0] == 3
    assert kept_of(manifest, folder) == ["one of a kind", "said before", "two of a kind"]
    assert (manifest.train.documents, manifest.validation.documents) == (3, 1)
