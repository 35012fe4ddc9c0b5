"""Dataset preparation: what the bins hold, that they depend on the inputs alone, and that half a dataset is none."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers

from litgpt_demo.config import DataConfig
from litgpt_demo.dataset import (
    DatasetManifest,
    PlannedDataset,
    finished_dataset,
    main,
    open_dataset,
    plan_dataset,
    prepare,
    problems,
    stage,
    validation_documents,
)
from litgpt_demo.faults import DataError, UserError
from litgpt_demo.manifests import write_manifest
from litgpt_demo.storage import open_storage, sha256_of

sys.path.append(str(Path(__file__).parents[1] / "fakes"))
from bucket_emulator import bucket_emulator

SEPARATOR = "\n---\n"
TEXTS = [f"Document {number}: " + " ".join(str(number * other) for other in range(30)) + " ü" for number in range(21)]
TEXTS[4] = "A document that quotes <|endoftext|> is one document."


def corpus(folder: Path, texts: list[str] = TEXTS) -> Path:
    """Two files of documents."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text(SEPARATOR.join(texts[:9]))
    (folder / "b.txt").write_text(SEPARATOR.join(texts[9:]))
    return folder


def settings_for(folder: Path, **fields: Any) -> DataConfig:
    return DataConfig.model_validate(
        {
            "corpus": {"kind": "files", "paths": [str(folder)], "separator": SEPARATOR},
            "tokenizer": {"kind": "train", "vocab_size": 300},
            "validation_fraction": 0.1,
        }
        | fields
    )


def prepared(folder: Path, root: Path, **fields: Any) -> tuple[DatasetManifest, Path]:
    planned = plan_dataset(settings_for(folder, **fields))
    return prepare(planned, open_storage(str(root))), root / planned.path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[DatasetManifest, Path]:
    """A dataset that tests only read."""
    folder = tmp_path_factory.mktemp("dataset")
    return prepared(corpus(folder / "corpus"), folder / "root")


@pytest.fixture
def copied(dataset: tuple[DatasetManifest, Path], tmp_path: Path) -> Path:
    """The same, for tests that spoil it."""
    return Path(shutil.copytree(dataset[1], tmp_path / dataset[1].name))


# --- what the bins hold -----------------------------------------------------------------------------------------------


def test_the_bins_hold_the_documents_of_the_documented_split_each_closed(
    dataset: tuple[DatasetManifest, Path],
) -> None:
    manifest, folder = dataset
    tokenizer = HfTokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    # As DESIGN says it, in other words than the source's.
    held_out = np.random.default_rng(2357).permutation(len(TEXTS))[: math.ceil(0.1 * len(TEXTS))].tolist()
    for name, chosen in [
        ("train.bin", [number for number in range(len(TEXTS)) if number not in held_out]),
        ("val.bin", sorted(held_out)),
    ]:
        # nanoGPT's train.py reads just so.
        ids = np.memmap(folder / name, dtype=np.uint16, mode="r")
        ends = np.flatnonzero(ids == manifest.end_of_text)
        found = [tokenizer.decode(piece[:-1].tolist()) for piece in np.split(ids, ends + 1)[:-1]]
        assert found == [TEXTS[number] for number in chosen]
        assert ends[-1] == len(ids) - 1


def test_the_manifest_tells_of_every_file_and_of_the_documents_in_it(dataset: tuple[DatasetManifest, Path]) -> None:
    manifest, folder = dataset
    assert (manifest.train.documents, manifest.validation.documents) == (18, 3)
    assert manifest.train.tokens * 2 == (folder / "train.bin").stat().st_size
    assert manifest.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert {record.path for record in manifest.files} == set(contents(folder)) - {"manifest.json"}
    assert {record.path: record.sha256 for record in manifest.files} == {
        record.path: sha256_of(folder / record.path) for record in manifest.files
    }
    assert [(name, size) for name, size, _ in json.loads(json.dumps(manifest.corpus))["files"]] == [
        (name, (folder.parents[2] / "corpus" / name).stat().st_size) for name in ("a.txt", "b.txt")
    ]
    assert problems(str(folder)) == []


