"""Corpora: what is listed, what is read, and what is said about files that cannot be."""

from __future__ import annotations

import gzip
import itertools
import random
import re
import shutil
import socket
import sysconfig
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
import zstandard
from bucket_emulator import bucket_emulator
from hub_server import Hub, Repository, running_hub
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from written import COMPRESS, FORMATS, SEPARATOR, as_jsonl, as_parquet, files, identity, read, write

from litgpt_demo.config import FileCorpus, HubCorpus, OpenWebTextCorpus, StdlibCorpus
from litgpt_demo.data.corpus import BATCH_BYTES, Source, documents, documents_by_footer, matches, plan_shards, sources
from litgpt_demo.errors import DataError, NetworkError, TrainLitgptError, UserError
from litgpt_demo.storage import Storage, open_storage

# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [form + compression for form in FORMATS for compression in COMPRESS])
@settings(max_examples=12, deadline=None)
@given(texts=st.lists(st.text().filter(lambda text: SEPARATOR[1:-1] not in text), max_size=9))
def test_documents_come_back_as_they_were_written(suffix: str, texts: list[str]) -> None:
    form, compress = FORMATS["." + suffix.split(".")[1]], COMPRESS[Path(suffix).suffix if suffix.count(".") > 1 else ""]
    with TemporaryDirectory() as folder:
        write(Path(folder), {f"corpus/part{suffix}": compress(form(texts))})
        found = read(files(f"{folder}/corpus", separator=SEPARATOR), Path(folder, "scratch"))
    assert found == [text for text in texts if text]


def test_a_text_file_without_separator_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    text = "\ufeffone\r\n\r\ntwo\n\x00\N{SNOWMAN}\n"
    write(tmp_path, {"a.txt": text.encode(), "b.md": b"", "c": b"no suffix"})
    assert read(files(tmp_path), tmp_path / "scratch") == [text, "no suffix"]


@pytest.mark.parametrize("seed", range(3))
def test_separators_are_found_wherever_the_chunks_of_reading_end(tmp_path: Path, seed: int) -> None:
    # Most of the text is separator, so most ends of the 1 MiB chunks fall inside one.
    separator = "-" * 999 + "é"
    draw = random.Random(seed)
    texts = ["-" * draw.randrange(1, 300) + "ü" * draw.randrange(1, 300) for _ in range(3000)]
    text = separator.join(texts)
    write(tmp_path, {"corpus.txt.zst": COMPRESS[".zst"](text.encode())})
    assert read(files(tmp_path, separator=separator), tmp_path / "scratch") == text.split(separator)


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_members_of_a_compressed_file_follow_each_other(tmp_path: Path, compression: str) -> None:
    compress = COMPRESS[compression]
    members = b"".join(compress(as_jsonl([text])) for text in ("one", "two", "x" * 300_000))
    write(tmp_path, {f"corpus.jsonl{compression}": members})
    assert read(files(tmp_path), tmp_path / "scratch") == ["one", "two", "x" * 300_000]


def test_zstd_with_a_window_beyond_the_usual_limit_is_read(tmp_path: Path) -> None:
    long = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=28)).compressobj()
    write(tmp_path, {"corpus.jsonl.zst": long.compress(as_jsonl(["one"])) + long.flush()})
    assert read(files(tmp_path), tmp_path / "scratch") == ["one"]


