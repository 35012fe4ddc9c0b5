from __future__ import annotations

import errno
import os
import pickle
import re
import resource
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from threading import Event, Thread
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from waiting import until

from litgpt_demo.errors import DataError, DiskFull, NetworkError, UserError
from litgpt_demo.storage import (
    BucketStorage,
    LocalStorage,
    ObjectInfo,
    Position,
    Storage,
    bucket_path,
    crc32c_of,
    is_remote,
    open_storage,
    sha256_of,
)

sys.path.append(str(Path(__file__).parents[2] / "fakes"))
from bucket_emulator import bucket_emulator
from bucket_faults import FOREVER, Fault, FaultyBucket, faulty_bucket

SMALL, LARGE = 1000, 9 << 20  # bytes; the client sends more than 8 MiB in a resumable upload


@pytest.fixture(scope="module")
def emulator() -> Iterator[str]:
    with bucket_emulator("drill-bucket") as address:
        yield address


@pytest.fixture(scope="module")
def proxy(emulator: str) -> Iterator[FaultyBucket]:
    with faulty_bucket(emulator) as proxy:
        yield proxy


@pytest.fixture
def bucket(emulator: str, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """An empty folder of a bucket that answers as it should."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator)
    return open_storage(f"gs://drill-bucket/{uuid4().hex}/runs")


@pytest.fixture
def faulty(proxy: FaultyBucket, monkeypatch: pytest.MonkeyPatch) -> BucketStorage:
    """The same behind the proxy, which has yet to be armed."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    proxy.arm()
    storage = open_storage(f"gs://drill-bucket/{uuid4().hex}")
    assert isinstance(storage, BucketStorage)
    return storage


@pytest.fixture(params=["local", "bucket"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "root")) if request.param == "local" else request.getfixturevalue("bucket")


# --- both -------------------------------------------------------------------------------------------------------------


def test_what_is_created_is_there_and_never_replaced(storage: Storage) -> None:
    assert storage.create("index/run/1.json", b"first")
    assert not storage.create("index/run/1.json", b"second")
    assert storage.read("index/run/1.json") == b"first"
    assert storage.list() == ["index/run/1.json"]


def test_creating_the_same_again_is_a_lost_answers_second_try(storage: Storage) -> None:
    assert storage.create("claim", b"mine")
    assert storage.create("claim", b"mine")


def test_of_many_creators_at_once_one_is_told_that_it_was_its_data(storage: Storage) -> None:
    claims = [f"from {number}".encode() for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        mine = list(pool.map(lambda data: storage.create("claim", data), claims))
    won = [data for data, was_mine in zip(claims, mine, strict=True) if was_mine]
    assert [storage.read("claim")] == won


def test_a_creator_whose_answer_was_lost_is_told_that_it_was_its_data(
    faulty: BucketStorage, proxy: FaultyBucket
) -> None:
    proxy.arm(Fault(on="upload", do="lose"))
    assert faulty.create("claim", b"mine")
    assert not faulty.create("claim", b"theirs")


def test_creating_where_a_folder_is_says_so(tmp_path: Path) -> None:
    (tmp_path / "claim").mkdir()
    with pytest.raises(UserError, match="claim"):
        open_storage(str(tmp_path)).create("claim", b"")


def test_creating_works_on_a_mount_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)  # as FAT and most FUSE mounts answer
    storage = open_storage(str(tmp_path))
    assert storage.create("claim", b"mine")
    assert not storage.create("claim", b"theirs")
    assert storage.read("claim") == b"mine"


@pytest.mark.parametrize("data", [b"", b"123456789", bytes(range(256)) * 5000], ids=["empty", "short", "1.2 MiB"])
def test_what_is_written_is_read_back(storage: Storage, data: bytes) -> None:
    stored = storage.write("a/b/file.bin", data)
    assert storage.read("a/b/file.bin") == data
    assert storage.stat("a/b/file.bin") == stored
    assert (stored.path, stored.size) == ("a/b/file.bin", len(data))


def test_the_checksum_is_crc32c(storage: Storage, tmp_path: Path) -> None:
    # The check value of CRC-32C (Castagnoli), RFC 3720 B.4's polynomial: https://reveng.sourceforge.io/crc-catalogue/
    assert storage.write("check", b"123456789").crc32c == "e3069283"
    storage.download("check", tmp_path / "check")
    assert crc32c_of(tmp_path / "check") == "e3069283"
    assert sha256_of(tmp_path / "check") == sha256(b"123456789").hexdigest()


def test_a_write_replaces_all_of_a_longer_file(storage: Storage) -> None:
    storage.write("metrics.jsonl", b"a longer first version")
    assert storage.write("metrics.jsonl", b"short").size == 5
    assert storage.read("metrics.jsonl") == b"short"


def test_listing_is_deep_sorted_and_relative_to_the_root(storage: Storage) -> None:
    for path in ("b.txt", "a/2", "a/10", "a/deep/er/x", ".hidden", "ab/other"):
        storage.write(path, b"x")
    assert storage.list() == [".hidden", "a/10", "a/2", "a/deep/er/x", "ab/other", "b.txt"]
    assert storage.list("a") == storage.list("a/") == ["a/10", "a/2", "a/deep/er/x"]
    assert storage.within("a").list() == ["10", "2", "deep/er/x"]


def test_listing_what_is_no_folder_is_empty(storage: Storage) -> None:
    assert storage.list() == []
    storage.write("file", b"x")
    assert storage.list("missing/folder") == []
    assert storage.list("file") == []


def test_only_files_exist(storage: Storage) -> None:
    storage.write("folder/file", b"x")
    assert storage.exists("folder/file")
    assert not storage.exists("folder")
    assert not storage.exists("folder/file/below")
    assert not storage.exists("folder/fil")


@pytest.mark.parametrize("path", ["missing", "folder", "folder/file/below"])
def test_the_full_address_of_a_missing_file_is_named(storage: Storage, tmp_path: Path, path: str) -> None:
    storage.write("folder/file", b"x")
    verbs: list[Callable[[], object]] = [
        lambda: storage.read(path),
        lambda: storage.read_on(path, Position()),
        lambda: storage.stat(path),
        lambda: storage.download(path, tmp_path / "target"),
    ]
    for verb in verbs:
        with pytest.raises(FileNotFoundError, match=re.escape(storage.address(path))):
            verb()
    assert not (tmp_path / "target").exists()


def test_upload_copies_and_with_move_takes_the_source_away(storage: Storage, tmp_path: Path) -> None:
    source = tmp_path / "train.bin"
    source.write_bytes(b"tokens")
    copied = storage.upload(source, "copy/train.bin")
    assert source.read_bytes() == b"tokens"
    moved = storage.upload(source, "moved/train.bin", move=True)
    assert not source.exists()
    assert storage.read("copy/train.bin") == storage.read("moved/train.bin") == b"tokens"
    assert (copied.crc32c, moved.path) == (moved.crc32c, "moved/train.bin")


def test_moving_a_link_leaves_the_file_it_points_to(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"weights")
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    storage.upload(tmp_path / "link", "model", move=True)
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "blob").read_bytes() == b"weights"
    (tmp_path / "blob").unlink()
    assert storage.read("model") == b"weights"


