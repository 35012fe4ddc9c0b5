"""Tokens that exist already: a dataset is made of them where they lie, and of none that are not the tokenizer's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from bucket_emulator import bucket_emulator
from corpora import contents, large_vocabulary
from pydantic import ValidationError

from litgpt_demo.data.batches import Windows, open_split
from litgpt_demo.data.dataset import DatasetManifest, finished_dataset, open_dataset, plan_dataset, stage
from litgpt_demo.data.ids import Ids
from litgpt_demo.data.preparation import prepare
from litgpt_demo.data.settings import DataConfig
from litgpt_demo.data.verification import verify_dataset
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.storage import open_storage

VOCABULARY, END = 300, 298


def write_bins(folder: Path, dtype: str = "<u2", names: tuple[str, ...] = ("train.bin",), **ids: int) -> Path:
    """A folder as nanoGPT leaves it: documents of nine tokens, each closed by end-of-text."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(7)
    for name, tokens in (*((name, 4000) for name in names), ("val.bin", 500)):
        written = generator.integers(0, END, tokens).astype(dtype)
        written[9::10] = END
        for place, number in ids.items():
            written[int(place.removeprefix("at"))] = number
        written.tofile(folder / name)
    return folder


def settings_for(path: str | Path, tokenizer: Path, **corpus: Any) -> DataConfig:
    source = {"kind": "tokens", "path": str(path), **corpus}
    return DataConfig.model_validate({"corpus": source, "tokenizer": {"kind": "file", "path": str(tokenizer)}})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_vocabulary(tmp_path_factory.mktemp("tokenizer"), VOCABULARY)


@pytest.fixture(scope="module")
def emulator() -> Iterator[str]:
    with bucket_emulator("tokens") as address:
        yield address


@pytest.fixture
def bucket(emulator: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator)
    return f"gs://tokens/{uuid4().hex}"


def adopted(data: DataConfig, root: str | Path) -> tuple[DatasetManifest, str]:
    planned, storage = plan_dataset(data), open_storage(str(root))
    manifest = prepare(planned, storage)
    assert finished_dataset(storage, planned) == manifest
    return manifest, storage.address(planned.path)


@pytest.mark.parametrize(("dtype", "asked"), [("<u2", "auto"), ("<u4", "uint32")])
def test_tokens_become_a_dataset_without_being_copied(tmp_path: Path, tokenizer: Path, dtype: str, asked: str) -> None:
    bins = write_bins(tmp_path / "bins", dtype)
    manifest, address = adopted(settings_for(bins, tokenizer, dtype=asked), tmp_path / "root")
    assert (manifest.dtype, manifest.train.tokens, manifest.train.documents) == (dtype, 4000, 400)
    assert (manifest.validation.tokens, manifest.vocab_size, manifest.end_of_text) == (500, VOCABULARY, END)
    assert manifest.places == {"train.bin": str(bins / "train.bin"), "val.bin": str(bins / "val.bin")}
    assert set(contents(Path(address))) == {
        "manifest.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json",
    }  # fmt: skip
    assert verify_dataset(address).problems == ()
    windows = open_split(stage(address, tmp_path / "scratch"), open_dataset(address), "train", length=10)
    assert isinstance(windows, Windows)
    assert np.array_equal(
        windows.read(np.array([3], dtype=np.uint64))[0][0], np.fromfile(bins / "train.bin", dtype)[30:40]
    )


def test_many_files_are_read_as_one_in_the_order_of_their_names(tmp_path: Path, tokenizer: Path) -> None:
    bins = write_bins(tmp_path / "bins", names=("train_000.bin", "train_001.bin"))
    manifest, address = adopted(settings_for(bins, tokenizer), tmp_path / "root")
    assert manifest.train.tokens == 8000
    windows = open_split(Path(address), manifest, "train", length=10)
    both = np.concatenate([np.fromfile(bins / f"train_00{number}.bin", "<u2") for number in range(2)])
    assert np.array_equal(
        windows.read(np.array([399, 500], dtype=np.uint64))[0], both[[range(3990, 4000), range(5000, 5010)]]
    )


def test_tokens_in_a_bucket_stay_there_and_are_fetched_where_they_are_read(
    tmp_path: Path, tokenizer: Path, bucket: str
) -> None:
    bins = write_bins(tmp_path / "bins")
    for name in ("train.bin", "val.bin"):
        open_storage(bucket).upload(bins / name, f"tokens/{name}")
    data = settings_for(f"{bucket}/tokens", tokenizer)
    for root in (str(tmp_path / "root"), f"{bucket}/root"):
        manifest, address = adopted(data, root)
        assert manifest.places["train.bin"] == f"{bucket}/tokens/train.bin"
        assert not open_storage(address).exists("train.bin")
        assert verify_dataset(address).problems == ()
        staged = stage(address, tmp_path / "scratch")
        assert (staged / "train.bin").read_bytes() == (bins / "train.bin").read_bytes()
        assert len(open_split(staged, open_dataset(str(staged)), "validation", length=10)) == 49


