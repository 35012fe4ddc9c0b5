"""A rank that falls silent is found, its stacks are kept, and its node ends with the exit code of a hang."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from nodes import report_of, start_node
from waiting import until

from litgpt_demo.errors import Fault
from litgpt_demo.heartbeat import NODE_DIRECTORY, Beat, Heartbeat, ask_for_stacks, clear_beats, overdue, read_beats
from litgpt_demo.node.agent import tagged
from litgpt_demo.processes import started

# --- signs of life ----------------------------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    """The environment of a rank below a node whose folder is `tmp_path`."""
    return {NODE_DIRECTORY: str(tmp_path), "RANK": "5", "LOCAL_RANK": "1"}


def test_a_rank_says_what_it_has_done_and_does(node: dict[str, str], tmp_path: Path) -> None:
    with Heartbeat(allow=30, environ=node) as heart:
        assert read_beats(tmp_path) == []
        before = time.monotonic()
        heart.beat(1_000_000, "training")
        heart.beat(7, "saving", allow=60)
        [beat] = read_beats(tmp_path)
    assert (beat.rank, beat.local_rank, beat.pid) == (5, 1, os.getpid())
    assert (beat.step, beat.doing, beat.allow) == (7, "saving", 60)
    assert before <= beat.ticks <= time.monotonic()
    assert read_beats(tmp_path) == []


def test_without_a_node_above_it_a_rank_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Heartbeat(allow=1, environ={}) as heart:
        heart.beat(1, "training")
    assert list(tmp_path.iterdir()) == []


def test_what_an_earlier_life_left_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    text = "import os; from litgpt_demo.heartbeat import Heartbeat; Heartbeat(allow=0).beat(1, 'training'); os._exit(9)"
    ended = subprocess.run([sys.executable, "-c", text], env=os.environ | {NODE_DIRECTORY: str(tmp_path)}, check=False)
    assert ended.returncode == 9
    assert len(list((tmp_path / "heartbeats").glob("*.json"))) == 1
    assert read_beats(tmp_path) == []
    clear_beats(tmp_path)
    assert not list((tmp_path / "heartbeats").glob("*.json"))


def test_a_file_cut_short_is_no_sign_of_life(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats" / "0.json").write_text('{"rank": 0, "local')
    assert read_beats(tmp_path) == []


def beat(rank: int, *, step: int, ticks: float, allow: float = 10.0) -> Beat:
    return Beat(
        rank=rank, local_rank=rank, pid=os.getpid(), started=started(os.getpid()), step=step, doing="training",
        time=0.0, ticks=ticks, allow=allow, stacks="",
    )  # fmt: skip


def test_the_rank_that_came_least_far_is_named_first_and_who_may_be_silent_is_not() -> None:
    waiting, slow = beat(0, step=6, ticks=100.0), beat(1, step=5, ticks=101.0)
    saving = beat(2, step=5, ticks=90.0, allow=1000.0)
    assert overdue([waiting, slow, saving], now=111.5) == [slow, waiting]
    assert overdue([waiting, slow, saving], now=110.5) == [waiting]
    assert overdue([waiting, slow, saving], now=109.0) == []


STUBBORN = """
import signal, sys, time
from litgpt_demo.heartbeat import Heartbeat
heart = Heartbeat(allow=60)
if "deaf" in sys.argv:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
heart.beat(3, "training")
def asleep_in_here():
    time.sleep(600)
