"""Several ranks and nodes of this machine save, resume in another number, and end together."""

import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from nodes import ended_nodes, report_of, started_nodes
from training_runs import NewRun, rows, train
from waiting import until

from litgpt_demo.errors import FailureClass
from litgpt_demo.heartbeat import NODE_DIRECTORY, read_beats
from litgpt_demo.metrics import curve
from litgpt_demo.node.agent import processes_with_env
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import folder_of, list_complete


def train_of(run: Path) -> tuple[str, ...]:
    return ("-m", "litgpt_demo", "train", "--run", str(run))


def test_two_nodes_leave_together_and_resume_bit_for_bit(new_run: NewRun, tmp_path: Path) -> None:
    """The machine of one is taken away."""
    settings = {"world_size": 2, "max_steps": 400, "evaluate_every": 400, "checkpoint_every": 400}
    taken, through = new_run("taken", **settings), new_run("through", **settings)
    with started_nodes(tmp_path / "first", *train_of(taken), nodes=2, grace=60) as nodes:
        own = tmp_path / "first" / "node-1"
        until(lambda: any(beat.step >= 5 for beat in read_beats(own)))
        nodes[1].terminate()
        outputs = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [45, 45], outputs
    reports = [report_of(tmp_path / "first", number) for number in (0, 1)]
    assert [report["fault"] for report in reports] == [FailureClass.PREEMPTED] * 2
    assert [report["signalled_at"] is not None for report in reports] == [False, True]
    saved = list_complete(open_storage(str(taken)))[0].step
    assert 5 <= saved < 400
    for run, name in ((taken, "second"), (through, "other")):
        codes, output = ended_nodes(tmp_path / name, *train_of(run), nodes=2)
        assert codes == [0, 0], output
    assert [row["step"] for row in rows(taken, "start")] == [0, saved]
    shares = [sorted((run / folder_of(400)).glob("*.distcp")) for run in (taken, through)]
    assert len(shares[0]) == 4
    assert [path.read_bytes() for path in shares[0]] == [path.read_bytes() for path in shares[1]]


def test_two_nodes_train_as_one_process_after_any_strategy(new_run: NewRun, tmp_path: Path) -> None:
    thirty: dict[str, Any] = {"max_steps": 30, "evaluate_every": 30, "checkpoint_every": 5, "keep_every": 5}
    # Weights decay so strongly that a strategy which loses the decay, as FSDP's first version did, shows in the loss.
    thirty |= {"weight_decay": 5.0, "activation_checkpointing": "full"}
    alone = new_run("alone", **thirty)
    train(alone)
    for strategy, kept in (("hybrid", 0), ("fsdp", 5), ("hybrid", 15), ("ddp", 25)):
        # Two micro-batches of each rank: what nodes send each other waits for the second.
        run = new_run("run", world_size=4, strategy=strategy, micro_batch=1, **thirty)
        before = curve(rows(run), "step", "loss") if kept else {}
        for step in range(kept + 5, 31, 5):
            shutil.rmtree(run / folder_of(step), ignore_errors=True)
        codes, output = ended_nodes(tmp_path / strategy / str(kept), *train_of(run), nodes=2, processes=2)
        assert codes == [0, 0], output
        assert rows(run, "start")[-1]["step"] == kept
        losses = curve(rows(run), "step", "loss")
        assert losses == pytest.approx(curve(rows(alone), "step", "loss"), abs=1e-5)
        assert len(losses) == 30
        assert not kept or losses[kept + 1] == before[kept + 1], "it goes on from the same bits"


def test_a_training_with_a_stopped_rank_ends_as_its_hang(new_run: NewRun, tmp_path: Path) -> None:
    often = {"checkpoint_every": 90_000, "evaluate_every": 90_000}
    run, own = new_run("run", world_size=2, max_steps=100_000, hang_timeout=30, **often), tmp_path / "d" / "node-0"
    with started_nodes(tmp_path / "d", *train_of(run), processes=2) as [node]:
        until(lambda: len(beats := read_beats(own)) == 2 and all(beat.step > 20 for beat in beats))
        [pid] = [beat.pid for beat in read_beats(own) if beat.rank == 1]
        os.kill(pid, signal.SIGSTOP)
        output, _ = node.communicate()
    assert node.returncode == 46, output
    [rank] = report_of(tmp_path / "d")["ranks"]
    assert (rank["rank"], rank["fault"]) == (1, FailureClass.HANG)
    assert "silent too: rank 0 (training, step " in rank["message"]
    assert any("litgpt_demo/training/loop" in line for line in rank["traceback"])
    assert processes_with_env(NODE_DIRECTORY, str(own)) == []


def test_ranks_do_not_outlive_a_torchrun_that_was_killed(tmp_path: Path) -> None:
    up, script = tmp_path / "up", tmp_path / "rank.py"
    script.write_text("import os, pathlib, sys, time\npathlib.Path(sys.argv[1]).write_text(str(os.getppid()))\n"
                      "time.sleep(600)")  # fmt: skip
    with started_nodes(tmp_path / "d", str(script), str(up), processes=2) as [node]:
        os.kill(int(until(lambda: up.exists() and up.read_text())), signal.SIGKILL)
        node.communicate()
    assert node.returncode == 43
    assert processes_with_env(NODE_DIRECTORY, str(tmp_path / "d" / "node-0")) == []


