"""Parquet files of a few kilobytes that stand for gigabytes, and footers that lie: refused, in bounded memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from written import files

from litgpt_demo.data.corpus import sources
from litgpt_demo.data.corpus.pages import DamagedPages, measure
from litgpt_demo.data.corpus.parquet import parquet_texts
from litgpt_demo.errors import DataError

MB = 1 << 20

READING = """
import json, re, resource, sys
from pathlib import Path
import pyarrow.compute, pyarrow.parquet
from litgpt_demo.data.corpus import parquet
from litgpt_demo.data.corpus.source import Source
from litgpt_demo.errors import DataError

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
path, parquet.SLACK = Path(sys.argv[1]), int(sys.argv[2])
source, before, rows, said = Source(address=str(path), name=path.name, size=0, version=""), peak(), 0, ""
try:
    for piece in parquet.parquet_texts(path, source, "text", most=1 << 30):
        rows += len(piece.texts)
except DataError as error:
    said = str(error)
print(json.dumps([rows, said, peak() - before]))
"""


def read_apart(path: Path, *, slack: int) -> tuple[int, str, int]:
    """The rows that a process of its own reads, the error that it ends with, and the memory that reading takes."""
    command = [sys.executable, "-c", READING, str(path), str(slack)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    rows, said, peak = json.loads(done.stdout)
    return rows, said, peak


def write_dictionary(path: Path) -> None:
    """A hundred thousand rows that are all the one value of a dictionary: 100 GB."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), pa.array(["a" * MB]))
    parquet.write_table(pa.table({"text": column}), path, compression="zstd", store_schema=False)


def write_prefixes(path: Path) -> None:
    """A thousand rows that are each as the row before: half a gigabyte."""
    coded = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    table = pa.table({"text": pa.chunked_array([["a" * (MB // 2)] * 100] * 10)})
    parquet.write_table(table, path, compression="zstd", write_statistics=False, **coded)


def write_empty(path: Path) -> None:
    """Twenty million empty rows."""
    column = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), 20_000_000), pa.array([""]))
    parquet.write_table(
        pa.table({"text": column}), path, compression="zstd", row_group_size=20_000_000, store_schema=False
    )


@pytest.mark.parametrize("write", [write_dictionary, write_prefixes, write_empty])
def test_a_few_kilobytes_that_stand_for_gigabytes_are_refused_in_little_memory(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    path = tmp_path / "bomb.parquet"
    write(path)
    assert path.stat().st_size < 60_000
    _, said, peak = read_apart(path, slack=32 * MB)
    assert re.search(r"bomb\.parquet, row group 0 holds .* or more, and at most .*Remove it, or write it anew", said)
    assert peak < 600 * MB


def test_a_text_that_many_rows_share_is_read_a_few_rows_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "shared.parquet"
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 900, pa.int32()), pa.array(["a" * MB]))
    parquet.write_table(pa.table({"text": column}), path, compression="zstd", store_schema=False)
    rows, said, peak = read_apart(path, slack=1 << 30)
    assert (rows, said) == (900, "")
    assert peak < 700 * MB


# --- footers ----------------------------------------------------------------------------------------------------------


def integer(number: int) -> bytes:
    """A number as Thrift's compact protocol writes it."""
    number, written = (number << 1) ^ (number >> 63), b""
    while number > 127:
        number, written = number >> 7, written + bytes([number & 127 | 128])
    return written + bytes([number])


def lying(path: Path, true: int, told: int) -> None:
    """Have the footer say another number, wherever it says this one."""
    content = path.read_bytes()
    size = int.from_bytes(content[-8:-4], "little")
    footer = content[-8 - size : -8]
    assert integer(true) in footer
    footer = footer.replace(integer(true), integer(told))
    path.write_bytes(content[: -8 - size] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def honest(path: Path) -> parquet.ColumnChunkMetaData:
    """A file whose footer has no number twice; its facts about the column."""
    table = pa.table({"id": list(range(77_777)), "text": [f"text {number}" for number in range(77_777)]})
    parquet.write_table(table, path, use_dictionary=False, compression="none")
    return parquet.read_metadata(path).row_group(0).column(1)


LIES = {
    "more rows": ("num_values", 1 << 50, "row group 0"),
    "fewer rows": ("num_values", 100, "row group 0"),
    "rows below none": ("num_values", -5, ""),
    "more bytes than the file has": ("total_compressed_size", 1 << 40, "footer"),
    "fewer bytes stored": ("total_compressed_size", 1000, "row group 0"),
    "bytes below none": ("total_compressed_size", -1, "footer"),
    "a place behind the end": ("data_page_offset", 1 << 40, "row group 0"),
    "a place before the file": ("data_page_offset", -9, "row group 0"),
    "a place within a page": ("data_page_offset", 200_000, "row group 0"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_footer_that_lies_is_no_parquet(tmp_path: Path, lie: str) -> None:
    fact, told, where = LIES[lie]
    path = tmp_path / "lie.parquet"
    lying(path, getattr(honest(path), fact), told)
    [source] = sources(files(tmp_path))
    with pytest.raises(DataError, match=rf"lie\.parquet, {where}.*damaged or cut off: .*; write or fetch it anew"):
        list(parquet_texts(path, source, "text", most=MB))


def test_a_footer_that_makes_the_text_small_does_not_have_it_all_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lie.parquet"
    table = pa.table({"text": ["a" * (8 * MB)] * 30})
    parquet.write_table(table, path, use_dictionary=False, compression="zstd", write_batch_size=1)
    lying(path, parquet.read_metadata(path).row_group(0).column(0).total_uncompressed_size, 1)
    rows, said, peak = read_apart(path, slack=1 << 30)
    assert (rows, said) == (30, "")
    assert peak < 120 * MB


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 250), st.integers(0, 1 << 62), st.integers(0, 1 << 62))
def test_any_bytes_are_pages_or_damaged(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, start: int, stored: int, values: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "pages"
    path.write_bytes(content)
    try:
        measured = measure(path, start, stored, values)
    except DamagedPages:
        return
    assert measured.rows > 0


def test_pages_without_values_end_with_the_column(tmp_path: Path) -> None:
    page = bytes([0x15, 0, 0x15, 0, 0x15, 0, 0x2C, 0x15, 0, 0x15, 0, 0, 0])
    (tmp_path / "pages").write_bytes(page * 1000)
    with pytest.raises(DamagedPages, match="its pages have 0 values and the footer says 5"):
        measure(tmp_path / "pages", 0, len(page) * 1000, 5)
