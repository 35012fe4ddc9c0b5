"""A node of a job: what it checks, brings and keeps, the code that it ends with, and a user's own code."""

import io
import os
import socket
import stat
import sys
import tarfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from time import time
from typing import Any

import pytest
from nodes import ended_nodes, report_of, started_nodes
from waiting import until

from litgpt_demo.errors import DataError, FailureClass, RankFailure
from litgpt_demo.heartbeat import NODE_DIRECTORY
from litgpt_demo.node import code
from litgpt_demo.node.agent import ShutdownState, TorchrunResult, fault_of, processes_with_env, run_ranks
from litgpt_demo.node.checks import check_call
from litgpt_demo.node.code import unpacked_code
from litgpt_demo.node.logs import uploaded
from litgpt_demo.node.main import exports
from litgpt_demo.node.rendezvous import Node
from litgpt_demo.storage import Storage, open_storage


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    return sink.getvalue()


def member(name: str, content: bytes = b"", **changes: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for attribute, value in changes.items():
        setattr(info, attribute, value)
    return info, content


def shipped(folder: Path, content: bytes) -> str:
    """The address of an archive under its hash."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{sha256(content).hexdigest()}.tar"
    path.write_bytes(content)
    return str(path)


def test_more_bytes_or_files_than_code_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = shipped(tmp_path / "root", archive(*(member(f"{number}.py") for number in range(4))))
    monkeypatch.setattr(code, "MOST_FILES", 3)
    with pytest.raises(DataError, match="unpacks to more than 3 files"), unpacked_code(address, tmp_path / "code"):
        pass
    monkeypatch.setattr(code, "MOST_ARCHIVE", 1000)
    with pytest.raises(DataError, match="at most 1,000 are read"), unpacked_code(address, tmp_path / "code"):
        pass


HOSTILE = {
    "a path out of the folder": archive(member("../escaped", b"x")),
    "a file through a link": archive(member("link", type=tarfile.SYMTYPE, linkname=".."), member("link/escaped", b"x")),
    "a hard link": archive(member("link", type=tarfile.LNKTYPE, linkname="../secret")),
    "a device": archive(member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "more than fits": archive(member("big", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.realsize": str(10**12)})),
    "a tar cut short": archive(member("train.py", b"x" * 2000))[:1000],
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_archive_is_a_data_error_that_writes_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_text("mine")
    with pytest.raises(DataError), unpacked_code(shipped(tmp_path / "root", content), tmp_path / "code"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"secret", "root", "code"}
    assert not any(path.is_symlink() for path in (tmp_path / "code").rglob("*"))


def test_unpacked_code_is_private_until_it_is_removed(tmp_path: Path) -> None:
    """Files that the program wrote next to it stay."""
    content = archive(member("lib/tool", b"#!/bin/sh", mode=0o755), member("table.csv", b"a,b\n"))
    with unpacked_code(shipped(tmp_path / "root", content), tmp_path / "code"):
        assert os.access(tmp_path / "code" / "lib" / "tool", os.X_OK)
        assert stat.S_IMODE((tmp_path / "code").stat().st_mode) == 0o700
        (tmp_path / "code" / "lib" / "__pycache__").mkdir()
        (tmp_path / "code" / "lib" / "__pycache__" / "second.pyc").touch()
        (tmp_path / "code" / "weights.pt").touch()
        with (tmp_path / "code" / "table.csv").open("a") as table:
            table.write("1,2\n")
    assert {path.name for path in (tmp_path / "code").iterdir()} == {"weights.pt", "table.csv"}


# The last word of the program is a folder in which the ranks say how far they are.
RANKS = b"""
import os, pathlib, random, sys, time
place, rank = pathlib.Path(sys.argv[-1]), os.environ["RANK"]
size = pathlib.Path(os.environ["LITGPT_DATASET"], "train.bin").stat().st_size
print(f"rank {rank} reads {size} bytes, is told {sys.argv[1:-1]}, imports {random.WHOSE}", flush=True)
(place / rank).touch()
while not ((place / "0").exists() and (place / "1").exists()):
    time.sleep(0.01)
if rank == "1":
    raise SystemExit(41)
time.sleep(600)
"""


def test_node_exits_with_the_class_of_its_failed_rank(tmp_path: Path, tiny_dataset: Path) -> None:
    """Modules of the user's that are called as two of Python's are meant for ranks; torchrun imports both itself."""
    content = archive(member("train.py", RANKS), member("random.py", b"WHOSE = 'mine'"), member("queue.py", b"1 / 0"))
    code = shipped(tmp_path / "root", content)
    directory, kept, place = tmp_path / "d", tmp_path / "kept", tmp_path / "place"
    place.mkdir()
    flags = ("--stage", str(tiny_dataset), "--code", code, "--log-uri", str(kept))
    # --run is how torchrun's own --run-path may be abbreviated, were the program's options not kept from it.
    program = ("train.py", "--run", "x", "--", "-m", str(place))
    codes, (printed,) = ended_nodes(directory, *program, processes=2, flags=flags)
    assert codes == [41], printed
    size = (tiny_dataset / "train.bin").stat().st_size
    text_part = f"reads {size} bytes, is told ['--run', 'x', '--', '-m'], imports mine"
    assert {f"[rank{rank}]:rank {rank} {text_part}" for rank in (0, 1)} <= set(printed.splitlines())
    assert "node 0 ends with 41 (data error)" in printed
    assert (kept / "node-0.log").read_text() == printed
    assert len(list(kept.glob("node-0/ranks/*/attempt_0/*/stdout.log"))) == 2
    report = report_of(kept)
    assert report == report_of(directory)
    assert [(rank["rank"], rank["secondary"]) for rank in report["ranks"]] == [(1, False), (0, True)]
    assert not (directory / "node-0" / "data").exists()
    assert not (directory / "node-0" / "code").exists()


def test_node_refuses_changed_code_as_a_data_error(tmp_path: Path) -> None:
    address = shipped(tmp_path / "root", archive(member("train.py", b"mine")))
    Path(address).write_bytes(archive(member("train.py", b"evil")))
    codes, _ = ended_nodes(tmp_path / "d", "train.py", flags=("--code", address))
    assert codes == [41]
    assert "so it was changed" in report_of(tmp_path / "d")["message"]
    assert not (tmp_path / "d" / "node-0" / "code").exists()


def node(tmp_path: Path, **changes: object) -> Node:
    (tmp_path / "rank.py").touch()
    meet = {"nodes": 1, "node_rank": 0, "host": "127.0.0.1", "port": 0, "run_id": "r-1", "processes": 1}
    made = Node(**meet, directory=tmp_path / "d", program=(str(tmp_path / "rank.py"),))  # type: ignore[arg-type]
    return replace(made, **changes)  # type: ignore[arg-type]


def test_every_trouble_is_found_at_once(tmp_path: Path) -> None:
    assert list(check_call(node(tmp_path))) == []
    (tmp_path / "file").touch()
    with socket.create_server(("", 0)) as another:
        port, place = another.getsockname()[1], tmp_path / "file" / "d"
        sick = node(tmp_path, nodes=0, port=port, processes=0, directory=place, program=("gone.py",))
        found = {trouble.code for trouble in check_call(sick)}
    assert found == {"node.rank", "node.processes", "node.program", "node.directory", "node.port"}


def test_ranks_get_threads_but_nothing_that_redirects_torchrun(tmp_path: Path) -> None:
    task = node(tmp_path, processes=4)
    env = exports(task, {"PET_NNODES": "7", "RANK": "3", "HOME": "/h"}, cores=10)
    assert env["OMP_NUM_THREADS"] == "2"
    assert env[NODE_DIRECTORY] == str(tmp_path / "d" / "node-0")
    assert {"PET_NNODES", "RANK"}.isdisjoint(env)
    assert exports(task, {"OMP_NUM_THREADS": "5"}, cores=1)["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_our_trainers_memory_has_segments_that_grow(tmp_path: Path, name: str) -> None:
    """A setting of the user's, by either name, stays. A script keeps torch's default."""
    allocator = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    trainer, script = (node(tmp_path, program=program) for program in (("-m", "litgpt_demo", "train"), ("a.py",)))
    assert exports(trainer, {}, cores=1).items() > allocator.items()
    assert exports(trainer, {name: "backend:native"}, cores=1)[name] == "backend:native"
    assert "PYTORCH_ALLOC_CONF" not in exports(trainer, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, cores=1)
    assert "PYTORCH_ALLOC_CONF" not in exports(script, {}, cores=1)


def failure(exit_code: int, message: str = "") -> RankFailure:
    return RankFailure(local_rank=0, exit_code=exit_code, message=message, time=100.0)


LOST_PEER = failure(1, "RuntimeError: Connection closed by peer")


@pytest.mark.parametrize(
    ("expected", "exit_code", "signalled_at", "failures", "agent", "oom"),
    [
        (None, 0, 99.0, (), None, False),
        (FailureClass.DATA, 1, 99.0, (failure(41),), None, True),
        (FailureClass.OUT_OF_MEMORY, 1, None, (failure(-9),), None, True),
        (FailureClass.PREEMPTED, 1, 99.0, (LOST_PEER,), None, False),
        (FailureClass.NETWORK, 1, 101.0, (LOST_PEER,), None, False),
        (FailureClass.NETWORK, 1, None, (), "RendezvousTimeoutError: nobody came", False),
    ],
)
def test_the_node_ends_with_the_class_of_what_happened_first(
    expected: FailureClass | None, exit_code: int, signalled_at: float | None, failures: tuple[RankFailure, ...],
    agent: str | None, oom: bool,
) -> None:  # fmt: skip
    ending = TorchrunResult(
        exit_code=exit_code, signalled_at=signalled_at, failures=failures, agent=agent, host_ran_out_of_memory=oom
    )
    assert fault_of(ending) is expected


SAVING = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit(45)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], "up").touch()
time.sleep(600)
"""


def test_a_node_asked_to_leave_lets_its_ranks_save(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(SAVING)
    with started_nodes(tmp_path / "d", str(tmp_path / "rank.py"), str(tmp_path)) as [node]:
        until((tmp_path / "up").exists)
        node.terminate()
        node.communicate()
    assert (tmp_path / "saved").exists()
    assert node.returncode == 45
    assert report_of(tmp_path / "d")["fault"] == FailureClass.PREEMPTED
    assert processes_with_env(NODE_DIRECTORY, str(tmp_path / "d" / "node-0")) == []


FORGETS_ITS_RANK = """
import pathlib, subprocess, sys
place = pathlib.Path(sys.argv[2])
rank = subprocess.Popen([sys.executable, *sys.argv[1:]])
while not (place / "up").exists():
    pass
sys.exit(1)
"""


def test_a_rank_that_was_just_started_may_save_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun does not know it yet if the signal comes at that moment."""
    place, rank = node(tmp_path), tmp_path / "rank.py"
    rank.write_text(SAVING)
    (tmp_path / "torchrun.py").write_text(FORGETS_ITS_RANK)
    command = [sys.executable, str(tmp_path / "torchrun.py"), str(rank), str(tmp_path)]
    monkeypatch.setattr("litgpt_demo.node.agent.torchrun_command", lambda node, log_dir: command)
    place.own.mkdir(parents=True)
    environ = os.environ | {NODE_DIRECTORY: str(place.own)}
    result = run_ranks(place, environ, ShutdownState(signalled_at=time()))
    assert (tmp_path / "saved").exists()
    assert fault_of(result) is FailureClass.PREEMPTED


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
    remaining = ("node-0/data/train.bin", "node-0/heartbeats/0.json", "node-0/.writable", "node-1.log")
    for name, text in {**kept, **dict.fromkeys(remaining, "not to be copied")}.items():
        path = tmp_path / "d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "d"


def test_logs_outlive_the_machine_but_data_does_not(directory: Path, target: Storage) -> None:
    """So do error files."""
    with uploaded(directory, target.address(), 0, interval=0.01):
        until(lambda: target.exists("node-0.log"))
        (directory / "node-0.log").write_text("hello\nand more\n")
        until(lambda: target.read("node-0.log") == b"hello\nand more\n")
        (directory / "node-0.json").write_text('{"exit_code": 43}')
    assert target.list() == [
        "node-0.json", "node-0.log", "node-0/network.json", "node-0/ranks/r_x/attempt_0/0/stderr.log",
    ]  # fmt: skip
    assert target.read("node-0.json") == b'{"exit_code": 43}'


LEAKING = """
import os, sys
print("downloading with", os.environ["HF_TOKEN"], flush=True)
print("by http://me:" + os.environ["HTTPS_PROXY"].split(":")[2].split("@")[0] + "@proxy.example", file=sys.stderr)
sys.stdout.write("x" * (1 << 20) + os.environ["WANDB_API_KEY"] + "x" * 9000)  # no line ends here
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise RuntimeError("401 for " + os.environ["HF_TOKEN"])
main()
"""


def test_no_log_or_report_of_a_node_has_a_secret_of_its_ranks(tmp_path: Path, target: Storage) -> None:
    secrets = {"HF_TOKEN": "hf_tokenOfTheHub", "WANDB_API_KEY": "0123456789abcdef" * 2}
    environ = secrets | {"HTTPS_PROXY": "http://me:pr0xy-s3cret@127.0.0.1:9"}
    (tmp_path / "leaking.py").write_text(LEAKING)
    flags = [f"--log-uri={target.address()}"]
    ended_nodes(tmp_path / "d", str(tmp_path / "leaking.py"), flags=flags, environ=environ)
    kept = {path: target.read(path) for path in target.list()}
    assert {path.rpartition("/")[2] for path in kept} >= {"node-0.json", "node-0.log", "stdout.log", "error.json"}
    for secret in (*secrets.values(), "pr0xy-s3cret"):
        assert [path for path, content in kept.items() if secret.encode() in content] == []
    assert b"downloading with ****" in kept["node-0.log"]
    report = report_of(tmp_path / "d")  # diagnoses, artifacts and notices are made of it
    assert "RuntimeError: 401 for [secure]" in report["ranks"][0]["message"]
    assert "hf_tokenOfTheHub" not in str(report)


@pytest.mark.parametrize("restart_count", [0, 1])  # by JobSet, and by nobody
def test_files_before_a_restart_are_moved_away(directory: Path, target: Storage, restart_count: int) -> None:
    target.write("node-0.json", b"the end of the first life")
    target.write("node-0.log", b"the first life")
    target.write("node-1.json", b"another node's")
    with uploaded(directory, target.address(), 0, restart_count=restart_count):
        pass
    assert target.read("restart-0/node-0.json") == b"the end of the first life"
    assert target.read("node-0.log") == b"hello\n"
    assert not target.exists("node-0.json")
    assert target.read("node-1.json") == b"another node's"
    with uploaded(directory, target.address(), 0, restart_count=restart_count and 2):
        pass
    assert target.read("restart-1/node-0.log") == b"hello\n"
    assert target.read("restart-0/node-0.log") == b"the first life"