def test_tokens_of_this_machine_are_copied_to_a_root_in_a_bucket_which_nodes_can_read(
    tmp_path: Path, tokenizer: Path, bucket: str
) -> None:
    manifest, address = adopted(settings_for(write_bins(tmp_path / "bins"), tokenizer), bucket)
    assert manifest.places == {}
    assert open_storage(address).read("val.bin") == (tmp_path / "bins" / "val.bin").read_bytes()


def test_the_same_tokens_elsewhere_are_the_same_dataset(tmp_path: Path, tokenizer: Path) -> None:
    one, other = (write_bins(tmp_path / name) for name in ("one", "other"))
    assert plan_dataset(settings_for(one, tokenizer)).key == plan_dataset(settings_for(other, tokenizer)).key
    write_bins(other, at5=7)
    assert plan_dataset(settings_for(one, tokenizer)).key != plan_dataset(settings_for(other, tokenizer)).key


@pytest.mark.parametrize(
    ("written", "corpus", "error", "said"),
    [
        ({"at3999": 300, "names": ("train.bin",)}, {}, UserError, "id 300, and data.tokenizer has the ids 0 to 299"),
        ({"dtype": "<u4"}, {}, UserError, "set data.corpus.dtype=uint32"),
        ({}, {"dtype": "uint32"}, UserError, "give the tokenizer that made these tokens"),
        ({}, {"train": "training*.bin"}, UserError, "data.corpus.train has .* but no file under"),
        ({}, {"path": "s3://bucket/tokens"}, UserError, "neither gs://bucket/prefix nor a local path"),
    ],
)
def test_files_that_are_not_this_tokenizers_ids_are_refused_and_nothing_is_left(
    tmp_path: Path, tokenizer: Path, written: dict[str, Any], corpus: dict[str, Any], error: type[Exception], said: str
) -> None:
    bins = write_bins(tmp_path / "bins", **{name: value for name, value in written.items() if name != "at3999"})
    if "at3999" in written:
        ids = np.fromfile(bins / "train.bin", "<u2")
        ids[-1] = written["at3999"]
        ids.tofile(bins / "train.bin")
    with pytest.raises(error, match=said):
        adopted(settings_for(**{"path": bins, "tokenizer": tokenizer} | corpus), tmp_path / "root")
    assert not list((tmp_path / "root").rglob("manifest.json"))


def test_a_file_that_is_cut_inside_of_an_id_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    bins = write_bins(tmp_path / "bins")
    (bins / "val.bin").write_bytes((bins / "val.bin").read_bytes()[:-1])
    with pytest.raises(DataError, match="999 bytes, which is no whole number of uint16 ids"):
        adopted(settings_for(bins, tokenizer), tmp_path / "root")


def test_tokens_that_change_later_are_noticed_before_they_are_trained_on(tmp_path: Path, tokenizer: Path) -> None:
    bins = write_bins(tmp_path / "bins")
    _, address = adopted(settings_for(bins, tokenizer), tmp_path / "root")
    write_bins(bins, at5=7)
    with pytest.raises(DataError, match=r"bins/train.bin has crc32c .* its manifest says"):
        stage(address, tmp_path / "scratch")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokenizer": {"kind": "train"}}, "has no text to be trained on"),
        ({"filters": {"min_characters": 5}}, "data.filters reads text"),
    ],
)
def test_settings_that_need_text_are_refused(tokenizer: Path, fields: dict[str, Any], said: str) -> None:
    data = settings_for("bins", tokenizer).model_dump() | fields
    with pytest.raises(ValidationError, match=said):
        DataConfig.model_validate(data)


# --- folders with an index --------------------------------------------------------------------------------------------


def shard(samples: list[bytes]) -> bytes:
    """The layout that litdata and MosaicML's streaming share."""
    head = 4 * (len(samples) + 2)
    places = head + np.cumsum([0, *map(len, samples)])
    return np.array([len(samples), *places], "<u4").tobytes() + b"".join(samples)


def write_folder(folder: Path, samples: dict[str, list[list[bytes]]], index: dict[str, Any]) -> Path:
    """A folder of shards, by split, with an index.json that `index` completes."""
    names = {"chunks": "filename", "shards": "basename"}
    for split, shards in samples.items():
        (folder / split).mkdir(parents=True)
        kind, each = next((name, index[name]) for name in names if name in index)
        entries = []
        for number, content in enumerate(shards):
            name = f"part-{len(shards) - number}.bin"  # whose order is the index's, not the names'
            (folder / split / name).write_bytes(shard(content))
            entries.append(each | ({"filename": name} if kind == "chunks" else {"raw_data": {"basename": name}}))
        (folder / split / "index.json").write_text(json.dumps(index | {kind: entries}))
    return folder


