"""Remote files: fetched once, by one process, taken up where they broke off, and listed without asking for each."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bucket_emulator import bucket_emulator
from bucket_faults import Fault, FaultyBucket, faulty_bucket
from hub_server import Hub, Repository, running_hub
from waiting import until
from written import as_jsonl, as_parquet, files, read, write

from litgpt_demo.config import HubCorpus
from litgpt_demo.data.corpus import Shard, forget, plan_shards, read_shard, sources
from litgpt_demo.errors import DataError, DiskFull, UserError
from litgpt_demo.storage import Storage, open_storage

TEXTS = [f"{number} " + "word " * 1000 for number in range(300)]
CORPUS = HubCorpus(kind="hub", name="someone/corpus")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    content = as_parquet(TEXTS, compression="none")
    with running_hub({CORPUS.name: Repository(files={"a.parquet": content}, large={"a.parquet"})}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield running


def only_shard() -> Shard:
    (shard,) = plan_shards(CORPUS, sources(CORPUS))
    return shard


def texts_of(shard: Shard, scratch: Path) -> list[str]:
    found = read_shard(CORPUS, shard, scratch=scratch, skip_bad=False)
    return [text for batch in found for text in batch.texts.to_pylist()]


# --- fetched once -----------------------------------------------------------------------------------------------------


def test_threads_that_want_one_file_fetch_it_once(hub: Hub, tmp_path: Path) -> None:
    shard = only_shard()
    hub.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        readings = [pool.submit(texts_of, shard, tmp_path) for _ in range(4)]
        until(lambda: bool(hub.starts))
        time.sleep(0.2)
        hub.gate.set()
        assert [reading.result() for reading in readings] == [TEXTS] * 4
    assert hub.starts == [0]


READ = """
import sys
from pathlib import Path
from litgpt_demo.config import HubCorpus
from litgpt_demo.data.corpus import plan_shards, read_shard, sources
corpus = HubCorpus(kind="hub", name="someone/corpus")
(shard,) = plan_shards(corpus, sources(corpus))
print(sum(len(batch.texts) for batch in read_shard(corpus, shard, scratch=Path(sys.argv[1]), skip_bad=False)))
"""


def reader(scratch: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", READ, str(scratch)], stdout=subprocess.PIPE, text=True)


@pytest.mark.long
def test_of_processes_that_want_one_file_the_next_goes_on_where_a_killed_one_was(hub: Hub, tmp_path: Path) -> None:
    # huggingface_hub keeps what has come by the 10 MB.
    content = as_parquet(["word " * 100_000] * 60, compression="none", dictionary=False)
    hub.repositories[CORPUS.name] = Repository(files={"a.parquet": content}, large={"a.parquet"})
    hub.gate.clear()
    first = reader(tmp_path)
    until(lambda: bool(hub.starts))
    other = reader(tmp_path)
    until(lambda: any(path.stat().st_size >= 10_000_000 for path in tmp_path.rglob("*.incomplete")))
    first.kill()
    first.communicate()
    hub.gate.set()
    assert other.communicate()[0].strip() == "60"
    assert hub.starts == [0, 10_485_760]


def test_what_was_fetched_and_spoiled_since_is_refused_once_and_fetched_anew(hub: Hub, tmp_path: Path) -> None:
    shard = only_shard()
    assert texts_of(shard, tmp_path) == TEXTS
    (content,) = tmp_path.rglob("content")
    content.write_bytes(content.read_bytes().replace(b"7 word", b"8 word"))
    with pytest.raises(DataError, match=r"a\.parquet has sha256"):
        texts_of(shard, tmp_path)
    assert texts_of(shard, tmp_path) == TEXTS
    assert hub.starts == [0, 0]


def test_what_is_forgotten_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    shard = only_shard()
    forget(sources(CORPUS), tmp_path)  # nothing there yet
    assert texts_of(shard, tmp_path) == TEXTS
    forget(sources(CORPUS), tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == 0
    assert texts_of(shard, tmp_path) == TEXTS
    assert hub.starts == [0, 0]


def test_a_disk_too_small_for_a_file_is_explained_and_nothing_taken_for_whole(hub: Hub, tmp_path: Path) -> None:
    shard = only_shard()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(DiskFull, match=r"bytes are needed, \d+ are free; make room"):
            texts_of(shard, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert texts_of(shard, tmp_path) == TEXTS


# --- a bucket ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyBucket]:
    with bucket_emulator("corpora") as host, faulty_bucket(host) as running:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.url)
        yield running


@pytest.fixture
def bucket(proxy: FaultyBucket) -> Storage:
    return open_storage("gs://corpora")


def test_the_files_of_a_bucket_are_listed_without_asking_for_each(
    proxy: FaultyBucket, bucket: Storage, tmp_path: Path
) -> None:
    contents = {f"{number:02}.txt": b"text %d" % number for number in range(20)}
    for name, data in contents.items():
        bucket.write(f"texts/{name}", data)
    proxy.arm()
    listed = sources(files("gs://corpora/texts/*.txt"))
    assert len(proxy.seen) <= 3
    here = sources(files(write(tmp_path, contents)))
    assert [(one.name, one.size, one.version) for one in listed] == [(one.name, one.size, one.version) for one in here]


@pytest.mark.parametrize("do", ["refuse", "cut", "flip", "hold"])
def test_a_bucket_that_falters_in_the_middle_gives_the_right_text(
    proxy: FaultyBucket, bucket: Storage, tmp_path: Path, do: str
) -> None:
    bucket.write("a.jsonl", as_jsonl(TEXTS))
    proxy.arm(Fault(on="download", do=do))  # type: ignore[arg-type]
    assert read(files("gs://corpora/a.jsonl"), tmp_path) == TEXTS
    assert proxy.seen.count("download") > 1


def test_a_bucket_that_is_not_there_is_the_users_error(bucket: Storage) -> None:
    with pytest.raises(UserError, match="gs://elsewhere"):
        sources(files("gs://elsewhere/texts"))
