"""Preparations that are killed, or whose bucket fails, go on where they were."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from bucket_faults import FOREVER, FailureClass, FaultyBucket
from corpora import (
    FORMATS,
    as_jsonl,
    as_parquet,
    contents,
    corpus_in,
    cut_into,
    large_vocabulary,
    of_each,
    settings_for,
    write,
)

from litgpt_demo.config import Filters
from litgpt_demo.data import workers
from litgpt_demo.data.dataset import PlannedDataset, finished_dataset, plan_dataset, stage
from litgpt_demo.data.preparation import in_threads, prepare
from litgpt_demo.data.workers import PrepContext
from litgpt_demo.errors import UserError
from litgpt_demo.storage import BucketStorage, open_storage

SHARD = 5_000
"""Stored bytes."""

# What `python -m litgpt_demo prepare` does, with smaller shards, until it would give a file such a name the n-th time.
PROGRAM = """
import fnmatch, os, signal, sys
from litgpt_demo.data import shards
shards._SMALLEST = shards._LARGEST = int(sys.argv[1])
remaining = int(sys.argv[3])
def hook(event, arguments):
    global remaining
    if event in ("os.rename", "os.link") and fnmatch.fnmatch(os.path.basename(arguments[1]), sys.argv[2]):
        remaining -= 1
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
from litgpt_demo.__main__ import main
main(["prepare", *sys.argv[4:]])
"""


def test_preparation_killed_repeatedly_makes_the_same_bytes(tmp_path: Path) -> None:
    texts = [f"{number % 90} {'word ' * (number % 90)}" for number in range(600)]
    corpus = {"a.parquet": as_parquet(texts[:300], compression="none"), "b.jsonl": as_jsonl(texts[300:])}
    tokenizer = {"kind": "file", "path": str(large_vocabulary(tmp_path / "tokenizer"))}
    filters = Filters(drop_duplicates=True, min_characters=40)
    source, root = write(tmp_path / "corpus", corpus), tmp_path / "root"
    planned = plan_dataset(settings_for(source, of_each(source), tokenizer=tokenizer, filters=filters))
    before = dict[str, tuple[int, int]]()
    for last_file, count in (("[0-9]*.json", 9), ("[0-9]*.json", 50), ("manifest.json", 1)):
        arguments = [last_file, str(count), "--root", str(root), "--data", planned.data.model_dump_json()]
        ended = subprocess.run([sys.executable, "-c", PROGRAM, str(SHARD), *arguments], stdout=subprocess.DEVNULL)
        assert ended.returncode == -signal.SIGKILL
        assert finished_dataset(open_storage(str(root)), planned) is None
        noted = {path.name: path.stat() for path in (root / planned.path / "shards").glob("[0-9]*.json")}
        now = {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in noted.items()}
        assert now.items() > before.items(), "what was noted is not made again"
        before = now
    with cut_into(SHARD):
        prepare(planned, open_storage(str(root)))
        prepare(planned, open_storage(str(tmp_path / "other")), map_steps=in_threads(1))
    assert contents(root) == contents(tmp_path / "other")


@pytest.fixture
def planned(tmp_path: Path) -> PlannedDataset:
    tokenizer = {"kind": "file", "path": str(large_vocabulary(tmp_path / "tokenizer"))}
    return plan_dataset(settings_for(corpus_in(tmp_path / "corpus"), tokenizer=tokenizer))


@pytest.fixture
def local(planned: PlannedDataset, tmp_path: Path) -> dict[str, bytes]:
    """The files of the same dataset in a local root, by their path below it."""
    prepare(planned, open_storage(str(tmp_path / "local")))
    return contents(tmp_path / "local")


# None may wait on this machine's disk, as where workers are on other machines; or all may.
@pytest.mark.parametrize(("seed", "waiting"), [(1, 0), (2, 1000)])
def test_preparation_is_right_when_requests_fail(
    proxy: FaultyBucket, bucket: BucketStorage, planned: PlannedDataset, local: dict[str, bytes], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, seed: int, waiting: int,
) -> None:  # fmt: skip
    """One request in five fails; no other file is left."""
    monkeypatch.setattr(workers, "_WAITING", waiting)
    proxy.arm(chance=Random(seed))
    with cut_into(1200):
        prepare(planned, bucket, map_steps=in_threads(4))
    staged = stage(bucket.address(planned.path), tmp_path / "scratch")
    assert proxy.objects() == local
    assert {f"{planned.path}/{name}": content for name, content in contents(staged).items()} == local
    assert not PrepContext(data=planned.data, root=bucket.root, path=planned.path).scratch.exists()


@pytest.mark.parametrize("end", [".parquet", ".jsonl"])
def test_copies_of_a_corpus_are_freed_when_disk_is_short(
    bucket: BucketStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Only the files that workers are reading are on the disk."""
    for number in range(9):
        bucket.write(f"corpus/{number}{end}", FORMATS[end]([f"{number} {'word ' * 500}", f"{number} another"]))
    tokenizer = {"kind": "file", "path": str(large_vocabulary(tmp_path / "tokenizer"))}
    planned = plan_dataset(settings_for(tmp_path, [bucket.address("corpus")], tokenizer=tokenizer))

    def most_at_once(room: float) -> int:
        monkeypatch.setattr(workers, "_MIN_FREE", room)
        root, copies = tmp_path / str(room), [0]

        def each(step: Any, items: Any) -> Any:
            for result in in_threads(1)(step, items):
                copies.append(sum("content" in files for _, _, files in os.walk(root)))  # some go meanwhile
                yield result

        with cut_into(2_000):
            prepare(planned, open_storage(str(root)), map_steps=each)
        return max(copies)

    assert most_at_once(0.0) == 9
    assert most_at_once(2.0) <= 1
    assert contents(tmp_path / "0.0") == contents(tmp_path / "2.0")


@pytest.mark.parametrize(("kind", "skip"), [("upload", 0), ("upload", 9), ("compose", 1)])
def test_preparation_continues_after_a_bucket_refused(
    proxy: FaultyBucket, bucket: BucketStorage, planned: PlannedDataset, local: dict[str, bytes], kind: Any, skip: int
) -> None:
    """A bucket that refused at once or half way has nothing that looks finished."""
    proxy.arm(FailureClass(on=kind, do="refuse", status=403, times=FOREVER, skip=skip))
    with cut_into(400), pytest.raises(UserError, match=f"bucket {proxy.bucket} refused"):
        prepare(planned, bucket, map_steps=in_threads(2))
    proxy.arm()
    assert finished_dataset(bucket, planned) is None
    assert any(name.endswith(".json") for name in proxy.objects()) == (skip > 0), "something was done, or nothing"
    with cut_into(400):
        prepare(planned, bucket, map_steps=in_threads(2))
    assert proxy.objects() == local
