"""The node's code works with the torch of every stack."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest
from distributions import requirements
from nodes import report_of, started_nodes
from waiting import until

from launcher.images.stacks import STACKS
from litgpt_demo.errors import FailureClass
from litgpt_demo.node import gpu
from litgpt_demo.node.checks import check_nccl
from litgpt_demo.node.network import NETWORK, NodeNetwork
from litgpt_demo.node.network_test import read_result

TESTS = Path(__file__).parents[2]
# pip's words where it is the machine that cannot have a wheel, and not the requirement that is wrong.
_NOT_TO_BE_HAD = re.compile(r"No matching distribution found for torch==|ConnectionError|Read timed out|No space left")


def python_with(torch: str, *packages: str, upon_ours: bool = False) -> Path:
    """Return the interpreter of an environment with that torch; skips the test where the wheel cannot be had.

    Made by pip as it is configured here: some gigabytes, within minutes. Later calls find it. With `upon_ours`, all
    else that the tests' own environment has is there too, behind what pip installed.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train-litgpt"
    folder = home / f"torch-{torch}{'-upon' if upon_ours else ''}"
    python, note = folder / "bin" / "python", folder / "installed"
    wanted = [f"torch=={torch}", *packages]
    if not note.exists() or note.read_text().splitlines() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *wanted]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode != 0 and (why := _NOT_TO_BE_HAD.search(done.stderr)):
            pytest.skip(f"{wanted[0]} cannot be had here: {why[0]}")
        assert done.returncode == 0, done.stderr
        note.write_text("\n".join(wanted))
    if upon_ours:  # of the checkout that runs now
        ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        purelib = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
        Path(purelib, "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


# What goes through torch: training, checkpoints, collection, torchrun.
CHOSEN = ("litgpt_demo/training", "litgpt_demo/export", "litgpt_demo/node")


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "stack", [name for name, stack in STACKS.items() if not version("torch").startswith(stack.torch)]
)
def test_package_works_with_the_torch_of_each_stack(stack: str, tmp_path: Path) -> None:
    """Training, checkpoints and nodes do."""
    python = python_with(STACKS[stack].torch, upon_ours=True)
    environ = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    command = [python, "-c", "import torch; print(torch.__version__)"]
    printed = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert printed.stdout.partition("+")[0].strip() == STACKS[stack].torch
    environ.pop("PYTEST_ADDOPTS", None)
    pytest_of = [python, "-m", "pytest", "-n", "0", f"--basetemp={tmp_path}/tests", "-o", f"cache_dir={tmp_path}/cache"]
    command = [*map(str, pytest_of), *(str(TESTS / folder) for folder in CHOSEN)]
    done = subprocess.run(command, cwd=TESTS.parent, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:]


# Of the era that GPUDirect-TCPX was made for, which was NCCL 2.19's. Its wheel is one for CUDA and runs on CPUs here.
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


def test_nodes_with_an_old_torch_measure_then_let_ranks_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image has that torch, requirements-node.txt and our package, and nothing else."""
    package = TESTS.parent / "litgpt_demo"
    python = python_with(TORCH, "numpy<2", *requirements((package / "requirements-node.txt").read_text()))
    shutil.copytree(package, tmp_path / "image" / "litgpt_demo", ignore=shutil.ignore_patterns("__pycache__"))
    own = {"PYTHONPATH": str(tmp_path / "image")}
    monkeypatch.setattr(gpu, "PYTHON", (str(python),))
    seen = gpu.torch_seen(os.environ | own)
    assert (seen.torch, seen.cuda, seen.nccl) == (f"{TORCH}+cu121", "12.1", "2.19.3")
    assert list(check_nccl(NodeNetwork(name="tcpx", nccl_net="x", nccl_versions=(">=2.19,<2.20",)), seen)) == []

    (tmp_path / "rank.py").write_text(RANK)
    network = NodeNetwork(test_seconds=3, floor_gbytes={2: 0.0001}).model_dump_json()
    program = (str(tmp_path / "rank.py"), str(tmp_path))
    environ = own | {NETWORK: network}
    with started_nodes(tmp_path / "d", *program, nodes=2, grace=60, python=str(python), environ=environ) as nodes:
        until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
        for node in nodes:
            node.terminate()
        outputs = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [45, 45], outputs
    for rank, text in enumerate(outputs):
        assert f"[rank{rank}]:torch {TORCH}+cu121 rank {rank} sum 3" in text.splitlines()
    path = tmp_path / "d" / "node-1" / "network.json"
    assert read_result(path.read_bytes(), str(path)).backend == "gloo"
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert report_of(tmp_path / "d", 1)["fault"] == FailureClass.PREEMPTED
