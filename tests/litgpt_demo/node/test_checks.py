"""Checks of a machine, on file systems that are made up; sockets and limits are real ones."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from litgpt_demo.errors import Fault
from litgpt_demo.node.checks import (
    check_daemon,
    check_glibc,
    check_interfaces,
    check_machine,
    check_shared_memory,
    cores_of,
    stop_probing,
)
from litgpt_demo.node.network import NETWORK, NodeNetwork
from litgpt_demo.node.rendezvous import Node
from litgpt_demo.node.torchrun import Rendezvous

NICS = NodeNetwork(name="tcpx", interfaces=("eth0", "eth1", "eth2", "eth3", "eth4"))


def cards(root: Path, *names: str, down: str = "") -> Path:
    for name in names:
        folder = root / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "operstate").write_text("down\n" if name == down else "up\n" if name != "lo" else "unknown\n")
    return root


def test_missing_interfaces_are_listed_with_those_that_are_there(tmp_path: Path) -> None:
    (found,) = check_interfaces(NICS, cards(tmp_path, "lo", "eth0", "eth1", "eth2"))
    assert found.what == "the interfaces eth3, eth4 are missing; there are eth0, eth1, eth2, lo"
    assert (found.fault, found.code) == (Fault.NODE, "network.interfaces")
    assert "networking.gke.io/interfaces" in found.fix


def test_an_interface_that_is_down_is_told(tmp_path: Path) -> None:
    root = cards(tmp_path, "lo", "eth0", "eth1", "eth2", "eth3", "eth4", down="eth3")
    assert [found.what for found in check_interfaces(NICS, root)] == ["the interface eth3 is down"]


def test_shared_memory_of_a_bare_container_is_too_small(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    there = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert list(check_shared_memory(NodeNetwork(shm_bytes=there), tmp_path)) == []
    (found,) = check_shared_memory(NodeNetwork(name="gib", shm_bytes=there + 2**30), tmp_path)
    assert (found.fault, found.code) == (Fault.USER, "node.shared-memory")
    assert "and gib needs" in found.what
    assert list(check_shared_memory(NodeNetwork(shm_bytes=1), tmp_path / "nowhere")) != []


@pytest.mark.parametrize(
    ("found", "sound"),
    [("glibc 2.31", False), ("glibc 2.35", True), ("glibc 2.4", False), ("musl 1.2", False), ("", False)],
)
def test_an_image_older_than_its_plugin_is_refused(found: str, sound: bool) -> None:
    assert (list(check_glibc(NodeNetwork(glibc="2.35"), found)) == []) is sound
    assert list(check_glibc(NodeNetwork(), found)) == []


def test_a_daemon_that_is_not_up_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "rx_rule_manager"
    with socket.socket(socket.AF_UNIX) as daemon:
        starts = threading.Timer(0.7, daemon.bind, [str(path)])
        starts.start()
        begun = time.monotonic()
        assert list(check_daemon(NodeNetwork(socket=str(path)), patience=20)) == []
        assert time.monotonic() - begun > 0.5
        starts.join()


def test_a_daemon_that_does_not_come_is_named_with_its_place(tmp_path: Path) -> None:
    network = NodeNetwork(name="tcpx", socket=str(tmp_path / "rx_rule_manager"))
    (found,) = check_daemon(network, patience=0)
    assert "the tcpx daemon does not answer at " in found.what
    assert "No such file" in found.what
    (tmp_path / "rx_rule_manager").touch()
    (found,) = check_daemon(network, patience=0)
    assert "it is no socket" in found.what


def test_a_daemon_behind_a_port_has_to_take_the_call() -> None:
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


def test_a_node_tells_all_of_it_and_ends_with_the_class_of_the_first(tmp_path: Path) -> None:
    script, profile = tmp_path / "profile.sh", tmp_path / "gone.sh"
    script.touch()
    network = NodeNetwork(name="gib", nccl_net="gIB", interfaces=("eth77",), scripts=(str(script), str(profile)))
    flags = "--nodes 2 --node-rank 1 --processes 1 --master 127.0.0.1:29500 --run-id r --directory d -- -m this"
    done = subprocess.run(
        [sys.executable, "-m", "litgpt_demo", "node", *flags.split()], cwd=tmp_path, timeout=60, check=False,
        env={**os.environ, NETWORK: network.model_dump_json(), "LD_LIBRARY_PATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 43
    codes = re.findall(r"^error \[(.*?)\]", done.stdout, re.MULTILINE)
    assert codes == ["network.interfaces", "nccl.plugin", "network.environment"]
    assert f"the network's script {profile} is not on this node -> see whether the installer's" in done.stdout
    assert "network.interfaces" in json.loads((tmp_path / "d" / "node-1.json").read_text())["message"]


# --- cores ------------------------------------------------------------------------------------------------------------


def test_sets_of_cores_are_read_as_the_kernel_writes_them() -> None:
    assert cores_of("0-2,8,10-11") == {0, 1, 2, 8, 10, 11}
    assert cores_of("") == set()


def test_ranks_are_kept_to_the_cores_that_the_network_leaves_them() -> None:
    program = """
import os
from litgpt_demo.node.checks import keep_to
mine = min(os.sched_getaffinity(0))
print(keep_to(f"{mine},4000-4095"), os.sched_getaffinity(0) == {mine}, keep_to("4000-4095").severity)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "True", "warning"]


# --- the MTU of paths -------------------------------------------------------------------------------------------------


def probing(root: Path, value: str) -> Path:
    setting = root / "proc/sys/net/ipv4/tcp_mtu_probing"
    setting.parent.mkdir(parents=True)
    setting.write_text(value)
    return setting


def test_tcp_is_kept_from_probing_where_the_network_is_to_be_so(tmp_path: Path) -> None:
    setting = probing(tmp_path, "1\n")
    assert list(stop_probing(NodeNetwork(), tmp_path)) == []
    assert setting.read_text() == "1\n"
    assert list(stop_probing(NodeNetwork(disable_pmtu=True), tmp_path)) == []
    assert setting.read_text() == "0\n"


def test_a_container_that_may_not_set_it_goes_on_where_it_is_so_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    setting = probing(tmp_path, "0\n")
    monkeypatch.setattr(Path, "write_text", refuse)
    assert list(stop_probing(NodeNetwork(disable_pmtu=True), tmp_path)) == []
    monkeypatch.undo()
    setting.write_text("1\n")
    monkeypatch.setattr(Path, "write_text", refuse)
    (found,) = stop_probing(NodeNetwork(disable_pmtu=True), tmp_path)
    assert (found.severity, found.code) == ("error", "network.pmtu")
    assert "Read-only file system" in found.what
