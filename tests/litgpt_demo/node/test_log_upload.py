from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from bucket_emulator import bucket_emulator
from test_node import free_port
from waiting import until

from litgpt_demo.node.log_upload import LogUploader
from litgpt_demo.storage import Storage, open_storage


@pytest.fixture(scope="module")
def emulator() -> Iterator[str]:
    with bucket_emulator("kept") as address:
        yield address


@pytest.fixture(params=["folder", "bucket"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """Where logs are kept."""
    if request.param == "folder":
        return open_storage(str(tmp_path / "kept"))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", request.getfixturevalue("emulator"))
    return open_storage(f"gs://kept/{uuid4().hex}/attempts/1")


def node_folder(tmp_path: Path) -> Path:
    """What a node leaves, and the dataset that it has staged."""
    directory = tmp_path / "d"
    files = {
        "node-0.log": "hello\n",
        "node-0/ranks/r_x/attempt_0/0/stderr.log": "Traceback",
        "node-0/network.json": "{}",
        "node-0/data/train.bin": "tokens",
        "node-0/heartbeats/0.json": "{}",
        "node-0/.writable": "",
        "node-1.log": "another node's",
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def test_logs_and_error_files_outlive_the_machine_and_data_does_not(tmp_path: Path, target: Storage) -> None:
    directory = node_folder(tmp_path)
    with LogUploader(directory, target.address(), 0, interval=0.2):
        until(lambda: target.exists("node-0.log"))
        (directory / "node-0.log").write_text("hello\nand more\n")
        until(lambda: target.read("node-0.log") == b"hello\nand more\n")
        (directory / "node-0.json").write_text('{"exit_code": 43}')
    assert target.list() == [
        "node-0.json", "node-0.log", "node-0/network.json", "node-0/ranks/r_x/attempt_0/0/stderr.log",
    ]  # fmt: skip
    assert target.read("node-0.json") == b'{"exit_code": 43}'


@pytest.mark.parametrize("told", [0, 1])  # by JobSet, and by nobody
def test_what_the_job_left_before_its_restart_is_set_aside(tmp_path: Path, target: Storage, told: int) -> None:
    directory = node_folder(tmp_path)
    target.write("node-0.json", b"the end of the first life")
    target.write("node-0.log", b"the first life")
    target.write("node-1.json", b"another node's")
    with LogUploader(directory, target.address(), 0, life=told):
        pass
    assert target.read("restart-0/node-0.json") == b"the end of the first life"
    assert target.read("restart-0/node-0.log") == b"the first life"
    assert target.read("node-0.log") == b"hello\n"
    assert not target.exists("node-0.json")
    assert target.read("node-1.json") == b"another node's"
    with LogUploader(directory, target.address(), 0, life=told and 2):
        pass
    assert target.read("restart-1/node-0.log") == b"hello\n"
    assert target.read("restart-0/node-0.log") == b"the first life"


def test_a_long_log_is_not_copied_at_every_look_but_at_the_end(tmp_path: Path) -> None:
    directory, target = node_folder(tmp_path), open_storage(str(tmp_path / "kept"))
    log = directory / "node-0.log"
    log.write_bytes(b"x" * 20 * 2**20)
    uploader = LogUploader(directory, target.address(), 0)
    sizes = []
    for _ in range(6):
        with log.open("ab") as file:
            file.write(b"y")
        uploader.copy()
        sizes.append(target.stat("node-0.log").size if target.exists("node-0.log") else 0)
    assert len(set(sizes) - {0}) == 2  # at every third look, for it is between two and three times 8 MiB
    uploader.copy(last=True)
    assert target.stat("node-0.log").size == log.stat().st_size


def test_a_place_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with LogUploader(node_folder(tmp_path), str(tmp_path / "file" / "kept"), 0):
        pass
    assert "warning [node.log-uri] logs could not be copied" in capsys.readouterr().out


@pytest.mark.training
def test_a_node_keeps_its_whole_log_its_ranks_output_and_its_report(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("print('from the rank')\nraise SystemExit(41)")
    kept = tmp_path / "kept"
    own = f"--nodes 1 --node-rank 0 --processes 1 --master 127.0.0.1:{free_port()} --run-id r --directory d --grace 5"
    command = [sys.executable, "-m", "litgpt_demo", "node", *own.split(), "--log-uri", str(kept), "--", "rank.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 41
    assert (kept / "node-0.log").read_text() == done.stdout
    assert "[rank0]:from the rank" in done.stdout
    assert "node 0 ends with 41 (data error)" in done.stdout
    assert json.loads((kept / "node-0.json").read_text())["fault"] == "data error"
    assert [path.read_text() for path in kept.glob("node-0/ranks/*/attempt_0/0/stdout.log")] == ["from the rank\n"]
