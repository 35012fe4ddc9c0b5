"""What a node leaves is copied to where it outlives the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from waiting import until

from litgpt_demo.node.log_upload import LogUploader
from litgpt_demo.storage import Storage, open_storage


@pytest.fixture
def target(root: str) -> Storage:
    """Where logs are kept."""
    return open_storage(root)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """What a node leaves, the dataset that it has staged, and another node's log."""
    kept = {
        "node-0.log": "hello\n",
        "node-0/ranks/r_x/attempt_0/0/stderr.log": "Traceback",
        "node-0/network.json": "{}",
    }
    left = ("node-0/data/train.bin", "node-0/heartbeats/0.json", "node-0/.writable", "node-1.log")
    for name, text in {**kept, **dict.fromkeys(left, "not to be copied")}.items():
        path = tmp_path / "d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "d"


def test_logs_and_error_files_outlive_the_machine_and_data_does_not(directory: Path, target: Storage) -> None:
    with LogUploader(directory, target.address(), 0, interval=0.01):
        until(lambda: target.exists("node-0.log"))
        (directory / "node-0.log").write_text("hello\nand more\n")
        until(lambda: target.read("node-0.log") == b"hello\nand more\n")
        (directory / "node-0.json").write_text('{"exit_code": 43}')
    assert target.list() == [
        "node-0.json", "node-0.log", "node-0/network.json", "node-0/ranks/r_x/attempt_0/0/stderr.log",
    ]  # fmt: skip
    assert target.read("node-0.json") == b'{"exit_code": 43}'


@pytest.mark.parametrize("told", [0, 1])  # by JobSet, and by nobody
def test_what_the_job_left_before_its_restart_is_set_aside(directory: Path, target: Storage, told: int) -> None:
    target.write("node-0.json", b"the end of the first life")
    target.write("node-0.log", b"the first life")
    target.write("node-1.json", b"another node's")
    with LogUploader(directory, target.address(), 0, life=told):
        pass
    assert target.read("restart-0/node-0.json") == b"the end of the first life"
    assert target.read("node-0.log") == b"hello\n"
    assert not target.exists("node-0.json")
    assert target.read("node-1.json") == b"another node's"
    with LogUploader(directory, target.address(), 0, life=told and 2):
        pass
    assert target.read("restart-1/node-0.log") == b"hello\n"
    assert target.read("restart-0/node-0.log") == b"the first life"
