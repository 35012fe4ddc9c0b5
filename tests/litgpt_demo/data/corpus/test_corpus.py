"""Corpora: which files they have, wherever these lie, and the documents in them."""

import gzip
import json
import os
import random
import re
import tarfile
import zipfile
from codecs import BOM_UTF8
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from corpora import (
    COMPRESS,
    FORMATS,
    SEPARATOR,
    as_jsonl,
    as_parquet,
    cut_into,
    files,
    list_files,
    of_each,
    put_objects,
    read,
    write,
)
from hub_server import Hub, Repository, running_hub
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from waiting import until

from litgpt_demo.config import Corpus, DataConfig, HubCorpus, OpenWebTextCorpus, StdlibCorpus, content_hash
from litgpt_demo.data.corpus import kind_of
from litgpt_demo.data.fetching import forget
from litgpt_demo.data.shards import documents, plan_shards, read_shard
from litgpt_demo.errors import DataError, NetworkError, UserError
from litgpt_demo.storage import BucketStorage, open_storage


def identity(corpus: Corpus) -> str:
    return content_hash(kind_of(corpus).identity(list_files(corpus)))


def test_texts_are_in_the_order_of_the_numbers_in_names(tmp_path: Path) -> None:
    texts = {name: name.encode() for name in ("2/b.txt", "10/a1.txt", "10/a.txt", "part10.txt", "part2.txt")}
    in_order = ["2/b.txt", "10/a.txt", "10/a1.txt", "part2.txt", "part10.txt"]
    assert read(files(write(tmp_path / "corpus", texts)), tmp_path) == in_order


@settings(max_examples=60)
@given(
    form=st.sampled_from(sorted(FORMATS)),
    compression=st.sampled_from(sorted(COMPRESS)),
    texts=st.lists(st.text().filter(lambda text: SEPARATOR[1:-1] not in text), max_size=9),
)
def test_documents_come_back_as_they_were_written(form: str, compression: str, texts: list[str]) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder), {f"corpus/part{form}{compression}": COMPRESS[compression](FORMATS[form](texts))})
        found = read(files(f"{folder}/corpus", separator=SEPARATOR), Path(folder, "scratch"))
    assert found == [text for text in texts if text]


def test_text_file_without_separator_is_one_document(tmp_path: Path) -> None:
    """Nothing is changed in it, except that the mark of UTF-8 is dropped."""
    text = "one\r\n\r\ntwo\n\x00\N{SNOWMAN}\ufeff\n"
    marked = BOM_UTF8 + text.encode()
    write(tmp_path, {"a.txt": marked, "b.md": b"", "c": b"no suffix", "d.txt.gz": gzip.compress(marked)})
    write(tmp_path, {"e.jsonl": BOM_UTF8 + as_jsonl(["three", "four"]), "f.jsonl.gz": gzip.compress(BOM_UTF8)})
    found = read(files(f"{tmp_path}/[a-d]*", f"{tmp_path}/*.jsonl*"), tmp_path / "scratch")
    assert found == [text, "no suffix", text, "three", "four"]


def test_compressed_file_has_any_members_window_or_name(tmp_path: Path) -> None:
    long = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=28)).compressobj()
    members = [b"".join(COMPRESS[end](as_jsonl([text])) for text in ("one", "two")) for end in COMPRESS]
    windowed = long.compress(as_jsonl(["one"])) + long.flush()
    named = {f"a.json{end}": data for end, data in zip(COMPRESS, members, strict=True)}
    write(tmp_path, named | {f"b{number}": data for number, data in enumerate(members)} | {"c.json.zst": windowed})
    assert read(files(tmp_path, format="jsonl"), tmp_path / "scratch") == ["one", "two"] * 2 * len(members) + ["one"]


