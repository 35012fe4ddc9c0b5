"""A folder and a bucket keep the same promises, a bucket also where requests fail, come late or are overtaken."""

import errno
import os
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from bucket_faults import FOREVER, FailureClass, FaultyBucket
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from litgpt_demo.errors import DataError, DiskFull, NetworkError, UserError
from litgpt_demo.storage import (
    BucketStorage,
    LocalStorage,
    ObjectInfo,
    ReadCursor,
    Storage,
    crc32c_of,
    open_storage,
    sha256_of,
)
from litgpt_demo.storage import bucket as storage_module
from litgpt_demo.storage.local import translate_os_errors

SMALL, LARGE = 1000, 9 << 20  # bytes; the client sends more than 8 MiB in a resumable upload


@pytest.fixture
def storage(root: str) -> Storage:
    return open_storage(root)


def test_created_file_is_never_replaced(storage: Storage) -> None:
    assert storage.create("index/run/1.json", b"first")
    assert storage.create("index/run/1.json", b"first")  # as after an answer that was lost
    assert not storage.create("index/run/1.json", b"second")
    claims = [f"from {number}".encode() for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda data: storage.create("claim", data), claims))
    won = [data for data, was_created in zip(claims, created, strict=True) if was_created]
    assert [storage.read("claim")] == won
    assert storage.read("index/run/1.json") == b"first"
    assert storage.list() == ["claim", "index/run/1.json"]


def test_a_listing_is_deep_sorted_and_of_a_folder_alone(storage: Storage) -> None:
    storage.write("b.txt", b"a longer first version")
    written = [storage.write(path, path.encode()) for path in (".hidden", "a/10", "a/2", "a/deep/er/x", "b.txt")]
    assert storage.inventory() == [storage.stat(path) for path in storage.list()] == written
    assert storage.list("a") == storage.list("a/") == ["a/10", "a/2", "a/deep/er/x"]
    assert not [*storage.list("b.txt"), *storage.list("missing/folder"), *storage.inventory("missing")]
    assert [storage.exists(path) for path in ("a/2", "a", "a/2/below", "a/1")] == [True, False, False, False]


def test_missing_file_is_named_by_its_full_address(storage: Storage, tmp_path: Path) -> None:
    storage.write("folder/file", b"x")
    for path in ("missing", "folder", "folder/file/below"):
        for verb in (
            storage.read,
            storage.stat,
            lambda path: storage.read_from(path, ReadCursor()),
            lambda path: storage.download(path, tmp_path / "target"),
            lambda path: storage.join(["folder/file", path], "whole"),
        ):
            with pytest.raises(FileNotFoundError, match=re.escape(storage.address(path))):
                verb(path)
    assert not (tmp_path / "target").exists()
    assert storage.list() == ["folder/file"]


def test_large_file_is_transferred_both_ways_or_moved(storage: Storage, tmp_path: Path) -> None:
    source, link, target = tmp_path / "large", tmp_path / "link", tmp_path / "staged" / "back"
    source.write_bytes(os.urandom(1 << 20) * 17 + b"tail")
    link.symlink_to(source)
    target.parent.mkdir()
    target.write_bytes(b"an old content")
    stored = storage.upload(link, "large", move=True)
    assert not link.is_symlink()
    assert stored == storage.download("large", target) == ObjectInfo("large", (17 << 20) + 4, crc32c_of(source))
    assert sha256_of(target) == sha256_of(source)
    assert list(target.parent.iterdir()) == [target]
    storage.upload(source, "copy")
    storage.upload(source, "moved", move=True)
    assert storage.stat("copy").crc32c == storage.stat("moved").crc32c == stored.crc32c
    with pytest.raises(FileNotFoundError, match="large"):
        storage.upload(source, "again")


def test_removal_or_move_takes_no_file_of_a_similar_name(storage: Storage) -> None:
    for path in ("step-1/a", "step-1/deep/b", "step-10/a", "step-1.json", "other", "torn/deep/a"):
        storage.write(path, path.encode())
    storage.move("torn", "damaged/torn.1")
    storage.remove("step-1")
    for path in ("other", "other", "never/was", "step-1.json/below"):
        storage.remove(path)
    assert storage.list() == ["damaged/torn.1/deep/a", "step-1.json", "step-10/a"]
    assert storage.read("damaged/torn.1/deep/a") == b"torn/deep/a"


