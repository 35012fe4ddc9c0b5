"""Dataset preparation: what the bins hold, that they depend on the inputs alone, and that half a dataset is none."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from corpora import (
    FILES,
    FILTERS,
    FORMATS,
    SEPARATOR,
    TEXTS,
    Files,
    contents,
    corpus_in,
    cut_into,
    expected,
    found,
    large_vocabulary,
    of_each,
    prepared,
    settings_for,
    write,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from litgpt_demo.config import DataConfig, Filters, TokenizerFile
from litgpt_demo.data.dataset import (
    DatasetManifest,
    PlannedDataset,
    finished_dataset,
    plan_dataset,
    stage,
    verify_dataset,
)
from litgpt_demo.data.preparation import MapSteps, check_totals, in_threads, prepare
from litgpt_demo.data.readers import FileFormat, Source, count_documents
from litgpt_demo.data.tokens import load_tokenizer
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.storage import Storage, is_remote, open_storage

T = TypeVar("T")
R = TypeVar("R")


@pytest.mark.parametrize(("size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_bins_hold_the_documents_of_the_documented_split(tmp_path: Path, size: int, dtype: Any) -> None:
    """An id has four bytes only where two are too few."""
    path = str(large_vocabulary(tmp_path / "tokenizer", size))
    manifest, folder = prepared(
        corpus_in(tmp_path / "corpus"), tmp_path / "root", tokenizer={"kind": "file", "path": path}
    )
    # As DESIGN says it, in other words than the source's.
    held_out = np.random.default_rng(2357).permutation(len(TEXTS))[: math.ceil(0.1 * len(TEXTS))].tolist()
    for name, validation in (("train.bin", False), ("val.bin", True)):
        ids = np.memmap(folder / name, dtype=dtype, mode="r")  # nanoGPT's train.py reads just so
        documents = np.split(ids, np.flatnonzero(ids == manifest.end_of_text) + 1)
        assert len(documents.pop()) == 0, "the last one is closed too"
        texts = HfTokenizer.from_file(path).decode_batch([ids[:-1].tolist() for ids in documents])
        assert texts == [text for number, text in enumerate(TEXTS) if (number in held_out) == validation]
    assert (manifest.vocab_size, manifest.train.documents, manifest.validation.documents) == (size, 18, 3)


class Killed(Exception):
    """The preparation is no more."""


def killed_after(results: int, each: MapSteps) -> MapSteps:
    remaining = iter(range(results))

    def mortal(step: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
        with closing(each(step, items)) as found:
            for result in found:
                if next(remaining, None) is None:
                    raise Killed
                yield result

    return mortal


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFile:
    return TokenizerFile(kind="file", path=str(large_vocabulary(tmp_path_factory.mktemp("tokenizer"))))


FIELDS = st.fixed_dictionaries(
    {
        "filters": st.one_of(st.just(Filters()), FILTERS),
        "validation_fraction": st.sampled_from([0.0005, 0.2, 0.5]),
        "split_seed": st.sampled_from([2357, 0]),
        "max_file_bytes": st.sampled_from([32_000_000_000, 300]),
    }
)
KILLS = st.lists(st.tuples(st.sampled_from([1, 2, 7]), st.integers(0, 12)), max_size=3)


def planned_case(
    folder: Path, files: Files, tokenizer: TokenizerFile, *, max_bytes: int | None = None, **fields: Any
) -> tuple[PlannedDataset, dict[str, Any]]:
    """A preparation, and what has to come of it."""
    source = write(folder / "corpus", {f"{n:02d}{form}": FORMATS[form](texts) for n, (form, texts) in enumerate(files)})
    corpus = {"kind": "files", "paths": of_each(source), "separator": SEPARATOR, "max_bytes": max_bytes}
    policy = "skip" if any(None in texts for _, texts in files) else "fail"
    planned = plan_dataset(settings_for(source, corpus=corpus, tokenizer=tokenizer, on_bad_document=policy, **fields))
    return planned, expected(files, load_tokenizer(tokenizer), planned.data)


@settings(max_examples=30)
@given(
    files=FILES, fields=FIELDS, max_bytes=st.one_of(st.none(), st.integers(20, 600)), shard=st.integers(1, 1500),
    batch=st.integers(64, 2000), kills=KILLS, workers=st.sampled_from([1, 2, 7]),
)  # fmt: skip
def test_bytes_depend_on_corpus_and_settings_only(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: TokenizerFile, files: Files, fields: dict[str, Any],
    max_bytes: int | None, shard: int, batch: int, kills: list[tuple[int, int]], workers: int,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("case")
    planned, wanted = planned_case(folder, files, tokenizer, max_bytes=max_bytes, **fields)
    assume(wanted["documents"] >= 2)
    storage = open_storage(str(folder / "root"))
    with cut_into(shard, batch):
        for mortals, results in kills:
            with suppress(Killed):
                prepare(planned, storage, map_steps=killed_after(results, in_threads(mortals)))
                break
            assert finished_dataset(storage, planned) is None
        manifest = prepare(planned, storage, map_steps=in_threads(workers))
    assert found(planned, folder / "root", manifest) == wanted
    assert verify_dataset(str(folder / "root" / planned.path)) == manifest
    of_the_dataset = {f"{planned.path}/{name}" for name in ["manifest.json", *(file.path for file in manifest.files)]}
    assert set(contents(folder / "root")) == of_the_dataset


@pytest.mark.parametrize("form", [".parquet", ".jsonl", ".txt"])
def test_empty_document_in_a_quick_count_is_found(
    form: str, tmp_path: Path, tokenizer: TokenizerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of the last shard includes a document that is empty: all are then counted and assigned again."""
    monkeypatch.setitem(FORMATS, ".jsonl", spaced_lines)
    texts = [f"Document {number} of a corpus that is counted quickly." for number in range(60)]
    files: Files = [(form, [*texts[:30]]), (form, [*texts[30:59], "", texts[59]])]
    planned, wanted = planned_case(tmp_path, files, tokenizer, validation_fraction=0.2)
    with cut_into(1500):
        manifest = prepare(planned, open_storage(str(tmp_path / "root")), map_steps=in_threads(1))
    assert found(planned, tmp_path / "root", manifest) == wanted


