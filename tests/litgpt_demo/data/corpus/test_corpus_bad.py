"""Bad documents, skipped or not, damaged files, and files that change while they are read."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from written import COMPRESS, SEPARATOR, as_jsonl, as_parquet, as_text, files, write

from litgpt_demo.data.corpus import BATCH_BYTES, BadDocument, Batch, Source, documents, plan_shards, read_shard, sources
from litgpt_demo.data.corpus.compression import opened, seekable
from litgpt_demo.data.corpus.lines import separated_texts, whole_text
from litgpt_demo.data.corpus.parquet import parquet_texts
from litgpt_demo.errors import DataError, TrainLitgptError, UserError


def binary_parquet(values: Sequence[bytes | None], *, rows: int = 2) -> bytes:
    """A column that says it is text, whatever the bytes."""
    sink = pa.BufferOutputStream()
    text = pa.array(values, pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": text}), sink, row_group_size=rows)
    return bytes(sink.getvalue().to_pybytes())


def skipping(
    folder: Path, target: int | None = None, **fields: object
) -> tuple[list[str], list[tuple[int, BadDocument]]]:
    """The documents of a folder with the bad ones as empty texts, and the bad ones by their number in the corpus."""
    corpus = files(folder, separator=SEPARATOR, **fields)
    texts: list[str] = []
    bad: list[tuple[int, BadDocument]] = []
    for shard in plan_shards(corpus, sources(corpus), target):
        first = len(texts)
        for batch in read_shard(corpus, shard, scratch=folder, skip_bad=True):
            texts += batch.texts.to_pylist()
            bad += ((first + one.index, one) for one in batch.bad)
    return texts, bad


# --- skipped ----------------------------------------------------------------------------------------------------------

LINES: dict[bytes, str] = {
    b"{nonsense": "is no JSON: Expecting property name",
    b'{"text": "\xff"}': "is not UTF-8 at byte 10 (0xff, invalid start byte)",
    b'\xef\xbb\xbf{"text": ""}': "is no JSON: Unexpected UTF-8 BOM",
    b'["text"]': 'is no JSON object but ["text"]',
    b'"text"': 'is no JSON object but "text"',
    b'{"body": "x"}': "has no field 'text'; it has 'body'",
    b'{"text": null}': "has null as 'text'",
    b'{"text": 7.5}': "has 7.5 as 'text'",
    b'{"text": ["x"]}': "has [\"x\"] as 'text'",
    b'{"text": "\\ud83d"}': "has half a surrogate pair in 'text'",
    b'{"text": "x"} {"text": "y"}': "is no JSON: Extra data",
    b"[" * 5000: "is no JSON",
}
GOOD = [
    b'{"text": "good"}',
    b'{"text": "\\ud83d\\ude00", "other": NaN}',
    b'{"text": "a", "text": "b"}',
    b'{"text": ""}',
]
GOOD += [b'{"other": "\\udead", "text": "z"}', b'{"text": "deep", "other": ' + b"[" * 300 + b"]" * 300 + b"}"]


@pytest.mark.parametrize("target", [None, 30])
def test_bad_lines_are_skipped_and_named_by_their_line(tmp_path: Path, target: int | None) -> None:
    lines = [line for bad in LINES for line in (b'{"text": "before"}', b"", bad)]
    write(tmp_path, {"deep/corpus.jsonl": b"\n".join(lines) + b"\n" + as_jsonl(["after"])})
    texts, bad = skipping(tmp_path, target)
    assert texts == ["before", ""] * len(LINES) + ["after"]
    assert [(number, one.place) for number, one in bad] == [
        (2 * n + 1, f"deep/corpus.jsonl, line {3 * n + 3}") for n in range(len(LINES))
    ]
    for (_, one), reason in zip(bad, LINES.values(), strict=True):
        assert one.reason.startswith(reason)


def one_line(line: bytes) -> str | None:
    """What json makes of a line by itself; None where it holds no document."""
    try:
        text = json.loads(line.decode())["text"]
        text.encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return str(text)


VALUE = st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=3)
WRITTEN = st.builds(
    lambda record, ascii: json.dumps(record, ensure_ascii=ascii).encode("utf-8", "surrogatepass"),
    VALUE | st.dictionaries(st.sampled_from(["text", "id", "é"]), VALUE | st.text() | st.characters(), max_size=3),
    st.booleans(),
)
LINE = st.sampled_from([*GOOD, *LINES]) | WRITTEN | st.binary(max_size=12).map(lambda data: data.replace(b"\n", b""))


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(LINE.filter(lambda line: bool(line) and not line.isspace()), max_size=6), target=st.integers(1, 60)
)
@example(lines=GOOD, target=1)
@example(lines=GOOD, target=10_000)
def test_a_line_means_the_same_in_any_company(lines: list[bytes], target: int) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder), {"a.jsonl": b"\n".join(lines)})
        texts, bad = skipping(Path(folder), target)
    alone = [one_line(line) for line in lines]
    assert texts == [text or "" for text in alone]
    assert [number for number, _ in bad] == [number for number, text in enumerate(alone) if text is None]


@pytest.mark.parametrize("target", [None, 1])
def test_bad_texts_between_separators_are_skipped_and_named_by_their_byte(tmp_path: Path, target: int | None) -> None:
    pieces = ["é".encode(), b"ab\xffcd", b"good", b"", b"\xc3", b"end"]
    write(tmp_path, {"a.txt": SEPARATOR.encode().join(pieces)})
    texts, bad = skipping(tmp_path, target)
    assert texts == ["é", "", "good", "", "", "end"]
    assert [(number, one.place, one.reason) for number, one in bad] == [
        (1, "a.txt, byte 9", "not UTF-8 (0xff, invalid start byte)"),
        (4, "a.txt, byte 31", "not UTF-8 (0xc3, unexpected end of data)"),
    ]


def test_a_document_that_no_memory_holds_is_refused_before_it_is_read() -> None:
    petabyte = Source(address="/data/dump.txt", name="dump.txt", size=10**15, version="crc32c:00000000")
    stream = io.BytesIO(b"the start of it")
    with pytest.raises(
        DataError, match=r"dump\.txt is one document of 1000000\.0 GB or more.*set data\.corpus\.separator"
    ):
        next(whole_text(stream, petabyte, most=10**16))
    assert stream.tell() == 0


# --- too long ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bomb.txt.zst", "bomb.txt.gz"])
def test_ten_bytes_of_a_small_file_that_holds_much_more_cost_a_few(tmp_path: Path, name: str) -> None:
    compress = COMPRESS[Path(name).suffix]
    (tmp_path / name).write_bytes(compress(b"\0" * 400_000_000))
    [source] = sources(files(tmp_path))
    tracemalloc.start()
    with opened(tmp_path / name, source) as stream:
        assert stream.read(10) == b"\0" * 10
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000_000


@pytest.mark.parametrize("compressed", [".gz", ".zst"])
def test_a_compressed_parquet_file_that_is_a_bomb_does_not_fill_the_disk(
    tmp_path: Path, compressed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("litgpt_demo.data.corpus.compression.SLACK", 1_000_000)
    # gzip makes zeros a thousand times smaller at most; zstd has no such bound.
    monkeypatch.setattr("litgpt_demo.data.corpus.compression.MOST_RATIO", 100)
    bomb = tmp_path / f"a.parquet{compressed}"
    bomb.write_bytes(COMPRESS[compressed](b"\0" * 100_000_000))
    [source] = sources(files(tmp_path))
    scratch = tmp_path / "scratch"
    with pytest.raises(DataError, match=rf"a\.parquet{compressed} holds more than .* bytes decompressed"):  # noqa: SIM117
        with seekable(bomb, source, scratch):
            pass
    assert list(scratch.iterdir()) == []


def test_a_row_group_whose_pages_have_too_much_text_is_not_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("litgpt_demo.data.corpus.parquet.SLACK", 100_000)
    bomb = tmp_path / "a.parquet"
    bomb.write_bytes(as_parquet(["x" * 20_000_000], compression="zstd", dictionary=False))
    assert bomb.stat().st_size < 20_000
    [source] = sources(files(tmp_path))
    refused = r"a\.parquet, row group 0 holds 20,000,\d+ bytes of text or more, and at most .*write it anew without"
    with pytest.raises(DataError, match=refused):
        next(parquet_texts(bomb, source, "text", most=1000))
    monkeypatch.undo()
    assert next(parquet_texts(bomb, source, "text", most=1_000_000)).flaws


TOO_LONG = b"x" * 3_000_000


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.txt", SEPARATOR.encode().join([b"one", TOO_LONG, b"three"]), f"byte {3 + len(SEPARATOR)}"),
        ("a.jsonl", as_jsonl(["one", TOO_LONG.decode(), "three"]), "line 2"),
        ("a.parquet", as_parquet(["one", TOO_LONG.decode(), "three"]), "row group"),
    ],
)
@pytest.mark.parametrize("compressed", ["", ".gz", ".zst"])
def test_a_document_that_is_too_long_is_named_or_left_out(
    tmp_path: Path, name: str, content: bytes, place: str, compressed: str
) -> None:
    write(tmp_path, {name + compressed: COMPRESS[compressed](content)})
    corpus = files(tmp_path, separator=SEPARATOR)
    [shard] = plan_shards(corpus, sources(corpus))
    with pytest.raises(DataError, match=rf"{name}.*: the document at {place}.* has more than 1,000,000 bytes"):
        list(read_shard(corpus, shard, scratch=tmp_path / "scratch", skip_bad=False, most=1_000_000))
    [batch] = read_shard(corpus, shard, scratch=tmp_path / "scratch", skip_bad=True, most=1_000_000)
    assert batch.texts.to_pylist() == ["one", "", "three"]
    assert [(one.index, one.reason) for one in batch.bad] == [(1, "has more than 1,000,000 bytes")]


@pytest.mark.parametrize("compressed", ["", ".gz", ".zst"])
def test_a_whole_file_that_is_too_long_is_named(tmp_path: Path, compressed: str) -> None:
    write(tmp_path, {f"book.txt{compressed}": COMPRESS[compressed](TOO_LONG)})
    corpus = files(tmp_path)
    with pytest.raises(DataError, match=r"book\.txt.*byte 0 has more than 100 bytes.*raise that setting"):
        list(documents(corpus, sources(corpus), scratch=tmp_path / "scratch", most=100))


def test_a_line_without_end_is_refused_before_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl.zst": COMPRESS[".zst"](b'{"text": "' + b"x" * 400_000_000)})
    corpus = files(tmp_path)
    tracemalloc.start()
    with pytest.raises(DataError, match="line 1 has more than 1,000,000 bytes"):
        list(documents(corpus, sources(corpus), scratch=tmp_path / "scratch", most=1_000_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000_000


class Trickle(io.BytesIO):
    """Gives a few bytes at a time, so that a small text spans many chunks."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(5, size) if size and size > 0 else 5)