def test_file_without_text_is_refused_or_one_bad_document(tmp_path: Path) -> None:
    archive, bundle = BytesIO(), BytesIO()
    with zipfile.ZipFile(archive, "w") as packed, tarfile.open(fileobj=bundle, mode="w") as tar:
        packed.writestr("a.txt", "one")
        tar.addfile(tarfile.TarInfo("a.txt"))
    text = '{"text": "one"}\n' * 9
    for name, data, what in (
        ("a.txt.zip", archive.getvalue(), "a zip archive; unpack it"),
        ("a.tar.gz", gzip.compress(bundle.getvalue()), "a tar archive; unpack it"),
        ("a.txt", text.encode("utf-16"), "written in UTF-16; convert it, .* iconv -f utf-16"),
        ("a.csv", text.encode("utf-16-be"), "written in UTF-16"),
        ("a.npy", b"\x93NUMPY\1\0", r"an array of numpy\.save; .* data\.corpus\.kind=tokens"),
        ("a.bin", as_parquet(["one"]), r"a parquet file; set data\.corpus\.format=parquet"),
    ):
        folder = write(tmp_path / name, {name: data, "b.txt": b'{"text": "two"}\n'})
        for corpus in (files(folder, format="jsonl"), files(folder, format="text", separator="\n")):
            with pytest.raises(DataError, match=f"{name}, byte 0: is {what}"):
                read(corpus, tmp_path)
            data, shards = (
                DataConfig(corpus=corpus, on_bad_document="skip"),
                plan_shards(corpus, list_files(corpus), 10),
            )
            found = [batch for shard in shards for batch in read_shard(data, shard, tmp_path)]
            assert [place.place for batch in found for place in batch.bad] == [f"{name}, byte 0"]


def test_row_group_is_never_held_in_memory(tmp_path: Path) -> None:
    # 100 MB in one row group, which compress to next to nothing.
    texts = pa.array([f"{number:04}" + "word " * 2000 for number in range(10_000)])
    parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", compression="zstd")
    corpus, before = files(tmp_path), pa.default_memory_pool()
    (shard,) = plan_shards(corpus, list_files(corpus))
    pa.set_memory_pool(pool := pa.proxy_memory_pool(before))
    try:
        found = sum(batch.texts.nbytes for batch in read_shard(DataConfig(corpus=corpus), shard, tmp_path))
    finally:
        pa.set_memory_pool(before)
    assert found > 100_000_000
    assert 10_000_000 < pool.max_memory() < 60_000_000  # pyarrow writes pages of 10 MB here, 1024 rows in one


# --- JSON lines are never trained on as text by mistake: C4's own files are `*.json.gz`

PAGES = ["first page", "second page\nwith a line", "third"]
LINES = "".join(json.dumps({"text": text, "url": "https://example.org"}) + "\n" for text in PAGES).encode()


def test_json_line_is_a_document(tmp_path: Path) -> None:
    names = {"c4-train.00000-of-01024.json.gz": gzip.compress(LINES), "part.json": LINES}
    corpus = files(write(tmp_path / "c4", names))
    assert read(corpus, tmp_path) == PAGES * 2


@pytest.mark.parametrize("separator", [None, "\n\n"])
def test_text_of_json_lines_is_refused_with_the_setting_to_use(tmp_path: Path, separator: str | None) -> None:
    folder = write(tmp_path / "texts", {"dump.txt": LINES})
    with pytest.raises(UserError, match=r"'text', 'url'.*data\.corpus\.format=jsonl and data\.corpus\.column=text"):
        read(files(folder, separator=separator), tmp_path)
    assert read(files(folder, format="text", separator=separator), tmp_path) == [LINES.decode()]
    for text in ('{"only": "one line is an object"}\nand this is none', "[1]\n[2]"):
        assert read(files(write(folder, {"dump.txt": text.encode()}), separator=separator), tmp_path) == [text]


MIXED = {
    "b/two.jsonl.gz": gzip.compress(as_jsonl(["three", "four"])),
    "a/one.txt": b"two",
    "a-z.txt": b"one",
    "c.parquet": as_parquet(["five", "six", "seven"], kind=pa.dictionary(pa.int8(), pa.large_string())),
}


def put(root: str, contents: dict[str, bytes]) -> None:
    for name, data in contents.items():
        open_storage(root).write(name, data)


