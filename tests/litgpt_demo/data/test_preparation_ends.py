"""Preparations that end early or meet each other: killed, out of room, two at once; and what memory they take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Barrier

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import contents, cut_into, large_vocabulary, settings_for

from litgpt_demo.config import DataConfig, Filters
from litgpt_demo.data.dataset import DatasetManifest, PlannedDataset, finished_dataset, plan_dataset
from litgpt_demo.data.preparation import in_threads, prepare
from litgpt_demo.errors import EXIT_CODES, DiskFull, Fault
from litgpt_demo.storage import open_storage

SHARD = 100_000
"""Stored bytes."""

# What `python -m litgpt_demo prepare` does, with smaller shards; with files of a limited size; and until it would give
# a file this name.
PROGRAM = """
import os, resource, signal, sys
from litgpt_demo.data.corpus import shards
shards._SMALLEST = shards._LARGEST = int(sys.argv[1])
if limit := int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
def hook(event, arguments):
    if event == "os.rename" and os.path.basename(arguments[1]) == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
from litgpt_demo.__main__ import main
ended = main(["prepare", *sys.argv[4:]])
# Not getrusage's: a process begins with the peak of the one that started it.
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print("peak:", int(peak) << 10)
sys.exit(ended)
"""


def command(data: DataConfig, root: Path, *, shard: int = SHARD, file_limit: int = 0, last_file: str = "") -> list[str]:
    asked = ["--root", str(root), "--data", data.model_dump_json()]
    return [sys.executable, "-c", PROGRAM, str(shard), str(file_limit), last_file, *asked]


def random_texts(folder: Path, size: int) -> Path:
    """Documents of random words, `size` bytes in all: a half in parquet, a half in JSON lines."""
    chance, documents, left = Random(7), [], size
    words = " ".join("".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 9))) for _ in range(100_000))
    while left > 0:
        start, length = chance.randrange(len(words)), chance.randint(10, 3000)
        documents.append(words[start : start + length])
        left -= len(documents[-1])
    folder.mkdir(parents=True)
    first, second = documents[: len(documents) // 2], documents[len(documents) // 2 :]
    pq.write_table(pa.table({"text": first}), folder / "a.parquet", row_group_size=40, compression="none")
    (folder / "b.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in second))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 MB."""
    return random_texts(tmp_path_factory.mktemp("ends") / "corpus", 4_000_000)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"kind": "file", "path": str(large_vocabulary(tmp_path_factory.mktemp("tokenizer"), 300))}


def undisturbed(planned: PlannedDataset, root: Path) -> dict[str, bytes]:
    """Every file of the dataset, made in one go, one shard after the other."""
    prepare(planned, open_storage(str(root)), each=in_threads(1))
    return contents(root)


# --- killed -----------------------------------------------------------------------------------------------------------


def noted(shards: Path) -> dict[str, tuple[int, int]]:
    """The ledger's records: which file each is, so that another of the same name can be told from it."""
    found = {path.name: path.stat() for path in shards.glob("[0-9]*.json")}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}


def killed_when(condition: Callable[[], bool], command: list[str]) -> None:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not condition():
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.0005)
    process.kill()
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("filters", "last_file"),
    [
        pytest.param(Filters(), "train.bin", marks=pytest.mark.long),
        (Filters(drop_duplicates=True, min_characters=40), "manifest.json"),
    ],
)
def test_a_preparation_killed_again_and_again_repeats_one_shard_per_worker_and_ends_with_the_same_bytes(
    source: Path, tokenizer: dict[str, str], tmp_path: Path, filters: Filters, last_file: str
) -> None:
    planned = plan_dataset(settings_for(source, tokenizer=tokenizer, filters=filters))
    root, chance = tmp_path / "root", Random(last_file)
    shards, program = root / planned.path / "shards", command(planned.data, root)
    before = noted(shards)
    for _ in range(2):
        enough = len(before) + chance.randint(1, 12)
        killed_when(lambda: len(noted(shards)) >= enough, program)  # noqa: B023
        assert finished_dataset(open_storage(str(root)), planned) is None
        now = noted(shards)
        assert {name: now.get(name) for name in before} == before
        lost = {path.name[:5] for path in shards.glob("*.train.bin")} - {name[:5] for name in now if len(name) == 10}
        assert len(lost) <= len(os.sched_getaffinity(0))
        before = now
    ended = subprocess.run(command(planned.data, root, last_file=last_file), stdout=subprocess.DEVNULL)
    assert ended.returncode == -signal.SIGKILL
    assert {name: noted(shards).get(name) for name in before} == before
    assert finished_dataset(open_storage(str(root)), planned) is None
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    assert contents(root) == undisturbed(planned, tmp_path / "other")


# --- no room ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_named_with_its_numbers_and_with_more_room_the_preparation_goes_on(
    source: Path, tokenizer: dict[str, str], small_disk: Path, tmp_path: Path
) -> None:
    planned, storage = plan_dataset(settings_for(source, tokenizer=tokenizer)), open_storage(str(small_disk))
    with cut_into(SHARD):
        with pytest.raises(DiskFull, match=r"No space left on device: \d+ bytes are needed, \d+ are free; make room"):
            prepare(planned, storage)
        assert finished_dataset(storage, planned) is None
        done = noted(small_disk / planned.path / "shards")
        assert done
        subprocess.run(["mount", "-o", "remount,size=40m", str(small_disk)], check=True)
        prepare(planned, storage)
    assert contents(small_disk) == undisturbed(planned, tmp_path / "other")


def test_a_file_system_without_large_files_is_named(source: Path, tokenizer: dict[str, str], tmp_path: Path) -> None:
    planned = plan_dataset(settings_for(source, tokenizer=tokenizer))
    program = command(planned.data, tmp_path / "root", file_limit=1_000_000)
    ended = subprocess.run(program, capture_output=True, text=True)
    assert ended.returncode == EXIT_CODES[Fault.DISK_FULL], ended.stderr
    assert "File too large" in ended.stderr
    assert "bytes are needed" in ended.stderr
    assert finished_dataset(open_storage(str(tmp_path / "root")), planned) is None
    with cut_into(SHARD):
        prepare(planned, open_storage(str(tmp_path / "root")))
    assert contents(tmp_path / "root") == undisturbed(planned, tmp_path / "other")


# --- two at once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0.0, 0.1, 0.3])
def test_two_preparations_of_one_dataset_at_once_both_end_well(
    source: Path, tokenizer: dict[str, str], tmp_path: Path, late: float
) -> None:
    planned, root = plan_dataset(settings_for(source, tokenizer=tokenizer)), tmp_path / "root"
    start = Barrier(2)

    def one(delay: float) -> DatasetManifest:
        start.wait()
        time.sleep(delay)
        return prepare(planned, open_storage(str(root)), each=in_threads(2))

    with cut_into(SHARD), ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, (0.0, late))
    assert first == second
    assert contents(root) == undisturbed(planned, tmp_path / "other")


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_preparation_takes_less_than_a_gigabyte_and_a_half(tokenizer: dict[str, str], tmp_path: Path) -> None:
    source = random_texts(tmp_path / "corpus", 60_000_000)
    data = settings_for(source, tokenizer=tokenizer)
    ended = subprocess.run(command(data, tmp_path / "root", shard=4 << 20), capture_output=True, text=True, check=True)
    assert int(ended.stdout.rpartition("peak: ")[2]) < 1_500_000_000