def test_uploading_a_missing_source_names_it(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.bin"):
        storage.upload(tmp_path / "nowhere.bin", "file")
    assert storage.list() == []


def test_download_replaces_the_target_and_leaves_nothing_beside_it(storage: Storage, tmp_path: Path) -> None:
    stored = storage.write("data/val.bin", b"new")
    target = tmp_path / "staged" / "val.bin"
    target.parent.mkdir()
    target.write_bytes(b"an old and longer content")
    assert storage.download("data/val.bin", target) == stored
    assert target.read_bytes() == b"new"
    assert [file.name for file in target.parent.iterdir()] == ["val.bin"]


def test_files_of_several_chunks_arrive_whole_both_ways(storage: Storage, tmp_path: Path) -> None:
    source = tmp_path / "large"
    source.write_bytes(os.urandom(1 << 20) * 17 + b"tail")
    stored = storage.upload(source, "large")
    assert stored == ObjectInfo("large", (17 << 20) + 4, crc32c_of(source))
    assert storage.download("large", tmp_path / "back") == stored
    assert sha256_of(tmp_path / "back") == sha256_of(source)


def test_remove_takes_a_file_or_a_folder_and_not_its_namesakes(storage: Storage) -> None:
    for path in ("step-1/a", "step-1/deep/b", "step-10/a", "step-1.json", "other"):
        storage.write(path, b"x")
    storage.remove("step-1")
    assert storage.list() == ["other", "step-1.json", "step-10/a"]
    storage.remove("other")
    storage.remove("other")
    storage.remove("never/was")
    storage.remove("step-1.json/below")
    assert storage.list() == ["step-1.json", "step-10/a"]
    storage.within("step-10").remove("")
    assert storage.list() == ["step-1.json"]


def test_a_folder_moves_with_all_that_is_in_it(storage: Storage) -> None:
    for path in ("step-1/a", "step-1/deep/b", "step-10/a"):
        storage.write(path, path.encode())
    storage.move("step-1", "damaged/step-1.1")
    assert storage.list() == ["damaged/step-1.1/a", "damaged/step-1.1/deep/b", "step-10/a"]
    assert storage.read("damaged/step-1.1/deep/b") == b"step-1/deep/b"


def test_a_storage_within_another_shares_its_files(storage: Storage) -> None:
    inner = storage.within("runs/owt")
    assert inner.root == storage.address("runs/owt") == f"{storage.root}/runs/owt"
    assert inner.write("a/b", b"x").path == "a/b"
    assert storage.list() == ["runs/owt/a/b"]
    assert open_storage(inner.root) == inner
    assert inner.within("") == inner


def test_a_storage_travels_to_other_processes(storage: Storage) -> None:
    storage.write("file", b"x")
    assert pickle.loads(pickle.dumps(storage)).read("file") == b"x"


NAMES = st.text(st.characters(exclude_categories=["C"], exclude_characters="/\\"), min_size=1, max_size=12).filter(
    lambda name: name not in {".", ".."} and not name.endswith(".partial")
)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(NAMES | st.sampled_from(["", ".", ".."]), min_size=1, max_size=6), absolute=st.booleans())
def test_no_path_leads_out_of_the_root(storage: Storage, parts: list[str], absolute: bool) -> None:
    path = "/" * absolute + "/".join(parts)
    if path.startswith("/") or ".." in parts:
        verbs = (storage.list, storage.exists, storage.read, storage.stat, storage.remove, storage.within)
        for verb in verbs:
            with pytest.raises(UserError, match="leaves the storage's root"):
                verb(path)
        with pytest.raises(UserError, match="leaves the storage's root"):
            storage.write(path, b"x")
        with pytest.raises(UserError, match="leaves the storage's root"):
            storage.upload(Path(__file__), path)
    else:
        tidy = [part for part in parts if part not in {"", "."}]
        assert storage.address(path) == "/".join([storage.root, *tidy])


