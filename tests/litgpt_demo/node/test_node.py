from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import free_port, until

from litgpt_demo.config import DataConfig, FileCorpus, TrainedTokenizer
from litgpt_demo.data.dataset import plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.errors import Fault, RankFailure, UserError
from litgpt_demo.heartbeat import NODE_DIRECTORY
from litgpt_demo.node.agent import Ending, fault_of, tagged
from litgpt_demo.node.checks import check_call, usable_cores
from litgpt_demo.node.main import exports
from litgpt_demo.node.rendezvous import Node, parse
from litgpt_demo.node.torchrun import Rendezvous
from litgpt_demo.storage import open_storage

CALL = "--nodes 2 --node-rank 1 --processes 4 --master 10.0.0.5:29500 --run-id r-1 --directory /d"


def node(tmp_path: Path, **changes: object) -> Node:
    (tmp_path / "rank.py").touch()
    meet = Rendezvous(nodes=1, node_rank=0, host="127.0.0.1", port=free_port(), run_id="r-1")
    made = Node(meet=meet, processes=1, directory=tmp_path / "d", program=(str(tmp_path / "rank.py"),))
    return replace(made, **changes)  # type: ignore[arg-type]


# --- what to do -------------------------------------------------------------------------------------------------------


def test_everything_behind_the_dashes_is_the_programs() -> None:
    asked = parse(
        [*CALL.split(), "--stage", "gs://b/one", "--stage", "/two", "--", "-m", "mine", "--nodes", "9", "--"], {}
    )
    assert asked.meet == Rendezvous(nodes=2, node_rank=1, host="10.0.0.5", port=29500, run_id="r-1")
    assert asked.program == ("-m", "mine", "--nodes", "9", "--")
    assert asked.stage == ("gs://b/one", "/two")
    assert asked.own == Path("/d/node-1")


def test_rank_and_peers_may_be_named_by_variables_of_the_platform() -> None:
    flags = (
        "--nodes env:COUNT --node-rank env:INDEX --master env:ADDRESS --processes 8 --run-id r --directory /d -- x.py"
    )
    asked = parse(flags.split(), {"COUNT": "16", "INDEX": "15", "ADDRESS": "[fd00::5]:29500"})
    assert asked.meet == Rendezvous(nodes=16, node_rank=15, host="[fd00::5]", port=29500, run_id="r")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("--node-rank 1", "--node-rank env:INDEX", "INDEX is not in the environment"),
        ("--nodes 2", "--nodes two", "--nodes='two' is not a whole number"),
        ("10.0.0.5:29500", "10.0.0.5", "has no port"),
        ("10.0.0.5:29500", "host:port", "'port' is not a whole number"),
        (" -- x.py", "", "no program given"),
    ],
)
def test_a_call_that_cannot_work_says_what_would(old: str, new: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(f"{CALL} -- x.py".replace(old, new).split(), {})


# --- checks and environment -------------------------------------------------------------------------------------------


def test_a_sound_node_has_no_troubles(tmp_path: Path) -> None:
    assert list(check_call(node(tmp_path))) == []


def test_every_trouble_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        meet = Rendezvous(nodes=0, node_rank=0, host="127.0.0.1", port=other.getsockname()[1], run_id="r")
        sick = node(tmp_path, meet=meet, processes=0, directory=tmp_path / "file" / "d", program=("gone.py",))
        found = {trouble.code: trouble for trouble in check_call(sick)}
    assert set(found) == {"node.rank", "node.processes", "node.program", "node.directory", "node.port"}
    assert str(found["node.program"]).startswith("error [node.program] the program gone.py is no file in ")


def test_only_node_0_needs_the_port(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        meet = Rendezvous(nodes=2, node_rank=1, host="127.0.0.1", port=other.getsockname()[1], run_id="r")
        assert list(check_call(node(tmp_path, meet=meet))) == []


def test_ranks_learn_their_threads_and_nothing_that_would_redirect_torchrun(tmp_path: Path) -> None:
    asked = node(tmp_path, processes=4)
    env = exports(asked, {"PET_NNODES": "7", "RANK": "3", "HOME": "/h"}, cores=10)
    assert env["OMP_NUM_THREADS"] == "2"
    assert env[NODE_DIRECTORY] == str(tmp_path / "d" / "node-0")
    assert env["HOME"] == "/h"
    assert {"PET_NNODES", "RANK"}.isdisjoint(env)
    assert exports(asked, {"OMP_NUM_THREADS": "5"}, cores=1)["OMP_NUM_THREADS"] == "5"


def test_cores_are_what_the_container_allows(tmp_path: Path) -> None:
    everything = usable_cores(tmp_path / "none")
    assert everything >= 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path / "cpu.max") == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path / "cpu.max") == everything


# --- the outcome ------------------------------------------------------------------------------------------------------


def failure(exit_code: int | None, message: str = "", *, time: float = 100.0) -> RankFailure:
    return RankFailure(local_rank=0, exit_code=exit_code, message=message, time=time)


LOST_PEER = "RuntimeError: Connection closed by peer"