DOCUMENTS = {"train": [[[5, 6, 7, END], [8, END]], [[9, 10, END]]], "val": [[[11, END]]]}


def encoded(encode: Any) -> dict[str, list[list[bytes]]]:
    return {split: [[encode(ids) for ids in part] for part in parts] for split, parts in DOCUMENTS.items()}


def column(encoding: str, **more: Any) -> dict[str, Any]:
    entry = {"column_names": ["id", "tokens"], "column_encodings": ["str", encoding], "column_sizes": [None, None]}
    return {"version": 2, "shards": {"format": "mds", "compression": None} | entry | more}


def row(value: bytes) -> bytes:
    """A sample of two columns without a fixed size."""
    return np.array([3, len(value)], "<u4").tobytes() + b"abc" + value


def litdata(**config: Any) -> dict[str, Any]:
    return {"chunks": {"dim": 4}, "config": {"data_format": ["no_header_tensor:16"], "compression": None} | config}


FOLDERS = {
    "litdata": (lambda ids: np.array(ids, "<i4").tobytes(), litdata()),
    "litdata of numpy": (lambda ids: np.array(ids, "<u2").tobytes(), litdata(data_format=["no_header_numpy:5"])),
    "MDS of arrays": (
        lambda ids: row(bytes([1 << 2, len(ids)]) + np.array(ids, "<u2").tobytes()), column("ndarray:uint16"),
    ),
    "MDS of arrays of any type": (
        lambda ids: row(bytes([33, 1 << 2, len(ids)]) + np.array(ids, "<i4").tobytes()), column("ndarray"),
    ),
    "MDS of bytes": (lambda ids: row(np.array(ids, "<i8").tobytes()), column("bytes")),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_of_litdata_and_mosaicml_are_imported_in_the_order_of_their_index(
    tmp_path: Path, tokenizer: Path, kind: str
) -> None:
    encode, index = FOLDERS[kind]
    folder = write_folder(tmp_path / "folder", encoded(encode), index)
    manifest, address = adopted(settings_for(folder, tokenizer), tmp_path / "root")
    assert np.fromfile(Path(address, "train.bin"), "<u2").tolist() == [5, 6, 7, END, 8, END, 9, 10, END]
    assert (manifest.train.documents, manifest.validation.tokens, manifest.places) == (3, 2, {})
    assert verify_dataset(address).problems == ()


@pytest.mark.parametrize(
    ("kind", "index", "said"),
    [
        ("litdata", litdata(compression="zstd:4"), "kept by zstd:4; write them without"),
        ("litdata", litdata(data_format=["jpeg"]), "tokens are one row of whole numbers each"),
        ("MDS of bytes", column("bytes", compression="zstd"), "kept by zstd"),
        ("MDS of bytes", column("pkl"), "keeps its tokens as pkl; write them as ndarray or bytes"),
        (
            "MDS of bytes",
            column("bytes", column_names=["a", "b"]),
            "has the columns a, b, and tokens are in one called",
        ),
    ],
)
def test_folders_that_do_not_hold_plain_tokens_are_refused(
    tmp_path: Path, tokenizer: Path, kind: str, index: dict[str, Any], said: str
) -> None:
    folder = write_folder(tmp_path / "folder", encoded(FOLDERS[kind][0]), index)
    with pytest.raises(UserError, match=said):
        adopted(settings_for(folder, tokenizer), tmp_path / "root")


def test_an_import_is_not_disturbed_by_another_one_of_the_same_folder_that_dies(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, index = FOLDERS["litdata"]
    folder = write_folder(tmp_path / "folder", encoded(encode), index)
    settings, add, others = settings_for(folder, tokenizer), Ids.add, list[BaseException]()

    def dies(self: Ids, block: bytes) -> None:
        raise KeyboardInterrupt

    def with_another(self: Ids, block: bytes) -> None:
        add(self, block)
        if not others:
            with monkeypatch.context() as patch:
                patch.setattr(Ids, "add", dies)
                with pytest.raises(KeyboardInterrupt) as died:
                    adopted(settings, tmp_path / "root")
                others.append(died.value)

    monkeypatch.setattr(Ids, "add", with_another)
    _, address = adopted(settings, tmp_path / "root")
    assert others
    assert np.fromfile(Path(address, "train.bin"), "<u2").tolist() == [5, 6, 7, END, 8, END, 9, 10, END]
    assert verify_dataset(address).problems == ()


def test_a_shard_that_is_cut_short_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    folder = write_folder(tmp_path / "folder", encoded(FOLDERS["litdata"][0]), litdata())
    path = folder / "train" / "part-1.bin"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"part-1.bin has .* and its samples lie elsewhere"):
        adopted(settings_for(folder, tokenizer), tmp_path / "root")