def test_a_given_format_overrides_the_file_name(tmp_path: Path) -> None:
    write(tmp_path, {"corpus.json.gz": gzip.compress(b'{"body": "one"}\n\n{"body": "two"}')})
    assert read(files(tmp_path, format="jsonl", column="body"), tmp_path / "scratch") == ["one", "two"]


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
    ids=str,
)
def test_strings_of_any_arrow_type_are_a_column_of_text(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["one", "", "two", "one", "a text of more than twelve bytes"]
    write(tmp_path, {"corpus.parquet": as_parquet(texts, kind=kind)})
    assert read(files(tmp_path), tmp_path / "scratch") == [text for text in texts if text]
    (shard,) = plan_shards(files(tmp_path), sources(files(tmp_path)))
    counted_texts = documents_by_footer(files(tmp_path), shard, scratch=tmp_path)
    assert counted_texts is not None
    assert counted_texts[0] == len(texts)


def test_a_null_in_a_column_of_categories_is_refused_by_its_row(tmp_path: Path) -> None:
    categories = pa.dictionary(pa.int32(), pa.string())
    write(tmp_path, {"corpus.parquet": as_parquet(["one", "two", "one", None], kind=categories)})
    with pytest.raises(DataError, match=r"corpus\.parquet, row group 1, row 1 has null in column 'text'"):
        read(files(tmp_path), tmp_path / "scratch")


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12), limit=st.integers(1, 60))
def test_reading_stops_after_the_document_that_reaches_max_bytes(texts: list[str], limit: int) -> None:
    with TemporaryDirectory() as folder:
        half = len(texts) // 2
        write(Path(folder), {"a.jsonl": as_jsonl(texts[:half]), "b.jsonl": as_jsonl(texts[half:])})
        found = read(files(folder, max_bytes=limit), Path(folder, "scratch"))
    totals = list(itertools.accumulate(len(text.encode()) for text in texts))
    needed = next((count for count, total in enumerate(totals, start=1) if total >= limit), len(texts))
    assert found == texts[:needed]


def test_a_long_jsonl_file_is_never_held_whole(tmp_path: Path) -> None:
    with (tmp_path / "corpus.jsonl").open("wb") as file:
        for number in range(256):
            file.write(as_jsonl([f"{number} " + "x" * 250_000]))
    corpus = files(tmp_path)
    found = sources(corpus)
    tracemalloc.start()
    total = sum(len(text) for text in documents(corpus, found, scratch=tmp_path / "scratch"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total > 64_000_000
    assert peak < 3 * BATCH_BYTES


# --- order and identity -----------------------------------------------------------------------------------------------

MIXED = {
    "b/two.jsonl.gz": gzip.compress(as_jsonl(["three", "four"])),
    "a/one.txt": b"two",
    "a-z.txt": b"one",
    "c.parquet": as_parquet(["five", "six", "seven"]),
}


def test_order_depends_on_names_not_on_the_folder_or_the_order_of_the_paths(tmp_path: Path) -> None:
    first = write(tmp_path / "first", MIXED)
    second = write(tmp_path / "elsewhere/second", dict(reversed(MIXED.items())))
    there = [f"{second}/**/*.txt", f"{second}/c.*", f"{second}/**/*.gz", str(second)]
    expected = ["one", "two", "three", "four", "five", "six", "seven"]
    assert read(files(first), tmp_path / "scratch") == expected
    assert read(files(*there), tmp_path / "scratch") == expected
    assert read(files(*reversed(there)), tmp_path / "scratch") == expected
    assert identity(files(second, second / "b")) == identity(files(second / "b", second))


def test_files_of_one_name_in_two_folders_are_both_taken_in_an_order_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, {"x/part.txt": b"one", "y/part.txt": b"two"})
    write(tmp_path / "swapped", {"x/part.txt": b"two", "y/part.txt": b"one"})
    here = read(files(tmp_path / "x", tmp_path / "y"), tmp_path / "scratch")
    assert sorted(here) == ["one", "two"]
    assert read(files(tmp_path / "swapped/x", tmp_path / "swapped/y"), tmp_path / "scratch") == here


def test_the_same_files_elsewhere_are_the_same_corpus_and_one_byte_makes_another(tmp_path: Path) -> None:
    here, there = write(tmp_path / "here", MIXED), tmp_path / "there"
    shutil.copytree(here, there)
    before = identity(files(here))
    assert identity(files(there)) == before
    assert identity(files(here, max_bytes=10)) != before
    assert identity(files(here, column="body")) != before
    (there / "a/one.txt").write_bytes(b"twp")
    assert identity(files(there)) != before
    (here / "a/one.txt").rename(here / "a/other.txt")
    assert identity(files(here)) != before


NAME = st.sampled_from(["a", "b.txt", "c", ".h", "ab", "b"])
NAMES = st.lists(NAME, min_size=1, max_size=3).map("/".join)
WILD = st.sampled_from(["**", "*", "a", "?", "*.txt", ".*", "[ab]*", "c"])
PATTERNS = st.lists(WILD, min_size=1, max_size=4).map("/".join)


@settings(max_examples=80, deadline=None)
@given(names=st.sets(NAMES, max_size=8), pattern=PATTERNS)
@example(names={"a"}, pattern="**/a/**")
def test_a_pattern_means_the_same_in_a_folder_and_in_a_list_of_names(names: set[str], pattern: str) -> None:
    with TemporaryDirectory() as folder:
        written = set()
        for name in sorted(names):
            path = Path(folder, "data", name)
            if not path.exists() and not any(parent.is_file() for parent in path.parents):
                write(Path(folder, "data"), {name: b"x"})
                written.add(name)
        wild = Path(folder, "data", pattern)
        expected = {str(Path(folder, "data", name)) for name in written if matches(name, pattern)}
        if wild.is_dir() or not set("*?[") & set(pattern):
            return  # a plain path, which selects a folder's files as well
        found = {source.address for source in sources(files(wild))} if expected else _none(files(wild))
        assert found == expected


def _none(corpus: FileCorpus) -> set[str]:
    with pytest.raises(UserError):
        sources(corpus)
    return set()


def test_relative_paths_are_those_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "cwd[1]", {"corpus/a.txt": b"one", "b.txt": b"two"})
    monkeypatch.chdir(tmp_path / "cwd[1]")
    assert read(files("corpus", "*.txt"), tmp_path / "scratch") == ["one", "two"]


