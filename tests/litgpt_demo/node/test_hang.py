"""A rank that falls silent is found and its stacks are kept; for whole jobs that hang see tests/real/training."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from nodes import ended_nodes, report_of
from waiting import until

from litgpt_demo.errors import FailureClass
from litgpt_demo.heartbeat import NODE_DIRECTORY, Beat, Heartbeat, Watcher, ask_for_stacks, read_beats, started


def test_a_heartbeat_has_the_steps_and_restores_signals(tmp_path: Path) -> None:
    before, node = signal.getsignal(signal.SIGUSR1), {NODE_DIRECTORY: str(tmp_path), "RANK": "5", "LOCAL_RANK": "1"}
    with Heartbeat(max_silence=30, environ=node) as heart:
        assert read_beats(tmp_path) == []
        heart.beat(1_000_000, "training")
        heart.sends = 4e9
        heart.beat(7, "saving", max_silence=60)
        [beat] = read_beats(tmp_path)
    assert (beat.rank, beat.local_rank, beat.pid) == (5, 1, os.getpid())
    assert (beat.step, beat.doing, beat.max_silence) == (7, "saving", 60)
    assert beat.sends == 4e9
    assert read_beats(tmp_path) == []
    assert signal.getsignal(signal.SIGUSR1) is before


def beat(rank: int, *, step: int, ticks: float, max_silence: float = 10.0) -> Beat:
    return Beat(
        rank=rank, local_rank=rank, pid=os.getpid(), started=started(os.getpid()), step=step, doing="training",
        time=0.0, ticks=ticks, max_silence=max_silence, stacks="",
    )  # fmt: skip


def test_the_overdue_rank_with_the_fewest_steps_is_first() -> None:
    """A rank within its own limit is not overdue."""
    waiting, slow = beat(0, step=6, ticks=100.0), beat(1, step=5, ticks=101.0)
    saving = beat(2, step=5, ticks=90.0, max_silence=1000.0)
    watcher = Watcher()
    assert watcher.overdue([waiting, slow, saving], paused=110.5, now=111.5) == [slow, waiting]
    assert watcher.overdue([waiting, slow, saving], paused=109.5, now=110.5) == [waiting]
    assert watcher.overdue([waiting, slow, saving], paused=108.0, now=109.0) == []


def test_a_suspended_node_restarts_the_timer_of_its_ranks() -> None:
    silent, watcher = beat(0, step=6, ticks=100.0), Watcher()
    assert watcher.overdue([silent], paused=102.0, now=122.0) == []
    assert watcher.overdue([silent], paused=130.9, now=131.9) == []
    assert watcher.overdue([silent], paused=131.2, now=132.2) == [silent]


FAILING = """
from litgpt_demo.heartbeat import Heartbeat
with Heartbeat(max_silence=60) as heart:
    heart.beat(417, "training")
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


def test_a_rank_that_fails_leaves_the_step_at_which_it_did(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    [code], _ = ended_nodes(tmp_path / "attempt", str(tmp_path / "failing.py"))
    node_report = report_of(tmp_path / "attempt")
    assert (code, node_report["fault"]) == (FailureClass.NODE.exit_code, FailureClass.NODE)
    assert [rank_report["step"] for rank_report in node_report["ranks"]] == [417]


STUBBORN = """
import time
from litgpt_demo.heartbeat import Heartbeat
Heartbeat(max_silence=60).beat(3, "training")
def asleep_in_here():
    print("up", flush=True)
    time.sleep(600)
asleep_in_here()
"""


def test_stacks_are_had_of_a_process_that_is_stopped(tmp_path: Path) -> None:
    environment = os.environ | {NODE_DIRECTORY: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", STUBBORN], env=environment, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout.readline() == "up\n"
        rank.send_signal(signal.SIGSTOP)
        beats = read_beats(tmp_path)
        ask_for_stacks(beats, within=60.0)
        until(lambda: "in asleep_in_here" in Path(beats[0].stacks).read_text())
        rank.kill()


def test_no_signal_reaches_a_process_with_a_reused_pid(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command) as stranger:
        (tmp_path / "stacks").touch()
        ended = replace(beat(0, step=1, ticks=0.0), pid=stranger.pid, stacks=str(tmp_path / "stacks"))
        (tmp_path / "heartbeats").mkdir()
        (tmp_path / "heartbeats" / "0.json").write_text(json.dumps(asdict(ended)))
        ask_for_stacks([ended], within=0.1)
        assert "(process" in (tmp_path / "stacks").read_text()
        assert read_beats(tmp_path) == []  # nor is the stranger taken for a rank that lives
        assert stranger.poll() is None
        stranger.kill()
