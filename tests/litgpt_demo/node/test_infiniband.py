"""Machines with InfiniBand cards, as /sys shows them.

The trees are written down, not copied from a machine: the files and the form of what is in them are those of the kernel
(drivers/infiniband/core/sysfs.c: `4: ACTIVE`, `400 Gb/sec (4X NDR)`), the machines those that NVIDIA describes
(https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html: 8 cards for GPUs, 2 for storage).
"""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest

from litgpt_demo.errors import NodeError
from litgpt_demo.node.environment import of_network
from litgpt_demo.node.infiniband import check_ports, find_ports, interface_to
from litgpt_demo.node.network import NodeNetwork

NDR, HDR, ETHERNET = "400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)", "100 Gb/sec (4X EDR)"
ACTIVE, INIT, DOWN = "4: ACTIVE", "2: INIT", "1: DOWN"
NETWORK = NodeNetwork(name="ib", nccl_net="IB", hca="", link="InfiniBand")

# Every card of a DGX H100 has one port; mlx5_10 and mlx5_11 are there for the storage, by Ethernet.
DGX = {f"mlx5_{number}": ("InfiniBand", ACTIVE, NDR) for number in range(8)} | {
    "mlx5_10": ("Ethernet", ACTIVE, ETHERNET),
    "mlx5_11": ("Ethernet", DOWN, ETHERNET),
}


def machine(root: Path, cards: dict[str, tuple[str, str, str]]) -> Path:
    """Write a machine's /sys: card to link layer, state and rate of its port 1."""
    for name, (link, state, rate) in cards.items():
        folder = root / "sys/class/infiniband" / name / "ports/1"
        (folder / "gids").mkdir(parents=True)
        for file, text in (("link_layer", link), ("state", state), ("rate", rate)):
            (folder / file).write_text(f"{text}\n")
        subnet = "fec0:0000:0000:0001" if "store" in name else "fe80:0000:0000:0000"
        (folder / "gids/0").write_text(f"{subnet}:b83f:d203:00ab:cdef\n")
    return root / "sys"


def test_nccl_gets_the_active_infiniband_ports_by_their_exact_names(tmp_path: Path) -> None:
    names = ",".join(f"mlx5_{number}:1" for number in range(8))
    assert find_ports(machine(tmp_path, DGX)) == {"NCCL_IB_HCA": f"={names}"}


def test_cards_of_any_name_are_found(tmp_path: Path) -> None:
    """The names that udev makes of their place: https://github.com/linux-rdma/rdma-core (rdma_rename)."""
    sys = machine(tmp_path, {"ibp24s0": ("InfiniBand", ACTIVE, HDR), "rocep65s0": ("Ethernet", ACTIVE, ETHERNET)})
    assert find_ports(sys) == {"NCCL_IB_HCA": "=ibp24s0:1"}


@pytest.mark.parametrize(
    ("cards", "told"),
    [
        pytest.param({}, "it has no RDMA card at all", id="no card"),
        pytest.param({"mlx5_0": ("Ethernet", ACTIVE, ETHERNET)}, r"mlx5_0:1 +Ethernet +ACTIVE +100 Gb", id="Ethernet"),
        pytest.param({"mlx5_0": ("InfiniBand", DOWN, "10 Gb/sec (4X SDR)")}, r"InfiniBand +DOWN +10 Gb", id="no link"),
        pytest.param({"mlx5_0": ("InfiniBand", INIT, NDR)}, r"InfiniBand +INIT +400 Gb", id="no subnet manager"),
    ],
)
def test_without_an_active_port_the_node_says_what_it_has(
    tmp_path: Path, cards: dict[str, tuple[str, str, str]], told: str
) -> None:
    sys = machine(tmp_path, cards)
    with pytest.raises(NodeError, match=rf"(?s)no InfiniBand port is active on this node; .*{told}.*roce or plain"):
        find_ports(sys)


def test_a_node_sets_its_ports_and_the_way_to_node_0(tmp_path: Path) -> None:
    machine(tmp_path, DGX)
    mine = of_network(NETWORK, {}, master="127.0.0.1", root=tmp_path)
    assert mine["NCCL_IB_HCA"].startswith("=mlx5_0:1,")
    assert mine["NCCL_SOCKET_IFNAME"] == "=lo"
    assert "NCCL_IB_GID_INDEX" not in mine


def test_what_the_user_sets_stays(tmp_path: Path) -> None:
    machine(tmp_path, DGX)
    chosen = {"NCCL_IB_HCA": "=mlx5_3:1", "NCCL_SOCKET_IFNAME": "bond0", "NCCL_IB_PKEY": "0x8001"}
    assert of_network(NETWORK, chosen, master="127.0.0.1", root=tmp_path) == chosen


def test_a_prefix_of_the_users_picks_among_the_ports(tmp_path: Path) -> None:
    machine(tmp_path, {**DGX, "ibstore0": ("InfiniBand", ACTIVE, HDR)})
    network = NETWORK.model_copy(update={"overrides": {"NCCL_IB_HCA": "ibstore"}})
    assert of_network(network, {}, root=tmp_path)["NCCL_IB_HCA"] == "=ibstore0:1"


def test_a_port_that_is_down_among_others_is_told(tmp_path: Path) -> None:
    sys = machine(tmp_path, {**DGX, "mlx5_3": ("InfiniBand", DOWN, NDR), "mlx5_4": ("InfiniBand", INIT, NDR)})
    found = list(check_ports(sys, locked=resource.RLIM_INFINITY))
    assert [(finding.code, finding.severity, finding.what.split()[0]) for finding in found] == [
        ("network.port-down", "warning", "mlx5_3:1"),
        ("network.port-down", "warning", "mlx5_4:1"),
    ]
    assert "cable" in found[0].fix
    assert "subnet manager" in found[1].fix


def test_ports_of_several_fabrics_are_told(tmp_path: Path) -> None:
    sys = machine(tmp_path, {**DGX, "ibstore0": ("InfiniBand", ACTIVE, HDR), "ibstore1": ("InfiniBand", DOWN, HDR)})
    found = {finding.code: finding for finding in check_ports(sys, locked=resource.RLIM_INFINITY)}
    assert "fec0:0000:0000:0001" in found["network.fabrics"].what
    assert "ibstore1" not in found["network.fabrics"].what
    assert "NCCL_IB_HCA" in found["network.fabrics"].fix


def test_a_machine_in_order_is_not_spoken_of(tmp_path: Path) -> None:
    assert list(check_ports(machine(tmp_path, DGX), locked=resource.RLIM_INFINITY)) == []


def test_too_little_memory_to_pin_is_told(tmp_path: Path) -> None:
    """64 KiB is what Slurm hands on from a login node that nobody set up for RDMA."""
    (finding,) = check_ports(machine(tmp_path, DGX), locked=64 * 1024)
    assert finding.code == "network.memlock"
    assert "PropagateResourceLimitsExcept=MEMLOCK" in finding.fix


def test_the_interface_is_the_one_that_leads_to_the_host() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no-such-host.invalid") is None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of no machine: https://www.rfc-editor.org/rfc/rfc5737
        except OSError:
            return  # this machine has no way out
    assert interface_to("192.0.2.1") in {name for _, name in socket.if_nameindex()} - {"lo"}
