"""What a node runs works with the torch of every stack, not only with that of the tests' own environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from distributions import requirements
from nodes import report_of, started_nodes
from other_torch import python_with
from waiting import until

from launcher.images.stacks import STACKS
from litgpt_demo.errors import Fault
from litgpt_demo.node.collectives import read_result
from litgpt_demo.node.nccl import check_nccl
from litgpt_demo.node.network import NETWORK, NodeNetwork
from litgpt_demo.node.torch_seen import torch_seen

TESTS = Path(__file__).parents[2]
OURS = version("torch").partition("+")[0]

# What goes through torch: training, checkpoints, collection, torchrun.
CHOSEN = ("litgpt_demo/training", "litgpt_demo/export", "litgpt_demo/node")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("stack", [stack.name for stack in STACKS.values() if stack.torch != OURS])
def test_training_checkpoints_and_nodes_work_with_the_torch_of_each_stack(stack: str, tmp_path: Path) -> None:
    python = python_with(STACKS[stack].torch, upon_ours=True)
    environ = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    asked = [python, "-c", "import torch; print(torch.__version__)"]
    said = subprocess.run(asked, env=environ, capture_output=True, text=True, check=True)
    assert said.stdout.partition("+")[0].strip() == STACKS[stack].torch
    command = [python, "-m", "pytest", "-n", "0", "--basetemp", tmp_path / "tests", "-o", f"cache_dir={tmp_path}/cache"]
    environ.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [*command, *(TESTS / folder for folder in CHOSEN)],
        cwd=TESTS.parent, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:]


OURS = Path(__file__).parents[3] / "litgpt_demo"
TORCH = "2.2.2"

RANK = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist

place, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo")
total = torch.ones(1) * (rank + 1)
dist.all_reduce(total)
print(f"torch {torch.__version__} rank {rank} sum {total.item():g}", flush=True)
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(place, f"saved-{rank}").touch(), sys.exit(45)))
pathlib.Path(place, f"up-{rank}").touch()
time.sleep(600)
"""


def test_two_nodes_measure_their_network_sum_and_let_their_ranks_save(tmp_path: Path) -> None:
    """Their only code of ours is the package, copied as into an image."""
    python = python_with(TORCH, "numpy<2", *requirements((OURS / "requirements-node.txt").read_text()))
    shutil.copytree(OURS, tmp_path / "image" / "litgpt_demo", ignore=shutil.ignore_patterns("__pycache__"))
    own = {"PYTHONPATH": str(tmp_path / "image")}
    seen = torch_seen(os.environ | own, python=str(python))
    assert (seen.torch, seen.cuda, seen.nccl) == (f"{TORCH}+cu121", "12.1", "2.19.3")
    assert list(check_nccl(NodeNetwork(name="tcpx", nccl_net="x", nccl_versions=(">=2.19,<2.20",)), seen)) == []

    (tmp_path / "rank.py").write_text(RANK)
    network = NodeNetwork(gate_seconds=3, floor_gbytes={2: 0.0001}).model_dump_json()
    program = (str(tmp_path / "rank.py"), str(tmp_path))
    how = {"nodes": 2, "grace": 60, "python": str(python), "environ": own | {NETWORK: network}}
    with started_nodes(tmp_path / "d", *program, **how) as nodes:  # type: ignore[arg-type]
        until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
        for node in nodes:
            node.terminate()
        said = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [45, 45], said
    for rank, text in enumerate(said):
        assert f"[rank{rank}]:torch {TORCH}+cu121 rank {rank} sum 3" in text.splitlines()
    path = tmp_path / "d" / "node-1" / "network.json"
    assert read_result(path.read_bytes(), str(path)).backend == "gloo"
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert report_of(tmp_path / "d", 1)["fault"] == Fault.PREEMPTED