# --- what cannot be read ----------------------------------------------------------------------------------------------

LINES = as_jsonl(["one", "two"])
PARQUET = as_parquet(["one", "two", "three" * 1000, "four" * 1000])
PLAIN_PARQUET = as_parquet(["one", "two", "three" * 1000, "four" * 1000], compression="none")


def spoiled(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :]


def not_utf8_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    text = pa.Array.from_buffers(pa.string(), 3, pa.array([b"ok", b"\xff\xfe", b"ok"]).buffers())
    parquet.write_table(pa.table({"text": text}), sink)
    return bytes(sink.getvalue().to_pybytes())


NOISE = random.Random(0).randbytes(200_000).hex()
CUT_ZSTD = COMPRESS[".zst"](LINES + as_jsonl([NOISE]))[:-1]
CUT_GZIP = gzip.compress(NOISE.encode())[:-9]
BAD_PAGE = PLAIN_PARQUET.replace(b"threethree", b"thrEethree", 1)

# What it is: the file's name and content, the class of error, and what the message says after the name.
BAD: dict[str, tuple[str, bytes, type[TrainLitgptError], str]] = {
    "text not UTF-8": ("f.txt", "é".encode() + b"ab\xffcd", DataError, r" is not UTF-8 at byte 4 \(0xff"),
    "second piece not UTF-8": ("f.sep", b"one\n---\n\xc3", DataError, r" is not UTF-8 at byte 8 \(0xc3"),
    "no JSON": ("f.jsonl", LINES + b"{nonsense", DataError, ", line 3 is no JSON"),
    "endless JSON": ("f.jsonl", b"[" * 200_000, DataError, ", line 1 is no JSON"),
    "JSON not UTF-8": ("f.jsonl", LINES + b'{"text": "\xe9"}', DataError, ", line 3 is not UTF-8 at byte 10"),
    "no object": ("f.jsonl", LINES + b'["text"]\n', DataError, r', line 3 is no JSON object but \["text"\]'),
    "field missing": (
        "f.jsonl",
        b'{"id": 1, "body": ""}',
        UserError,
        ", line 1 has no field 'text'; it has 'id', 'body'",
    ),
    "null in JSON": ("f.jsonl", LINES + b'{"text": null}', DataError, ", line 3 has null as 'text'"),
    "number in JSON": ("f.jsonl", LINES + b'{"text": 7}', DataError, ", line 3 has 7 as 'text'"),
    "half a pair": ("f.jsonl", LINES + b'{"text": "\\ud83d"}', DataError, ", line 3 has half a surrogate pair"),
    "gzip cut off": ("f.txt.gz", CUT_GZIP, DataError, r" is damaged gzip after byte \d+ .*cut off"),
    "gzip checksum": ("f.txt.gz", spoiled(gzip.compress(b"one"), -8), DataError, " is damaged gzip .*data check"),
    "gzip garbage": ("f.txt.gz", gzip.compress(b"one") + b"tail", DataError, " is damaged gzip after byte 3 "),
    "no gzip": ("f.txt.gz", b"plain text", DataError, " is damaged gzip after byte 0 .*header"),
    "zstd cut off": ("f.jsonl.zst", CUT_ZSTD, DataError, r" is damaged zstd after byte \d+ .*cut off"),
    "no zstd": ("f.jsonl.zst", b"plain text", DataError, " is damaged zstd after byte 0"),
    "empty zstd": ("f.jsonl.zst", b"", DataError, " is damaged zstd after byte 0 .*cut off"),
    "parquet cut off": ("f.parquet", PARQUET[:-20], DataError, ", footer: no readable parquet"),
    "no parquet": ("f.parquet", b"plain text, and long enough", DataError, ", footer: no readable parquet"),
    "empty parquet": ("f.parquet", b"", DataError, ", footer: no readable parquet"),
    "page damaged": ("f.parquet", BAD_PAGE, DataError, ", row group 1: no readable parquet"),
    "null row": (
        "f.parquet",
        as_parquet(["", "", "", None]),
        DataError,
        ", row group 1, row 1 has null in column 'text'",
    ),
    "row not UTF-8": ("f.parquet", not_utf8_parquet(), DataError, ", row group 0, row 1 is not UTF-8"),
    "column of numbers": ("f.parquet", PARQUET, UserError, " has int64 in column 'id'"),
    "column missing": ("f.parquet", PARQUET, UserError, " has no column 'body'; it has 'id', 'text'"),
}
COLUMNS = {"column of numbers": "id", "column missing": "body"}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named_with_the_place_in_it(case: str, tmp_path: Path) -> None:
    name, data, error, words = BAD[case]
    write(tmp_path, {f"good/{name}": data})
    corpus = files(tmp_path, column=COLUMNS.get(case, "text"), separator=SEPARATOR)
    with pytest.raises(error, match=re.escape(name) + words):
        read(corpus, tmp_path / "scratch")


