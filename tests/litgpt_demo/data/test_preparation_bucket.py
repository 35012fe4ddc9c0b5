"""Preparing in a bucket that answers as buckets do: late, wrongly, not at all, or no."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import google_crc32c
import httpx
import pytest
from bucket_emulator import bucket_emulator
from bucket_faults import FOREVER, Fault, FaultyBucket, faulty_bucket
from corpora import contents, corpus_in, cut_into, large_vocabulary, prepared, settings_for

from litgpt_demo.data.dataset import DatasetManifest, PlannedDataset, finished_dataset, plan_dataset, stage
from litgpt_demo.data.preparation import in_threads, prepare, workers
from litgpt_demo.data.preparation.ledger import Work
from litgpt_demo.data.verification import verify_dataset
from litgpt_demo.errors import UserError
from litgpt_demo.storage import open_storage

T = TypeVar("T")
R = TypeVar("R")


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyBucket]:
    with bucket_emulator("datasets") as address, faulty_bucket(address) as proxy:
        yield proxy


@pytest.fixture
def bucket(proxy: FaultyBucket, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of a bucket behind a proxy that has yet to be armed."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    proxy.arm()
    return f"gs://datasets/{uuid4().hex}"


@pytest.fixture
def planned(tmp_path: Path) -> PlannedDataset:
    tokenizer = {"kind": "file", "path": str(large_vocabulary(tmp_path / "tokenizer", 300))}
    return plan_dataset(settings_for(corpus_in(tmp_path / "corpus"), tokenizer=tokenizer))


@pytest.fixture
def local_folder(planned: PlannedDataset, tmp_path: Path) -> Path:
    """The same dataset in a local root."""
    prepare(planned, open_storage(str(tmp_path / "local")))
    return tmp_path / "local" / planned.path


@pytest.fixture
def local(local_folder: Path) -> dict[str, bytes]:
    """Its files without the manifest."""
    found = contents(local_folder)
    del found["manifest.json"]
    return found


def raw_objects(proxy: FaultyBucket, root: str) -> dict[str, bytes]:
    """Every object below the root, as the service lists it: hidden and temporary ones too."""
    prefix = root.removeprefix("gs://datasets/") + "/"
    listed = httpx.get(f"{proxy.upstream}/storage/v1/b/datasets/o", params={"prefix": prefix}).json().get("items", [])
    names = [item["name"] for item in listed]
    return {
        name.removeprefix(prefix): httpx.get(
            f"{proxy.upstream}/storage/v1/b/datasets/o/{name.replace('/', '%2F')}", params={"alt": "media"}
        ).content
        for name in names
    }


def without_manifest(objects: dict[str, bytes], planned: PlannedDataset) -> dict[str, bytes]:
    below = {name.removeprefix(f"{planned.path}/"): content for name, content in objects.items()}
    del below["manifest.json"]
    return below


@pytest.mark.long
def test_with_one_request_in_five_spoilt_the_bytes_are_right_and_nothing_else_is_left(
    proxy: FaultyBucket, bucket: str, planned: PlannedDataset, local: dict[str, bytes], tmp_path: Path
) -> None:
    proxy.arm_at_random(seed=1)
    with cut_into(1200):
        manifest = prepare(planned, open_storage(bucket), each=in_threads(4))
    requests = len(proxy.seen)
    proxy.arm()
    assert requests > 40
    assert without_manifest(raw_objects(proxy, bucket), planned) == local
    assert {record.path: record.crc32c for record in manifest.files} == {
        name: f"{google_crc32c.value(content):08x}" for name, content in local.items()
    }
    assert not Work(data=planned.data, root=bucket, path=planned.path).scratch.exists()
    assert verify_dataset(f"{bucket}/{planned.path}").problems == ()
    staged = stage(f"{bucket}/{planned.path}", tmp_path / "scratch")
    assert {name: data for name, data in contents(staged).items() if name != "manifest.json"} == local


@pytest.mark.parametrize("waiting", [0, 1000])
def test_the_manifest_in_a_bucket_is_the_local_one_to_the_byte_wherever_its_pieces_are_hashed_from(
    proxy: FaultyBucket,
    bucket: str,
    planned: PlannedDataset,
    local_folder: Path,
    waiting: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # None may wait on this machine's disk, as where workers are on other machines; or all may.
    monkeypatch.setattr(workers, "_WAITING", waiting)
    with cut_into(400):
        prepare(planned, open_storage(bucket), each=in_threads(3))
    assert raw_objects(proxy, bucket)[f"{planned.path}/manifest.json"] == (local_folder / "manifest.json").read_bytes()
    assert (proxy.seen.count("download") > 5) == (waiting == 0)  # the tokenizer is fetched in any case


def test_the_pieces_of_an_earlier_run_are_in_the_manifest_of_the_one_that_goes_on(
    proxy: FaultyBucket, bucket: str, planned: PlannedDataset, local_folder: Path
) -> None:
    proxy.arm(Fault(on="upload", do="refuse", status=403, times=FOREVER, skip=14))
    with cut_into(400), pytest.raises(UserError, match="bucket datasets refused"):
        prepare(planned, open_storage(bucket), each=in_threads(2))
    proxy.arm()
    scratch = Work(data=planned.data, root=bucket, path=planned.path).scratch
    assert not list(scratch.glob("pieces-*"))
    with cut_into(400):
        prepare(planned, open_storage(bucket), each=in_threads(2))
    assert raw_objects(proxy, bucket)[f"{planned.path}/manifest.json"] == (local_folder / "manifest.json").read_bytes()
    assert not scratch.exists()


def no_step(step: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
    raise AssertionError("a step was begun")
    yield


def test_a_bucket_that_is_not_there_is_refused_before_anything_is_encoded(bucket: str, planned: PlannedDataset) -> None:
    with pytest.raises(UserError, match="there is no bucket 'elsewhere'; check its name, or make it"):
        prepare(planned, open_storage("gs://elsewhere/root"), each=no_step)


def test_a_bucket_that_refuses_writing_is_refused_before_anything_is_encoded(
    proxy: FaultyBucket, bucket: str, planned: PlannedDataset
) -> None:
    proxy.arm(Fault(on="upload", do="refuse", status=403, times=FOREVER))
    with pytest.raises(UserError, match=r"bucket datasets refused: .*roles/storage\.object"):
        prepare(planned, open_storage(bucket), each=no_step)
    proxy.arm()
    assert raw_objects(proxy, bucket) == {}


@pytest.mark.parametrize("kind", ["upload", "compose"])
def test_a_bucket_that_refuses_half_way_holds_nothing_that_looks_finished_and_is_gone_on_with(
    proxy: FaultyBucket, bucket: str, planned: PlannedDataset, local: dict[str, bytes], kind: Any
) -> None:
    storage = open_storage(bucket)
    proxy.arm(Fault(on=kind, do="refuse", status=403, times=FOREVER, skip=9 if kind == "upload" else 1))
    with cut_into(1200), pytest.raises(UserError, match="bucket datasets refused"):
        prepare(planned, storage, each=in_threads(2))
    proxy.arm()
    assert finished_dataset(storage, planned) is None
    done = {name for name in raw_objects(proxy, bucket) if name.endswith(".json")}
    assert done
    with cut_into(1200):
        prepare(planned, storage, each=in_threads(2))
    assert without_manifest(raw_objects(proxy, bucket), planned) == local


def test_two_preparations_in_one_bucket_at_once_both_end_well(
    proxy: FaultyBucket, bucket: str, planned: PlannedDataset, local: dict[str, bytes]
) -> None:
    def one(_: int) -> DatasetManifest:
        return prepare(planned, open_storage(bucket), each=in_threads(2))

    with cut_into(1200), ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, range(2))
    assert first == second
    assert without_manifest(raw_objects(proxy, bucket), planned) == local


def test_a_dataset_prepared_for_one_place_does_not_disturb_its_preparation_for_another(
    proxy: FaultyBucket, bucket: str, planned: PlannedDataset, local: dict[str, bytes]
) -> None:
    slow, fast = f"{bucket}/slow", f"{bucket}/fast"
    proxy.arm(Fault(on="upload", do="stall", skip=4))  # three files of the tokenizer, one survey: a piece of tokens
    with ThreadPoolExecutor(1) as pool:
        stalled = pool.submit(prepare, planned, open_storage(slow), each=in_threads(1))
        while proxy.seen.count("upload") < 5:
            time.sleep(0.005)
        prepare(planned, open_storage(fast))
        proxy.arm()
        stalled.result()
    for place in (slow, fast):
        assert without_manifest(raw_objects(proxy, place), planned) == local


def test_numbered_files_in_a_bucket_are_the_local_ones(proxy: FaultyBucket, bucket: str, tmp_path: Path) -> None:
    source = corpus_in(tmp_path / "corpus")
    with cut_into(300):
        _, folder = prepared(source, tmp_path / "root", max_file_bytes=900)
        planned = plan_dataset(settings_for(source, max_file_bytes=900))
        manifest = prepare(planned, open_storage(bucket))
    assert len(manifest.train.files) > 1
    found = contents(folder)
    del found["manifest.json"]
    assert without_manifest(raw_objects(proxy, bucket), planned) == found