asleep_in_here()
"""


@pytest.mark.parametrize("state", ["running", "stopped", "deaf"])
def test_stacks_are_had_of_a_process_even_if_it_is_stopped_and_else_a_word_why_not(tmp_path: Path, state: str) -> None:
    rank = subprocess.Popen([sys.executable, "-c", STUBBORN, state], env=os.environ | {NODE_DIRECTORY: str(tmp_path)})
    try:
        until(lambda: bool(read_beats(tmp_path)))
        time.sleep(0.1)
        if state == "stopped":
            rank.send_signal(signal.SIGSTOP)
        beats = read_beats(tmp_path)
        ask_for_stacks(beats, patience=2.0)
        told = Path(beats[0].stacks).read_text()
        assert ("in asleep_in_here" in told) == (state != "deaf")
        assert ("did not answer SIGUSR1" in told) == (state == "deaf")
    finally:
        rank.kill()
        rank.wait()


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EPERM])
def test_stacks_are_had_where_the_system_gives_no_descriptor_of_a_process(
    refusal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(refusal, os.strerror(refusal))

    rank = subprocess.Popen([sys.executable, "-c", STUBBORN], env=os.environ | {NODE_DIRECTORY: str(tmp_path)})
    try:
        until(lambda: bool(read_beats(tmp_path)))
        monkeypatch.setattr(os, "pidfd_open", refuse)
        beats = read_beats(tmp_path)
        ask_for_stacks(beats, patience=2.0)
        assert "in asleep_in_here" in Path(beats[0].stacks).read_text()
    finally:
        rank.kill()
        rank.wait()


def test_no_signal_reaches_another_process_that_got_the_pid_of_a_rank(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        (tmp_path / "stacks").touch()
        left = replace(beat(0, step=1, ticks=0.0), pid=stranger.pid, stacks=str(tmp_path / "stacks"))
        (tmp_path / "heartbeats").mkdir()
        (tmp_path / "heartbeats" / "0.json").write_text(json.dumps(asdict(left)))
        ask_for_stacks([left], patience=0.5)
        assert "(process" in (tmp_path / "stacks").read_text()
        assert read_beats(tmp_path) == []  # nor is the stranger taken for a rank that lives
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


# --- for real ---------------------------------------------------------------------------------------------------------


LEFT_ALONE = """
import time
import torch, torch.distributed as dist
from litgpt_demo.heartbeat import Heartbeat

dist.init_process_group("gloo")
with Heartbeat(allow=3) as heart:
    def looks_for_its_data():
        time.sleep(600)
    for step in range(5):
        heart.beat(step, "summing")
        if step == 4 and dist.get_rank() == 1:
            looks_for_its_data()
        dist.all_reduce(torch.ones(1))
"""


@pytest.mark.long
@pytest.mark.training
def test_a_sum_that_one_rank_never_joins_ends_with_the_stacks_of_all(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LEFT_ALONE)
    with start_node(tmp_path / "d", str(tmp_path / "script.py")) as ended:
        said, _ = ended.communicate(timeout=60)
    assert ended.returncode == 46, said
    told = report_of(tmp_path / "d")
    assert told["fault"] == Fault.HANG
    assert "it had done 4 steps and was summing" in told["message"]
    stacks = {path.stem[-1]: path.read_text() for path in (tmp_path / "d").rglob("stacks-of-rank-*.txt")}
    assert "in looks_for_its_data" in stacks["1"]
    assert "in all_reduce" in stacks["0"]
    assert tagged(NODE_DIRECTORY, str(tmp_path / "d" / "node-0")) == []


@pytest.mark.long
@pytest.mark.training
def test_a_training_whose_rank_is_stopped_ends_as_a_hang_that_names_it(
    new_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = new_run("run", world_size=2, max_steps=100_000, hang_after=3, checkpoint_every=90_000, evaluate_every=90_000)
    with start_node(tmp_path / "d", "-m", "litgpt_demo", "train", "--run", str(run)) as ended:
        own = tmp_path / "d" / "node-0"
        until(lambda: len(beats := read_beats(own)) == 2 and all(beat.step > 20 for beat in beats))
        [pid] = [beat.pid for beat in read_beats(own) if beat.rank == 1]
        os.kill(pid, signal.SIGSTOP)
        said, _ = ended.communicate(timeout=60)
    assert ended.returncode == 46, said
    [rank] = report_of(tmp_path / "d")["ranks"]
    assert (rank["rank"], rank["fault"]) == (1, Fault.HANG)
    assert "rank 1 has given no sign of life for" in rank["message"]
    assert "silent too: rank 0 (training, step " in rank["message"]
    assert any("litgpt_demo/training/loop" in line for line in rank["traceback"])
    assert tagged(NODE_DIRECTORY, str(own)) == []
