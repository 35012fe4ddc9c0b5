"""Ranks on GPUs of their own end where one GPU ends, and a rank that hangs, comes late or has no GPU is named."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import ended_nodes, report_of
from training_runs import NewRun, rows, train

from litgpt_demo.config import ModelConfig
from litgpt_demo.errors import FailureClass
from litgpt_demo.metrics import curve
from litgpt_demo.node.network import NETWORK, NodeNetwork
from litgpt_demo.node.network_test import read_result

Record = Callable[[str, object], None]
VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
def two(device: torch.device) -> torch.device:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    return device


@pytest.fixture
def four(two: torch.device) -> torch.device:
    if two.type == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("there are no four GPUs")
    return two


def trained(run: Path, directory: Path, *, nodes: int = 1) -> Path:
    """The run, trained by two ranks on each of some nodes; the first rank has the last GPU."""
    visible = [f"{2 * node + 1},{2 * node}" for node in range(nodes)]
    command = ("-m", "litgpt_demo", "train", "--run", str(run))
    environs = [{VISIBLE: numbers} for numbers in visible] if torch.cuda.is_available() else []
    codes, output = ended_nodes(directory, *command, nodes=nodes, processes=2, of_node=environs)
    assert codes == [0] * nodes, output
    return run


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_end_where_one_ends(
    two: torch.device, new_run: NewRun, tmp_path: Path, strategy: str, precision: str, record_property: Record
) -> None:
    """With an evaluation of another number of samples on each rank, and weights that decay so that it shows."""
    compiled = "blocks" if two.type == "cuda" else "none"
    settings: dict[str, Any] = {"max_steps": 30, "evaluation_samples": 5, "micro_batch": 4, "weight_decay": 5.0}
    settings |= {"precision": precision, "compile": compiled}
    alone, run = new_run("alone", **settings), new_run("run", world_size=2, strategy=strategy, **settings)
    train(alone)
    trained(run, tmp_path / "d")
    for kind, name in (("step", "loss"), ("step", "grad_norm"), ("evaluation", "validation_loss")):
        expected, found = curve(rows(alone), kind, name), curve(rows(run), kind, name)
        record_property(name, max(abs(found[step] / expected[step] - 1) for step in expected))
        assert found == pytest.approx(expected, rel=1e-2)


def test_a_hybrid_of_two_nodes_ends_where_one_gpu_ends(
    four: torch.device, new_run: NewRun, tmp_path: Path, record_property: Record
) -> None:
    """With four micro-batches of each rank; what nodes send each other waits for the last."""
    settings = {"max_steps": 200, "micro_batch": 1, "global_batch": 16, "evaluate_every": 200, "checkpoint_every": 200}
    alone, run = new_run("alone", **settings), new_run("run", world_size=4, strategy="hybrid", **settings)
    train(alone)
    trained(run, tmp_path / "d", nodes=2)
    expected, found = curve(rows(alone), "step", "loss"), curve(rows(run), "step", "loss")
    record_property("largest difference", max(abs(found[step] - expected[step]) for step in expected))
    assert found == pytest.approx(expected, rel=2e-2)


def test_a_hybrid_in_bfloat16_takes_the_memory_of_fsdp(
    four: torch.device, new_run: NewRun, tmp_path: Path, record_property: Record
) -> None:
    """torch 2.13 may hold all buffers of a sum in float32 (https://github.com/pytorch/pytorch/issues/179128)."""
    model = ModelConfig(name="pythia-160m" if four.type == "cuda" else "pythia-14m", sequence_length=32)
    few: dict[str, Any] = {"model": model, "precision": "bf16-true", "max_steps": 3, "compile": "none"}
    fsdp = trained(new_run("fsdp", world_size=2, strategy="fsdp", **few), tmp_path / "a")
    hybrid = trained(new_run("hybrid", world_size=4, strategy="hybrid", **few), tmp_path / "b", nodes=2)
    memory = [rows(run, "step")[-1]["memory"] for run in (fsdp, hybrid)]
    record_property("fsdp, hybrid", memory)
    if four.type == "cuda":
        assert memory[1] - memory[0] < 2 * rows(fsdp, "start")[0]["parameters"]


STUCK = """
import sys, time
import torch
from litgpt_demo.training import loop
train_step = loop.train_step

def stuck(training, step):
    if step == 20 and training.fabric.global_rank == 1:
        if training.fabric.device.type == "cuda":
            torch.cuda._sleep(10**13)  # an hour and more
        else:
            time.sleep(10_000)
    return train_step(training, step)

loop.train_step = stuck
sys.exit(loop.main(["--run", sys.argv[1]]))
"""


def test_a_gpu_that_hangs_is_named_by_its_rank(
    two: torch.device, new_run: NewRun, tmp_path: Path, record_property: Record
) -> None:
    """The node ends the job before NCCL does, and says whose step it was."""
    (tmp_path / "rank.py").write_text(STUCK)
    run = new_run("run", world_size=2, max_steps=1000, hang_timeout=30, evaluate_every=1000, checkpoint_every=1000)
    codes, output = ended_nodes(tmp_path / "d", str(tmp_path / "rank.py"), str(run), processes=2)
    ranks = report_of(tmp_path / "d")["ranks"]
    record_property("ranks", [(rank["rank"], rank["fault"], rank["message"]) for rank in ranks])
    assert codes == [46], output
    assert [(rank["rank"], rank["fault"]) for rank in ranks] == [(1, FailureClass.HANG)]


LATE = """
import sys, time
from litgpt_demo import timeouts
from litgpt_demo.training import loop
timeouts.LEAST_COLLECTIVE, set_up = 10.0, loop.set_up

def late(*parts):
    if parts[2].global_rank == 1:
        time.sleep(40)  # as to stage, to draw weights and to compile may take
    return set_up(*parts)

loop.set_up = late
sys.exit(loop.main(["--run", sys.argv[1]]))
"""


def test_a_rank_that_comes_too_late_ends_the_job_with_a_reason(
    two: torch.device, new_run: NewRun, tmp_path: Path, record_property: Record
) -> None:
    """No collective waits longer than torch's limit, which is ten seconds here."""
    (tmp_path / "rank.py").write_text(LATE)
    run = new_run("run", world_size=2, hang_timeout=5, strategy="ddp")
    codes, output = ended_nodes(tmp_path / "d", str(tmp_path / "rank.py"), str(run), processes=2)
    report = report_of(tmp_path / "d")
    record_property("report", [report["fault"], report["message"], report["ranks"]])
    assert codes[0] not in {0, None}, output
    assert report["fault"] not in {"", FailureClass.UNKNOWN}


def test_a_rank_without_a_gpu_ends_the_job_with_a_reason(
    gpu: torch.device, new_run: NewRun, tmp_path: Path, record_property: Record
) -> None:
    run = new_run("run", world_size=2, compile="none")
    command = ("-m", "litgpt_demo", "train", "--run", str(run))
    codes, output = ended_nodes(tmp_path / "d", *command, processes=2, environ={VISIBLE: "0"})
    report = report_of(tmp_path / "d")
    record_property("report", [report["fault"], report["message"]])
    assert codes[0] not in {0, None}, output
    assert "gpu" in (report["message"] + output[0]).lower()


SAVING = """
import sys
from pathlib import Path
import torch
from lightning.fabric import Fabric
from states import pair, stepped_by_hand
from litgpt_demo.training.saving import Saver

torch.cuda.set_device(1)
fabric = Fabric(accelerator="cuda", devices=[1])
torch.manual_seed(1)
model, optimizer = pair(1, device="cuda:1")
training = stepped_by_hand(Path(sys.argv[1]), fabric, fabric.setup_module(model), fabric.setup_optimizers(optimizer))
with Saver(training, on_result=print) as saver:
    saver.save(1, None)
print("contexts:", [torch._C._cuda_hasPrimaryContext(number) for number in range(2)])
"""


def test_a_save_makes_no_context_on_another_gpu(gpu: torch.device, two: torch.device, tmp_path: Path) -> None:
    """Neither does the random state of a step."""
    command = [sys.executable, "-c", SAVING, str(tmp_path)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "contexts: [False, True]"


def test_two_nodes_measure_by_nccl_over_loopback(gpu: torch.device, tmp_path: Path) -> None:
    """NCCL refuses two ranks on one GPU of one host, so that each node is a host of its own by NCCL_HOSTID."""
    (tmp_path / "rank.py").write_text("print('trained')")
    network, count = NodeNetwork(test_seconds=30, floor_gbytes={2: 0.001}, gpus=1), torch.cuda.device_count()
    codes, output = ended_nodes(
        tmp_path / "d", str(tmp_path / "rank.py"), nodes=2,
        environ={NETWORK: network.model_dump_json(exclude_defaults=True), "NCCL_SOCKET_IFNAME": "lo"},
        of_node=[
            {"NCCL_HOSTID": f"host-{number}", VISIBLE: str(number % count)} for number in (0, 1)
        ],
    )  # fmt: skip
    assert codes == [0, 0], output
    path = tmp_path / "d" / "node-0" / "network.json"
    assert read_result(path.read_bytes(), str(path)).backend == "nccl"
