from __future__ import annotations

from typing import Any

import pytest

from launcher.reports.charts import svg
from launcher.reports.datasets import fraction, lengths, lengths_chart, lengths_markdown, progress_text, table
from litgpt_demo.data.dataset import DatasetManifest, Split
from litgpt_demo.data.preparation import Preparation
from litgpt_demo.manifests import FileRecord


def file(path: str, size: int) -> FileRecord:
    return FileRecord(path=path, size=size, crc32c="00000000")


def manifest(**changes: Any) -> DatasetManifest:
    values: dict[str, Any] = {
        "format": 2,
        "name": "books",
        "key": "0123456789",
        "corpus": {},
        "filters": {},
        "dropped": {"duplicate": 12, "min_characters": 3456},
        "bad_documents": 2,
        "bad_places": ("books.jsonl: line 7: no JSON", "books.jsonl: line 9: no JSON"),
        "document_lengths": (0, 0, 50, 0, 150),
        "tokenizer_hash": "ab",
        "vocab_size": 4096,
        "end_of_text": 0,
        "dtype": "<u2",
        "validation_fraction": 0.01,
        "split_seed": 2357,
        "text_bytes": 20_000_000,
        "train": Split(
            documents=150, tokens=4_500_000, files=(file("train-00000.bin", 8_000_000), file("b", 1_000_000))
        ),
        "validation": Split(documents=50, tokens=1_500, files=(file("val.bin", 3_000),)),
        "tokenizer": (),
    }
    return DatasetManifest.model_validate({**values, **changes})


# --- while it is made -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("progress", "words", "done"),
    [
        (
            Preparation(phase="tokenizer", documents=1200, text_bytes=8_000_000),
            "tokenizer: training on 1,200 documents, 8.00 MB",
            None,
        ),
        (
            Preparation(phase="survey", documents=1200, text_bytes=10**9, seconds=2.0),
            "survey: 1,200 documents, 500 MB/s",
            None,
        ),
        (
            Preparation(
                phase="encode", documents=1200, text_bytes=10**9, all_bytes=4 * 10**9, tokens=3 * 10**8, seconds=10.0
            ),
            "encode: 1,200 documents, 300 M tokens, 100 MB/s, 30 s left",
            0.25,
        ),
        (Preparation(phase="publish"), "publish: joining the pieces", 1.0),
    ],
)
def test_progress_says_phase_amounts_pace_and_what_is_left(
    progress: Preparation, words: str, done: float | None
) -> None:
    assert progress_text(progress) == words
    assert fraction(progress) == done


def test_before_the_first_shard_no_time_is_promised() -> None:
    assert "left" not in progress_text(Preparation(phase="encode", all_bytes=10, seconds=1.0))


def test_a_corpus_without_a_byte_has_no_fraction() -> None:
    assert fraction(Preparation(phase="encode", documents=2, all_bytes=0)) is None


# --- when it is done --------------------------------------------------------------------------------------------------


def test_the_table_has_files_sizes_tokens_drops_and_the_pace() -> None:
    figures = {row["figure"]: row["value"] for row in table(manifest(), seconds=10.0)}
    assert figures["Training: files"] == "train-00000.bin and 1 more"
    assert figures["Training: size"] == "9.00 MB"
    assert figures["Training: tokens per document"] == "30,000.0"
    assert figures["Validation: files"] == "val.bin"
    assert figures["Validation: tokens"] == "1,500"
    assert figures["Dropped: min_characters"] == "3,456 documents"
    assert figures["Bad documents"] == "2"
    assert figures["Time"] == "10 s"
    assert figures["Speed"] == "2.00 MB/s"


def test_a_split_without_documents_has_a_table_too() -> None:
    empty = Split(documents=0, tokens=0, files=(file("val.bin", 0),))
    figures = {row["figure"]: row["value"] for row in table(manifest(validation=empty), seconds=0.0)}
    assert figures["Validation: tokens per document"] == "0.0"


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_lengths_are_shares_of_all_documents_from_the_shortest_class_on() -> None:
    assert lengths(manifest()) == {"4": 25.0, "8": 0.0, "16": 75.0}


def test_long_lengths_are_named_shortly() -> None:
    counts = [0] * 9 + [1] * 22
    assert list(lengths(manifest(document_lengths=counts)))[:3] == ["512", "1k", "2k"]
    assert list(lengths(manifest(document_lengths=counts)))[-2:] == ["512M", "1G"]


def test_both_pictures_have_a_bar_for_each_length() -> None:
    page = lengths_markdown(manifest())
    assert 'x-axis "tokens, this many to twice as many" ["4", "8", "16"]' in page
    assert "bar [25.00, 0.00, 75.00]" in page
    drawing = svg(lengths_chart(manifest()), width=440, height=260)
    assert drawing.count("fill: var(--blue)") == 3
    assert all(f">{name}</text>" in drawing for name in ("4", "8", "16", "60 %"))
    assert "Length of documents, percent of 200" in drawing


def test_a_dataset_without_lengths_has_no_picture() -> None:
    assert lengths_markdown(manifest(document_lengths=())) == ""
    assert lengths(manifest(document_lengths=(0, 0))) == {}
