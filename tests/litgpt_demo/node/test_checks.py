"""Checks of a machine, on file systems that are made up; sockets are real ones."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from litgpt_demo.errors import Fault
from litgpt_demo.node.checks import check_daemon, check_interfaces, check_machine, cores_of
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.node.rendezvous import Node
from litgpt_demo.node.torchrun import Rendezvous


def test_missing_interfaces_and_those_that_are_down_are_named(tmp_path: Path) -> None:
    for name, state in {"lo": "unknown", "eth0": "up", "eth1": "down"}.items():
        folder = tmp_path / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "operstate").write_text(f"{state}\n")
    missing, down = check_interfaces(NodeNetwork(interfaces=("lo", "eth0", "eth1", "eth2")), tmp_path)
    assert (missing.fault, missing.code, "eth2 are missing" in missing.what) == (Fault.NODE, "network.interfaces", True)
    assert (down.code, "eth1 is down" in down.what) == ("network.interface-down", True)


def test_a_daemon_that_does_not_answer_is_named_with_its_place(tmp_path: Path) -> None:
    network = NodeNetwork(name="tcpx", socket=str(tmp_path / "rx_rule_manager"))
    assert "No such file" in next(check_daemon(network, patience=0)).what
    (tmp_path / "rx_rule_manager").touch()
    assert "it is no socket" in next(check_daemon(network, patience=0)).what
    with socket.socket() as daemon:
        daemon.bind(("127.0.0.1", 0))
        network = NodeNetwork(name="tcpxo", socket=f"127.0.0.1:{daemon.getsockname()[1]}")
        assert "Connection refused" in next(check_daemon(network, patience=0)).what
        daemon.listen()
        assert list(check_daemon(network, patience=0)) == []


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    network = NodeNetwork(
        name="tcpx", nccl_net="GPUDirectTCPX_v7", interfaces=("eth9",), gpus=8, glibc="9.9", shm_bytes=2**60,
        library_paths=(str(tmp_path / "plugin"),),
    )  # fmt: skip
    meet = Rendezvous(nodes=2, node_rank=0, host="h", port=1, run_id="r")
    node = Node(meet=meet, processes=8, directory=tmp_path, program=("x",), network=network)
    found = [trouble.code for trouble in check_machine(node, {"PATH": "/none"}, root=tmp_path)]
    assert found == [
        "gpu.count", "gpu.libcuda", "network.interfaces", "node.shared-memory", "image.glibc", "nccl.plugin",
    ]  # fmt: skip


def test_ranks_are_kept_to_the_cores_that_the_network_leaves_them() -> None:
    assert cores_of("0-2,8,10-11") == {0, 1, 2, 8, 10, 11}
    program = """
import os
from litgpt_demo.node.checks import keep_to
mine = min(os.sched_getaffinity(0))
print(keep_to(f"{mine},4000-4095"), os.sched_getaffinity(0) == {mine}, keep_to("4000-4095").severity)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "True", "warning"]