@given(count=st.integers(0, 5000), fraction=st.floats(0.0001, 0.9999), seed=st.integers(0, 2**32))
def test_the_validation_documents_are_a_share_rounded_up_without_repeats(
    count: int, fraction: float, seed: int
) -> None:
    chosen = validation_documents(count, fraction=fraction, seed=seed)
    assert len(chosen) == math.ceil(fraction * count)
    assert len(set(chosen.tolist())) == len(chosen)
    assert chosen.tolist() == np.random.default_rng(seed).permutation(count)[: len(chosen)].tolist()


def large_vocabulary(folder: Path, size: int) -> Path:
    """A byte-level tokenizer with one merge and ids up to `size`, most of them never met."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    vocabulary |= {f"<unused {number}>": number for number in range(len(alphabet), size - 2)}
    vocabulary |= {"<|endoftext|>": size - 2, "Do": size - 1}
    tokenizer = HfTokenizer(models.BPE(vocab=vocabulary, merges=[("D", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize(("size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_ids_take_four_bytes_only_where_two_do_not_hold_them(tmp_path: Path, size: int, dtype: Any) -> None:
    tokenizer = large_vocabulary(tmp_path / "tokenizer", size)
    manifest, folder = prepared(
        corpus(tmp_path / "corpus"), tmp_path / "root", tokenizer={"kind": "file", "path": str(tokenizer)}
    )
    assert (manifest.vocab_size, np.dtype(manifest.dtype)) == (size, np.dtype(dtype))
    ids = np.memmap(folder / "val.bin", dtype=dtype, mode="r")
    assert ids.max() == size - 1
    decoder = HfTokenizer.from_file(str(tokenizer))
    held_out = sorted(validation_documents(len(TEXTS), fraction=0.1, seed=2357).tolist())
    assert decoder.decode(ids.tolist()).split("<|endoftext|>")[:-1] == [TEXTS[number] for number in held_out]
    assert problems(str(folder)) == []


# --- what its bytes and its key depend on -----------------------------------------------------------------------------


def test_the_same_text_in_another_folder_makes_the_same_bytes_under_the_same_key(
    dataset: tuple[DatasetManifest, Path], tmp_path: Path
) -> None:
    _, folder = dataset
    _, other = prepared(corpus(tmp_path / "elsewhere"), tmp_path / "root")
    assert other.name == folder.name.replace("corpus", "elsewhere")
    first, again = contents(folder), contents(other)
    del first["manifest.json"], again["manifest.json"]  # it carries the name, which is the folder's
    assert again == first


def test_the_bytes_do_not_depend_on_the_number_of_cores(dataset: tuple[DatasetManifest, Path], tmp_path: Path) -> None:
    _, folder = dataset
    command = [sys.executable, "-m", "litgpt_demo", "prepare", "--root", str(tmp_path / "root"), "--data"]
    data = settings_for(corpus(tmp_path / "corpus")).model_dump_json()
    one_core = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run([*command, data], check=True, timeout=120, env=one_core, capture_output=True)
    assert contents(tmp_path / "root" / "datasets" / folder.name) == contents(folder)


@settings(max_examples=15, deadline=None)
@given(place=st.integers(0, 100), flip=st.integers(1, 127), data=st.data())
def test_a_byte_of_the_text_is_part_of_the_key(
    tmp_path_factory: pytest.TempPathFactory, place: int, flip: int, data: st.DataObject
) -> None:
    folder = corpus(tmp_path_factory.mktemp("corpus") / "corpus")
    before = plan_dataset(settings_for(folder)).key
    file = folder / data.draw(st.sampled_from(["a.txt", "b.txt"]))
    text = bytearray(file.read_bytes())
    text[place] ^= flip
    file.write_bytes(text)
    assert plan_dataset(settings_for(folder)).key != before


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": {"kind": "train", "vocab_size": 301}},
        {"validation_fraction": 0.2},
        {"split_seed": 1},
        {"corpus": {"kind": "files", "paths": ["corpus"], "separator": "\n"}},
        {"corpus": {"kind": "files", "paths": ["corpus"], "separator": SEPARATOR, "max_bytes": 500}},
    ],
)
def test_a_setting_that_decides_the_bytes_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    folder = corpus(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    assert plan_dataset(settings_for(folder, **change)).key != plan_dataset(settings_for(folder)).key


def test_a_tokenizer_counts_by_its_content_not_by_its_place(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "corpus")
    keys = [
        plan_dataset(settings_for(folder, tokenizer={"kind": "file", "path": str(path)})).key
        for path in (
            large_vocabulary(tmp_path / "one", 300),
            large_vocabulary(tmp_path / "two", 300),
            large_vocabulary(tmp_path / "other", 301),
        )
    ]
    assert keys[0] == keys[1] != keys[2]


# --- done or not done -------------------------------------------------------------------------------------------------


def state(folder: Path) -> dict[str, tuple[int, int]]:
    return {name: ((folder / name).stat().st_ino, (folder / name).stat().st_mtime_ns) for name in contents(folder)}


def test_a_finished_dataset_is_found_done_and_not_touched(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus")
    manifest, folder = prepared(source, tmp_path / "root")
    before = state(folder)
    assert prepared(source, tmp_path / "root") == (manifest, folder)
    assert state(folder) == before
    assert not list((tmp_path / "root" / ".scratch").iterdir())


def test_a_finished_dataset_that_lost_a_file_is_refused_by_the_files_name(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus")
    _, folder = prepared(source, tmp_path / "root")
    (folder / "val.bin").unlink()
    with pytest.raises(DataError, match=r"has a manifest but lacks val\.bin; .*delete the folder and run again"):
        prepared(source, tmp_path / "root")


def test_leftovers_without_a_manifest_are_made_anew(dataset: tuple[DatasetManifest, Path], tmp_path: Path) -> None:
    _, finished = dataset
    source = corpus(tmp_path / "corpus")
    leftover = tmp_path / "root" / "datasets" / finished.name
    (leftover / "tokenizer").mkdir(parents=True)
    (leftover / "train.bin").write_bytes(b"half")
    (leftover / "tokenizer" / "old.json").write_bytes(b"{}")
    prepared(source, tmp_path / "root")
    assert contents(leftover) == contents(finished)


@pytest.mark.parametrize("moment", [".scratch/*/all.bin", "datasets/*/tokenizer/tokenizer.json"])
def test_a_preparation_killed_while_it_encodes_or_publishes_leaves_nothing_done(tmp_path: Path, moment: str) -> None:
    texts = [f"{number} some words of a document " * 80 for number in range(8000)]  # more than one batch
    source, root = corpus(tmp_path / "corpus", texts), tmp_path / "root"
    tokenizer = large_vocabulary(tmp_path / "tokenizer", 300)
    data = settings_for(source, tokenizer={"kind": "file", "path": str(tokenizer)})
    command = [sys.executable, "-m", "litgpt_demo", "prepare", "--root", str(root), "--data", data.model_dump_json()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not any(path.stat().st_size for path in root.glob(moment)):
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    planned, storage = plan_dataset(data), open_storage(str(root))
    assert finished_dataset(storage, planned) is None
    again = prepare(planned, storage)
    assert problems(str(root / planned.path)) == []
    assert again == prepare(planned, open_storage(str(tmp_path / "other")))


def test_a_flipped_bit_is_found_and_its_file_named(copied: Path, tmp_path: Path) -> None:
    assert stage(str(copied), tmp_path / "scratch") == copied
    content = bytearray((copied / "train.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (copied / "train.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"is not what its manifest says: .*train\.bin has crc32c"):
        stage(str(copied), tmp_path / "scratch")
    assert len(problems(str(copied))) == 1


def test_a_folder_without_manifest_is_no_dataset(copied: Path, tmp_path: Path) -> None:
    (copied / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"has no manifest.*train-litgpt prepare"):
        stage(str(copied), tmp_path / "scratch")


def rewritten(folder: Path, **fields: object) -> str:
    """The dataset under a manifest with other fields."""
    write_manifest(open_storage(str(folder)), open_dataset(str(folder)).model_copy(update=fields))
    return str(folder)


def test_ids_beyond_the_vocabulary_and_unclosed_documents_are_problems(copied: Path) -> None:
    manifest = open_dataset(str(copied))
    largest = max(int(np.memmap(copied / name, dtype="<u2", mode="r").max()) for name in ("train.bin", "val.bin"))
    assert any(
        f"holds the id {largest}, the vocabulary ends at {largest - 1}" in problem
        for problem in problems(rewritten(copied, vocab_size=largest))
    )
    assert problems(rewritten(copied, vocab_size=manifest.vocab_size, end_of_text=299)) == [
        "train.bin does not close 18 documents with id 299",
        "val.bin does not close 3 documents with id 299",
    ]


# --- refused ----------------------------------------------------------------------------------------------------------


def refused(root: Path, planned: PlannedDataset, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        prepare(planned, open_storage(str(root)))
    assert finished_dataset(open_storage(str(root)), planned) is None
    assert not list((root / ".scratch").iterdir())


@pytest.mark.parametrize("count", [0, 1])
def test_a_corpus_of_less_than_two_documents_is_refused(tmp_path: Path, count: int) -> None:
    source = corpus(tmp_path / "corpus", TEXTS[:count])
    tokenizer = large_vocabulary(tmp_path / "tokenizer", 300)
    planned = plan_dataset(settings_for(source, tokenizer={"kind": "file", "path": str(tokenizer)}))
    refused(tmp_path / "root", planned, DataError, f"has {count} documents in 2 files; .*give more text")


def test_a_split_that_leaves_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    planned = plan_dataset(settings_for(corpus(tmp_path / "corpus"), validation_fraction=0.99))
    refused(tmp_path / "root", planned, UserError, r"validation_fraction=0\.99 of 21 documents leaves none to train on")


def test_a_corpus_too_small_for_the_vocabulary_is_refused(tmp_path: Path) -> None:
    planned = plan_dataset(settings_for(corpus(tmp_path / "corpus"), tokenizer={"kind": "train", "vocab_size": 50_000}))
    refused(tmp_path / "root", planned, DataError, "vocab_size=50000")


def test_openwebtext_with_other_totals_than_everyones_is_an_error(dataset: tuple[DatasetManifest, Path]) -> None:
    from litgpt_demo.dataset import _check_totals

    manifest = dataset[0].model_copy(update={"vocab_size": 50257, "end_of_text": 50256})
    data = DataConfig.model_validate({"corpus": {"kind": "openwebtext"}})
    planned = PlannedDataset(data=data, sources=(), tokenizer=None, name="openwebtext", key="k")
    with pytest.raises(DataError, match="'train': 9035582198"):
        _check_totals(planned, manifest)
    totals = {"train": (8_009_762, 9_035_582_198), "validation": (4_007, 4_434_897)}
    splits = {
        name: getattr(manifest, name).model_copy(update={"documents": documents, "tokens": tokens})
        for name, (documents, tokens) in totals.items()
    }
    _check_totals(planned, manifest.model_copy(update=splits))


# --- a bucket ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with bucket_emulator("datasets") as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        yield "gs://datasets/root"


def test_a_dataset_in_a_bucket_has_the_local_ones_bytes_and_is_staged_from_there(
    dataset: tuple[DatasetManifest, Path], bucket: str, tmp_path: Path
) -> None:
    manifest, folder = dataset
    planned = plan_dataset(settings_for(corpus(tmp_path / "corpus")))
    assert prepare(planned, open_storage(bucket)) == manifest
    assert prepare(planned, open_storage(bucket)) == manifest
    remote = open_storage(f"{bucket}/{planned.path}")
    assert {name: remote.read(name) for name in remote.list()} == contents(folder)
    staged = stage(remote.root, tmp_path / "scratch")
    assert contents(staged) == {name: data for name, data in contents(folder).items() if name != "manifest.json"}


def test_the_prepare_command_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = settings_for(corpus(tmp_path / "corpus"))
    assert main(["--root", str(tmp_path / "root"), "--data", data.model_dump_json()]) == 0
    manifest = open_dataset(str(tmp_path / "root" / plan_dataset(data).path))
    assert (
        f"{manifest.train.tokens} training tokens, {manifest.validation.tokens} validation" in capsys.readouterr().out
    )