def test_documents_before_a_bad_line_are_handed_out_first(tmp_path: Path) -> None:
    write(tmp_path, {"f.jsonl": LINES + b"{"})
    corpus = files(tmp_path)
    found = documents(corpus, sources(corpus), scratch=tmp_path / "scratch")
    assert [next(found), next(found)] == ["one", "two"]
    with pytest.raises(DataError):
        next(found)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing.txt", "missing.txt does not exist"),
        ("missing/*.txt", "missing does not exist"),
        ("folder/*.parquet", r"no file under .*/folder matches '\*\.parquet'"),
        ("folder/empty", r"no file under .*/folder/empty matches"),
        ("", "has an empty path"),
        ("s3://bucket/corpus", "only local paths and gs:// addresses"),
    ],
)
def test_paths_that_select_nothing_are_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str
) -> None:
    write(tmp_path, {"folder/a.txt": b"one", "folder/.hidden.parquet": b""})
    (tmp_path / "folder/empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        sources(files(path))


@pytest.mark.parametrize(
    ("change", "words"), [(lambda path: path.write_bytes(b"twp"), "changed meanwhile"), (Path.unlink, "is gone")]
)
def test_a_file_that_changes_after_it_was_listed_is_refused(
    tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    write(tmp_path, {"a.txt": b"one", "b.txt": b"two"})
    corpus = files(tmp_path)
    found = documents(corpus, sources(corpus), scratch=tmp_path / "scratch")
    assert next(found) == "one"
    change(tmp_path / "b.txt")
    with pytest.raises(DataError, match=rf"b\.txt .*{words}"):
        next(found)


# --- the standard library ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stdlib() -> list[Source]:
    return sources(StdlibCorpus(kind="stdlib", max_bytes=None))


def test_the_standard_library_is_megabytes_of_text_and_the_same_twice(stdlib: list[Source], tmp_path: Path) -> None:
    corpus = StdlibCorpus(kind="stdlib", max_bytes=None)
    texts = list(documents(corpus, stdlib, scratch=tmp_path))
    assert sum(map(len, texts)) > 5_000_000
    assert texts == read(corpus, tmp_path)


def test_the_standard_library_holds_no_installed_packages(stdlib: list[Source]) -> None:
    names = [source.name for source in stdlib]
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if {"site-packages", "dist-packages", "__pycache__"} & set(name.split("/"))]
    assert not [name for name in names if name.startswith(("/", ".."))]


def test_of_the_standard_librarys_tests_only_files_that_are_not_utf8_are_left_out(
    stdlib: list[Source],
) -> None:
    folder = Path(sysconfig.get_path("stdlib"))
    if not (folder / "test").is_dir():
        pytest.skip("this Python comes without its test suite")
    good, bad = set(), set()
    for path in (folder / "test").rglob("*.py"):
        try:
            path.read_text("utf-8")
        except UnicodeDecodeError:
            bad.add(path.relative_to(folder).as_posix())
        else:
            good.add(path.relative_to(folder).as_posix())
    assert {source.name for source in stdlib if source.name.startswith("test/")} == good
    assert bad


def test_the_first_megabyte_of_the_standard_library_is_a_sample_of_it(stdlib: list[Source], tmp_path: Path) -> None:
    corpus = StdlibCorpus(kind="stdlib", max_bytes=1_000_000)
    texts = list(documents(corpus, stdlib, scratch=tmp_path))
    assert 1_000_000 <= sum(len(text.encode()) for text in texts) < 3_000_000
    names = [source.name for source in stdlib[: len(texts)]]
    assert min(names) < "e"
    assert max(names) > "test/"


# --- a bucket ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    with bucket_emulator("corpora") as host:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        yield open_storage("gs://corpora")


def test_the_same_files_in_a_bucket_are_the_same_corpus(bucket: Storage, tmp_path: Path) -> None:
    here = files(write(tmp_path / "here", MIXED))
    for name, data in MIXED.items():
        bucket.write(f"deep/corpus/{name}", data)
    there = files("gs://corpora/deep/corpus")
    assert identity(there) == identity(here)
    assert read(there, tmp_path / "scratch") == read(here, tmp_path / "scratch")


@pytest.mark.parametrize(
    ("address", "texts"),
    [
        ("gs://corpora", ["one", "two", "three"]),
        ("gs://corpora/", ["one", "two", "three"]),
        ("gs://corpora/a.txt", ["one"]),
        ("gs://corpora/*.txt", ["one"]),
        ("gs://corpora/**/*.txt", ["one", "two"]),
        ("gs://corpora/b", ["two", "three"]),
        ("gs://corpora/b/?/c.*", ["two"]),
    ],
)
def test_addresses_in_a_bucket_select_as_paths_do(
    bucket: Storage, tmp_path: Path, address: str, texts: list[str]
) -> None:
    for name, data in {"a.txt": b"one", "b/b/c.txt": b"two", "b/d.md": b"three", "b/.git/x": b"hidden"}.items():
        bucket.write(name, data)
        write(tmp_path / "corpora", {name: data})
    assert read(files(address), tmp_path / "scratch") == texts
    assert read(files(address.replace("gs://", f"{tmp_path}/")), tmp_path / "scratch") == texts


def test_a_bucket_without_such_files_is_the_users_error(bucket: Storage) -> None:
    with pytest.raises(UserError, match=r"no file under gs://corpora/b matches '\*\.txt'"):
        sources(files("gs://corpora/b/*.txt"))
    with pytest.raises(UserError, match="gs://corpora/b does not exist"):
        sources(files("gs://corpora/b"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda bucket: bucket.write("b.txt", b"twp"), "changed meanwhile"),
        (lambda bucket: bucket.remove("b.txt"), "is gone"),
    ],
)
def test_an_object_that_changes_after_it_was_listed_is_refused(
    bucket: Storage, tmp_path: Path, change: Callable[[Storage], object], words: str
) -> None:
    bucket.write("a.txt", b"one")
    bucket.write("b.txt", b"two")
    corpus = files("gs://corpora")
    found = documents(corpus, sources(corpus), scratch=tmp_path)
    assert next(found) == "one"
    change(bucket)
    with pytest.raises(DataError, match=rf"b\.txt .*{words}"):
        next(found)