def spaced_lines(texts: Sequence[str]) -> bytes:
    return "".join(f"{json.dumps({'text': text}, separators=(',', ' : '))}\n" for text in texts).encode()


@pytest.mark.parametrize(
    ("name", "content", "counts"),
    [
        ("a.txt", "eins<>zwei<>drei", (3, 12)),
        ("a.txt", "eins<><>drei", None),
        ("a.jsonl", '{"text": "a"}\n\n{"text": "b"}\n', (2, 26)),
        ("a.jsonl", '{"text": "a"}\n{"text": ""}\n', None),
        ("a.jsonl", '{"text":""}\n', None),
        ("a.jsonl", '{"text" : ""}\n', (1, 13)),
        ("a.jsonl", '\ufeff\n{"text": "a"}\n', (1, 13)),
        ("a.txt", "\ufeffeins<>zwei", (2, 8)),
    ],
)
def test_documents_are_counted_by_lines_and_separators(
    name: str, content: str, counts: tuple[int, int] | None, tmp_path: Path
) -> None:
    """An empty document is counted only where no quick look shows it."""
    path = write(tmp_path, {name: content.encode()}) / name
    source = Source(address=str(path), name=name, size=len(content), version="", file=path)
    assert count_documents(path, source, FileFormat(separator="<>"), most=100) == counts


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b'[{"text": "a"}, {"text": "b"}]', "is not a JSON object"),
        ("a.txt", b"PK\3\4 a", "is a zip archive"),
    ],
)
def test_a_single_bad_file_is_not_called_too_few_documents(
    name: str, content: bytes, problem: str, tmp_path: Path, tokenizer: TokenizerFile
) -> None:
    with pytest.raises(DataError, match=problem):
        prepared(write(tmp_path / "corpus", {name: content}), tmp_path / "root", tokenizer=tokenizer)


