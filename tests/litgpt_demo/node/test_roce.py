"""Tables of GIDs as pods of RoCE clusters have them, made up under a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.errors import Fault, NodeError
from litgpt_demo.node.environment import rdma
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.node.network_use import NetworkUse
from litgpt_demo.node.roce import Cards, PortCounters, find_cards

Table = dict[int, tuple[str, str, str]]

LINK_LOCAL = "fe80:0000:0000:0000:0a00:27ff:fe4e:66a1"
V4 = "0000:0000:0000:0000:0000:ffff:0a00:0105"
OTHER_V4 = "0000:0000:0000:0000:0000:ffff:0a00:0106"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
V1, V2 = "IB/RoCE v1", "RoCE v2"

# As in the pods of the cluster that the profile is of: v1 and v2 of the same address, one of each family.
USUAL: Table = {
    0: (LINK_LOCAL, V1, "net1"), 1: (LINK_LOCAL, V2, "net1"), 8: (V4, V1, "net1"), 9: (V4, V2, "net1"),
}  # fmt: skip
NETWORK = NodeNetwork(name="roce", nccl_net="IB", hca="mlx5", interfaces=("net1",))


def card(root: Path, name: str, table: Table, *, port: int = 1) -> None:
    folder = root / "class/infiniband" / name / f"ports/{port}"
    for part in ("gids", "gid_attrs/types", "gid_attrs/ndevs", "counters"):
        (folder / part).mkdir(parents=True)
    (folder / "gids" / "15").write_text(f"{ZERO}\n")
    for index, (address, kind, interface) in table.items():
        (folder / "gids" / str(index)).write_text(f"{address}\n")
        (folder / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")
        if interface:
            (folder / "gid_attrs/ndevs" / str(index)).write_text(f"{interface}\n")


@given(index=st.integers(0, 255))
def test_whatever_the_index_of_roce_v2_over_ipv4_it_is_found(
    tmp_path_factory: pytest.TempPathFactory, index: int
) -> None:
    """A table has 256 entries, of which most are empty; there may be gaps anywhere."""
    root = tmp_path_factory.mktemp("sys")
    near = [place for place in (index - 3, index + 5) if 0 <= place < 256]
    card(root, "mlx5_0", dict.fromkeys(near, (LINK_LOCAL, V2, "net1")) | {index: (V4, V2, "net1")})
    assert find_cards(root, "mlx5", ("net1",)) == Cards(names=("mlx5_0:1",), index=index)


def test_another_pods_address_in_the_same_table_is_not_taken(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_0", {5: (OTHER_V4, V2, "veth1a"), **USUAL})
    assert find_cards(tmp_path, "mlx5", ("net1",)).index == 9
    assert find_cards(tmp_path, "mlx5", ("veth1a",)).index == 5


def test_the_second_port_is_used_where_the_first_has_no_address(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_0", {0: (LINK_LOCAL, V2, "net1")}, port=1)
    card(tmp_path, "mlx5_0", USUAL, port=2)
    assert find_cards(tmp_path, "mlx5", ("net1",)) == Cards(names=("mlx5_0:2",), index=9)


def test_several_cards_with_the_same_index_are_all_used_and_named_exactly(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_1", USUAL)
    card(tmp_path, "mlx5_10", USUAL)
    found = find_cards(tmp_path, "mlx5", ("net1",))
    assert found.environment() == {"NCCL_IB_HCA": "=mlx5_1:1,mlx5_10:1", "NCCL_IB_GID_INDEX": "9"}


@pytest.mark.parametrize(
    "table",
    [
        pytest.param({0: (LINK_LOCAL, V2, "net1"), 8: (V4, V1, "net1")}, id="version 1 only"),
        pytest.param({3: ("0000:0000:0000:0000:0000:ffff:0000:0000", V2, "net1")}, id="no address yet"),
        pytest.param({3: (V4, V2, "veth1a")}, id="another pod's only"),
    ],
)
def test_without_such_an_address_it_fails_and_shows_the_table(tmp_path: Path, table: Table) -> None:
    card(tmp_path, "mlx5_0", table)
    with pytest.raises(NodeError, match=r"no address of mlx5\* is RoCE v2 over IPv4 on net1 in the table") as told:
        find_cards(tmp_path, "mlx5", ("net1",))
    for address, kind, interface in table.values():
        assert all(word in str(told.value) for word in (address, kind, interface))


def test_two_addresses_of_one_port_are_not_chosen_between(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_0", {**USUAL, 11: (OTHER_V4, V2, "net1")})
    with pytest.raises(NodeError, match=r"mlx5_0:1 has more than one address") as told:
        find_cards(tmp_path, "mlx5", ("net1",))
    assert V4 in str(told.value)
    assert OTHER_V4 in str(told.value)


def test_a_pod_without_cards_is_told_which_annotation_gives_them(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"look at the pod's annotation k8s\.v1\.cni\.cncf\.io/networks"):
        find_cards(tmp_path, "mlx5", ())


def test_ports_that_disagree_are_not_forced_into_one_index(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_0", USUAL)
    card(tmp_path, "mlx5_1", {3: USUAL[9]})
    with pytest.raises(NodeError, match="mlx5_0:1, mlx5_1:1 have it at different indices"):
        find_cards(tmp_path, "mlx5", ("net1",))
    assert find_cards(tmp_path, "mlx5_1", ("net1",)).index == 3


def test_nccl_is_given_card_and_index_unless_the_user_gave_them(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_bond_0", USUAL)
    found = {"NCCL_IB_HCA": "=mlx5_bond_0:1", "NCCL_IB_GID_INDEX": "9"}
    assert rdma(NETWORK, {}, tmp_path) == found
    assert rdma(NETWORK, {"NCCL_IB_HCA": "mlx5_bond"}, tmp_path) == found
    assert rdma(NETWORK, {"NCCL_IB_GID_INDEX": "3"}, tmp_path) == {}
    assert rdma(NETWORK, {"NCCL_IB_HCA": "^mlx5_3"}, tmp_path) == {}


# --- proof of use -----------------------------------------------------------------------------------------------------

MEGABYTE = 10**6


def sent(root: Path, *, by_card: int, by_kernel: int) -> None:
    """What the counters say by now, in bytes; the card's counts words of four."""
    port = root / "class/infiniband/mlx5_0/ports/1/counters"
    statistics = root / "class/net/net1/statistics"
    statistics.mkdir(parents=True, exist_ok=True)
    (port / "port_xmit_data").write_text(f"{by_card // 4}\n")
    (statistics / "tx_bytes").write_text(f"{by_kernel}\n")


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    card(tmp_path, "mlx5_0", USUAL)
    sent(tmp_path, by_card=4_000 * MEGABYTE, by_kernel=9_000 * MEGABYTE)
    return tmp_path


