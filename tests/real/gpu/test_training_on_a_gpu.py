"""A real GPU: the reports of torch and NCCL, and the numbers of a CPU but for rounding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nodes import ended_nodes
from states import loss_and_gradients, model_with_loss
from training_runs import NewRun, rows, train

from litgpt_demo.config import ModelConfig, TrainConfig
from litgpt_demo.metrics import curve
from litgpt_demo.node.gpu import check_gpus, check_used, torch_seen
from litgpt_demo.node.network import NETWORK, NodeNetwork
from litgpt_demo.node.network_test import read_result
from litgpt_demo.training.setup import apply_float8_ac_compile

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


def test_a_run_ends_on_the_gpu_near_where_it_ends_on_a_cpu(new_run: NewRun, finished: Path) -> None:
    run = new_run("run")
    train(run)
    gpu_loss, cpu_loss = ([row["loss"] for row in rows(folder, "step")] for folder in (run, finished))
    assert gpu_loss == pytest.approx(cpu_loss, rel=1e-2)
    assert torch.cuda.max_memory_allocated() > 0


def test_a_deterministic_training_repeats_bit_for_bit(new_run: NewRun) -> None:
    settings = {"deterministic": True, "precision": "bf16-mixed"}
    losses = []
    for name in ("one", "two"):
        run = new_run(name, **settings)
        train(run)
        losses.append([row["loss"] for row in rows(run, "step")])
    assert losses[0] == losses[1]


def test_steps_report_the_memory_of_the_allocator(new_run: NewRun) -> None:
    run = new_run("run")
    train(run)
    last = rows(run, "step")[-1]
    assert last["memory_reserved"] >= last["memory"] > 0
    assert last["allocation_retries"] == 0
    assert rows(run, "start")[0]["compile"] == "blocks"


@pytest.mark.parametrize("name", ["transformer-100b", "transformer-175b"])
def test_a_block_of_a_model_that_fits_no_gpu_trains_on_one(new_run: NewRun, name: str) -> None:
    if torch.cuda.mem_get_info()[1] < 40e9:
        pytest.skip("weights, gradients and averages of such a block take 15 GB, and its update as much again")
    model = ModelConfig(name=name, config={"n_layer": 1, "padded_vocab_size": 320}, sequence_length=32)
    once = {"evaluate_every": 12, "checkpoint_every": 12}
    run = new_run("run", model=model, precision="bf16-true", learning_rate=1e-4, **once)
    train(run)
    losses = curve(rows(run), "step", "loss")
    assert losses[12] < losses[1] - 0.3


def test_float8_multiplies_on_gpus_that_can() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply in float8")
    plain, eighth = model_with_loss(128, "cuda"), model_with_loss(128, "cuda")
    train = TrainConfig(float8=True, compile="blocks", precision="bf16-mixed")
    apply_float8_ac_compile(eighth, train, torch.device("cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        assert loss_and_gradients(eighth)[0] == pytest.approx(loss_and_gradients(plain)[0], rel=0.05)


def test_torch_computes_on_every_gpu_that_the_driver_shows() -> None:
    seen = torch_seen(os.environ)
    assert (seen.cuda, seen.gpus, seen.gpu_error) == (torch.version.cuda, torch.cuda.device_count(), "")
    assert seen.nccl == ".".join(map(str, torch.cuda.nccl.version()))
    network = NodeNetwork(gpus=seen.gpus)
    errors = [finding for finding in check_gpus(network, os.environ) if finding.severity == "error"]
    assert [*errors, *check_used(network, seen, os.environ, processes=seen.gpus)] == []


SAVING = """
import sys
from pathlib import Path
import torch
from lightning.fabric import Fabric
from states import pair, stepped_by_hand
from litgpt_demo.training.saving import Saver

torch.cuda.set_device(1)
fabric = Fabric(accelerator="cuda", devices=[1])
model, optimizer = pair(1, device="cuda:1")
training = stepped_by_hand(Path(sys.argv[1]), fabric, fabric.setup_module(model), fabric.setup_optimizers(optimizer))
with Saver(training, on_result=print) as saver:
    saver.save(1, None)
print("contexts:", [torch._C._cuda_hasPrimaryContext(number) for number in range(2)])
"""


def test_a_save_makes_no_context_on_another_gpu(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("a rank's GPU is another than the first one only where there are two")
    command = [sys.executable, "-c", SAVING, str(tmp_path)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "contexts: [False, True]"


def test_two_nodes_measure_by_nccl_over_loopback(tmp_path: Path) -> None:
    """NCCL refuses two ranks on one GPU of one host, so that each node is a host of its own by NCCL_HOSTID."""
    (tmp_path / "rank.py").write_text("print('trained')")
    network, count = NodeNetwork(test_seconds=30, floor_gbytes={2: 0.001}, gpus=1), torch.cuda.device_count()
    codes, output = ended_nodes(
        tmp_path / "d", str(tmp_path / "rank.py"), nodes=2,
        environ={NETWORK: network.model_dump_json(exclude_defaults=True), "NCCL_SOCKET_IFNAME": "lo"},
        of_node=[
            {"NCCL_HOSTID": f"host-{number}", "CUDA_VISIBLE_DEVICES": str(number % count)} for number in (0, 1)
        ],
    )  # fmt: skip
    assert codes == [0, 0], output
    path = tmp_path / "d" / "node-0" / "network.json"
    assert read_result(path.read_bytes(), str(path)).backend == "nccl"