def test_hash_depends_on_names_bytes_settings_not_on_folders(root: str, tmp_path: Path) -> None:
    """Neither the folder nor the order of the paths changes the order of documents or the hash."""
    first = write(tmp_path / "first", MIXED)
    second = f"{root}/elsewhere/second"
    put(second, dict(reversed(MIXED.items())))
    corpus, paths = files(*of_each(first)), [f"{second}/**/*.txt", f"{second}/c.*", f"{second}/**/*.gz", f"{second}/b"]
    for same in (corpus, files(*paths), files(*reversed(paths))):
        assert read(same, tmp_path / "scratch") == ["one", "two", "three", "four", "five", "six", "seven"]
    # Files of one name in two folders are both taken, in an order of their own.
    write(tmp_path, {"x/part.txt": b"one", "y/part.txt": b"two", "z/part.txt": b"one"})
    found = [read(files(tmp_path / a, tmp_path / b), tmp_path / "scratch") for a, b in ("xy", "yz")]
    assert found[0] == found[1]
    assert sorted(found[0]) == ["one", "two"]
    equal, before = files(*of_each(second, ".txt", ".gz", ".parquet")), identity(corpus)
    assert before == identity(equal) != identity(files(*corpus.paths, max_bytes=10))
    put(second, {"a/one.txt": b"twp"})
    (first / "a/one.txt").rename(first / "a/other.txt")
    assert len({before, identity(equal), identity(corpus)}) == 3


def test_an_address_selects_a_file_a_folder_or_what_matches(root: str, tmp_path: Path) -> None:
    put(root, {"a.txt": b"one", "b/b/c.txt": b"two", "b/d.md": b"three", "b/.git/x": b"hidden", ".a.parquet": b""})
    selected = {"": ["one", "two", "three"], "a.txt": ["one"], "**/*.txt": ["one", "two"], "b/?/c.*": ["two"]}
    assert {path: read(files(f"{root}/{path}"), tmp_path / "scratch") for path in selected} == selected
    with pytest.raises(UserError, match=r"/\*\.parquet', but no file matches it"):
        list_files(files(f"{root}/*.parquet"))
    for missing in ("missing", "missing/deep/**/*.txt"):
        with pytest.raises(UserError, match="no file matches it"):
            list_files(files(f"{root}/{missing}"))


def test_files_of_a_writer_are_skipped_unless_named(root: str, tmp_path: Path) -> None:
    """As Spark, Databricks and Delta Lake leave a folder; but `__init__.py` is text."""
    beside = ["_SUCCESS", "_common_metadata", "_metadata", ".part-0.parquet.crc", "_delta_log/0.crc", "_temporary/0/a"]
    data = {"day=1/part-0.parquet": as_parquet(["one"]), "code/__init__.py": b"two"}
    put(root, dict.fromkeys([*beside, "day=1/_committed_7", "code/_started_7"], b"beside") | data)
    selected = {"day=1": "one", "*/*.parquet": "one", "code": "two", "code/**": "two", "**/*.py": "two"}
    selected |= dict.fromkeys(["_delta_log/*", "_SUCC*", "day=1/_committed_7"], "beside")
    assert {path: read(files(f"{root}/{path}"), tmp_path / "s") for path in selected} == {
        path: [text] for path, text in selected.items()
    }


@pytest.mark.parametrize("name", ["deep//a.txt", "/a.txt", "./a.txt", "deep/./a.txt", "deep/../a.txt", "deep/a\nb.txt"])
def test_odd_object_of_a_bucket_is_refused_by_its_name(bucket: BucketStorage, tmp_path: Path, name: str) -> None:
    put(bucket.address("texts"), {"deep/b.txt": b"one"})
    put_objects(bucket, f"texts/{name}", "texts/deep/")
    for pattern in ("", "/**/*.txt"):
        with pytest.raises(UserError, match=re.escape(f"the object {name!r}")):
            list_files(files(f"{bucket.address('texts')}{pattern}"))
    assert read(files(f"{bucket.address('texts')}/*/b.txt"), tmp_path) == ["one"]