def use_of(root: Path, *, allow_sockets: bool = False) -> NetworkUse:
    network = NETWORK.model_copy(update={"allow_sockets": allow_sockets})
    counters = PortCounters(root, ("mlx5_0:1",), ("net1",))
    return NetworkUse(network, root / "no logs", nodes=2, counters=counters)


def test_ports_that_move_while_the_interface_stays_still_prove_rdma(counted: Path) -> None:
    use = use_of(counted)
    sent(counted, by_card=4_900 * MEGABYTE, by_kernel=9_001 * MEGABYTE)
    assert use.look() is None


def test_an_interface_that_moves_while_the_ports_stay_still_ends_the_run(
    counted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use, allowed = use_of(counted), use_of(counted, allow_sockets=True)
    sent(counted, by_card=4_001 * MEGABYTE, by_kernel=9_900 * MEGABYTE)
    told = use.look()
    assert told is not None
    assert told.fault is Fault.NODE
    assert "the ranks do not send by RDMA: 1 MB by the cards, 900 MB through the kernel" in told.message
    assert allowed.look() is None
    assert "warning [network.unused] the ranks do not send by RDMA" in capsys.readouterr().out


def test_a_little_traffic_says_nothing_and_neither_do_counters_that_cannot_be_read(counted: Path) -> None:
    use = use_of(counted)
    sent(counted, by_card=4_000 * MEGABYTE, by_kernel=9_100 * MEGABYTE)
    assert use.look() is None
    (counted / "class/infiniband/mlx5_0/ports/1/counters/port_xmit_data").unlink()
    assert use.look() is None
