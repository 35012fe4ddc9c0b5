"""Nodes in an image of a user's own, with a torch of the era that GPUDirect-TCPX was made for, which was NCCL 2.19's.

The environment has that torch, requirements-node.txt and nothing else. Its wheel is one for CUDA and runs on CPUs here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributions import requirements
from nodes import ended_nodes, report_of, started_nodes
from other_torch import python_with
from waiting import until

from litgpt_demo.errors import EXIT_CODES, Fault
from litgpt_demo.node.collectives import read_result
from litgpt_demo.node.gpu import check_used
from litgpt_demo.node.nccl import check_nccl
from litgpt_demo.node.network import NETWORK, NodeNetwork
from litgpt_demo.node.torch_seen import TorchSeen, torch_seen

OURS = Path(__file__).parents[3] / "litgpt_demo"
TORCH = "2.2.2"

RANK = """
import os, pathlib, signal, sys, time
import psutil
import torch, torch.distributed as dist

mode, rank = sys.argv[1], int(os.environ["RANK"])
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("gloo")
total = torch.ones(1) * (rank + 1)
dist.all_reduce(total)
listening = [one.laddr.ip for one in psutil.net_connections("tcp")
             if one.status == "LISTEN" and one.laddr.port == int(os.environ["MASTER_PORT"])]
sys.stdout.write(f"torch {torch.__version__} rank {rank} sum {total.item():g} store at {listening}\\n")
pathlib.Path(sys.argv[2], f"up-{rank}").touch()
if mode == "fail":
    if rank == 1:
        raise ValueError("the cause")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
if mode == "save":
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), pathlib.Path(sys.argv[2], f"saved-{rank}").touch(),
                                              sys.exit(45)))
if mode in ("save", "stubborn"):
    time.sleep(600)
dist.destroy_process_group()
"""

Program = Callable[[str], tuple[str, ...]]


@pytest.fixture(scope="module")
def old_python() -> Path:
    return python_with(TORCH, "numpy<2", *requirements((OURS / "requirements-node.txt").read_text()))


@pytest.fixture
def how(old_python: Path, tmp_path: Path) -> dict[str, Any]:
    """How nodes are started whose only code of ours is the package, copied as into an image."""
    shutil.copytree(OURS, tmp_path / "image" / "litgpt_demo", ignore=shutil.ignore_patterns("__pycache__"))
    return {"python": str(old_python), "environ": {"PYTHONPATH": str(tmp_path / "image")}}


@pytest.fixture
def program(tmp_path: Path) -> Program:
    (tmp_path / "rank.py").write_text(RANK)
    return lambda mode: (str(tmp_path / "rank.py"), mode, str(tmp_path))


def test_two_nodes_pass_the_gate_and_sum_over_gloo_with_the_store_on_loopback_alone(
    how: dict[str, Any], program: Program, tmp_path: Path
) -> None:
    how["environ"][NETWORK] = NodeNetwork(gate_seconds=3, floor_gbytes={2: 0.0001}).model_dump_json()
    codes, said = ended_nodes(tmp_path / "d", *program("sum"), nodes=2, **how)
    assert codes == [0, 0], said
    for rank, text in enumerate(said):
        assert f"[rank{rank}]:torch {TORCH}+cu121 rank {rank} sum 3 store at ['127.0.0.1']" in text.splitlines()
    path = tmp_path / "d" / "node-1" / "network.json"
    result = read_result(path.read_bytes(), str(path))
    assert (result.nodes, result.backend, len(result.hosts)) == (2, "gloo", 2)


def test_a_rank_that_fails_is_reported_with_its_traceback(
    how: dict[str, Any], program: Program, tmp_path: Path
) -> None:
    codes, said = ended_nodes(tmp_path / "d", *program("fail"), processes=2, **how)
    assert codes == [EXIT_CODES[Fault.USER]], said
    told = report_of(tmp_path / "d")
    assert told["message"] == "local rank 1 ended with exit code 1 (user error): ValueError: the cause"
    assert told["ranks"][0]["traceback"][-1] == "ValueError: the cause"


@pytest.mark.parametrize(("mode", "grace", "saved"), [("save", 60, 2), ("stubborn", 2, 0)])
def test_nodes_that_are_asked_to_leave_let_their_ranks_save_as_long_as_they_have_grace(
    how: dict[str, Any], program: Program, tmp_path: Path, mode: str, grace: int, saved: int
) -> None:
    with started_nodes(tmp_path / "d", *program(mode), nodes=2, grace=grace, **how) as nodes:
        until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
        for node in nodes:
            node.terminate()
        said = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [45, 45], said
    assert len(list(tmp_path.glob("saved-*"))) == saved
    assert report_of(tmp_path / "d", 1)["fault"] == Fault.PREEMPTED


# --- what torch says there --------------------------------------------------------------------------------------------

# A driver of CUDA 11.4, as far as CUDA's runtime asks before it gives up (cuda.h).
DRIVER = "int cuInit(unsigned f) { return 0; } int cuDriverGetVersion(int *v) { *v = 11040; return 0; }"


def seen_by(python: Path, **environ: str) -> TorchSeen:
    return torch_seen({**os.environ, "PYTHONPATH": str(OURS.parent), **environ}, python=str(python))


def test_its_nccl_is_the_one_that_tcpx_is_qualified_for(old_python: Path) -> None:
    seen = seen_by(old_python)
    assert (seen.torch, seen.cuda, seen.nccl) == (f"{TORCH}+cu121", "12.1", "2.19.3")
    tcpx = NodeNetwork(name="tcpx", nccl_net="GPUDirectTCPX_v7", nccl_versions=(">=2.19,<2.20",))
    assert list(check_nccl(tcpx, seen)) == []


def test_a_machine_without_a_driver_and_one_with_an_old_driver_are_told_apart(old_python: Path, tmp_path: Path) -> None:
    (found,) = check_used(NodeNetwork(gpus=8), seen_by(old_python), {}, processes=8)
    assert (found.code, found.fault) == ("gpu.unused", Fault.NODE)
    assert "Found no NVIDIA driver on your system" in found.what
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-o", str(tmp_path / "libcuda.so.1"), "-"]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    seen = seen_by(old_python, LD_LIBRARY_PATH=str(tmp_path))
    (found,) = check_used(NodeNetwork(gpus=8), seen, {}, processes=8)
    assert "the machine's driver is too old for it (it knows CUDA 11.4 at most)" in found.what
    assert found.fix.startswith("CUDA 12 needs driver 525.60.13 or newer")