ONE_DISK_IS_FULL = """
import json, resource, sys
from pathlib import Path
from states import training_of
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.training.resuming import resume
from litgpt_demo.training.saving import Saver
from litgpt_demo.training.step import train_step

run, place = map(Path, sys.argv[1:])
training = training_of(run)
rank, told = training.fabric.global_rank, []
with Saver(training, on_result=told.append) as saver:
    train_step(training, 0)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    saver.save(1, None)
    train_step(training, 1)
    try:
        saver.finish()
    except TrainLitgptError as error:
        (place / f"{rank}.json").write_text(json.dumps([type(error).__name__, str(error)]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    train_step(training, 2)
    saver.save(3, None)
if rank == 0:
    (place / "told.json").write_text(json.dumps([[saved.step, saved.warning] for saved in told]))
else:
    assert told == []
assert resume(training, on_warning=print) == 3
"""


def on_two_ranks(script: str, run: Path, place: Path) -> list[Any]:
    """Run a script by a node; returns what its ranks have left in `place`."""
    place.mkdir()
    (place / "script.py").write_text(script)
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    codes, output = ended_nodes(place / "d", str(place / "script.py"), str(run), str(place), processes=2, environ=path)
    assert codes == [0], output
    return [json.loads((place / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_a_full_disk_of_one_rank_costs_all_of_them_one_save(new_run: NewRun, tmp_path: Path) -> None:
    run, place = new_run("run", world_size=2), tmp_path / "place"
    errors = on_two_ranks(ONE_DISK_IS_FULL, run, place)
    assert errors[0] == errors[1]
    assert errors[0][0] == "DiskFull"
    assert "rank-1/step-1: File too large" in errors[0][1]
    (first, warning), last = json.loads((place / "told.json").read_text())
    assert (first, last) == (1, [3, None])
    assert "the checkpoint of step 1 was not saved" in warning
    assert [found.step for found in list_complete(open_storage(str(run)))] == [3]
    assert not (run / folder_of(1)).exists()


ONE_MACHINE_IS_TAKEN_AWAY = """
import json, os, signal, sys
from pathlib import Path
from states import training_of
from litgpt_demo.errors import Preempted
from litgpt_demo.training.loop import fit

training, passes = training_of(Path(sys.argv[1])), 0
rank = training.fabric.global_rank

def count(*_):
    global passes
    passes += training.model.training
    if passes == 10 and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)

training.model.register_forward_hook(count)
try:
    fit(training)
except Preempted as error:
    Path(sys.argv[2], f"{rank}.json").write_text(json.dumps([passes, str(error)]))
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_give_up_a_step_after_the_same_micro_batch(new_run: NewRun, tmp_path: Path, strategy: str) -> None:
    run = new_run("run", strategy=strategy, world_size=2, global_batch=64, micro_batch=1)
    outcomes = on_two_ranks(ONE_MACHINE_IS_TAKEN_AWAY, run, tmp_path / "place")
    # The ranks vote before each of the first step's 32 micro-batches, because its time is not known yet.
    assert outcomes[0] == outcomes[1]
    assert 10 < outcomes[0][0] < 14
    assert "no step had ended" in outcomes[0][1]
    assert list_complete(open_storage(str(run))) == []


ONE_LOSS_IS_INFINITE = """
import json, math, sys
from pathlib import Path
from states import training_of
from litgpt_demo.training.loop import fit

training = training_of(Path(sys.argv[1]))
rank, passes = training.fabric.global_rank, iter(range(1000))

def spoil(_module, given, loss):
    number = next(passes) if training.model.training else 0
    return loss + math.inf if rank == 1 and number // 2 == 6 else loss

training.model.register_forward_hook(spoil)
fit(training)
sums = [float(weight.to_local().double().sum() if hasattr(weight, "to_local") else weight.double().sum())
        for weight in training.model.parameters()]
steps = [float(state["step"]) for state in training.optimizer.optimizer.state.values()]
Path(sys.argv[2], f"{rank}.json").write_text(json.dumps([sums, steps]))
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loss_of_nan_on_one_rank_costs_all_one_update(new_run: NewRun, tmp_path: Path, strategy: str) -> None:
    run = new_run("run", world_size=2, strategy=strategy, on_nonfinite="skip")
    (first, steps), (second, _) = on_two_ranks(ONE_LOSS_IS_INFINITE, run, tmp_path / "place")
    assert all(map(math.isfinite, first))
    assert strategy == "fsdp" or first == second
    assert set(steps) == {11}
    (skip,) = rows(run, "skip")
    assert (skip["step"], skip["why"], len(skip["windows"])) == (7, "the loss of step 7 is inf", 4)
    assert {row["step"] for row in rows(run, "step")} == set(range(1, 13)) - {7}