def test_name_that_is_not_utf_8_is_shown_escaped(tmp_path: Path) -> None:
    latin = os.fsdecode(b"caf\xe9")
    folder = write(tmp_path / latin, {f"{latin}{end}": form(["one", "two"]) for end, form in FORMATS.items()})
    corpus = files(*of_each(tmp_path), separator=SEPARATOR)
    with cut_into(1):
        assert len(plan_shards(corpus, list_files(corpus))) > 3
    assert read(corpus, tmp_path / "scratch") == ["one", "two"] * 3
    content: Any = kind_of(corpus).identity(list_files(corpus))
    assert content["files"][0][0] == r"caf\xe9/caf\xe9.jsonl"
    with pytest.raises(UserError, match=r"several formats: 1 jsonl \(caf\\xe9/caf\\xe9\.jsonl\)"):
        list_files(files(folder.parent))
    write(folder, {f"{latin}.txt": b"\xe9"})
    with pytest.raises(DataError, match=r"caf\\xe9/caf\\xe9\.txt, byte 0: is not UTF-8"):
        read(files(*of_each(tmp_path, ".txt")), tmp_path / "scratch")


def test_linked_folder_is_read_once_and_dead_links_are_named(
    tmp_path: Path,
) -> None:
    """Links that lead back or nowhere are named too."""
    folder, outside = tmp_path / "corpus", write(tmp_path / "there", {"c.txt": b"three"})
    deep = write(folder, {"a.txt": b"one", "deep/b.txt": b"two"}) / "deep"
    for link, target in {"deep/up": folder, "deep/self": deep, "also": deep, "z": outside, "home": tmp_path}.items():
        (folder / link).symlink_to(target)
    (outside / "back").symlink_to(folder)
    (folder / "b.txt").symlink_to(folder / "b.txt")
    for path in (folder, f"{folder}/**/*.txt"):
        assert read(files(path), tmp_path / "scratch") == ["one", "two", "three"]
        kind_of(files(path)).list_files(left_out := [])
        back = {"deep/self": deep, "deep/up": folder, "home": tmp_path}
        above = [f"{folder}/{link} is a link to {target}, which contains it" for link, target in back.items()]
        assert sorted(left_out) == [f"{folder}/b.txt is a broken link", *above]


def test_mixed_formats_are_refused_until_a_pattern_selects_one(root: str, tmp_path: Path, hub: Hub) -> None:
    cards = {"README.md": b"# A card", "LICENSE": b"Take it.", "dataset_infos.json": b'{"default": {}}'}
    data = {"data/a.parquet": as_parquet(["one"]), "data/b.parquet": as_parquet(["two"]), ".gitattributes": b"* lfs"}
    put(f"{root}/cloned", cards | data)
    found = r"1 jsonl \(dataset_infos\.json\), 2 parquet \(data/a\.parquet, data/b\.parquet\), 2 text \(LICENSE, README"
    for path in (f"{root}/cloned", f"{root}/cloned/**"):
        with pytest.raises(UserError, match=rf"cloned.* several formats: {found}\.md\); select the files to read"):
            list_files(files(path))
    with pytest.raises(UserError, match=r"several formats: 1 jsonl \(extra/notes\.jsonl\), 2 parquet .*, 1 text"):
        list_files(repository(files="**/*"))
    for pattern, cards_pattern in (("data", "*.md"), ("data/*", "README.md"), ("**/*.parquet", "*.md")):
        corpus = files(f"{root}/cloned/{pattern}", f"{root}/cloned/{cards_pattern}")
        assert read(corpus, tmp_path / "scratch") == ["# A card", "one", "two"]


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_changes_after_it_was_listed_is_refused(root: str, tmp_path: Path, gone: bool) -> None:
    put(root, {"a.txt": b"one", "b.txt": b"two"})
    corpus = files(root)
    found = documents(DataConfig(corpus=corpus), list_files(corpus), tmp_path / "scratch")
    assert next(found) == "one"
    open_storage(root).remove("b.txt") if gone else put(root, {"b.txt": b"twp"})
    with pytest.raises(DataError, match=r"b\.txt was removed" if gone else r"b\.txt .*it has changed"):
        next(found)


def test_stdlib_sample_covers_all_packages(tmp_path: Path) -> None:
    """Installed packages are not part of it."""
    sample = StdlibCorpus(kind="stdlib", max_bytes=1_000_000)
    listed = list_files(sample)
    names = [source.name for source in listed]
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if {"site-packages", "dist-packages", "__pycache__"} & set(name.split("/"))]
    texts = list(documents(DataConfig(corpus=sample), listed, tmp_path))
    assert 1_000_000 <= sum(len(text.encode()) for text in texts) < 3_000_000
    assert min(names[: len(texts)]) < "e" < "t" < max(names[: len(texts)])