@pytest.mark.parametrize(
    ("expected", "exit_code", "asked", "failures", "agent", "oom"),
    [
        (None, 0, None, (), None, False),
        (None, 0, 99.0, (), None, False),
        (Fault.DATA, 1, None, (failure(41),), None, False),
        (Fault.NETWORK, 1, None, (failure(1, LOST_PEER),), None, False),
        (Fault.NODE, 1, None, (failure(-9),), None, False),
        (Fault.OUT_OF_MEMORY, 1, None, (failure(-9),), None, True),
        (Fault.DATA, 1, None, (failure(41),), None, True),
        (Fault.NODE, 1, None, (failure(-15),), None, False),
        (Fault.PREEMPTED, 1, 99.0, (), None, False),
        (Fault.PREEMPTED, -15, 99.0, (), None, False),
        (Fault.PREEMPTED, 1, 99.0, (failure(1, LOST_PEER),), None, False),
        (Fault.NETWORK, 1, 101.0, (failure(1, LOST_PEER),), None, False),
        (Fault.DATA, 1, 99.0, (failure(41),), None, False),
        (Fault.NETWORK, 1, None, (), "DistStoreError: Timed out after 601 seconds", False),
        (Fault.NETWORK, 1, None, (), "RendezvousTimeoutError: nobody came", False),
        (Fault.UNKNOWN, 1, None, (), "RuntimeError: odd", False),
        (Fault.NODE, -9, None, (), None, False),
        (Fault.UNKNOWN, 2, None, (), None, False),
    ],
)
def test_the_node_ends_with_the_class_of_what_happened_first(
    expected: Fault | None,
    exit_code: int,
    asked: float | None,
    failures: tuple[RankFailure, ...],
    agent: str | None,
    oom: bool,
) -> None:
    ending = Ending(exit_code=exit_code, asked=asked, failures=failures, agent=agent, host_ran_out_of_memory=oom)
    assert fault_of(ending) is expected


# --- for real ---------------------------------------------------------------------------------------------------------


def start(tmp_path: Path, text: str, *more: str, processes: int = 1) -> subprocess.Popen[str]:
    (tmp_path / "rank.py").write_text(text)
    own = f"--nodes 1 --node-rank 0 --processes {processes} --run-id r --directory d --grace 5"
    flags = [*own.split(), "--master", f"127.0.0.1:{free_port()}", *more]
    command = [sys.executable, "-m", "litgpt_demo", "node", *flags, "--", "rank.py"]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def report_of(tmp_path: Path) -> dict[str, object]:
    told: dict[str, object] = json.loads((tmp_path / "d" / "node-0.json").read_text())
    return told


def test_a_node_that_cannot_start_says_why_and_ends_with_its_class(tmp_path: Path) -> None:
    with start(tmp_path, "", "--stage", str(tmp_path / "no-dataset")) as ended:
        said, _ = ended.communicate(timeout=60)
    assert ended.returncode == 41
    assert "no manifest" in str(report_of(tmp_path)["message"])
    assert "node 0 ends with 41 (data error)" in said


def test_an_unknown_command_is_answered_with_those_there_are() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "litgpt_demo", "trian"], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 2
    assert (
        "'trian' is not a command. usage: python -m litgpt_demo {node,train,prepare,verify,windows,collect,collectives}"
        in ended.stderr
    )


@pytest.mark.training
def test_ranks_read_the_staged_dataset_and_their_output_says_who_spoke(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one\n\ntwo\n\nthree\n\n" * 20)
    corpus = FileCorpus(kind="files", paths=(str(tmp_path / "text"),), separator="\n\n")
    data = DataConfig(corpus=corpus, tokenizer=TrainedTokenizer(kind="train", vocab_size=257), validation_fraction=0.1)
    planned = plan_dataset(data)
    prepare(planned, open_storage(str(tmp_path)))
    text = "import os, sys, pathlib\nsize = pathlib.Path(os.environ['LITGPT_DATASET'], 'train.bin').stat().st_size\n"
    text += "sys.stdout.write(f'rank {os.environ[\"RANK\"]} reads {size} bytes\\n')"
    with start(tmp_path, text, "--stage", str(tmp_path / planned.path), processes=2) as ended:
        said, _ = ended.communicate(timeout=60)
    size = (tmp_path / planned.path / "train.bin").stat().st_size
    assert ended.returncode == 0, said
    assert {f"[rank{rank}]:rank {rank} reads {size} bytes" for rank in (0, 1)} <= set(said.splitlines())
    assert (report_of(tmp_path)["exit_code"], report_of(tmp_path)["fault"]) == (0, None)


@pytest.mark.training
def test_a_node_asked_to_leave_lets_its_ranks_save(tmp_path: Path) -> None:
    text = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(1)
    pathlib.Path("saved").touch()
    sys.exit(45)
signal.signal(signal.SIGTERM, save)
pathlib.Path("up").touch()
time.sleep(600)
"""
    with start(tmp_path, text) as ended:
        until((tmp_path / "up").exists)
        ended.terminate()
        ended.communicate(timeout=30)
    assert (tmp_path / "saved").exists()
    assert ended.returncode == 45
    told = report_of(tmp_path)
    assert told["fault"] == "preempted"
    assert told["ended"] - told["started"] > 1  # what it cost


@pytest.mark.training
def test_ranks_do_not_outlive_a_torchrun_that_was_killed(tmp_path: Path) -> None:
    text = "import os, pathlib, time\npathlib.Path('up').write_text(str(os.getppid()))\ntime.sleep(600)"
    with start(tmp_path, text, processes=2) as ended:
        os.kill(int(until(lambda: (tmp_path / "up").exists() and (tmp_path / "up").read_text())), signal.SIGKILL)
        ended.communicate(timeout=30)
    assert ended.returncode == 43
    assert tagged(NODE_DIRECTORY, str(tmp_path / "d" / "node-0")) == []
