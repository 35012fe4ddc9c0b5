"""Token ids that somebody else made: read where they lie, counted, checked, and refused where they do not fit."""

import gzip
import io
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from corpora import POINTER, TEXTS, contents, large_vocabulary
from training_runs import NewRun, rows, train

from litgpt_demo.config import DataConfig
from litgpt_demo.data.dataset import (
    DatasetManifest,
    finished_dataset,
    open_dataset,
    open_split,
    plan_dataset,
    stage,
    verify_dataset,
)
from litgpt_demo.data.preparation import Preparation, prepare
from litgpt_demo.errors import DataError, TrainLitgptError
from litgpt_demo.storage import Storage, open_storage

IDS = np.random.default_rng(1).integers(0, 256, 4000)
IDS[99::100] = 298  # end of text


def put(place: str, files: dict[str, Any], dtype: str = "<u2") -> str:
    for name, ids in files.items():
        open_storage(place).write(name, ids if isinstance(ids, bytes) else ids.astype(dtype).tobytes())
    return place


def data_at(place: str, folder: Path, **fields: Any) -> DataConfig:
    tokenizer = {"kind": "file", "path": str(large_vocabulary(folder / "tokenizer"))}
    return DataConfig.model_validate({"corpus": {"kind": "tokens", "path": place, **fields}, "tokenizer": tokenizer})


def made(data: DataConfig, root: str) -> tuple[DatasetManifest, str]:
    planned = plan_dataset(data)
    reports = list[Preparation]()
    manifest = prepare(planned, open_storage(root), report=reports.append)
    counted = [(report.documents, report.tokens) for report in reports if report.phase == "count"]
    assert counted[-1:] in ([], [(manifest.documents, manifest.tokens)]), "none if it is found done"
    assert finished_dataset(open_storage(root), planned) == manifest
    return manifest, open_storage(root).address(planned.path)


@pytest.mark.parametrize("lies", ["folder", "bucket"])
@pytest.mark.parametrize("under", ["folder", "bucket"])
def test_token_files_are_copied_only_into_or_out_of_a_bucket(
    bucket: Storage, tmp_path: Path, lies: str, under: str
) -> None:
    places = {"folder": str(tmp_path / "data"), "bucket": bucket.address("data")}
    files = {"train-0.bin": IDS[:1500], "train-1.bin": IDS[1500:3000], "val.bin": IDS[3000:], "meta.pkl": b"pickle"}
    put(places[lies], files, "<u4")
    manifest, address = made(data_at(places[lies], tmp_path, dtype="uint32"), places[under] + "-root")
    assert (manifest.external_root, manifest.dtype) == (places[lies] if lies == under else None, "<u4")
    assert (manifest.train.tokens, manifest.train.documents, manifest.validation.tokens) == (3000, 30, 1000)
    assert verify_dataset(address) == manifest
    folder = stage(address, tmp_path / "scratch")
    staged = open_dataset(str(folder))
    inputs, _ = open_split(folder, staged, staged.train, length=2999).read(np.zeros(1, dtype=np.uint64))
    assert inputs.ravel().tolist() == IDS[:2999].tolist()
    listed = {name for name in open_storage(address).list() if name.endswith(".bin")}
    assert listed == (set() if lies == under else {"train-0.bin", "train-1.bin", "val.bin"})


def test_files_of_ids_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    cut = {f"train_{number}.bin": IDS[250 * number : 250 * (number + 1)] for number in (10, 0, 9, 2, 11, 1)}
    place = put(str(tmp_path / "data"), {**cut, "val.bin": IDS[3000:]})
    manifest, address = made(data_at(place, tmp_path), str(tmp_path / "root"))
    assert [record.path for record in manifest.train.files] == [f"train_{n}.bin" for n in (0, 1, 2, 9, 10, 11)]
    inputs, _ = open_split(Path(address), manifest, manifest.train, length=1499).read(np.zeros(1, dtype=np.uint64))
    assert inputs.ravel().tolist() == [*IDS[:750], *IDS[2250:2999]]


def test_run_trains_on_files_of_nanogpt_until_they_change(tmp_path: Path, new_run: NewRun) -> None:
    place = put(str(tmp_path / "openwebtext"), {"train.bin": IDS[:3000], "val.bin": IDS[3000:]})
    before = contents(Path(place))
    data, root = data_at(place, tmp_path), str(tmp_path / "root")
    planned, (_, address) = plan_dataset(data), made(data, root)
    run = new_run("run", dataset=Path(address), max_steps=4)
    train(run)
    assert len(rows(run, "step")) == 4
    assert contents(Path(place)) == before
    put(place, {"train.bin": IDS[1:3001]})
    with pytest.raises(DataError, match=r"train\.bin has crc32c"):
        stage(address, tmp_path)
    (Path(place) / "val.bin").unlink()
    with pytest.raises(DataError, match=r"val\.bin is missing in .*openwebtext; .*run again"):
        finished_dataset(open_storage(root), planned)


def saved_by_numpy(ids: Any) -> bytes:
    np.save(stream := io.BytesIO(), ids)
    return stream.getvalue()