@given(
    st.text("ab\n", max_size=80), st.sampled_from(["\n", "\n\n", "\n\n\n", "ab"]), st.integers(1, 12) | st.just(10**6)
)
def test_texts_are_cut_where_the_separators_are_and_only_long_ones_are_left_out(
    text: str, separator: str, most: int
) -> None:
    source = Source(address="/a.txt", name="a.txt", size=len(text), version="")
    texts: list[str] = []
    places: list[str] = []
    for piece in separated_texts(Trickle(text.encode()), source, separator.encode(), most=most):
        texts += piece.texts.to_pylist()
        places += [flaw.place for flaw in piece.flaws]
    expected, byte, long = text.split(separator), 0, []
    for one in expected:
        long += [f"a.txt, byte {byte}"] if len(one) > most else []
        byte += len(one) + len(separator)
    assert texts == [one if len(one) <= most else "" for one in expected]
    assert places == long


def test_a_whole_text_file_can_be_a_bad_document(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"one", "b.txt.gz": gzip.compress(b"latin \xe9 one"), "c.txt": b"three"})
    texts, bad = skipping(tmp_path)
    assert texts == ["one", "", "three"]
    assert [(number, one.place) for number, one in bad] == [(1, "b.txt.gz, byte 6")]


@pytest.mark.parametrize("target", [None, 1])
def test_bad_rows_are_skipped_and_named_by_row_group_and_row(tmp_path: Path, target: int | None) -> None:
    write(tmp_path, {"a.parquet": binary_parquet([b"one", None, b"\xff", b"four", b"", b"six", b"\xed\xa0\x80"])})
    texts, bad = skipping(tmp_path, target)
    assert texts == ["one", "", "", "four", "", "six", ""]
    assert [(number, one.place, one.reason) for number, one in bad] == [
        (1, "a.parquet, row group 0, row 1", "has null in column 'text'"),
        (2, "a.parquet, row group 1, row 0", bad[1][1].reason),
        (6, "a.parquet, row group 3, row 0", bad[2][1].reason),
    ]
    assert bad[1][1].reason.startswith("is not UTF-8 in column 'text' ('utf-8' codec can't decode byte 0xff")


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.none() | st.binary(max_size=4) | st.text(max_size=4).map(str.encode), max_size=12),
    rows=st.integers(1, 4),
    target=st.integers(1, 300),
)
def test_any_bytes_in_parquet_are_text_or_bad(values: list[bytes | None], rows: int, target: int) -> None:
    def text(value: bytes | None) -> str | None:
        try:
            return None if value is None else value.decode()
        except UnicodeDecodeError:
            return None

    with TemporaryDirectory() as folder:
        write(Path(folder), {"a.parquet": binary_parquet(values, rows=rows)})
        texts, bad = skipping(Path(folder), target)
    assert texts == [text(value) or "" for value in values]
    assert [number for number, _ in bad] == [number for number, value in enumerate(values) if text(value) is None]


