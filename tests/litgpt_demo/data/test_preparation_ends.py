"""Preparations that are killed, by the operating system and at once, go on where they were."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from corpora import as_jsonl, as_parquet, contents, cut_into, large_vocabulary, settings_for, write

from litgpt_demo.config import Filters
from litgpt_demo.data.dataset import finished_dataset, plan_dataset
from litgpt_demo.data.preparation import in_threads, prepare
from litgpt_demo.storage import open_storage

SHARD = 5_000
"""Stored bytes."""

# What `python -m litgpt_demo prepare` does, with smaller shards, until it would give a file such a name the n-th time.
PROGRAM = """
import fnmatch, os, signal, sys
from litgpt_demo.data.corpus import shards
shards._SMALLEST = shards._LARGEST = int(sys.argv[1])
left = int(sys.argv[3])
def hook(event, arguments):
    global left
    if event in ("os.rename", "os.link") and fnmatch.fnmatch(os.path.basename(arguments[1]), sys.argv[2]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
from litgpt_demo.__main__ import main
main(["prepare", *sys.argv[4:]])
"""


def noted(shards: Path) -> dict[str, tuple[int, int]]:
    """The ledger's records: which file each is, so that another of the same name can be told from it."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in shards.glob("[0-9]*.json")}


def test_a_preparation_killed_again_and_again_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    texts = [f"{number % 90} {'word ' * (number % 90)}" for number in range(600)]
    corpus = {"a.parquet": as_parquet(texts[:300], compression="none"), "b.jsonl": as_jsonl(texts[300:])}
    planned = plan_dataset(
        settings_for(
            write(tmp_path / "corpus", corpus),
            tokenizer={"kind": "file", "path": str(large_vocabulary(tmp_path / "tokenizer"))},
            filters=Filters(drop_duplicates=True, min_characters=40),
        )
    )
    root = tmp_path / "root"
    shards, before = root / planned.path / "shards", dict[str, tuple[int, int]]()
    for last_file, count in (("[0-9]*.json", 9), ("[0-9]*.json", 50), ("manifest.json", 1)):
        asked = [last_file, str(count), "--root", str(root), "--data", planned.data.model_dump_json()]
        ended = subprocess.run([sys.executable, "-c", PROGRAM, str(SHARD), *asked], stdout=subprocess.DEVNULL)
        assert ended.returncode == -signal.SIGKILL
        assert finished_dataset(open_storage(str(root)), planned) is None
        now = noted(shards)
        assert {name: now.get(name) for name in before} == before, "what was noted is not made again"
        assert len(now) > len(before)
        before = now
    with cut_into(SHARD):
        prepare(planned, open_storage(str(root)))
        prepare(planned, open_storage(str(tmp_path / "other")), each=in_threads(1))
    assert contents(root) == contents(tmp_path / "other")
