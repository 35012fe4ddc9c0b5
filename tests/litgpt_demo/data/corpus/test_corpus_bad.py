"""Bad documents, skipped or not, damaged and hostile files, and files that change while they are read."""

import gzip
import json
import os
import random
import re
import tracemalloc
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from corpora import (
    COMPRESS,
    FORMATS,
    POINTER,
    SEPARATOR,
    as_jsonl,
    as_parquet,
    cut_into,
    files,
    list_files,
    of_each,
    read,
    write,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from litgpt_demo.config import Corpus, DataConfig, TokenizerFile, TokensCorpus
from litgpt_demo.data.readers import BadDocument, opened, seekable
from litgpt_demo.data.shards import documents, plan_shards, read_shard
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.storage import Storage, open_storage


def skipping(
    folder: Path, target: int | None = None, *, separator: str = SEPARATOR, most: int = 1 << 30
) -> tuple[list[str], list[tuple[int, BadDocument]]]:
    """The documents of a folder with the bad ones as empty texts, and the bad ones by their number in the corpus."""
    corpus = files(*of_each(folder), separator=separator)
    texts: list[str] = []
    bad: list[tuple[int, BadDocument]] = []
    data = DataConfig(corpus=corpus, on_bad_document="skip", max_document_bytes=most)
    for shard in plan_shards(corpus, list_files(corpus), target):
        for batch in read_shard(data, shard, folder):
            bad += [(len(texts) + document.index, document) for document in batch.bad]
            texts += batch.texts.to_pylist()
    return texts, bad


LINES = [
    b"{nonsense", b'{"text": "\xff"}', b'["text"]', b'"text"', b'{"body": "x"}', b'{"text": null}', b'{"text": 7.5}',
    b'{"text": "\\ud83d"}', b'{"text": "x"} {"text": "y"}', b"[" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("target", [None, 1])
def test_bad_documents_are_skipped_and_named_by_position(tmp_path: Path, target: int | None) -> None:
    pieces = ["é".encode(), b"ab\xffcd", b"good", b"", b"\xc3", b"end"]
    lines = as_jsonl(["one"]) + b'\n{"body": "x"}\n' + as_jsonl(["three"])
    # A column that says it is text, whatever the bytes.
    rows = as_parquet(pa.array([b"one", None, b"\xff", b"four"], pa.binary()).view(pa.string()))
    texts_file = SEPARATOR.encode().join(pieces)
    write(tmp_path, {"a.txt": texts_file, "b.txt.gz": gzip.compress(b"\xe9"), "c.jsonl": lines, "d.parquet": rows})
    texts, bad = skipping(tmp_path, target)
    assert texts == ["é", "", "good", "", "", "end", "", "one", "", "three", "one", "", "", "four"]
    assert [(number, document.place) for number, document in bad] == [
        (1, "a.txt, byte 9"),
        (4, "a.txt, byte 31"),
        (6, "b.txt.gz, byte 0"),
        (8, "c.jsonl, line 3"),
        (11, "d.parquet, row group 0, row 1"),
        (12, "d.parquet, row group 1, row 0"),
    ]
    assert bad[3][1].reason.startswith("has no field 'text'; it has 'body'")


GOOD = [b'{"text": "\\ud83d\\ude00", "other": NaN}', b'{"text": "a", "text": "b"}', b'{"text": ""}']
GOOD += [b'{"other": "\\udead", "text": "z"}', b'{"text": "deep", "other": ' + b"[" * 300 + b"]" * 300 + b"}"]
VALUE = st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=3)
WRITTEN = st.builds(
    lambda record, ascii: json.dumps(record, ensure_ascii=ascii).encode("utf-8", "surrogatepass"),
    VALUE | st.dictionaries(st.sampled_from(["text", "id", "é"]), VALUE | st.text() | st.characters(), max_size=3),
    st.booleans(),
)
LINE = st.sampled_from([*GOOD, *LINES]) | WRITTEN | st.binary(max_size=12).map(lambda data: data.replace(b"\n", b""))
# A file that begins with one is no JSON lines. Hypothesis tries the constants of the code that it runs.
SIGNATURES = tuple(b"\xff|\xfe|\xef\xbb\xbf|\x1f|\xfd|%PDF-|PK|PAR1|7z|Rar!|BZh|\4\x22|(\xb5".split(b"|"))


def one_line(line: bytes) -> str | None:
    """What json makes of a line by itself; None where it holds no document."""
    try:
        text = json.loads(line.decode())["text"]
        text.encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return str(text)


@settings(max_examples=60)
@given(
    lines=st.lists(LINE.filter(lambda line: line.strip() and not line.startswith(SIGNATURES)), max_size=6),
    target=st.integers(1, 60),
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


# --- damaged: refused even where bad documents are skipped ------------------------------------------------------------

TEXTS = [f"{number} " + "word " * 50 for number in range(200)]
PARQUET = as_parquet(TEXTS, compression="none")
NOISE = as_jsonl([random.Random(0).randbytes(200_000).hex()])


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("f.parquet", PARQUET[:-20], ", footer: not readable parquet, damaged or cut off"),
        ("f.parquet", PARQUET.replace(b"120 word", b"120 wurd"), ", row group 60: not readable"),
        ("f.jsonl.gz", gzip.compress(NOISE)[:-9], " is damaged gzip after byte "),
        ("f.txt.gz", gzip.compress(b"one") + b"tail", " is damaged gzip after byte 3 "),
        ("f.txt.zst", COMPRESS[".zst"](NOISE)[:-1], " is damaged zstd after byte "),
        ("f.txt.xz", COMPRESS[".xz"](NOISE)[:-9], " is damaged xz after byte "),
        ("f.txt.bz2", COMPRESS[".bz2"](b"one") + b"BZh9 but no block", " is damaged bzip2 after byte 3 "),
    ],
    ids=range(7),
)
def test_a_damaged_file_is_no_bad_document(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    write(tmp_path / "corpus", {name: data})
    for reading in (lambda: skipping(tmp_path / "corpus"), lambda: read(files(tmp_path / "corpus"), tmp_path)):
        with pytest.raises(DataError, match=re.escape(name + message)):
            reading()


def test_unreadable_parquet_file_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = files(write(tmp_path / "corpus", {"a.parquet": as_parquet(TEXTS)}))
    with pytest.raises(UserError, match="has no column 'body'; it has 'id', 'text'"):
        read(corpus.model_copy(update={"column": "body"}), tmp_path)
    with pytest.raises(UserError, match="has int64 in column 'id', but documents are strings"):
        read(corpus.model_copy(update={"column": "id"}), tmp_path)

    monkeypatch.setattr("litgpt_demo.data.readers.MOST_RATIO", 0)
    monkeypatch.setattr("litgpt_demo.data.readers.SLACK", 0)
    with pytest.raises(DataError, match=r"row group 0 holds .* bytes of text or more, but at most 0 are expanded"):
        read(corpus, tmp_path)


@contextmanager
def little_memory() -> Iterator[None]:
    """Python's own, of which 50 MB are little here."""
    tracemalloc.start()
    yield
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 50_000_000


@pytest.mark.parametrize("compression", [".gz", ".zst", ".bz2", ".xz"])
def test_start_of_a_compressed_bomb_costs_little_memory(tmp_path: Path, compression: str) -> None:
    name = f"bomb.txt{compression}"
    (tmp_path / name).write_bytes(COMPRESS[compression](b"\0" * 200_000_000))
    [source] = list_files(files(tmp_path))
    with little_memory(), opened(tmp_path / name, source) as stream:
        assert stream.read(10) == b"\0" * 10


@pytest.mark.parametrize("ending", FORMATS)
def test_null_byte_in_a_document_is_text(tmp_path: Path, ending: str) -> None:
    texts = ["a\0b", "\0", "plain"]
    write(tmp_path, {f"a{ending}": FORMATS[ending](texts)})
    assert skipping(tmp_path) == (texts, [])


@pytest.mark.parametrize("name", ["b.txt", "b.jsonl", "b.parquet", "b.txt.zst", "train.bin"])
def test_git_lfs_pointer_in_a_corpus_is_refused(tmp_path: Path, bucket: Storage, name: str) -> None:
    """At once on this machine, and in a bucket when it was fetched; never skipped like a bad document."""
    for place in (open_storage(str(tmp_path / "clone")), bucket.within("clone")):
        place.write(name, POINTER)
        corpus: Corpus = files(f"{place.address()}/*")
        if name == "train.bin":
            place.write("val.bin", POINTER)
            corpus = TokensCorpus(kind="tokens", path=place.address())
        tokenizer = TokenizerFile(kind="file", path="nowhere")
        data = DataConfig(corpus=corpus, on_bad_document="skip", tokenizer=tokenizer)
        with pytest.raises(UserError, match=rf"{re.escape(place.address(name))} is a Git LFS pointer.*`git lfs pull`"):
            list(documents(data, list_files(corpus), tmp_path / "scratch"))


def test_a_text_about_git_lfs_is_a_document(tmp_path: Path) -> None:
    """It begins as a pointer does, and stands for no file."""
    text = f"{POINTER.splitlines()[0].decode()} is how a pointer begins"
    write(tmp_path, {"a.txt": text.encode()})
    data = DataConfig(corpus=files(tmp_path))
    assert "".join(documents(data, list_files(data.corpus), tmp_path / "scratch")) == text


def test_a_line_without_end_is_refused_before_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl.zst": COMPRESS[".zst"](b'{"text": "' + b"x" * 200_000_000)})
    data = DataConfig(corpus=files(tmp_path), max_document_bytes=1_000_000)
    found = documents(data, list_files(data.corpus), tmp_path / "scratch")
    with little_memory(), pytest.raises(DataError, match="line 1: has more than 1,000,000 bytes"):
        next(found)


def test_parquet_bomb_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("litgpt_demo.data.readers.SLACK", 1_000_000)
    bomb, scratch = tmp_path / "a.parquet.zst", tmp_path / "scratch"
    bomb.write_bytes(COMPRESS[".zst"](b"\0" * 100_000_000))
    [source] = list_files(files(tmp_path))
    refused = pytest.raises(DataError, match=r"a\.parquet\.zst holds more than .* bytes decompressed")
    with refused, seekable(bomb, source, scratch):
        pass
    assert list(scratch.iterdir()) == []


TOO_LONG = "x" * 3_000_000


@pytest.mark.parametrize(
    ("name", "place"), [("a.txt.gz", f"byte {3 + len(SEPARATOR)}"), ("a.jsonl", "line 2"), ("a.parquet", "row group")]
)
def test_a_document_that_is_too_long_is_named_or_left_out(tmp_path: Path, name: str, place: str) -> None:
    content = FORMATS[Path(name.removesuffix(".gz")).suffix](["one", TOO_LONG, "three"])
    write(tmp_path, {name: gzip.compress(content) if name.endswith(".gz") else content})
    data = DataConfig(corpus=files(tmp_path, separator=SEPARATOR), max_document_bytes=1_000_000)
    [shard] = plan_shards(data.corpus, list_files(data.corpus))
    with pytest.raises(DataError, match=rf"{name}, {place}.*: has more than 1,000,000 bytes"):
        list(read_shard(data, shard, tmp_path / "scratch"))
    [batch] = read_shard(data.model_copy(update={"on_bad_document": "skip"}), shard, tmp_path / "scratch")
    assert batch.texts.to_pylist() == ["one", "", "three"]
    assert [(document.index, document.reason) for document in batch.bad] == [(1, "has more than 1,000,000 bytes")]


@settings(max_examples=200)
@given(
    text=st.text("ab\n-é", max_size=80), separator=st.sampled_from(["\n", "\n\n", "aa", "aba", "abaab", "é"]),
    target=st.integers(1, 40) | st.none(), chunk=st.integers(1, 9), most=st.integers(1, 12) | st.just(1 << 30),
    mark=st.sampled_from([b"", BOM_UTF8]),
)  # fmt: skip
@example(text="aaaaaaa", separator="aa", target=1, chunk=5, most=1 << 30, mark=b"")
@example(text="ababababaabab", separator="aba", target=2, chunk=5, most=1 << 30, mark=b"")
@example(text="\n\n\n\n\na\n\n\n", separator="\n\n", target=3, chunk=5, most=1 << 30, mark=b"")
def test_text_is_cut_at_separators_in_shards_and_chunks(
    text: str, separator: str, target: int | None, chunk: int, most: int, mark: bytes
) -> None:
    """Only documents that are too long are left out."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("litgpt_demo.data.readers.CHUNK", chunk)
        write(Path(folder), {"a.txt": mark + text.encode()})
        found, bad = skipping(Path(folder), target, separator=separator, most=most)
    expected, byte, long = text.split(separator), len(mark), []
    for number, document in enumerate(expected):
        if len(document.encode()) > most:
            long.append((number, f"a.txt, byte {byte}"))
            expected[number] = ""
        byte += len((document + separator).encode())
    assert found == expected
    assert [(number, document.place) for number, document in bad] == long


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, {name: PARQUET if name == "a.parquet" else as_jsonl(TEXTS)}) / name
    before, corpus = path.stat(), files(tmp_path)
    (shard,) = plan_shards(corpus, list_files(corpus), 1 << 30)
    with cut_into(1 << 30, batch=1000):
        found = read_shard(DataConfig(corpus=corpus, on_bad_document="skip"), shard, tmp_path)
        next(found)
        # Another text of the same size at the same time, as two writes within one tick of the clock leave it.
        path.write_bytes(path.read_bytes().replace(b"199 word", b"199 bird"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(DataError, match=rf"{name} has crc32c .* was listed: it has changed"):
            list(found)
