"""A node of a job: what it checks, what its ranks get, and the exit code that it ends with."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from nodes import report_of, started_nodes
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