# --- the Hub ----------------------------------------------------------------------------------------------------------

LARGE = as_parquet([NOISE, "two", "three"])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    repositories = {
        "someone/corpus": Repository(
            files={
                "README.md": b"# A corpus",
                "data/b-large.parquet": LARGE,
                "data/a-small.parquet": as_parquet(["one"]),
                "extra/notes.jsonl": as_jsonl(["note"]),
            },
            large={"data/b-large.parquet"},
        ),
        "someone/gated": Repository(files={"a.parquet": as_parquet(["secret"])}, gated=True),
        "Skylion007/openwebtext": Repository(files={"plain_text/train-00000-of-00001.parquet": as_parquet(["web"])}),
    }
    with running_hub(repositories) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield running


def dataset(name: str = "someone/corpus", **fields: object) -> HubCorpus:
    return HubCorpus.model_validate({"kind": "hub", "name": name, **fields})


def test_a_repository_is_read_file_by_file_and_each_is_fetched_once(hub: Hub, tmp_path: Path) -> None:
    assert read(dataset(), tmp_path / "scratch") == ["one", NOISE, "two", "three"]
    fetched = [request for request in hub.requests if request.startswith("GET /large")]
    assert read(dataset(), tmp_path / "scratch") == ["one", NOISE, "two", "three"]
    assert [request for request in hub.requests if request.startswith("GET /large")] == fetched