def test_max_bytes_of_a_large_corpus_reads_few_shards(tmp_path: Path, tokenizer: TokenizerFile) -> None:
    many: Files = [(".txt", [f"The text of file {number}. " * 4]) for number in range(64)]
    steps = list[object]()

    def counting(step: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
        steps.extend(items)
        yield from in_threads(2)(step, items)

    planned, _ = planned_case(tmp_path, many, tokenizer, max_bytes=150)
    with cut_into(100):
        prepare(planned, open_storage(str(tmp_path / "root")), map_steps=counting)
    # Two are surveyed to find the limit, the second one again up to it, and both are encoded.
    assert len(steps) <= 2 * 3 + 1


def stored(root: str, planned: PlannedDataset) -> dict[str, bytes]:
    storage = open_storage(root).within(planned.path)
    return {path: storage.read(path) for path in storage.list()}


def test_a_finished_dataset_is_done_and_staged_from_where_it_is(
    dataset: tuple[DatasetManifest, Path], root: str, tmp_path: Path
) -> None:
    planned, storage = plan_dataset(settings_for(corpus_in(tmp_path / "corpus"))), open_storage(root)
    for name in ("train.bin", "tokenizer/old.json"):  # as another attempt left them, without its manifest
        storage.write(f"{planned.path}/{name}", b"half")
    made = prepare(planned, storage)
    assert (made, stored(root, planned)) == (dataset[0], contents(dataset[1]))
    assert prepare(planned, storage, map_steps=killed_after(0, in_threads(1))) == made
    assert storage.list(".scratch") == []
    staged = stage(f"{root}/{planned.path}", tmp_path / "scratch")
    assert contents(staged) == contents(dataset[1])


def test_two_preparations_at_once_make_the_same_numbered_files(
    root: str, tmp_path: Path, tokenizer: TokenizerFile
) -> None:
    """A split above the cap is several files."""
    source = corpus_in(tmp_path / "corpus")
    planned = plan_dataset(settings_for(source, tokenizer=tokenizer, max_file_bytes=1000))
    with cut_into(300), ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: prepare(planned, open_storage(root), map_steps=in_threads(2)), range(2))
    _, folder = prepared(source, tmp_path / "whole", tokenizer=tokenizer)
    parts = {name: part for name, part in stored(root, planned).items() if name.startswith("train")}
    assert first == second
    assert list(parts) == [f"train-{number:05d}.bin" for number in range(len(parts))]
    assert b"".join(parts.values()) == (folder / "train.bin").read_bytes()
    assert max(map(len, parts.values())) <= 1000


def test_a_corpus_makes_equal_files_wherever_it_lies(bucket: Storage, tmp_path: Path, tokenizer: TokenizerFile) -> None:
    """Files on this machine are cut into several shards, those in a bucket are not."""
    source = corpus_in(tmp_path / "corpus")
    for name, content in contents(source).items():
        bucket.write(f"corpus/{name}", content)
    corpora, made = {"here": str(source), "there": bucket.address("corpus")}, dict[str, dict[str, bytes]]()
    for case, root in (("here", "a"), ("there", "b"), ("here, there", "c"), ("there, here", bucket.address("root"))):
        address = root if is_remote(root) else str(tmp_path / root)
        places = [corpora[place] for place in case.split(", ")]
        with cut_into(300):
            for place in places:
                planned = plan_dataset(settings_for(source, [place], tokenizer=tokenizer, max_file_bytes=1001))
                each = in_threads(2) if place == places[-1] else killed_after(3, in_threads(1))
                with suppress(Killed):
                    prepare(planned, open_storage(address), map_steps=each)
        made[case] = stored(address, planned)
        assert verify_dataset(f"{address}/{planned.path}").name == planned.name
    assert made["here"] == made["there"] == made["here, there"] == made["there, here"]
    assert len(made["here"]["train-00000.bin"]) == 1000