SAMPLES = [IDS[100 * number : 100 * (number + 1)].astype("<u2").tobytes() for number in range(30)]


def shard_of(samples: list[bytes], head: bytes) -> bytes:
    """A shard of Streaming, with its settings as `head`, or of litdata without."""
    begin = 4 * (len(samples) + 2) + len(head)
    numbers = [len(samples), *accumulate(map(len, samples), initial=begin)]
    return np.array(numbers, "<u4").tobytes() + head + b"".join(samples)


@pytest.mark.parametrize(
    ("files", "dtype", "message"),
    [
        *(
            ({"train.bin": saved_by_numpy(IDS.astype(kind))}, "<u2", r"train\.bin is a file of numpy\.save.*tofile")
            for kind in ("uint16", "int32", "int64")
        ),
        ({"train.bin": IDS.astype("<i8").tobytes()}, "<u2", "looks like ids of 8 bytes.*write them as uint32"),
        ({"train.bin": b"another header\n" + bytes(range(255)) + IDS.astype("<i8").tobytes()}, "<u2", "ids of 8 bytes"),
        ({"train.bin": bytes(range(1, 255)) + IDS.astype("<i4").tobytes()}, "<u2", r"ids of 4 bytes.*dtype=uint32"),
        ({"train.bin": IDS.astype("<i8").tobytes()}, "<u4", "looks like ids of 8 bytes"),
        ({"train.bin": shard_of(SAMPLES, b'{"column_names":["ids"]}')}, "<u2", r"is a shard of Streaming \(MDS\)"),
        ({"train.bin": shard_of([b"1"] * 2000, b"")}, "<u2", "is a shard of Streaming .* or litdata"),
        ({"train.bin": b"MMIDIDX\0\0" + bytes(99)}, "<u2", "of Megatron's index; the ids are in the .bin next to it"),
        ({"train.bin": safetensors.numpy.save({"ids": IDS})}, "<u2", "is a file of safetensors"),
        ({"train.bin": POINTER}, "<u2", r"train\.bin is a Git LFS pointer"),
        ({"train.bin": b"<!DOCTYPE html>\n<html><body>404 \xc3\xbc</body></html>"}, "<u2", "is an HTML page; give"),
        ({"train.bin": TEXTS[0].encode() * 99}, "<u2", "train.bin is text"),
        ({"train.bin": gzip.compress(IDS.tobytes())}, "<u2", "is compressed by gzip; decompress it"),
        ({"train.bin": (20240801).to_bytes(4, "little") + bytes(1020)}, "<u4", "is a file of llm.c, which has a h"),
        ({"train.bin": IDS + 10}, "<u2", r"train\.bin holds the id 308, but the tokenizer's last id is 299"),
        ({"train.bin": IDS}, "<u4", r"looks like ids of 4 bytes.*data\.corpus\.dtype=uint32"),
        ({"train.bin": b"abc"}, "<u2", r"has 3 bytes, which do not split into ids of 2 bytes; set data\.corpus\.dtype"),
        ({"train.bin": b"LITPKDS\0" * 20}, "<u2", "is a file of LitGPT's packed dataset, which has a header"),
        ({"chunk-0-0.bin": IDS}, "<u2", r"has no file train\*\.bin.*data\.corpus\.train"),
    ],
)
def test_file_without_the_tokenizers_ids_is_refused(tmp_path: Path, files: Any, dtype: str, message: str) -> None:
    place = put(str(tmp_path / "data"), {**files, "val.bin": IDS[:100]}, dtype)
    with pytest.raises(TrainLitgptError, match=message):
        made(data_at(place, tmp_path), str(tmp_path / "root"))
    assert not [*(tmp_path / "root").glob("datasets/*/manifest.json")]


def test_token_files_are_copied_after_all_were_checked(
    bucket: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file belongs to one split only."""
    monkeypatch.chdir(put(str(tmp_path / "data"), {"train.bin": IDS, "val.bin": IDS + 10}))
    with pytest.raises(TrainLitgptError, match=r"selects every file of data\.corpus\.train"):
        plan_dataset(data_at("../data", tmp_path, train="./*.bin", validation="*.bin"))
    with pytest.raises(TrainLitgptError, match="holds the id 308"):
        made(data_at("../data", tmp_path), bucket.address("root"))
    assert not [stored.path for stored in bucket.inventory() if stored.path.endswith(".bin")]


def test_token_ids_need_a_tokenizer_that_exists(tmp_path: Path) -> None:
    """Text is not mistaken for token ids."""
    place = put(str(tmp_path / "data"), {"train.bin": IDS, "val.bin": IDS})
    with pytest.raises(ValueError, match="token ids need the tokenizer that made them"):
        DataConfig.model_validate({"corpus": {"kind": "tokens", "path": place}})
    as_text = DataConfig.model_validate({"corpus": {"kind": "files", "paths": [place]}})
    with pytest.raises(DataError, match=r"train\.bin, byte .* set data\.corpus\.kind=tokens"):
        made(as_text, str(tmp_path / "root"))
