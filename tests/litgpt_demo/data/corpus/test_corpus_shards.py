"""A corpus in shards: the same documents however it is cut, and batches that fit the memory."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from written import COMPRESS, SEPARATOR, as_jsonl, as_parquet, as_text, files, write

from litgpt_demo.config import Corpus, FileCorpus
from litgpt_demo.data.corpus import BATCH_BYTES, Batch, Shard, Source, documents, plan_shards, read_shard, sources


def batches(corpus: Corpus, shards: Sequence[Shard], scratch: Path, *, skip_bad: bool = False) -> Iterator[Batch]:
    for shard in shards:
        yield from read_shard(corpus, shard, scratch=scratch, skip_bad=skip_bad)


def in_shards(corpus: Corpus, target: int, scratch: Path) -> list[str]:
    """Every document, empty ones too."""
    shards = plan_shards(corpus, sources(corpus), target)
    return [text for batch in batches(corpus, shards, scratch) for text in batch.texts.to_pylist()]


# --- the same documents however it is cut -----------------------------------------------------------------------------

SEPARATORS = ["\n\n", "\n", "aa", "aba", "abaab", "é", "\n---\n"]
TEXT = st.text(alphabet="ab\n-é", max_size=60)


@settings(max_examples=150, deadline=None)
@given(text=TEXT, separator=st.sampled_from(SEPARATORS), target=st.integers(1, 40))
@example(text="aaaaaaa", separator="aa", target=1)
@example(text="ababababaabab", separator="aba", target=2)
@example(text="\n\n\n\n\na\n\n\n", separator="\n\n", target=3)
def test_text_in_shards_is_the_text_split_in_one_go(text: str, separator: str, target: int) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder), {"a.txt": text.encode()})
        assert in_shards(files(folder, separator=separator), target, Path(folder)) == text.split(separator)


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.one_of(st.text(max_size=12).map(lambda text: json.dumps({"text": text})), st.just(" "))),
    ending=st.sampled_from(["", "\n"]),
    target=st.integers(1, 99),
)
def test_json_lines_in_shards_are_the_lines(lines: list[str], ending: str, target: int) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder), {"a.jsonl": ("\n".join(lines) + ending).encode()})
        found = in_shards(files(folder), target, Path(folder))
    assert found == [json.loads(line)["text"] for line in lines if line.strip()]


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(max_size=30), max_size=20),
    rows=st.integers(1, 5),
    target=st.integers(1, 900),
    data=st.data(),
)
def test_parquet_in_shards_is_the_column(texts: list[str], rows: int, target: int, data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        kind = data.draw(st.sampled_from([pa.string(), pa.large_string()]))
        nested = pa.array([{"text": "not this one"}] * len(texts), pa.struct([("text", pa.string())]))
        parquet.write_table(
            pa.table({"other": nested, "text": pa.array(texts, kind)}), f"{folder}/a.parquet", row_group_size=rows
        )
        assert in_shards(files(folder), target, Path(folder)) == texts


FILES = st.lists(
    st.tuples(
        st.sampled_from([".txt", ".jsonl", ".parquet"]),
        st.sampled_from(["", "", ".gz", ".zst"]),
        st.lists(st.text(alphabet="xyz ü", max_size=20), min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=6,
)


def mixed(folder: str, contents: list[tuple[str, str, list[str]]], **fields: object) -> FileCorpus:
    make = {".txt": as_text, ".jsonl": as_jsonl, ".parquet": as_parquet}
    named = {f"{n}{form}{end}": COMPRESS[end](make[form](texts)) for n, (form, end, texts) in enumerate(contents)}
    return files(write(Path(folder, "corpus"), named), separator=SEPARATOR, **fields)


@settings(max_examples=40, deadline=None)
@given(contents=FILES, target=st.integers(1, 400))
def test_files_of_all_formats_in_shards_are_the_documents_in_order(
    contents: list[tuple[str, str, list[str]]], target: int
) -> None:
    with TemporaryDirectory() as folder:
        corpus, scratch = mixed(folder, contents), Path(folder, "scratch")
        assert in_shards(corpus, target, scratch) == [text for *_, texts in contents for text in texts]


@settings(max_examples=40, deadline=None)
@given(contents=FILES, target=st.integers(1, 400), limit=st.integers(1, 200))
def test_a_limit_ends_at_the_same_document_whatever_the_shards(
    contents: list[tuple[str, str, list[str]]], target: int, limit: int
) -> None:
    with TemporaryDirectory() as folder:
        corpus, scratch = mixed(folder, contents, max_bytes=limit), Path(folder, "scratch")
        found: list[str] = []
        for shard in plan_shards(corpus, sources(corpus), target):
            left = limit - sum(len(text.encode()) for text in found)
            if left > 0:
                found += (
                    text for b in batches(corpus, [replace(shard, limit=left)], scratch) for text in b.texts.to_pylist()
                )
        assert [text for text in found if text] == list(documents(corpus, sources(corpus), scratch=scratch))
        every = [text for *_, texts in contents for text in texts]
        totals = list(itertools.accumulate(len(text.encode()) for text in every))
        assert found == every[: next((n for n, total in enumerate(totals, 1) if total >= limit), len(every))]


def test_nothing_is_read_after_the_document_that_reaches_the_limit(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": as_jsonl(["one", "two"]) + b"{no JSON", "b.jsonl": b"nor here"})
    corpus = files(tmp_path)
    (shard,) = plan_shards(corpus, sources(corpus))
    found = list(batches(corpus, [replace(shard, limit=4)], tmp_path))
    assert [batch.texts.to_pylist() for batch in found] == [["one", "two"]]


# --- shards -----------------------------------------------------------------------------------------------------------

MIB = 1 << 20


def remote(*sizes: int) -> list[Source]:
    return [
        Source(address=f"gs://bucket/{n:05}.parquet", name=f"{n:05}.parquet", size=size, version=f"crc32c:{n:08x}")
        for n, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([100 * MIB] * 3, [1, 1, 1]),  # files that cannot be cut
        ([MIB] * 10, [4, 4, 2]),  # 4 MiB at least
        ([3 * MIB, 2 * MIB, 2 * MIB], [1, 2]),  # no shard grows beyond it
        ([10 * MIB] * 1000, [2] * 500),  # 25 MiB, a 400th of all
        ([40 * MIB] * 4000, [1] * 4000),  # 64 MiB at most
        ([0] * 5, [5]),
        ([], []),
    ],
)
def test_a_shard_is_a_400th_of_the_corpus_but_neither_tiny_nor_huge(sizes: list[int], parts: list[int]) -> None:
    corpus, listed = files("gs://bucket"), remote(*sizes)
    shards = plan_shards(corpus, listed)
    assert [len(shard.parts) for shard in shards] == parts
    assert [shard.number for shard in shards] == list(range(len(shards)))
    assert [part.source for shard in shards for part in shard.parts] == listed
    assert pickle.loads(pickle.dumps(shards)) == shards


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_large_local_file_is_cut_without_gap_or_overlap(tmp_path: Path, name: str) -> None:
    texts = [f"document {number} " + "x" * 50 for number in range(400)]
    make = {".txt": as_text, ".jsonl": as_jsonl, ".parquet": lambda texts: as_parquet(texts, compression="none")}
    write(tmp_path, {name: make[Path(name).suffix](texts)})
    corpus = files(tmp_path, separator=SEPARATOR)
    shards = plan_shards(corpus, sources(corpus), 2000)
    assert 10 <= len(shards) <= 40
    parts = [part for shard in shards for part in shard.parts]
    assert [part.end for part in parts[:-1]] == [part.start for part in parts[1:]]
    assert (parts[0].start, parts[-1].end) == (0, None)
    for shard in (shards[-1], shards[0]):  # in any order
        (batch,) = batches(corpus, [shard], tmp_path)
        assert 1 <= len(batch.texts) < 60


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst", "a.parquet.gz", "whole.md"])
def test_what_cannot_be_cut_is_one_shard(tmp_path: Path, name: str) -> None:
    write(tmp_path, {name: COMPRESS[".gz"](b"x" * 9999) * 100})
    corpus = files(tmp_path, separator=None if name.startswith("whole") else SEPARATOR)
    assert len(plan_shards(corpus, sources(corpus), 100)) == 1


def test_a_damaged_file_is_planned_and_refused_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, {"a.parquet": as_parquet(["one"] * 1000)[:-100]})
    corpus = files(tmp_path)
    (shard,) = plan_shards(corpus, sources(corpus), 100)
    with pytest.raises(Exception, match=r"a\.parquet, footer: no readable parquet"):
        list(batches(corpus, [shard], tmp_path))


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_batches_hold_about_the_same_amount_of_text(tmp_path: Path, name: str) -> None:
    texts = [f"{number}:" + "x" * 10_000 for number in range(2500)]
    texts[1000] = "y" * 2 * BATCH_BYTES
    make = {".txt": as_text, ".jsonl": as_jsonl, ".parquet": as_parquet}
    write(tmp_path, {name: make[Path(name).suffix](texts)})
    corpus = files(tmp_path, separator=SEPARATOR)
    found = list(batches(corpus, plan_shards(corpus, sources(corpus), 1 << 30), tmp_path))
    assert [text for batch in found for text in batch.texts.to_pylist()] == texts
    sizes = sorted(sum(map(len, batch.texts.to_pylist())) for batch in found)
    assert len(sizes) <= 7
    assert sizes[-1] < 3 * BATCH_BYTES + 300_000
    assert sizes[-2] < 1.3 * BATCH_BYTES


def test_many_small_files_make_one_batch(tmp_path: Path) -> None:
    write(tmp_path, {f"{number:03}.txt": f"text {number}".encode() for number in range(200)})
    corpus = files(tmp_path)
    (batch,) = batches(corpus, plan_shards(corpus, sources(corpus)), tmp_path)
    assert batch.texts.to_pylist() == [f"text {number}" for number in range(200)]
    assert batch.texts.type == pa.large_string()


MEASURE = """
import sys
from pathlib import Path
import pyarrow as pa
from litgpt_demo.data.corpus import plan_shards, read_shard, sources
from litgpt_demo.config import FileCorpus
corpus = FileCorpus(kind="files", paths=(sys.argv[1],))
(shard,) = plan_shards(corpus, sources(corpus))
size = sum(batch.texts.nbytes for batch in read_shard(corpus, shard, scratch=Path("."), skip_bad=False))
print(size, pa.default_memory_pool().max_memory())
"""


def test_a_row_group_is_never_held_whole(tmp_path: Path) -> None:
    # 200 MB in one row group, which compress to next to nothing.
    texts = pa.array([f"{number:04}" + "word " * 2000 for number in range(20_000)])
    parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", compression="zstd", row_group_size=20_000)
    size, peak = subprocess.check_output([sys.executable, "-c", MEASURE, str(tmp_path)], text=True).split()
    assert int(size) > 200_000_000
    assert int(peak) < 7 * BATCH_BYTES  # pyarrow writes pages of 10 MB here, 1024 rows in one
