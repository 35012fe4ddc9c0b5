"""A corpus in shards: the same documents however it is cut, and batches that fit the memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from corpora import cut_into
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from written import FORMATS, SEPARATOR, files, write

from litgpt_demo.config import Corpus
from litgpt_demo.data.corpus import Batch, Shard, plan_shards, read_shard, sources


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


# --- shards and batches -----------------------------------------------------------------------------------------------


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