@pytest.mark.parametrize("path", ["", ".", "a\nb", "a\0b", "folder/.0123.partial"])
def test_names_that_one_of_the_storages_cannot_hold_are_refused_by_both(storage: Storage, path: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(path))):
        storage.write(path, b"x")
    assert storage.list() == []


# --- addresses --------------------------------------------------------------------------------------------------------


def test_a_local_address_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_storage("runs/../data/") == LocalStorage(root=str(tmp_path / "data"))
    assert open_storage("~/data").root == str(tmp_path / "home" / "data")


def test_what_lies_on_this_machine_has_a_path_and_what_lies_in_a_bucket_a_page(tmp_path: Path) -> None:
    local, bucket = open_storage(str(tmp_path)), open_storage("gs://my-bucket/runs")
    assert (local.local_path(), local.local_path("a/b")) == (tmp_path, tmp_path / "a" / "b")
    assert bucket.local_path("a/b") is None
    assert local.browse_url("report.html") is None
    assert bucket.browse_url("a/report.html") == "https://storage.cloud.google.com/my-bucket/runs/a/report.html"


@pytest.mark.parametrize(
    ("address", "remote", "bucket"),
    [
        ("gs://bucket/a/b", True, "bucket/a/b"),
        ("hf://datasets/owner/name", True, None),
        ("/folder/gs:/x", False, None),
        ("gs", False, None),
    ],
)
def test_an_address_says_whether_it_is_remote_and_what_it_is_in_a_bucket(
    address: str, remote: bool, bucket: str | None
) -> None:
    assert (is_remote(address), bucket_path(address)) == (remote, bucket)


def test_a_bucket_address_is_tidied() -> None:
    assert open_storage("gs://my-bucket").root == "gs://my-bucket"
    assert open_storage("gs://my-bucket/a//b/").root == "gs://my-bucket/a/b"
    assert open_storage("gs://my-bucket").address("x") == "gs://my-bucket/x"


