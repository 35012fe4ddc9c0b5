"""Whole nodes of this machine: they leave together, end hangs, and outlive nobody."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from nodes import ended_nodes, report_of, started_nodes
from training_runs import NewRun, rows
from waiting import until

from litgpt_demo.errors import Fault
from litgpt_demo.heartbeat import NODE_DIRECTORY, read_beats
from litgpt_demo.node.agent import tagged
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import committed, folder_of


def train_of(run: Path) -> tuple[str, ...]:
    return ("-m", "litgpt_demo", "train", "--run", str(run))


def test_two_nodes_of_which_one_is_taken_away_leave_together_and_go_on_bit_for_bit(
    new_run: NewRun, tmp_path: Path
) -> None:
    settings = {"world_size": 2, "max_steps": 400, "evaluate_every": 400, "checkpoint_every": 400}
    taken, through = new_run("taken", **settings), new_run("through", **settings)
    with started_nodes(tmp_path / "first", *train_of(taken), nodes=2, grace=60) as nodes:
        own = tmp_path / "first" / "node-1"
        until(lambda: any(beat.step >= 5 for beat in read_beats(own)))
        nodes[1].terminate()
        said = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [45, 45], said
    reports = [report_of(tmp_path / "first", number) for number in (0, 1)]
    assert [report["fault"] for report in reports] == [Fault.PREEMPTED] * 2
    assert [report["asked"] is not None for report in reports] == [False, True]
    saved = committed(open_storage(str(taken)))[0].step
    assert 5 <= saved < 400
    for run, name in ((taken, "second"), (through, "other")):
        codes, said = ended_nodes(tmp_path / name, *train_of(run), nodes=2)
        assert codes == [0, 0], said
    assert [row["step"] for row in rows(taken, "start")] == [0, saved]
    shares = [sorted((run / folder_of(400)).glob("*.distcp")) for run in (taken, through)]
    assert len(shares[0]) == 2
    assert [path.read_bytes() for path in shares[0]] == [path.read_bytes() for path in shares[1]]


def test_a_training_whose_rank_is_stopped_ends_as_a_hang_that_names_it(new_run: NewRun, tmp_path: Path) -> None:
    often = {"checkpoint_every": 90_000, "evaluate_every": 90_000}
    run, own = new_run("run", world_size=2, max_steps=100_000, hang_after=30, **often), tmp_path / "d" / "node-0"
    with started_nodes(tmp_path / "d", *train_of(run), processes=2) as [node]:
        until(lambda: len(beats := read_beats(own)) == 2 and all(beat.step > 20 for beat in beats))
        [pid] = [beat.pid for beat in read_beats(own) if beat.rank == 1]
        os.kill(pid, signal.SIGSTOP)
        said, _ = node.communicate()
    assert node.returncode == 46, said
    [rank] = report_of(tmp_path / "d")["ranks"]
    assert (rank["rank"], rank["fault"]) == (1, Fault.HANG)
    assert "silent too: rank 0 (training, step " in rank["message"]
    assert any("litgpt_demo/training/loop" in line for line in rank["traceback"])
    assert tagged(NODE_DIRECTORY, str(own)) == []


def test_ranks_do_not_outlive_a_torchrun_that_was_killed(tmp_path: Path) -> None:
    up, script = tmp_path / "up", tmp_path / "rank.py"
    script.write_text("import os, pathlib, sys, time\npathlib.Path(sys.argv[1]).write_text(str(os.getppid()))\n"
                      "time.sleep(600)")  # fmt: skip
    with started_nodes(tmp_path / "d", str(script), str(up), processes=2) as [node]:
        os.kill(int(until(lambda: up.exists() and up.read_text())), signal.SIGKILL)
        node.communicate()
    assert node.returncode == 43
    assert tagged(NODE_DIRECTORY, str(tmp_path / "d" / "node-0")) == []
