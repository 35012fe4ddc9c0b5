"""A corpus in shards: the same documents however it is cut, and batches that fit the memory."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from corpora import cut_into
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from written import COMPRESS, FORMATS, SEPARATOR, files, write

from litgpt_demo.config import Corpus, FileCorpus
from litgpt_demo.data.corpus import Batch, Shard, Source, documents, plan_shards, read_shard, sources


def batches(corpus: Corpus, shards: Sequence[Shard], scratch: Path) -> Iterator[Batch]:
    for shard in shards:
        yield from read_shard(corpus, shard, scratch=scratch, skip_bad=False)


def in_shards(corpus: Corpus, target: int, scratch: Path) -> list[str]:
    """Every document, empty ones too."""
    shards = plan_shards(corpus, sources(corpus), target)
    return [text for batch in batches(corpus, shards, scratch) for text in batch.texts.to_pylist()]


# --- the same documents however it is cut -----------------------------------------------------------------------------

SEPARATORS = ["\n\n", "\n", "aa", "aba", "abaab", "é", "\n---\n"]


@settings(max_examples=150)
@given(text=st.text(alphabet="ab\n-é", max_size=60), separator=st.sampled_from(SEPARATORS), target=st.integers(1, 40))
@example(text="aaaaaaa", separator="aa", target=1)
@example(text="ababababaabab", separator="aba", target=2)
@example(text="\n\n\n\n\na\n\n\n", separator="\n\n", target=3)
def test_text_in_shards_is_the_text_split_in_one_go(text: str, separator: str, target: int) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder), {"a.txt": text.encode()})
        assert in_shards(files(folder, separator=separator), target, Path(folder)) == text.split(separator)


FILES = st.lists(
    st.tuples(
        st.sampled_from(sorted(FORMATS)),
        st.sampled_from(["", *COMPRESS]),
        st.lists(st.text(alphabet="xyz ü", max_size=20), min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=6,
)


def mixed(folder: str, contents: list[tuple[str, str, list[str]]], **fields: object) -> FileCorpus:
    named = {f"{n}{form}{end}": COMPRESS[end](FORMATS[form](texts)) for n, (form, end, texts) in enumerate(contents)}
    return files(write(Path(folder, "corpus"), named), separator=SEPARATOR, **fields)


@settings(max_examples=80)
@given(contents=FILES, target=st.integers(1, 400), limit=st.integers(1, 200))
def test_documents_come_in_order_and_a_limit_ends_at_the_same_one_whatever_the_shards(
    contents: list[tuple[str, str, list[str]]], target: int, limit: int
) -> None:
    with TemporaryDirectory() as folder:
        corpus, scratch = mixed(folder, contents, max_bytes=limit), Path(folder, "scratch")
        every = [text for *_, texts in contents for text in texts]
        assert in_shards(corpus, target, scratch) == every
        found: list[str] = []
        for shard in plan_shards(corpus, sources(corpus), target):
            left = limit - sum(len(text.encode()) for text in found)
            if left > 0:
                found += in_shards_of(corpus, replace(shard, limit=left), scratch)
        assert [text for text in found if text] == list(documents(corpus, sources(corpus), scratch=scratch))
        totals = list(itertools.accumulate(len(text.encode()) for text in every))
        assert found == every[: next((n for n, total in enumerate(totals, 1) if total >= limit), len(every))]


def in_shards_of(corpus: Corpus, shard: Shard, scratch: Path) -> list[str]:
    return [text for batch in batches(corpus, [shard], scratch) for text in batch.texts.to_pylist()]


# --- shards and batches -----------------------------------------------------------------------------------------------

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([100 * MIB] * 3, [1, 1, 1]),  # files that cannot be cut
        ([MIB] * 10, [4, 4, 2]),  # 4 MiB at least
        ([3 * MIB, 2 * MIB, 2 * MIB], [1, 2]),  # no shard grows beyond it
        ([10 * MIB] * 1000, [2] * 500),  # 25 MiB, a 400th of all
        ([40 * MIB] * 4000, [1] * 4000),  # 64 MiB at most
        ([0] * 5, [5]),
    ],
)
def test_a_shard_is_a_400th_of_the_corpus_but_neither_tiny_nor_huge(sizes: list[int], parts: list[int]) -> None:
    listed = [
        Source(address=f"gs://bucket/{n:05}.parquet", name=f"{n:05}.parquet", size=size, version=f"crc32c:{n:08x}")
        for n, size in enumerate(sizes)
    ]
    shards = plan_shards(files("gs://bucket"), listed)
    assert [len(shard.parts) for shard in shards] == parts
    assert [shard.number for shard in shards] == list(range(len(shards)))
    assert [part.source for shard in shards for part in shard.parts] == listed
    assert pickle.loads(pickle.dumps(shards)) == shards


@pytest.mark.parametrize("form", FORMATS)
def test_batches_hold_about_the_same_amount_of_text(tmp_path: Path, form: str) -> None:
    texts = [f"{number}:" + "x" * 100 for number in range(250)]
    texts[100] = "y" * 20_000
    write(tmp_path, {f"a{form}": FORMATS[form](texts)})
    corpus = files(tmp_path, separator=SEPARATOR)
    with cut_into(1 << 30, batch=10_000):
        found = list(batches(corpus, plan_shards(corpus, sources(corpus)), tmp_path))
    assert [text for batch in found for text in batch.texts.to_pylist()] == texts
    sizes = sorted(sum(map(len, batch.texts.to_pylist())) for batch in found)
    assert sizes[-1] < 33_000
    assert sizes[-2] < 13_000


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
    assert int(peak) < 60_000_000  # pyarrow writes pages of 10 MB here, 1024 rows in one