@pytest.mark.parametrize(
    "address", ["s3://bucket/x", "https://storage.googleapis.com/b/o", "file:///data", "gs:/lost/a/slash"]
)
def test_other_schemes_are_refused_and_the_supported_ones_named(address: str) -> None:
    with pytest.raises(UserError, match=r"gs://bucket/prefix nor a local path"):
        open_storage(address)


@pytest.mark.parametrize("address", ["gs://", "gs:///prefix", "gs://Upper/x", "gs://ab", "", " ", "~no-such-user/x"])
def test_addresses_that_name_nothing_are_refused(address: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(address)) if address.strip() else "empty"):
        open_storage(address)


@pytest.mark.parametrize("address", ["/", "gs://whole-bucket"])
def test_everything_there_is_will_not_be_removed(address: str) -> None:
    with pytest.raises(UserError, match="will not remove everything"):
        open_storage(address).remove("")


def test_the_bucket_client_is_loaded_only_where_a_bucket_is_used() -> None:
    opened = "import sys, litgpt_demo.storage as s; s.open_storage('gs://bucket/x')"
    program = f"{opened}; print('google.cloud.storage' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


# --- a local folder ---------------------------------------------------------------------------------------------------


def test_a_writer_killed_in_the_middle_leaves_the_old_content(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "root"))
    storage.write("state", b"old")
    os.mkfifo(tmp_path / "source")
    program = f"""
        from pathlib import Path
        from litgpt_demo.storage import open_storage
        open_storage({storage.root!r}).upload(Path({str(tmp_path / "source")!r}), "state")
    """
    writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    try:
        with (tmp_path / "source").open("wb") as source:  # opens when the writer does
            source.write(bytes(8 << 20))
            source.flush()
            until(lambda: sum(file.stat().st_size for file in (tmp_path / "root").glob(".*.partial")) > 4 << 20)
            writer.kill()
            assert writer.wait() == -signal.SIGKILL
    finally:
        writer.kill()
    assert storage.read("state") == b"old"
    assert storage.list() == ["state"]
    storage.remove("")
    assert not (tmp_path / "root").exists()


