"""A node of a job: what it checks, what its ranks get, and the exit code that it ends with."""

from __future__ import annotations

import socket
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from tarfile import TarInfo
from tarfile import open as open_tar

import pytest
from nodes import ended_nodes, report_of, started_nodes
from waiting import until

from litgpt_demo.errors import Fault, RankFailure
from litgpt_demo.heartbeat import NODE_DIRECTORY
from litgpt_demo.node.agent import Ending, fault_of, tagged
from litgpt_demo.node.checks import check_call
from litgpt_demo.node.main import exports
from litgpt_demo.node.rendezvous import Node
from litgpt_demo.node.torchrun import Rendezvous


def node(tmp_path: Path, **changes: object) -> Node:
    (tmp_path / "rank.py").touch()
    meet = Rendezvous(nodes=1, node_rank=0, host="127.0.0.1", port=0, run_id="r-1")
    made = Node(meet=meet, processes=1, directory=tmp_path / "d", program=(str(tmp_path / "rank.py"),))
    return replace(made, **changes)  # type: ignore[arg-type]


def test_every_trouble_is_found_at_once(tmp_path: Path) -> None:
    assert list(check_call(node(tmp_path))) == []
    (tmp_path / "file").touch()
    with socket.create_server(("", 0)) as other:
        meet = Rendezvous(nodes=0, node_rank=0, host="127.0.0.1", port=other.getsockname()[1], run_id="r")
        sick = node(tmp_path, meet=meet, processes=0, directory=tmp_path / "file" / "d", program=("gone.py",))
        found = {trouble.code for trouble in check_call(sick)}
    assert found == {"node.rank", "node.processes", "node.program", "node.directory", "node.port"}


def test_ranks_learn_their_threads_and_nothing_that_would_redirect_torchrun(tmp_path: Path) -> None:
    asked = node(tmp_path, processes=4)
    env = exports(asked, {"PET_NNODES": "7", "RANK": "3", "HOME": "/h"}, cores=10)
    assert env["OMP_NUM_THREADS"] == "2"
    assert env[NODE_DIRECTORY] == str(tmp_path / "d" / "node-0")
    assert {"PET_NNODES", "RANK"}.isdisjoint(env)
    assert exports(asked, {"OMP_NUM_THREADS": "5"}, cores=1)["OMP_NUM_THREADS"] == "5"


def failure(exit_code: int, message: str = "") -> RankFailure:
    return RankFailure(local_rank=0, exit_code=exit_code, message=message, time=100.0)


LOST_PEER = failure(1, "RuntimeError: Connection closed by peer")


@pytest.mark.parametrize(
    ("expected", "exit_code", "asked", "failures", "agent", "oom"),
    [
        (None, 0, 99.0, (), None, False),
        (Fault.DATA, 1, 99.0, (failure(41),), None, True),
        (Fault.OUT_OF_MEMORY, 1, None, (failure(-9),), None, True),
        (Fault.PREEMPTED, 1, 99.0, (LOST_PEER,), None, False),
        (Fault.NETWORK, 1, 101.0, (LOST_PEER,), None, False),
        (Fault.NETWORK, 1, None, (), "RendezvousTimeoutError: nobody came", False),
    ],
)
def test_the_node_ends_with_the_class_of_what_happened_first(
    expected: Fault | None, exit_code: int, asked: float | None, failures: tuple[RankFailure, ...], agent: str | None,
    oom: bool,
) -> None:  # fmt: skip
    ending = Ending(exit_code=exit_code, asked=asked, failures=failures, agent=agent, host_ran_out_of_memory=oom)
    assert fault_of(ending) is expected


# The last word of the program is a folder in which the ranks say how far they are.
RANKS = """
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


def archived(folder: Path, **modules: str) -> Path:
    """The user's code under its hash."""
    content = BytesIO()
    with open_tar(fileobj=content, mode="w") as tar:
        for name, text in modules.items():
            (info := TarInfo(f"{name}.py")).size = len(text)
            tar.addfile(info, BytesIO(text.encode()))
    path = folder / f"{sha256(content.getvalue()).hexdigest()}.tar"
    path.write_bytes(content.getvalue())
    return path


def test_a_node_brings_data_and_code_and_ends_with_the_class_of_the_rank_that_failed(
    tmp_path: Path, tiny_dataset: Path
) -> None:
    """Modules of the user's that are called as two of Python's are meant for ranks; torchrun imports both itself."""
    code = archived(tmp_path, train=RANKS, random="WHOSE = 'mine'", queue="1 / 0")
    directory, kept, place = tmp_path / "d", tmp_path / "kept", tmp_path / "place"
    place.mkdir()
    flags = ("--stage", str(tiny_dataset), "--code", str(code), "--log-uri", str(kept))
    # --run is how torchrun's own --run-path may be abbreviated, were the program's options not kept from it.
    program = ("train.py", "--run", "x", "--", "-m", str(place))
    codes, (said,) = ended_nodes(directory, *program, processes=2, flags=flags)
    assert codes == [41], said
    size = (tiny_dataset / "train.bin").stat().st_size
    words = f"reads {size} bytes, is told ['--run', 'x', '--', '-m'], imports mine"
    assert {f"[rank{rank}]:rank {rank} {words}" for rank in (0, 1)} <= set(said.splitlines())
    assert "node 0 ends with 41 (data error)" in said
    assert (kept / "node-0.log").read_text() == said
    assert len(list(kept.glob("node-0/ranks/*/attempt_0/*/stdout.log"))) == 2
    told = report_of(kept)
    assert told == report_of(directory)
    assert [(rank["rank"], rank["bystander"]) for rank in told["ranks"]] == [(1, False), (0, True)]
    assert not (directory / "node-0" / "data").exists()
    assert not (directory / "node-0" / "code").exists()


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
    assert report_of(tmp_path / "d")["fault"] == Fault.PREEMPTED
    assert tagged(NODE_DIRECTORY, str(tmp_path / "d" / "node-0")) == []
