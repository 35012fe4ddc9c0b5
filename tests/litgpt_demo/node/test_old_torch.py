"""Nodes in an image of a user's own, with a torch of the era that GPUDirect-TCPX was made for, which was NCCL 2.19's.

The environment has that torch, requirements-node.txt and nothing else. Its wheel is one for CUDA and runs on CPUs here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from distributions import requirements
from nodes import report_of, start_node
from other_torch import python_with
from waiting import free_port, until

from litgpt_demo.errors import EXIT_CODES, Fault
from litgpt_demo.node.collectives import read_result
from litgpt_demo.node.gpu import check_used
from litgpt_demo.node.nccl import check_nccl
from litgpt_demo.node.network import NETWORK, NodeNetwork
from litgpt_demo.node.torch_seen import TorchSeen, torch_seen

pytestmark = [pytest.mark.long, pytest.mark.training, pytest.mark.timeout(1500)]

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

Start: TypeAlias = Callable[..., list["subprocess.Popen[str]"]]


@pytest.fixture(scope="module")
def old_python() -> Path:
    return python_with(TORCH, "numpy<2", *requirements((OURS / "requirements-node.txt").read_text()))


@pytest.fixture
def start(old_python: Path, tmp_path: Path) -> Start:
    """Starts a job's nodes, whose only code of ours is the package, copied as into an image."""
    shutil.copytree(OURS, tmp_path / "image" / "litgpt_demo", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "rank.py").write_text(RANK)
    port = free_port()

    def started(mode: str, *, nodes: int = 1, processes: int = 1, grace: int = 5, gate: int = 0) -> list[object]:
        network = NodeNetwork(gate_seconds=gate, floor_gbytes={2: 0.0001}).model_dump_json(exclude_defaults=True)
        environ = {"PYTHONPATH": str(tmp_path / "image"), **({NETWORK: network} if gate else {})}
        program = (str(tmp_path / "rank.py"), mode, str(tmp_path))
        return [
            start_node(
                tmp_path / "d", *program, processes=processes, nodes=nodes, number=number, port=port, grace=grace,
                python=str(old_python), environ=environ,
            )
            for number in range(nodes)
        ]  # fmt: skip

    return started  # type: ignore[return-value]


def outputs(nodes: list[subprocess.Popen[str]]) -> list[str]:
    return [node.communicate(timeout=300)[0] for node in nodes]


def test_two_nodes_pass_the_gate_and_sum_over_gloo_with_the_store_on_loopback_alone(
    start: Start, tmp_path: Path
) -> None:
    nodes = start("sum", nodes=2, gate=3)
    said = outputs(nodes)
    assert [node.returncode for node in nodes] == [0, 0], said
    for rank, text in enumerate(said):
        assert f"[rank{rank}]:torch {TORCH}+cu121 rank {rank} sum 3 store at ['127.0.0.1']" in text.splitlines()
    path = tmp_path / "d" / "node-1" / "network.json"
    result = read_result(path.read_bytes(), str(path))
    assert (result.nodes, result.backend, len(result.hosts)) == (2, "gloo", 2)


def test_a_rank_that_fails_is_reported_with_its_traceback_and_its_peer_is_not_waited_for(
    start: Start, tmp_path: Path
) -> None:
    nodes = start("fail", processes=2)
    until((tmp_path / "up-1").exists)
    begun = time.monotonic()
    said = outputs(nodes)
    assert time.monotonic() - begun < 25  # torchrun alone would give the peer 30 s
    assert nodes[0].returncode == EXIT_CODES[Fault.USER], said
    told = report_of(tmp_path / "d")
    assert told["message"] == "local rank 1 ended with exit code 1 (user error): ValueError: the cause"
    assert told["ranks"][0]["traceback"][-1] == "ValueError: the cause"


def test_nodes_that_are_asked_to_leave_let_their_ranks_save(start: Start, tmp_path: Path) -> None:
    nodes = start("save", nodes=2)
    until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
    for node in nodes:
        node.terminate()
    said = outputs(nodes)
    assert [node.returncode for node in nodes] == [45, 45], said
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert report_of(tmp_path / "d", 1)["fault"] == Fault.PREEMPTED


def test_ranks_that_outstay_their_grace_are_killed_though_torchrun_knows_no_such_flag(
    start: Start, tmp_path: Path
) -> None:
    nodes = start("stubborn", grace=2)
    until((tmp_path / "up-0").exists)
    begun = time.monotonic()
    nodes[0].terminate()
    said = outputs(nodes)
    assert nodes[0].returncode == 45, said
    assert 2 <= time.monotonic() - begun < 11  # at 12 the node itself would kill torchrun, which by itself waits for 30


# --- what torch says there --------------------------------------------------------------------------------------------

# A driver of CUDA 11.4, as far as CUDA's runtime asks before it gives up (cuda.h).
DRIVER = "int cuInit(unsigned f) { return 0; } int cuDriverGetVersion(int *v) { *v = 11040; return 0; }"


def seen_by(python: Path, **environ: str) -> TorchSeen:
    seen = torch_seen({**os.environ, "PYTHONPATH": str(OURS.parent), **environ}, python=str(python))
    assert seen is not None
    return seen


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