def test_bad_documents_are_counted_over_the_batches_of_a_shard(tmp_path: Path) -> None:
    lines = as_jsonl(["x" * 100_000] * 300).splitlines()
    lines[5] = lines[150] = lines[299] = b"{"
    write(tmp_path, {"a.jsonl": b"\n".join(lines)})
    corpus = files(tmp_path)
    (shard,) = plan_shards(corpus, sources(corpus), 1 << 30)
    found = list(read_shard(corpus, shard, scratch=tmp_path, skip_bad=True))
    assert len(found) > 2
    assert [(one.index, one.place) for batch in found for one in batch.bad] == [
        (5, "a.jsonl, line 6"),
        (150, "a.jsonl, line 151"),
        (299, "a.jsonl, line 300"),
    ]


def test_a_bad_document_behind_the_limit_is_not_met(tmp_path: Path) -> None:
    write(tmp_path, {"a.parquet": binary_parquet([b"one", b"two", None], rows=3)})
    corpus = files(tmp_path, max_bytes=4)
    assert list(documents(corpus, sources(corpus), scratch=tmp_path)) == ["one", "two"]


# --- damaged: refused even where bad documents are skipped ------------------------------------------------------------

TEXTS = [f"{number} " + "word " * 50 for number in range(200)]
PARQUET = as_parquet(TEXTS, compression="none")
NUMBERS = as_parquet(TEXTS).replace(b"text", b"body")
DAMAGED: dict[str, tuple[str, bytes, type[TrainLitgptError], str]] = {
    "cut off": ("f.parquet", PARQUET[:-20], DataError, ", footer: no readable parquet, damaged or cut off"),
    "half there": ("f.parquet", PARQUET[: len(PARQUET) // 2], DataError, ", footer: no readable parquet"),
    "page spoiled": ("f.parquet", PARQUET.replace(b"120 word", b"120 wurd"), DataError, ", row group 60: no readable"),
    "no column": ("f.parquet", NUMBERS, UserError, " has no column 'text'; it has 'id', 'body'"),
    "gzip cut off": ("f.jsonl.gz", gzip.compress(as_jsonl(TEXTS))[:-9], DataError, " is damaged gzip after byte "),
    "zstd cut off": ("f.txt.zst", COMPRESS[".zst"](as_text(TEXTS))[:-1], DataError, " is damaged zstd after byte "),
}


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("target", [None, 2000])
def test_a_damaged_file_is_no_bad_document(tmp_path: Path, case: str, target: int | None) -> None:
    name, data, error, words = DAMAGED[case]
    write(tmp_path, {name: data})
    with pytest.raises(error, match=re.escape(name + words)):
        skipping(tmp_path, target)


# --- files that change ------------------------------------------------------------------------------------------------

LONG = [f"{number} " + "word " * 20_000 for number in range(250)]
MAKE: dict[str, Callable[[Sequence[str]], bytes]] = {
    "a.txt": as_text,
    "a.jsonl": as_jsonl,
    "a.parquet": lambda texts: as_parquet(texts, compression="none"),
}


@pytest.fixture(scope="module")
def contents() -> dict[str, bytes]:
    return {name: make(LONG) for name, make in MAKE.items()}


def rewritten(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"249 word", b"249 bird"))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def unnoticeable(path: Path) -> None:
    """Another text of the same size at the same time, as two writes within one tick of the clock leave it."""
    before = path.stat()
    rewritten(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def begun(folder: Path, name: str, content: bytes, *, age: float) -> tuple[Iterator[Batch], Path]:
    """A reading whose first batch has been handed out."""
    path = write(folder, {name: content}) / name
    os.utime(path, (time.time() - age, time.time() - age))
    corpus = files(folder, separator=SEPARATOR)
    (shard,) = plan_shards(corpus, sources(corpus), 1 << 30)
    found = read_shard(corpus, shard, scratch=folder, skip_bad=True)
    assert next(found).texts.nbytes < 2 * BATCH_BYTES
    return found, path


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rewritten, "has crc32c .* listed was .*changed meanwhile"),
        (replaced, "was written anew while it was read"),
        (cut_off, "has crc32c .* changed meanwhile"),
        (appended, "has crc32c .* changed meanwhile"),
        (unnoticeable, "has crc32c .* changed meanwhile"),
        (Path.unlink, "was there when the corpus was listed and is gone"),
    ],
)
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, contents: dict[str, bytes], name: str, change: Callable[[Path], object], words: str
) -> None:
    age = 0 if change is unnoticeable else 3600
    found, path = begun(tmp_path, name, contents[name], age=age)
    change(path)
    with pytest.raises(DataError, match=re.escape(name) + " " + words):
        list(found)


def test_a_change_is_noticed_where_a_limit_ends_the_reading_too(tmp_path: Path) -> None:
    path = write(tmp_path, {"a.txt": as_text(LONG)}) / "a.txt"
    corpus = files(tmp_path, separator=SEPARATOR, max_bytes=2 * BATCH_BYTES)
    found = documents(corpus, sources(corpus), scratch=tmp_path)
    next(found)
    appended(path)
    with pytest.raises(DataError, match="changed meanwhile"):
        list(found)


def test_a_checksum_is_known_only_as_long_as_the_file_stays_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path, {"a.txt": b"one"}) / "a.txt"
    os.utime(path, (1e9, 1e9))
    corpus = files(tmp_path)
    listed = sources(corpus)
    assert list(documents(corpus, listed, scratch=tmp_path)) == ["one"]
    path.write_bytes(b"two")
    os.utime(path, (1e9, 1e9 + 1))
    with pytest.raises(DataError, match="changed meanwhile"):
        list(documents(corpus, listed, scratch=tmp_path))
    path.write_bytes(b"one")
    assert list(documents(corpus, listed, scratch=tmp_path)) == ["one"]