@pytest.mark.parametrize("count", [0, 33])
def test_files_are_joined_in_the_order_given_and_stay(storage: Storage, count: int) -> None:
    parts = {f"shards/{number:05d}": bytes([number]) * number for number in reversed(range(count))}
    for path, data in parts.items():
        storage.write(path, data)
    joined = storage.join(list(parts), "train.bin")
    assert storage.read("train.bin") == b"".join(parts.values())
    assert storage.stat("train.bin") == joined == storage.join(list(parts), "train.bin")
    assert storage.list() == [*sorted(parts), "train.bin"]


NAMES = st.text(st.characters(exclude_categories=["C"], exclude_characters="/\\"), min_size=1, max_size=12).filter(
    lambda name: name not in {".", ".."} and not name.endswith(".partial")
)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.dictionaries(PATHS, st.binary(max_size=50), min_size=1, max_size=3))
def test_any_set_of_paths_comes_back_as_it_was_put(storage: Storage, files: dict[str, bytes]) -> None:
    assume(not any(f"{a}/" in f"{b}/" for a in files for b in files if a != b))  # a file is no folder
    inner = storage.within(uuid4().hex)
    for path, data in files.items():
        inner.write(path, data)
    assert inner.list() == sorted(files)
    assert {path: inner.read(path) for path in inner.list()} == files
    for path in files:
        inner.remove(path)
    assert inner.list() == []


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(NAMES | st.sampled_from(["", ".", ".."]), min_size=1, max_size=6), absolute=st.booleans())
def test_no_path_leads_out_of_the_root(storage: Storage, parts: list[str], absolute: bool) -> None:
    path = "/" * absolute + "/".join(parts)
    if path.startswith("/") or ".." in parts:
        for verb in (storage.list, storage.read, storage.remove, storage.within, lambda path: storage.write(path, b"")):
            with pytest.raises(UserError, match="leaves the storage's root"):
                verb(path)
    else:
        tidy = [part for part in parts if part not in {"", "."}]
        assert storage.address(path) == "/".join([storage.root, *tidy])


def test_name_that_one_storage_cannot_hold_is_refused_by_both(storage: Storage) -> None:
    for path in ("", ".", "a\nb", "a\0b", "folder/.0123.partial"):
        with pytest.raises(UserError, match=re.escape(repr(path))):
            storage.write(path, b"x")
    assert storage.list() == []


def test_an_address_is_made_absolute_and_tidy_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_storage("runs/../data/") == LocalStorage(root=str(tmp_path / "data"))
    assert open_storage("~/data").root == str(tmp_path / "home" / "data")
    assert open_storage("gs://my-bucket/a//b/").root == "gs://my-bucket/a/b"
    for address in ("s3://bucket/x", "gs:/lost/a/slash", "gs:///prefix", "gs://Upper/x", "~no-such/x"):
        with pytest.raises(UserError, match=re.escape(address)):
            open_storage(address)


def test_a_reader_beside_a_writer_sees_only_whole_versions(tmp_path: Path) -> None:
    storage, versions = open_storage(str(tmp_path)), [bytes([number]) * 200_000 for number in (1, 2)]
    storage.write("config.json", versions[0])

    def keep_writing() -> None:
        for number in range(50):
            storage.write("config.json", versions[number % 2])

    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(keep_writing)
        while not writing.done():
            assert storage.read("config.json") in versions
            assert storage.list() == ["config.json"]
        writing.result()