def test_a_reader_beside_two_writers_sees_only_whole_versions(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    versions = [bytes([number]) * 200_000 for number in (1, 2)]
    storage.write("config.json", versions[0])
    done = Event()

    def keep_writing(version: bytes) -> None:
        while not done.is_set():
            storage.write("config.json", version)

    writers = [Thread(target=keep_writing, args=[version]) for version in versions]
    for writer in writers:
        writer.start()
    try:
        seen = [(storage.read("config.json"), storage.list()) for _ in range(50)]
    finally:
        done.set()
        for writer in writers:
            writer.join()
    assert all(content in versions and names == ["config.json"] for content, names in seen)


def test_a_full_disk_is_a_node_fault_with_the_arithmetic(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "root"))
    storage.write("state", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # no file of this process may grow past 1 MiB
    try:
        with pytest.raises(DiskFull, match=rf"{storage.address('state')}.*3145728 bytes are needed, \d+ are free"):
            storage.write("state", bytes(3 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert storage.read("state") == b"old"
    assert [file.name for file in (tmp_path / "root").iterdir()] == ["state"]


def test_a_file_where_a_folder_is_needed_is_a_user_error(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.write("runs", b"a file")
    with pytest.raises(UserError, match=re.escape(storage.address("runs/config.json"))):
        storage.write("runs/config.json", b"x")
    storage.write("data/a", b"x")
    with pytest.raises(UserError, match=re.escape(storage.address("data"))):
        storage.write("data", b"x")
    assert storage.list() == ["data/a", "runs"]


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs Linux's sysfs, where even root may not make files")
def test_a_refused_write_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"/sys/kernel/config.json: .*owner and mode"):
        open_storage("/sys/kernel").write("config.json", b"x")


def test_moving_across_file_systems_copies(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    source = elsewhere / f"litgpt-{uuid4().hex}"
    source.write_bytes(b"shard")
    try:
        stored = open_storage(str(tmp_path)).upload(source, "shard", move=True)
        assert not source.exists()
    finally:
        source.unlink(missing_ok=True)
    assert stored == open_storage(str(tmp_path)).stat("shard")


def test_files_are_as_readable_as_the_umask_says(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        open_storage(str(tmp_path)).write("shared", b"x")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o640


def test_linked_folders_are_listed_and_outlive_the_removal_of_the_link(tmp_path: Path) -> None:
    dataset, run = open_storage(str(tmp_path / "dataset")), open_storage(str(tmp_path / "run"))
    dataset.write("manifest.json", b"{}")
    run.write("config.json", b"{}")
    (tmp_path / "run" / "data").symlink_to(tmp_path / "dataset")
    (tmp_path / "run" / "broken").symlink_to(tmp_path / "nowhere")
    assert run.list() == ["config.json", "data/manifest.json"]
    run.remove("broken")
    assert not (tmp_path / "run" / "broken").is_symlink()
    run.remove("")
    assert not (tmp_path / "run").exists()
    assert dataset.list() == ["manifest.json"]


# --- a bucket that fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("do", ["refuse", "lose", "shorten", "flip request"])
def test_an_upload_survives_a_fault(faulty: BucketStorage, proxy: FaultyBucket, do: str, size: int) -> None:
    data = os.urandom(size)
    faulty.write("train.bin", b"old")
    proxy.arm(Fault(on="upload", do=do))
    stored = faulty.write("train.bin", data)
    assert faulty.read("train.bin") == data
    assert faulty.stat("train.bin") == stored


@pytest.mark.parametrize("do", ["refuse", "lose", "cut", "flip"])
def test_a_download_survives_a_fault(faulty: BucketStorage, proxy: FaultyBucket, tmp_path: Path, do: str) -> None:
    data = os.urandom(3 << 20)
    stored = faulty.write("train.bin", data)
    proxy.arm(Fault(on="download", do=do))
    assert faulty.download("train.bin", tmp_path / "train.bin") == stored
    assert (tmp_path / "train.bin").read_bytes() == data
    proxy.arm(Fault(on="download", do=do))
    assert faulty.read("train.bin") == data


def test_corruption_of_what_was_resumed_is_noticed(faulty: BucketStorage, proxy: FaultyBucket, tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    faulty.write("train.bin", data)
    proxy.arm(Fault(on="download", do="cut"), Fault(on="download", do="flip"))
    faulty.download("train.bin", tmp_path / "train.bin")
    assert (tmp_path / "train.bin").read_bytes() == data
    assert proxy.seen.count("download") == 3


def test_bytes_that_stay_wrong_are_an_error_and_no_file(
    faulty: BucketStorage, proxy: FaultyBucket, tmp_path: Path
) -> None:
    faulty.write("train.bin", os.urandom(SMALL))
    (tmp_path / "old").write_bytes(b"good")
    proxy.arm(Fault(on="download", do="flip", times=FOREVER))
    for target in ("new", "old"):
        with pytest.raises(DataError, match=re.escape(faulty.address("train.bin"))):
            faulty.download("train.bin", tmp_path / target)
    with pytest.raises(DataError, match="did not come out right"):
        faulty.read("train.bin")
    assert [file.name for file in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_bytes() == b"good"


def test_an_upload_that_always_arrives_damaged_never_shows(faulty: BucketStorage, proxy: FaultyBucket) -> None:
    faulty.write("state", b"old")
    proxy.arm(Fault(on="upload", do="flip request", times=FOREVER))
    with pytest.raises(DataError, match=re.escape(faulty.address("state"))):
        faulty.write("state", os.urandom(SMALL))
    assert faulty.read("state") == b"old"


def test_a_source_that_changes_under_the_upload_never_shows(
    faulty: BucketStorage, proxy: FaultyBucket, tmp_path: Path
) -> None:
    faulty.write("state", b"old")
    proxy.arm()
    source = tmp_path / "source"
    os.mkfifo(source)

    def be_something_else_each_time_it_is_read() -> None:
        for times_read in range(6):  # to sum it up, then for five tries, each of which begins with a look
            until(lambda: proxy.seen.count("look") >= times_read)  # noqa: B023 (called at once)
            source.write_bytes(bytes([times_read]) * SMALL)

    Thread(target=be_something_else_each_time_it_is_read, daemon=True).start()
    with pytest.raises(DataError, match=re.escape(faulty.address("state"))):
        faulty.upload(source, "state")
    assert faulty.read("state") == b"old"


@pytest.mark.parametrize("do", ["refuse", "lose", "shorten"])
def test_looks_and_removals_survive_a_fault(faulty: BucketStorage, proxy: FaultyBucket, do: str) -> None:
    faulty.write("a/b", b"x")
    proxy.arm(Fault(on="look", do=do))
    assert faulty.list() == ["a/b"]
    proxy.arm(Fault(on="look", do=do))
    assert faulty.stat("a/b").size == 1
    proxy.arm(Fault(on="delete", do=do))
    faulty.remove("a")
    assert faulty.list() == []


def test_a_late_request_does_not_land_on_a_newer_object(faulty: BucketStorage, proxy: FaultyBucket) -> None:
    faulty.write("metrics.jsonl", b"1\n")
    proxy.arm(Fault(on="upload", do="hold"))  # never answered, so sent again
    faulty.write("metrics.jsonl", b"1\n2\n")
    faulty.write("metrics.jsonl", b"1\n2\n3\n")
    assert proxy.release() == [412]
    assert faulty.read("metrics.jsonl") == b"1\n2\n3\n"


def test_of_two_creators_exactly_the_one_that_came_first_wins(faulty: BucketStorage, proxy: FaultyBucket) -> None:
    others: list[bool] = []
    proxy.arm(
        Fault(on="upload", do="overtake", meanwhile=lambda: others.append(faulty.create("attempt.json", b"theirs")))
    )
    assert not faulty.create("attempt.json", b"mine")
    assert others == [True]
    assert faulty.read("attempt.json") == b"theirs"


@pytest.mark.parametrize("before", [True, False], ids=["replaced", "made"])
def test_a_manifest_that_another_writes_between_the_look_and_the_commit_is_replaced_whole(
    faulty: BucketStorage, proxy: FaultyBucket, before: bool
) -> None:
    if before:
        faulty.write("manifest.json", b"first")
    others: list[ObjectInfo] = []
    proxy.arm(
        Fault(on="upload", do="overtake", meanwhile=lambda: others.append(faulty.write("manifest.json", b"theirs")))
    )
    mine = faulty.write("manifest.json", b"mine")
    assert len(others) == 1
    # The first try is refused (412): it looks again, and what it replaces is what it saw.
    assert proxy.seen.count("upload") == 3
    assert faulty.stat("manifest.json") == mine
    assert faulty.read("manifest.json") == b"mine"


def test_a_manifest_that_is_replaced_while_it_is_read_comes_whole(faulty: BucketStorage, proxy: FaultyBucket) -> None:
    faulty.write("manifest.json", b"a longer first one")
    proxy.arm(Fault(on="download", do="overtake", meanwhile=lambda: faulty.write("manifest.json", b"theirs")))
    assert faulty.read("manifest.json") == b"theirs"
    assert proxy.seen.count("download") == 2


def test_a_manifest_that_is_replaced_while_it_is_removed_goes_too(faulty: BucketStorage, proxy: FaultyBucket) -> None:
    faulty.write("run/manifest.json", b"first")
    proxy.arm(Fault(on="delete", do="overtake", meanwhile=lambda: faulty.write("run/manifest.json", b"theirs")))
    faulty.remove("run")
    assert proxy.seen.count("delete") == 2
    assert faulty.list() == []


def test_a_late_removal_does_not_take_a_newer_object(faulty: BucketStorage, proxy: FaultyBucket) -> None:
    faulty.write("metrics.jsonl", b"1\n")
    proxy.arm(Fault(on="delete", do="hold"))  # never answered, so sent again
    faulty.remove("metrics.jsonl")
    faulty.write("metrics.jsonl", b"2\n")
    assert proxy.release() == [412]
    assert faulty.read("metrics.jsonl") == b"2\n"


def test_what_is_there_already_is_not_sent_again(faulty: BucketStorage, proxy: FaultyBucket) -> None:
    first = faulty.write("train.bin", b"tokens")
    proxy.arm()
    assert faulty.write("train.bin", b"tokens") == first
    assert proxy.seen == ["look"]


def test_what_is_created_takes_one_request(faulty: BucketStorage, proxy: FaultyBucket) -> None:
    proxy.arm()
    assert faulty.create("attempt.json", b"first")
    assert proxy.seen == ["upload"]
    assert not faulty.create("attempt.json", b"second")
    assert faulty.read("attempt.json") == b"first"


def test_a_bucket_that_does_not_answer_is_a_network_fault(
    faulty: BucketStorage, proxy: FaultyBucket, tmp_path: Path
) -> None:
    hasty = replace(faulty, patience=0.1)
    faulty.write("state", b"x")
    proxy.arm(*[Fault(on=on, do="refuse", times=FOREVER) for on in ("look", "upload", "download", "delete")])
    verbs: list[Callable[[], object]] = [
        lambda: hasty.read("state"),
        lambda: hasty.write("state", b"y"),
        lambda: hasty.list(),
        lambda: hasty.remove("state"),
        lambda: hasty.download("state", tmp_path / "target"),
    ]
    for verb in verbs:
        with pytest.raises(NetworkError, match=re.escape(f"{hasty.root}")):
            verb()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_removal_takes_the_manifest_first(faulty: BucketStorage, proxy: FaultyBucket) -> None:
    for path in ("step-1/a.distcp", "step-1/manifest.json", "step-1/z.distcp"):
        faulty.write(path, b"x")
    proxy.arm(Fault(on="delete", do="refuse", skip=1, times=FOREVER))
    with pytest.raises(NetworkError):
        replace(faulty, patience=0.1).remove("step-1")
    assert faulty.list() == ["step-1/a.distcp", "step-1/z.distcp"]


def test_a_missing_bucket_is_a_user_error_for_every_verb(emulator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator)
    storage = open_storage("gs://no-such-bucket/runs")
    for verb in (storage.list, storage.exists, storage.read, storage.stat, storage.remove):
        with pytest.raises(UserError, match=r"no bucket 'no-such-bucket'.*buckets create gs://no-such-bucket"):
            verb("x")
    with pytest.raises(UserError, match="no bucket 'no-such-bucket'"):
        storage.write("x", b"x")
    with pytest.raises(UserError, match="no bucket 'no-such-bucket'"):
        storage.upload(Path(__file__), "x")


def test_a_refusal_names_bucket_role_and_command(faulty: BucketStorage, proxy: FaultyBucket) -> None:
    proxy.arm(Fault(on="look", do="refuse", status=403, times=FOREVER))
    with pytest.raises(UserError, match=r"drill-bucket refused.*gs://drill-bucket .*role=roles/storage.objectViewer"):
        faulty.read("state")
    proxy.arm(Fault(on="upload", do="refuse", status=403, times=FOREVER))
    with pytest.raises(UserError, match=r"/state: bucket drill-bucket refused.*role=roles/storage.objectUser"):
        faulty.write("state", b"x")


def test_missing_credentials_are_a_user_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "gone.json"))
    with pytest.raises(UserError, match="gcloud auth application-default login"):
        open_storage("gs://drill-bucket/x").list()


def test_missing_credentials_are_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(UserError, match=r"no usable credentials: Your default credentials were not found") as refused:
        open_storage("gs://drill-bucket/x").list()
    assert str(refused.value).endswith("for more information; run `gcloud auth application-default login`")


def test_foreign_names_that_no_path_reaches_are_left_out(bucket: BucketStorage) -> None:
    bucket.write("a/file", b"x")
    for name in ("a/", "a//b"):  # the console's mark of a folder, and a name with an empty part
        bucket._objects._handle.blob(bucket._name("") + "/" + name).upload_from_string(b"")
    assert bucket.list() == ["a/file"]


def test_an_inventory_is_the_list_with_sizes_and_checksums(storage: Storage) -> None:
    written = [storage.write(path, path.encode()) for path in ("a/10", "a/2", "a/deep/x", "b")]
    assert storage.inventory() == sorted(written, key=lambda stored: stored.path)
    assert storage.inventory("a") == written[:3]
    assert storage.inventory("missing") == []


@pytest.mark.parametrize("count", [0, 1, 2, 33])
def test_files_are_joined_in_the_order_given_and_stay(storage: Storage, count: int) -> None:
    parts = {f"shards/{number:05d}": bytes([number]) * number for number in reversed(range(count))}
    for path, data in parts.items():
        storage.write(path, data)
    whole = storage.join(list(parts), "train.bin")
    assert storage.read("train.bin") == b"".join(parts.values())
    assert storage.stat("train.bin") == whole
    assert storage.list() == [*sorted(parts), "train.bin"]


def test_a_part_that_is_not_there_is_named(storage: Storage) -> None:
    storage.write("a", b"x")
    with pytest.raises(FileNotFoundError, match=re.escape(storage.address("b"))):
        storage.join(["a", "b"], "whole")
    assert storage.list() == ["a"]