def test_only_the_files_that_are_reached_are_fetched(hub: Hub, tmp_path: Path) -> None:
    corpus = dataset()
    found = documents(corpus, sources(corpus), scratch=tmp_path)
    assert next(found) == "one"
    assert not [request for request in hub.requests if "b-large" in request]


def test_other_formats_of_a_repository_go_by_their_names(hub: Hub, tmp_path: Path) -> None:
    assert read(dataset(files="**/*.jsonl"), tmp_path) == ["note"]
    assert read(dataset(files="*.md"), tmp_path) == ["# A corpus"]


def test_a_branch_and_its_commit_are_the_same_corpus_until_a_file_of_it_changes(hub: Hub) -> None:
    repository = hub.repositories["someone/corpus"]
    before = identity(dataset())
    assert identity(dataset(revision=repository.commit)) == before
    repository.files["README.md"] = b"# Another word about it"
    assert identity(dataset()) == before
    repository.files["data/b-large.parquet"] = as_parquet(["other"])
    assert identity(dataset()) != before


def test_openwebtext_is_its_repository_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    corpus = OpenWebTextCorpus(kind="openwebtext", revision="main")
    (source,) = sources(corpus)
    commit = hub.repositories["Skylion007/openwebtext"].commit
    assert source.address == f"hf://datasets/Skylion007/openwebtext@{commit}/plain_text/train-00000-of-00001.parquet"
    assert read(corpus, tmp_path) == ["web"]


def test_a_download_that_breaks_off_is_taken_up_again(hub: Hub, tmp_path: Path) -> None:
    hub.cuts = 2
    assert read(dataset(), tmp_path) == ["one", NOISE, "two", "three"]
    assert hub.cuts == 0


def test_a_hub_that_always_breaks_off_is_a_network_error(hub: Hub, tmp_path: Path) -> None:
    hub.cuts = 1000
    with pytest.raises(NetworkError, match=r"b-large\.parquet could not be fetched from http://127\.0\.0\.1"):
        read(dataset(), tmp_path)


def test_a_file_that_comes_damaged_is_noticed_though_its_size_is_right(hub: Hub, tmp_path: Path) -> None:
    hub.spoil = True
    with pytest.raises(DataError, match=r"b-large\.parquet has sha256 .* came damaged"):
        read(dataset(), tmp_path)


@pytest.mark.parametrize(
    ("corpus", "words"),
    [
        (dataset("someone/missing"), "has no dataset someone/missing, or it is private.*HF_TOKEN"),
        (dataset(revision="v9"), "someone/corpus has no branch, tag or commit 'v9'"),
        (dataset(files="*.parquet"), r"matches no file of the dataset someone/corpus; it has README\.md, data/a-small"),
        (dataset("someone/gated"), "someone/gated is gated: accept its conditions"),
    ],
)
def test_what_the_hub_refuses_is_explained(hub: Hub, tmp_path: Path, corpus: HubCorpus, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(corpus, tmp_path)


@pytest.mark.parametrize(
    ("status", "error"), [(503, NetworkError), (429, NetworkError), (401, UserError), (400, UserError)]
)
def test_other_answers_of_the_hub_tell_whether_to_try_again(hub: Hub, status: int, error: type[Exception]) -> None:
    hub.failing = status
    with pytest.raises(error, match=f"dataset someone/corpus: .*{status if status != 400 else 'Bad request'}"):
        sources(dataset())


def test_a_hub_out_of_reach_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and nobody listens
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with pytest.raises(UserError, match=f"the Hub at {endpoint} cannot be reached"):
            sources(dataset())