TEXTS = ["one", random.Random(0).randbytes(200_000).hex(), "two", "three"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    contents = {
        "README.md": b"# A corpus",
        "data/b-large.parquet": as_parquet(TEXTS[1:], kind=pa.string_view()),
        "data/a-small.parquet": as_parquet(TEXTS[:1]),
        "extra/notes.jsonl": as_jsonl(["note"]),
    }
    repositories = {
        "someone/corpus": Repository(contents, large={"data/b-large.parquet"}),
        "someone/gated": Repository({"a.parquet": as_parquet(["secret"])}, gated=True),
        "a/mirror": Repository({"../../evil.jsonl": as_jsonl(["x"])}),
    }
    with running_hub(repositories) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield running


def repository(name: str = "someone/corpus", **fields: object) -> HubCorpus:
    return HubCorpus.model_validate({"kind": "hub", "name": name, **fields})


def test_remote_file_is_fetched_once_when_it_is_reached(hub: Hub, tmp_path: Path) -> None:
    """All threads share one download until it is forgotten."""
    found = documents(DataConfig(corpus=repository()), list_files(repository()), tmp_path)
    assert next(found) == "one"
    assert hub.starts == []
    hub.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        readings = [pool.submit(read, repository(), tmp_path) for _ in range(4)]
        until(lambda: bool(hub.starts))
        hub.gate.set()
        assert [reading.result() for reading in readings] == [TEXTS] * 4
    assert hub.starts == [0]
    forget(list_files(repository()), tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == 0
    assert read(repository(), tmp_path) == TEXTS


def test_branch_and_its_commit_are_the_same_corpus(hub: Hub, tmp_path: Path) -> None:
    stored = hub.repositories["someone/corpus"]
    assert read(repository(files="**/*.jsonl"), tmp_path) == ["note"]
    before = identity(repository())
    assert identity(repository(revision=stored.commit)) == before
    stored.files["README.md"] = b"# Another word about it"
    assert identity(repository()) == before
    stored.files["data/b-large.parquet"] = as_parquet(["other"])
    assert identity(repository()) != before
    hub.repositories["Skylion007/openwebtext"] = Repository({"plain_text/train.parquet": as_parquet(["web"])})
    assert read(OpenWebTextCorpus(kind="openwebtext", revision="main"), tmp_path) == ["web"]


def test_broken_download_continues_and_a_damaged_one_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.cuts = 1000
    with pytest.raises(NetworkError, match=r"b-large\.parquet could not be fetched .*http://127\.0\.0\.1"):
        read(repository(), tmp_path)
    hub.cuts = 2
    assert read(repository(), tmp_path) == TEXTS
    assert hub.cuts == 0
    hub.spoil = True
    for content in tmp_path.rglob("content"):
        content.write_bytes(content.read_bytes()[:-20] + b"x" * 20)
    for spoilt in ("a-small.parquet has git", "b-large.parquet has sha256", "b-large.parquet has sha256"):
        with pytest.raises(DataError, match=f"{spoilt} .* or was damaged"):
            read(repository(), tmp_path)
    hub.spoil = False
    assert read(repository(), tmp_path) == TEXTS


def test_hub_refusals_are_explained(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for corpus, message in (
        (repository("someone/missing"), "refused someone/missing at main.* or is private.*HF_TOKEN"),
        (repository(revision="v9"), "someone/corpus at v9.* it has no such branch, tag or commit"),
        (repository(files="*.parquet"), r"matches no file of the dataset someone/corpus; it has README\.md, data/a-s"),
        (repository("someone/gated"), "someone/gated at .* it is gated: accept its conditions"),
        (repository("a/mirror", files="../../*.jsonl"), r"lists '\.\./\.\./evil\.jsonl', which leads out of"),
    ):
        with pytest.raises(UserError, match=message):
            read(corpus, tmp_path)
    for hub.failing, error in ((503, NetworkError), (429, NetworkError), (401, UserError)):
        with pytest.raises(error, match=f"someone/corpus at main: .*{hub.failing}"):
            list_files(repository())
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"the Hub at http://127\.0\.0\.1:9 cannot be reached"):
        list_files(repository())
