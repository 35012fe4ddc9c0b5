"""Preparing text that is not as it should be: refused by file and position, or skipped and written down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import SEPARATOR, contents, cut_into, large_vocabulary, settings_for

from litgpt_demo.config import DataConfig
from litgpt_demo.data.dataset import finished_dataset, plan_dataset
from litgpt_demo.data.preparation import in_threads, prepare
from litgpt_demo.errors import DataError
from litgpt_demo.storage import open_storage

GOOD = [f"Good document number {number}." for number in range(12)]


def lines(*documents: str) -> bytes:
    return b"".join(json.dumps({"text": document}).encode() + b"\n" for document in documents)


def parquet(path: Path, documents: Sequence[str | None]) -> None:
    pq.write_table(pa.table({"text": documents}), path, row_group_size=2)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three files of four good documents each."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text(SEPARATOR.join(GOOD[:4]))
    (folder / "b.jsonl").write_bytes(lines(*GOOD[4:8]))
    parquet(folder / "c.parquet", GOOD[8:])
    return folder


@pytest.fixture
def data(source: Path, tmp_path: Path) -> DataConfig:
    tokenizer = large_vocabulary(tmp_path / "tokenizer", 300)
    return settings_for(source, tokenizer={"kind": "file", "path": str(tokenizer)})


@pytest.mark.parametrize(("shard", "bad_lines"), [(1, 1), (10_000, 2000)])
def test_bad_documents_are_skipped_and_counted_and_the_good_ones_are_all_there(
    data: DataConfig, source: Path, tmp_path: Path, shard: int, bad_lines: int
) -> None:
    storage = open_storage(str(tmp_path / "root"))
    good = plan_dataset(data)
    prepare(good, storage)
    (source / "a.txt").write_bytes(SEPARATOR.join(GOOD[:4]).encode() + SEPARATOR.encode() + b"caf\xe9")
    (source / "b.jsonl").write_bytes(lines(*GOOD[4:6]) + b'{"text": 7}\n' * bad_lines + lines(*GOOD[6:8]))
    parquet(source / "c.parquet", [*GOOD[8:11], None, GOOD[11]])
    planned = plan_dataset(data.model_copy(update={"on_bad_document": "skip"}))
    with cut_into(shard):
        manifest = prepare(planned, storage)
    found, wanted = (contents(tmp_path / "root" / path) for path in (planned.path, good.path))
    assert [found[name] for name in ("train.bin", "val.bin")] == [wanted[name] for name in ("train.bin", "val.bin")]
    assert (manifest.documents, manifest.bad_documents, manifest.dropped) == (12, 2 + bad_lines, {})
    places = [place.partition(": ")[0] for place in manifest.bad_places]
    assert places[:2] == ["a.txt, byte 115", "b.jsonl, line 3"]
    assert len(places) <= 1000, "of very many, the first places are written down"


@pytest.mark.parametrize("shard", [1, 10_000])
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"good" + SEPARATOR.encode() + b"caf\xe9", r"a\.txt.*byte 12"),
        ("b.jsonl", lines(*GOOD[4:8]) + b"{\n", r"b\.jsonl, line 5"),
        ("c.parquet", b"no parquet", r"c\.parquet, footer"),
    ],
)
def test_what_cannot_be_read_is_named_and_repaired_goes_through(
    data: DataConfig, source: Path, tmp_path: Path, name: str, content: bytes, words: str, shard: int
) -> None:
    whole = (source / name).read_bytes()
    (source / name).write_bytes(content)
    storage, spoilt = open_storage(str(tmp_path / "root")), plan_dataset(data)
    with cut_into(shard), pytest.raises(DataError, match=words):
        prepare(spoilt, storage, each=in_threads(2))
    assert finished_dataset(storage, spoilt) is None
    (source / name).write_bytes(whole)
    assert prepare(plan_dataset(data), storage).documents == len(GOOD)


@pytest.mark.parametrize("when", ["listed", "survey"])
def test_a_source_that_changes_after_it_was_listed_or_between_two_readings_is_named(
    data: DataConfig, source: Path, tmp_path: Path, when: str
) -> None:
    storage, planned = open_storage(str(tmp_path / "root")), plan_dataset(data)

    def change_at(phase: str) -> None:
        if phase == when:
            (source / "a.txt").write_text(SEPARATOR.join(GOOD[:3]))

    change_at("listed")
    with cut_into(1), pytest.raises(DataError, match=r"a\.txt.*chang"):
        prepare(planned, storage, each=in_threads(1), report=lambda progress: change_at(progress.phase))
    assert finished_dataset(storage, planned) is None