def test_prepare_command_makes_the_same_bytes_on_one_core(
    dataset: tuple[DatasetManifest, Path], tmp_path: Path
) -> None:
    manifest, folder = dataset
    command = [sys.executable, "-m", "litgpt_demo", "prepare", "--root", str(tmp_path / "root"), "--data"]
    data = settings_for(corpus_in(tmp_path / "corpus")).model_dump_json()
    # Neither the number of threads nor Python's hashing may show in the tokenizer or the ids.
    environ = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "7"}
    output = subprocess.run([*command, data], check=True, env=environ, capture_output=True, text=True).stdout
    assert contents(tmp_path / "root" / "datasets" / folder.name) == contents(folder)
    assert f"{manifest.train.tokens} training tokens, {manifest.validation.tokens} validation" in output


BAD = {"on_bad_document": "skip"}
SKIPPED = r"left out 1,203 bad ones: a\.jsonl, line 1: has 7 .*; a\.jsonl, line 2: has null .*; a\.jsonl, line 4: is no"


@pytest.mark.parametrize(
    ("texts", "fields", "message"),
    [
        (TEXTS[:1], {}, "has 1 documents in 2 files, but .*give more text"),
        (TEXTS, {"filters": {"min_characters": 1000}}, "has 0 documents .*; 21 more are .* dropped by data"),
        (TEXTS, {"validation_fraction": 0.99}, r"=0\.99 of 21 documents leaves none to train on"),
        ([], BAD, SKIPPED),
        ([], BAD | {"tokenizer": {"kind": "train", "vocab_size": 300}}, SKIPPED),
    ],
    ids=range(5),
)
def test_corpus_without_a_dataset_is_refused_with_its_problems(
    tmp_path: Path, tokenizer: TokenizerFile, texts: list[str], fields: dict[str, Any], message: str
) -> None:
    source = corpus_in(tmp_path / "corpus", texts) if texts else tmp_path / "corpus"
    if not texts:
        write(source, {"a.jsonl": b'{"text": 7}\n{"text": null}\n\nno\n' + b"{}\n" * 1200})
    planned = plan_dataset(settings_for(source, **{"tokenizer": tokenizer} | fields))
    with pytest.raises((DataError, UserError), match=message):
        prepare(planned, open_storage(str(tmp_path / "root")))
    assert finished_dataset(open_storage(str(tmp_path / "root")), planned) is None
    assert not (tmp_path / "root" / ".scratch").exists()


def test_manifest_names_the_first_bad_documents(tmp_path: Path, tokenizer: TokenizerFile) -> None:
    lines = b'{"text": "one"}\n' + b'{"text": 7}\n' * 2000 + b'{"text": "two"}\n'
    source = write(tmp_path / "corpus", {"c.jsonl": lines})
    manifest, _ = prepared(source, tmp_path / "root", tokenizer=tokenizer, on_bad_document="skip")
    assert (manifest.documents, manifest.bad_documents, len(manifest.bad_places)) == (2, 2000, 1000)
    assert manifest.bad_places[0] == "c.jsonl, line 2: has 7 as 'text'"


def test_openwebtext_with_other_totals_is_an_error(dataset: tuple[DatasetManifest, Path]) -> None:
    manifest = dataset[0].model_copy(update={"vocab_size": 50257, "end_of_text": 50256})
    data = DataConfig.model_validate({"corpus": {"kind": "openwebtext"}})
    planned = PlannedDataset(data=data, sources=(), tokenizer=None, name="openwebtext", content_hash="k")
    with pytest.raises(DataError, match="'train': 9035582198"):
        check_totals(planned, manifest)
