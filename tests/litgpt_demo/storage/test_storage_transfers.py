"""Large files go up and down in parts, are joined by the bucket, and go on where a killed process stopped."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from litgpt_demo.errors import DataError, DiskFull, NetworkError
from litgpt_demo.storage import BucketStorage, combined_crc32c, open_storage

sys.path.append(str(Path(__file__).parents[2] / "fakes"))
from bucket_emulator import bucket_emulator
from bucket_faults import FOREVER, Fault, FaultyBucket, faulty_bucket

PART = 256 << 10
PARTS = 10
CONTENT = os.urandom((PARTS - 1) * PART + 5)
"""Of so many parts, the last of them short."""


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyBucket]:
    with bucket_emulator("drill-bucket") as address, faulty_bucket(address) as proxy:
        yield proxy


@pytest.fixture
def bucket(proxy: FaultyBucket, monkeypatch: pytest.MonkeyPatch) -> BucketStorage:
    """An empty folder of a bucket behind a proxy that has yet to be armed, and for which little is large."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    proxy.arm()
    return BucketStorage(root=f"gs://drill-bucket/{uuid4().hex}", part_size=PART, parallel=3)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "train.bin"
    path.write_bytes(CONTENT)
    return path


def everything(bucket: BucketStorage) -> list[str]:
    """The names of all objects below the root, those too that no verb shows."""
    return [name.name.removeprefix(bucket._name("") + "/") for name in bucket._objects.listed(bucket._name("") + "/")]


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def killed_when(condition: Callable[[], bool], bucket: BucketStorage, action: str) -> None:
    """Another process does `action` with a `storage` that is the bucket, until it is killed."""
    program = f"""
        from pathlib import Path
        from litgpt_demo.storage import BucketStorage
        storage = {bucket!r}
        {action}
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    try:
        until(condition)
        assert process.poll() is None
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL


# --- checksums --------------------------------------------------------------------------------------------------------


@given(first=st.binary(max_size=200), second=st.binary(max_size=200), repeated=st.integers(0, 3000))
def test_the_checksum_of_a_whole_follows_from_those_of_its_halves(first: bytes, second: bytes, repeated: int) -> None:
    second *= repeated
    checksums = [f"{google_crc32c.value(data):08x}" for data in (first, second, first + second)]
    assert combined_crc32c(checksums[0], checksums[1], len(second)) == checksums[2]


# --- up and down ------------------------------------------------------------------------------------------------------


def test_a_large_file_goes_up_and_down_in_parts_and_leaves_nothing_behind(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path, tmp_path: Path
) -> None:
    stored = bucket.upload(source, "data/train.bin")
    assert proxy.seen.count("upload") == PARTS
    assert everything(bucket) == ["data/train.bin"]
    proxy.arm()
    assert (
        bucket.download("data/train.bin", tmp_path / "there" / "train.bin") == bucket.stat("data/train.bin") == stored
    )
    assert proxy.seen.count("download") == PARTS
    assert (tmp_path / "there" / "train.bin").read_bytes() == CONTENT
    assert names_in(tmp_path / "there") == ["train.bin"]


@pytest.mark.parametrize("size", [2 * PART, 2 * PART + 1])
def test_a_file_is_large_when_it_is_more_than_two_parts(
    bucket: BucketStorage, proxy: FaultyBucket, tmp_path: Path, size: int
) -> None:
    (tmp_path / "source").write_bytes(CONTENT[:size])
    bucket.upload(tmp_path / "source", "file")
    bucket.download("file", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == CONTENT[:size]
    requests = 3 if size > 2 * PART else 1
    assert (proxy.seen.count("upload"), proxy.seen.count("download")) == (requests, requests)


def test_what_is_there_already_is_transferred_neither_way(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path, tmp_path: Path
) -> None:
    stored = bucket.upload(source, "train.bin")
    proxy.arm()
    assert bucket.upload(source, "train.bin") == bucket.download("train.bin", source) == stored
    assert set(proxy.seen) == {"look"}


def test_a_target_of_the_same_size_and_other_bytes_is_replaced(bucket: BucketStorage, source: Path) -> None:
    bucket.upload(source, "train.bin")
    source.write_bytes(bytes(len(CONTENT)))
    bucket.download("train.bin", source)
    assert source.read_bytes() == CONTENT


def test_an_empty_object_whose_answers_leave_out_its_size_is_an_empty_file(
    bucket: BucketStorage, proxy: FaultyBucket, tmp_path: Path
) -> None:
    def zeros_dropped() -> None:
        proxy.arm(*(Fault(on=kind, do="drop zeros", times=FOREVER) for kind in ("look", "upload", "begin")))

    zeros_dropped()
    written = bucket.write("empty", b"")
    assert (written.size, written.crc32c) == (0, "00000000")
    assert bucket.stat("empty") == written
    assert written in bucket.inventory()
    assert bucket.read("empty") == b""
    assert bucket.download("empty", tmp_path / "empty") == written
    assert (tmp_path / "empty").read_bytes() == b""


def test_several_parts_are_on_their_way_at_once(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path, tmp_path: Path
) -> None:
    for verb, kind in ((bucket.upload, "upload"), (bucket.download, "download")):
        with ThreadPoolExecutor(1) as pool:
            proxy.arm(Fault(on=kind, do="stall", times=bucket.parallel))  # type: ignore[arg-type]
            first, second = (source, "train.bin") if kind == "upload" else ("train.bin", tmp_path / "target")
            done = pool.submit(verb, first, second)  # type: ignore[arg-type]
            until(lambda: done.done() or proxy.seen.count(kind) >= bucket.parallel)  # noqa: B023 (called at once)
            assert not done.done()
            proxy.arm()
            done.result()
    assert (tmp_path / "target").read_bytes() == CONTENT


# --- killed -----------------------------------------------------------------------------------------------------------


def test_an_upload_goes_on_where_a_killed_one_stopped(bucket: BucketStorage, proxy: FaultyBucket, source: Path) -> None:
    went_through = 4
    proxy.arm(Fault(on="upload", do="stall", skip=went_through, times=FOREVER))
    killed_when(
        lambda: proxy.seen.count("upload") == went_through + bucket.parallel,
        bucket,
        f'storage.upload(Path({str(source)!r}), "data/train.bin")',
    )
    assert bucket.list() == bucket.inventory() == []
    assert len(everything(bucket)) == went_through
    proxy.arm()
    bucket.upload(source, "data/train.bin")
    assert proxy.seen.count("upload") == PARTS - went_through
    assert bucket.read("data/train.bin") == CONTENT
    assert everything(bucket) == ["data/train.bin"]


def test_what_a_killed_upload_left_goes_with_its_folder(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path
) -> None:
    proxy.arm(Fault(on="compose", do="refuse", times=FOREVER))
    with pytest.raises(NetworkError):
        replace(bucket, patience=0.1).upload(source, "data/train.bin")
    proxy.arm()
    assert len(everything(bucket)) == PARTS
    bucket.remove("data")
    assert everything(bucket) == []


def test_an_upload_that_was_killed_at_its_very_end_is_only_tidied_up(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path
) -> None:
    proxy.arm(Fault(on="delete", do="refuse", times=FOREVER))
    with pytest.raises(NetworkError):
        replace(bucket, patience=0.1).upload(source, "train.bin")
    proxy.arm()
    assert len(everything(bucket)) == PARTS + 1
    bucket.upload(source, "train.bin")
    assert {"upload", "compose"}.isdisjoint(proxy.seen)
    assert everything(bucket) == ["train.bin"]


@pytest.mark.parametrize("damaged", [0, 1], ids=["intact", "one range damaged meanwhile"])
def test_a_download_goes_on_where_a_killed_one_stopped(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path, tmp_path: Path, damaged: int
) -> None:
    bucket.upload(source, "data/train.bin")
    target = tmp_path / "there" / "train.bin"
    target.parent.mkdir()
    target.write_bytes(b"of before")
    came_through = 4
    proxy.arm(Fault(on="download", do="stall", skip=came_through, times=FOREVER))
    killed_when(
        lambda: proxy.seen.count("download") == came_through + bucket.parallel,
        bucket,
        f'storage.download("data/train.bin", Path({str(target)!r}))',
    )
    assert target.read_bytes() == b"of before"
    assert open_storage(str(target.parent)).list() == ["train.bin"]
    if damaged:
        (partial,) = [path for path in target.parent.glob(".*.partial") if ".journal." not in path.name]
        with partial.open("r+b") as file:
            file.write(bytes([file.read(1)[0] ^ 1]) if not file.seek(0) else b"")
    proxy.arm()
    bucket.download("data/train.bin", target)
    assert proxy.seen.count("download") == PARTS - came_through + damaged
    assert target.read_bytes() == CONTENT
    assert names_in(target.parent) == ["train.bin"]


def test_a_download_that_a_dead_network_ended_is_gone_on_with(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path, tmp_path: Path
) -> None:
    bucket.upload(source, "train.bin")
    proxy.arm(Fault(on="download", do="refuse", skip=6, times=FOREVER))
    with pytest.raises(NetworkError, match=re.escape(bucket.address("train.bin"))):
        replace(bucket, patience=0.1).download("train.bin", tmp_path / "target")
    assert not (tmp_path / "target").exists()
    proxy.arm()
    bucket.download("train.bin", tmp_path / "target")
    assert proxy.seen.count("download") == PARTS - 6
    assert (tmp_path / "target").read_bytes() == CONTENT


def test_what_was_fetched_of_an_older_object_is_not_gone_on_with(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path, tmp_path: Path
) -> None:
    bucket.upload(source, "train.bin")
    proxy.arm(Fault(on="download", do="refuse", skip=6, times=FOREVER))
    with pytest.raises(NetworkError):
        replace(bucket, patience=0.1).download("train.bin", tmp_path / "target")
    newer = CONTENT[::-1]
    source.write_bytes(newer)
    proxy.arm()
    bucket.upload(source, "train.bin")
    bucket.download("train.bin", tmp_path / "target")
    assert proxy.seen.count("download") == PARTS
    assert (tmp_path / "target").read_bytes() == newer


def test_two_downloads_to_one_place_do_not_disturb_each_other(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path, tmp_path: Path
) -> None:
    bucket.upload(source, "train.bin")
    target = tmp_path / "there" / "train.bin"
    proxy.arm(Fault(on="download", do="stall", skip=5, times=bucket.parallel))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(bucket.download, "train.bin", target)
        until(lambda: proxy.seen.count("download") == 5 + bucket.parallel)
        second = bucket.download("train.bin", target)
        assert target.read_bytes() == CONTENT
        proxy.arm()
        assert first.result() == second
    assert target.read_bytes() == CONTENT
    assert names_in(target.parent) == ["train.bin"]


def test_a_download_beside_another_to_one_place_leaves_nothing_where_it_fails(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path, tmp_path: Path
) -> None:
    bucket.upload(source, "train.bin")
    target = tmp_path / "there" / "train.bin"
    stalled = Fault(on="download", do="stall", skip=5, times=bucket.parallel)
    proxy.arm(stalled, Fault(on="download", do="refuse", skip=5, times=FOREVER))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(bucket.download, "train.bin", target)
        until(lambda: proxy.seen.count("download") == 5 + bucket.parallel)
        theirs = set(names_in(target.parent))
        with pytest.raises(NetworkError):
            replace(bucket, patience=0.1).download("train.bin", target)
        assert set(names_in(target.parent)) == theirs
        proxy.arm()
        first.result()
    assert names_in(target.parent) == ["train.bin"]


def test_an_object_that_is_replaced_in_the_middle_of_its_download_comes_whole(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path, tmp_path: Path
) -> None:
    bucket.upload(source, "train.bin")
    newer = CONTENT[::-1]
    proxy.arm(Fault(on="download", do="stall", skip=5, times=bucket.parallel))
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(bucket.download, "train.bin", tmp_path / "target")
        until(lambda: proxy.seen.count("download") == 5 + bucket.parallel)
        stored = bucket.write("train.bin", newer)
        proxy.arm()
        assert coming.result() == stored
    assert (tmp_path / "target").read_bytes() == newer


# --- a bucket that fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "do"),
    [(on, do) for on in ("upload", "compose") for do in ("refuse", "lose", "shorten")]
    + [("upload", "flip request"), ("compose", "forget a source")],
)
def test_an_upload_in_parts_survives_a_fault(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path, on: str, do: str
) -> None:
    bucket.write("train.bin", b"old")
    proxy.arm(Fault(on=on, do=do, skip=PARTS // 2 if on == "upload" else 0, times=2))  # type: ignore[arg-type]
    stored = bucket.upload(source, "train.bin")
    assert bucket.stat("train.bin") == stored
    assert bucket.read("train.bin") == CONTENT
    assert everything(bucket) == ["train.bin"]


@pytest.mark.parametrize("do", ["refuse", "lose", "cut", "flip"])
def test_a_download_in_ranges_survives_a_fault(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path, tmp_path: Path, do: str
) -> None:
    bucket.upload(source, "train.bin")
    proxy.arm(Fault(on="download", do=do, skip=PARTS // 2, times=2))  # type: ignore[arg-type]
    bucket.download("train.bin", tmp_path / "there" / "train.bin")
    assert (tmp_path / "there" / "train.bin").read_bytes() == CONTENT
    assert names_in(tmp_path / "there") == ["train.bin"]


@pytest.mark.long
def test_all_comes_right_where_one_request_in_five_goes_wrong(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path, tmp_path: Path
) -> None:
    proxy.arm_at_random(seed=2357)
    bucket.upload(source, "data/train.bin")
    bucket.join(["data/train.bin"] * 2, "data/twice.bin")
    bucket.download("data/twice.bin", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == CONTENT * 2
    bucket.remove("data/train.bin")
    proxy.arm()
    assert everything(bucket) == ["data/twice.bin"]


def test_ranges_that_stay_wrong_are_an_error_and_no_file(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path, tmp_path: Path
) -> None:
    bucket.upload(source, "train.bin")
    proxy.arm(Fault(on="download", do="flip", times=FOREVER))
    with pytest.raises(DataError, match=re.escape(bucket.address("train.bin"))):
        bucket.download("train.bin", tmp_path / "there" / "train.bin")
    assert sum(file.stat().st_size for file in (tmp_path / "there").iterdir()) == 0


def test_a_source_that_shrinks_under_the_upload_never_shows(
    bucket: BucketStorage, proxy: FaultyBucket, source: Path
) -> None:
    bucket.write("train.bin", b"old")
    proxy.arm(Fault(on="upload", do="stall", skip=2, times=bucket.parallel))
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(bucket.upload, source, "train.bin")
        until(lambda: proxy.seen.count("upload") == 2 + bucket.parallel)
        os.truncate(source, 5 * PART + 7)
        proxy.arm()
        with pytest.raises(DataError, match="did not come out right"):
            going.result()
    assert bucket.read("train.bin") == b"old"


def test_a_full_disk_ends_a_download_in_ranges_with_the_arithmetic(
    bucket: BucketStorage, source: Path, tmp_path: Path
) -> None:
    bucket.upload(source, "train.bin")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PART, hard))  # no file of this process may grow past that
    try:
        with pytest.raises(DiskFull, match=rf"target: .*{len(CONTENT)} bytes are needed, \d+ are free"):
            bucket.download("train.bin", tmp_path / "target")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "target").exists()


# --- joining ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(bucket: BucketStorage, proxy: FaultyBucket) -> list[str]:
    """40 files: more than one composition takes, so that they are joined as (32 + 8)."""
    names = [f"shards/{number:05d}" for number in range(40)]
    bucket._objects.each(lambda name: bucket.write(name, name.encode() * int(name[-5:])), names)
    proxy.arm()
    return names


JOINED = b"".join(f"shards/{number:05d}".encode() * number for number in range(40))


def test_a_bucket_joins_by_itself_in_a_tree(bucket: BucketStorage, proxy: FaultyBucket, shards: list[str]) -> None:
    stored = bucket.join(shards, "train.bin")
    assert proxy.seen.count("compose") == 3
    assert {"upload", "begin", "download"}.isdisjoint(proxy.seen)
    assert bucket.read("train.bin") == JOINED
    assert everything(bucket) == [*shards, "train.bin"]
    proxy.arm()
    assert bucket.join(shards, "train.bin") == stored
    assert set(proxy.seen) == {"look"}


@pytest.mark.parametrize("do", ["refuse", "lose", "shorten", "forget a source"])
def test_joining_survives_faults(bucket: BucketStorage, proxy: FaultyBucket, shards: list[str], do: str) -> None:
    bucket.write("train.bin", b"old")
    proxy.arm(Fault(on="compose", do=do, skip=1, times=3))  # type: ignore[arg-type]
    bucket.join(shards, "train.bin")
    assert bucket.read("train.bin") == JOINED
    assert everything(bucket) == [*shards, "train.bin"]


def test_joining_goes_on_with_what_an_earlier_one_joined(
    bucket: BucketStorage, proxy: FaultyBucket, shards: list[str]
) -> None:
    proxy.arm(Fault(on="compose", do="refuse", skip=2, times=FOREVER))
    with pytest.raises(NetworkError, match=re.escape(bucket.address("train.bin"))):
        replace(bucket, patience=0.1).join(shards, "train.bin")
    assert bucket.list() == [stored.path for stored in bucket.inventory()] == shards
    assert len(everything(bucket)) == len(shards) + 2
    proxy.arm()
    bucket.join(shards, "train.bin")
    assert proxy.seen.count("compose") == 1
    assert bucket.read("train.bin") == JOINED


def test_a_late_composition_does_not_land_on_a_newer_object(
    bucket: BucketStorage, proxy: FaultyBucket, shards: list[str]
) -> None:
    proxy.arm(Fault(on="compose", do="hold"))  # never answered, so sent again
    bucket.join(shards[:3], "train.bin")
    bucket.write("train.bin", b"newer")
    assert proxy.release() == [412]
    assert bucket.read("train.bin") == b"newer"


def test_a_whole_that_stays_other_than_its_parts_is_an_error_and_no_file(
    bucket: BucketStorage, proxy: FaultyBucket, shards: list[str]
) -> None:
    proxy.arm(Fault(on="compose", do="forget a source", times=FOREVER))
    with pytest.raises(DataError, match=r"train\.bin: did not come out right"):
        bucket.join(shards[:3], "train.bin")
    assert bucket.list() == shards


def test_joined_files_of_a_folder_share_no_file_system_with_a_linked_part(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    part = elsewhere / f"litgpt-{uuid4().hex}"
    part.write_bytes(CONTENT)
    storage = open_storage(str(tmp_path))
    try:
        (tmp_path / "a").symlink_to(part)
        storage.write("b", b"tail")
        storage.join(["a", "b", "a"], "whole")
    finally:
        part.unlink()
    assert storage.read("whole") == CONTENT + b"tail" + CONTENT


def test_a_folder_does_not_join_again_what_is_there(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.write("a", b"12")
    storage.write("b", b"34")
    stored = storage.join(["a", "b"], "whole")
    before = (tmp_path / "whole").stat()
    assert storage.join(["a", "b"], "whole") == stored
    assert (tmp_path / "whole").stat() == before
    storage.write("b", b"43")
    storage.join(["a", "b"], "whole")
    assert storage.read("whole") == b"1243"


def test_a_full_disk_ends_joining_with_the_arithmetic(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.write("a", CONTENT[:PART])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PART, hard))
    try:
        with pytest.raises(DiskFull, match=rf"whole: .*{2 * PART} bytes are needed, \d+ are free"):
            storage.join(["a", "a"], "whole")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names_in(tmp_path) == ["a"]
