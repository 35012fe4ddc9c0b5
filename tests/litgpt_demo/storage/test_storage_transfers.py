"""Large files go up and down in parts and are joined by the bucket; an upload goes on where a killed one stopped."""

import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bucket_faults import FOREVER, FailureClass, FaultyBucket
from waiting import until

from litgpt_demo.errors import DataError, NetworkError
from litgpt_demo.storage import BucketStorage, ObjectInfo

PART = 256 << 10
PARTS = 10
CONTENT = os.urandom((PARTS - 1) * PART + 5)
"""Of so many parts, the last of them short."""


@pytest.fixture
def storage(bucket: BucketStorage) -> BucketStorage:
    """The bucket's folder, for which little is large."""
    return replace(bucket, part_size=PART, parallel=3)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "train.bin").write_bytes(CONTENT)
    return tmp_path / "train.bin"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir()
    return tmp_path / "there" / "train.bin"


def test_large_file_is_transferred_in_parts_once(
    storage: BucketStorage, proxy: FaultyBucket, source: Path, target: Path
) -> None:
    stored = storage.upload(source, "data/train.bin")
    assert proxy.seen.count("upload") == PARTS
    assert list(proxy.objects()) == ["data/train.bin"]
    assert storage.download("data/train.bin", target) == storage.stat("data/train.bin") == stored
    assert proxy.seen.count("download") == PARTS
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]
    proxy.arm()
    assert storage.upload(source, "data/train.bin") == storage.download("data/train.bin", target) == stored
    assert set(proxy.seen) == {"look"}
    target.write_bytes(bytes(len(CONTENT)))
    storage.download("data/train.bin", target)
    assert target.read_bytes() == CONTENT


def test_empty_object_without_a_size_is_an_empty_file(storage: BucketStorage, proxy: FaultyBucket) -> None:
    kinds: tuple[Any, ...] = ("look", "upload", "begin")
    proxy.arm(*(FailureClass(on=kind, do="drop zeros", times=FOREVER) for kind in kinds))
    written = storage.write("empty", b"")
    assert storage.stat("empty") == written == ObjectInfo("empty", 0, "00000000")
    assert storage.inventory() == [written]
    assert storage.read("empty") == b""


@pytest.mark.parametrize("kind", ["look", "upload"])
def test_answers_without_metadata_are_retried(storage: BucketStorage, proxy: FaultyBucket, kind: Any) -> None:
    """A proxy may answer 200 with `{}`."""
    proxy.arm(FailureClass(on=kind, do="empty"))
    assert storage.write("some", b"some").size == 4
    assert storage.read("some") == b"some"
    proxy.arm(FailureClass(on="look", do="empty", times=FOREVER))
    with pytest.raises(DataError, match="lacks its generation, size or checksum; check whether something else"):
        storage.write("some", b"more")


def test_upload_continues_where_a_killed_one_stopped(storage: BucketStorage, proxy: FaultyBucket, source: Path) -> None:
    proxy.arm(FailureClass(on="upload", do="stall", skip=4, times=FOREVER))
    program = f"""
        from pathlib import Path
        from litgpt_demo.storage import BucketStorage
        {storage!r}.upload(Path({str(source)!r}), "data/train.bin")
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)]) as process:
        try:
            until(lambda: proxy.seen.count("upload") >= 4 + storage.parallel)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not [*storage.list(), *storage.inventory()]
    assert len(proxy.objects()) == 4
    proxy.arm()
    storage.upload(source, "data/train.bin")
    assert proxy.seen.count("upload") == PARTS - 4
    assert proxy.objects() == {"data/train.bin": CONTENT}


def test_parts_of_a_killed_upload_are_removed_later(storage: BucketStorage, proxy: FaultyBucket, source: Path) -> None:
    """They go with the folder or with the next upload."""
    for kind, path in (("compose", "data/train.bin"), ("delete", "train.bin")):
        proxy.arm(FailureClass(on=kind, do="refuse", times=FOREVER))  # type: ignore[arg-type]
        with pytest.raises(NetworkError):
            replace(storage, patience=0.1).upload(source, path)
    proxy.arm()
    storage.remove("data")
    assert len(proxy.objects()) == PARTS + 1
    storage.upload(source, "train.bin")
    assert {"upload", "compose"}.isdisjoint(proxy.seen)
    assert proxy.objects() == {"train.bin": CONTENT}


def test_two_downloads_to_one_path_do_not_disturb_each_other(
    storage: BucketStorage, proxy: FaultyBucket, source: Path, target: Path
) -> None:
    storage.upload(source, "train.bin")
    proxy.arm(FailureClass(on="download", do="stall", skip=5, times=storage.parallel))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(storage.download, "train.bin", target)
        until(lambda: proxy.seen.count("download") >= 5 + storage.parallel)
        storage.download("train.bin", target)
        assert target.read_bytes() == CONTENT
        stored = storage.write("train.bin", CONTENT[::-1])
        proxy.arm()
        assert first.result() == stored
    assert target.read_bytes() == CONTENT[::-1]
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("on", "do"), [("upload", "flip request"), ("compose", "forget a source"), ("download", "flip")]
)
def test_a_part_that_comes_damaged_is_transferred_again(
    storage: BucketStorage, proxy: FaultyBucket, source: Path, tmp_path: Path, on: Any, do: Any
) -> None:
    storage.write("train.bin", b"old")
    if on != "download":
        proxy.arm(FailureClass(on=on, do=do, times=FOREVER))
        with pytest.raises(DataError, match="could not be transferred intact"):
            storage.upload(source, "train.bin")
        assert storage.read("train.bin") == b"old"
    proxy.arm(FailureClass(on=on, do=do, times=2))
    storage.upload(source, "train.bin")
    storage.download("train.bin", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == CONTENT
    assert proxy.objects() == {"train.bin": CONTENT}
