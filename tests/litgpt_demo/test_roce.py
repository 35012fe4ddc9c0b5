"""Tables of GIDs as pods of RoCE clusters have them, made up under a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from litgpt_demo.environment import rdma
from litgpt_demo.faults import NodeError
from litgpt_demo.network import NodeNetwork
from litgpt_demo.roce import gid_index

LINK_LOCAL = "fe80:0000:0000:0000:0a00:27ff:fe4e:66a1"
V4 = "0000:0000:0000:0000:0000:ffff:0a00:0105"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"

# As in the pods of the cluster that the profile is of: v1 and v2 of the same address, one of each family.
USUAL = {
    0: (LINK_LOCAL, "IB/RoCE v1", "net1"), 1: (LINK_LOCAL, "RoCE v2", "net1"), 8: (V4, "IB/RoCE v1", "net1"),
    9: (V4, "RoCE v2", "net1"),
}  # fmt: skip


def card(root: Path, name: str, table: dict[int, tuple[str, str, str]]) -> None:
    port = root / "class/infiniband" / name / "ports/1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    for index in range(16):
        address, kind, interface = table.get(index, (ZERO, "", ""))
        (port / "gids" / str(index)).write_text(f"{address}\n")
        if kind:  # the kernel answers EINVAL for the others; a file that is not there is refused as well
            (port / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")
            (port / "gid_attrs/ndevs" / str(index)).write_text(f"{interface}\n")


def test_the_index_is_that_of_roce_v2_over_ipv4(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_bond_0", USUAL)
    assert gid_index(tmp_path, "mlx5", ("eth0", "net1")) == 9


def test_another_pods_address_in_the_same_table_is_not_taken(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_0", {5: (V4.replace("0105", "0106"), "RoCE v2", "veth1a"), **USUAL})
    assert gid_index(tmp_path, "mlx5", ("eth0", "net1")) == 9
    assert gid_index(tmp_path, "mlx5", ("veth1a",)) == 5


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            {0: (LINK_LOCAL, "RoCE v2", "net1"), 8: (V4, "IB/RoCE v1", "net1")},
            "no address of mlx5. is RoCE v2 over IPv4",
        ),
        ({3: ("0000:0000:0000:0000:0000:ffff:0000:0000", "RoCE v2", "net1")}, "no address of mlx5. is RoCE v2"),
        ({}, "the table is empty"),
    ],
)
def test_without_such_an_address_it_fails_and_shows_the_table(
    tmp_path: Path, table: dict[int, tuple[str, str, str]], words: str
) -> None:
    card(tmp_path, "mlx5_0", table)
    with pytest.raises(NodeError, match=words):
        gid_index(tmp_path, "mlx5", ("net1",))


def test_a_pod_without_cards_is_told_which_annotation_gives_them(tmp_path: Path) -> None:
    with pytest.raises(
        NodeError, match=r"there are none; look at the pod's annotation k8s\.v1\.cni\.cncf\.io/networks"
    ):
        gid_index(tmp_path, "mlx5", ())
    card(tmp_path, "irdma0", USUAL)
    with pytest.raises(NodeError, match=r"there are irdma0; .*set the right prefix as NCCL_IB_HCA"):
        gid_index(tmp_path, "mlx5", ())


def test_cards_that_disagree_are_not_forced_into_one_index(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_0", USUAL)
    card(tmp_path, "mlx5_1", {3: USUAL[9]})
    with pytest.raises(NodeError, match="mlx5_0 9, mlx5_1 3"):
        gid_index(tmp_path, "mlx5", ("net1",))
    assert gid_index(tmp_path, "mlx5_1", ("net1",)) == 3


def test_nccl_is_given_card_and_index_unless_the_user_gave_them(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_bond_0", USUAL)
    network = NodeNetwork(name="roce", hca="mlx5", interfaces=("eth0", "net1"))
    assert rdma(network, {}, tmp_path) == {"NCCL_IB_HCA": "mlx5", "NCCL_IB_GID_INDEX": "9"}
    assert rdma(network, {"NCCL_IB_HCA": "mlx5_bond_0"}, tmp_path)["NCCL_IB_HCA"] == "mlx5_bond_0"
    assert rdma(network, {"NCCL_IB_GID_INDEX": "3"}, tmp_path) == {}
    assert rdma(network, {"NCCL_IB_HCA": "^mlx5_3"}, tmp_path) == {}