def test_full_disk_error_has_sizes_and_old_content_stays(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "root"))
    storage.write("state", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # no file of this process may grow past 1 MiB
    try:
        with pytest.raises(DiskFull, match=rf"{storage.address('state')}.*3145728 bytes are needed, but \d+ are free"):
            storage.write("state", bytes(3 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert storage.read("state") == b"old"
    assert [file.name for file in (tmp_path / "root").iterdir()] == ["state"]


def test_creating_works_on_a_mount_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)  # as FAT and most FUSE mounts answer
    storage = open_storage(str(tmp_path))
    assert storage.create("claim", b"mine")
    assert not storage.create("claim", b"theirs")
    assert storage.read("claim") == b"mine"


def test_linked_folder_is_listed_and_outlives_its_link(tmp_path: Path) -> None:
    dataset, run = open_storage(str(tmp_path / "dataset")), open_storage(str(tmp_path / "run"))
    dataset.write("manifest.json", b"{}")
    run.write("config.json", b"{}")
    (tmp_path / "run" / "data").symlink_to(tmp_path / "dataset")
    (tmp_path / "run" / "broken").symlink_to(tmp_path / "nowhere")
    assert run.list() == ["config.json", "data/manifest.json"]
    open_storage(str(tmp_path)).remove("run")
    assert not (tmp_path / "run").exists()
    assert dataset.list() == ["manifest.json"]


@pytest.mark.parametrize(("do", "size"), [("refuse", SMALL), ("shorten", SMALL), ("lose", LARGE)])
def test_every_verb_survives_a_fault(
    bucket: BucketStorage, proxy: FaultyBucket, tmp_path: Path, do: Any, size: int
) -> None:
    def spoilt(on: Any, do: Any = do) -> BucketStorage:
        proxy.arm(FailureClass(on=on, do=do))
        return bucket

    data = os.urandom(size)
    bucket.write("a/b", b"old")
    stored = spoilt("upload").write("a/b", data)
    assert spoilt("look").stat("a/b") == stored
    assert spoilt("look").list() == ["a/b"]
    for kind in ("cut", "flip", do):
        assert spoilt("download", kind).read("a/b") == data
        assert spoilt("download", kind).download("a/b", tmp_path / kind) == stored
        assert (tmp_path / kind).read_bytes() == data
    assert spoilt("upload", "flip request").write("a/c", data).crc32c == stored.crc32c
    assert spoilt("upload").upload(tmp_path / do, "a/d", is_new=True).crc32c == stored.crc32c
    spoilt("delete").remove("a")
    assert bucket.list() == []


def test_bytes_that_stay_wrong_are_an_error_and_never_show(
    bucket: BucketStorage, proxy: FaultyBucket, tmp_path: Path
) -> None:
    bucket.write("state", b"old")
    (tmp_path / "old").write_bytes(b"good")
    proxy.arm(
        FailureClass(on="upload", do="flip request", times=FOREVER),
        FailureClass(on="download", do="flip", times=FOREVER),
    )
    for verb in (
        bucket.read,
        lambda path: bucket.write(path, os.urandom(SMALL)),
        lambda path: bucket.download(path, tmp_path / "old"),
    ):
        with pytest.raises(DataError, match=re.escape(bucket.address("state"))):
            verb("state")
    proxy.arm()
    assert bucket.read("state") == b"old"
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("old", b"good")]


def test_a_late_request_does_not_touch_a_newer_object(bucket: BucketStorage, proxy: FaultyBucket) -> None:
    bucket.write("metrics.jsonl", b"1\n")
    proxy.arm(
        FailureClass(on="upload", do="hold"), FailureClass(on="delete", do="hold")
    )  # never answered, so sent again
    bucket.write("metrics.jsonl", b"1\n2\n")
    bucket.remove("metrics.jsonl")
    bucket.write("metrics.jsonl", b"1\n2\n3\n")
    assert proxy.release() == [412, 412]
    assert bucket.read("metrics.jsonl") == b"1\n2\n3\n"


def test_new_file_takes_one_request_and_another_is_sent_once(
    bucket: BucketStorage, proxy: FaultyBucket, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    for content, is_new, requests in (
        (b"new", True, ["upload"]),
        (b"other", True, ["upload", "look", "upload"]),
        (b"other", False, ["look"]),
        (b"third", False, ["look", "upload"]),
    ):
        file.write_bytes(content)
        proxy.arm()
        bucket.upload(file, "piece", is_new=is_new)
        assert proxy.seen == requests
        assert bucket.read("piece") == content
    proxy.arm(FailureClass(on="upload", do="hold"))
    bucket.upload(file, "piece")
    file.write_bytes(b"fourth")
    bucket.upload(file, "piece")
    bucket.remove("piece")
    assert proxy.release() == [412]
    assert not bucket.exists("piece")


def test_first_of_two_creators_wins(bucket: BucketStorage, proxy: FaultyBucket) -> None:
    create = partial(bucket.create, "attempt.json", b"theirs")
    proxy.arm(FailureClass(on="upload", do="overtake", meanwhile=create))
    assert not bucket.create("attempt.json", b"mine")
    assert create(), "it is there already"
    proxy.arm(FailureClass(on="upload", do="lose"))
    assert bucket.create("claim", b"mine"), "though the answer was lost"


def test_manifest_replaced_meanwhile_is_never_mixed(bucket: BucketStorage, proxy: FaultyBucket) -> None:
    def overtaken(on: Any) -> BucketStorage:
        bucket.write("run/manifest.json", b"a longer first one")
        proxy.arm(FailureClass(on=on, do="overtake", meanwhile=lambda: bucket.write("run/manifest.json", b"theirs")))
        return bucket

    assert overtaken("upload").write("run/manifest.json", b"mine") == bucket.stat("run/manifest.json")
    assert bucket.read("run/manifest.json") == b"mine"
    assert overtaken("download").read("run/manifest.json") == b"theirs"
    overtaken("delete").remove("run")
    assert bucket.list() == []


def test_a_bucket_that_does_not_answer_is_a_network_fault(bucket: BucketStorage, proxy: FaultyBucket) -> None:
    hasty = replace(bucket, patience=0.1)
    bucket.write("state", b"x")
    proxy.arm(*[FailureClass(on=on, do="refuse", times=FOREVER) for on in ("look", "upload", "download", "delete")])
    for verb in (hasty.read, hasty.list, hasty.remove, lambda path: hasty.create(path, b"y")):
        with pytest.raises(NetworkError, match=hasty.root):
            verb("state")


def test_an_interrupted_removal_has_taken_the_manifest(bucket: BucketStorage, proxy: FaultyBucket) -> None:
    for path in ("step-1/a.distcp", "step-1/manifest.json", "step-1/z.distcp"):
        bucket.write(path, b"x")
    proxy.arm(FailureClass(on="delete", do="refuse", skip=1, times=FOREVER))
    with pytest.raises(NetworkError):
        replace(bucket, patience=0.1).remove("step-1")
    assert bucket.list() == ["step-1/a.distcp", "step-1/z.distcp"]


def test_missing_or_refusing_bucket_is_named_with_a_command(bucket: BucketStorage, proxy: FaultyBucket) -> None:
    missing = open_storage("gs://no-such-bucket/runs")
    for ask in (missing.list, missing.read, missing.remove, lambda path: missing.write(path, b"x")):
        with pytest.raises(UserError, match=r"'no-such-bucket' does not exist.*buckets create gs://no-such-bucket"):
            ask("x")
    proxy.arm(*(FailureClass(on=on, do="refuse", status=403, times=FOREVER) for on in ("look", "upload")))
    for verb, role in ((lambda: bucket.read("state"), "Viewer"), (lambda: bucket.create("state", b"x"), "User")):
        with pytest.raises(UserError, match=rf"{proxy.bucket} refused.*role=roles/storage\.object{role}"):
            verb()


def test_missing_credentials_are_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    storage_module._client.cache_clear()  # an earlier test may have had credentials
    with pytest.raises(UserError, match=r"no usable credentials: .*`gcloud auth application-default login`"):
        open_storage("gs://some-bucket/x").list()


@pytest.mark.parametrize(
    ("files", "free", "message"),
    [(1000, 0, "no more files, whatever their size .*; remove files"), (1000, 9, "4 bytes are"), (0, 0, "4 bytes are")],
)
def test_full_disk_error_names_files_or_bytes(
    files: int, free: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems count no files."""
    seen = SimpleNamespace(f_bavail=2**30, f_frsize=1, f_files=files, f_favail=free)
    monkeypatch.setattr(os, "statvfs", lambda path: seen)
    with pytest.raises(DiskFull, match=message), translate_os_errors(str(tmp_path / "x"), needed=4):
        raise OSError(errno.ENOSPC, "No space left on device")
