"""What the network adds to the environment of ranks: by its scripts, and by tables of GIDs as pods have them."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.errors import FailureClass, NodeError, UserError
from litgpt_demo.node.environment import find_cards, of_network, rdma, require_executable_cache, sourced
from litgpt_demo.node.network import NetworkUse, NodeNetwork

BASE = {"PATH": os.environ["PATH"]}

# As the network's own script does: it needs a variable, puts its folder first, and overwrites what was set before.
PROFILE = """
[[ -n "${NCCL_LIB_DIR:-}" ]] || { echo "NCCL_LIB_DIR is not set"; exit 1; }
export LD_LIBRARY_PATH="${NCCL_LIB_DIR}:${LD_LIBRARY_PATH:-}" NCCL_DEBUG=WARN NCCL_LONG=$'two\\nlines = "quoted"'
NCCL_NOT_EXPORTED=1
echo sourced
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "profile.sh").write_text(PROFILE)
    return str(tmp_path / "profile.sh")


def test_user_variables_win_over_network_over_scripts(script: str) -> None:
    network = NodeNetwork(
        scripts=(script,),
        library_paths=("/usr/local/gib/lib64", "/plugin"),
        environment={"NCCL_DEBUG": "INFO", "NCCL_NET": "gIB"},
        user_env={"NCCL_NET": "Socket"},
    )
    before = {**BASE, "NCCL_LIB_DIR": "/plugin", "LD_LIBRARY_PATH": "/opt/hpcx:/plugin", "NCCL_DEBUG": "TRACE"}
    own_variables = of_network(network, before)
    assert (own_variables["NCCL_DEBUG"], own_variables["NCCL_NET"], own_variables["NCCL_LONG"]) == (
        "INFO",
        "Socket",
        'two\nlines = "quoted"',
    )
    assert own_variables["LD_LIBRARY_PATH"] == "/usr/local/gib/lib64:/plugin:/opt/hpcx"
    assert "NCCL_NOT_EXPORTED" not in own_variables


def test_a_script_that_fails_or_is_not_there_ends_the_node(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"profile\.sh ended with"):
        sourced((script,), BASE)
    assert "NCCL_LIB_DIR is not set" in capfd.readouterr().out
    with pytest.raises(NodeError, match=r"set_nccl_env\.sh is not on this node; check whether the plugin is installed"):
        sourced((f"{script}/set_nccl_env.sh",), BASE)


def test_compiling_to_where_nothing_may_be_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "not yet there")}
    require_executable_cache(kept)
    noexec = SimpleNamespace(f_flag=os.statvfs(tmp_path).f_flag | os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda path: noexec)
    with pytest.raises(UserError, match="set TMPDIR or TORCHINDUCTOR_CACHE_DIR to a folder elsewhere"):
        require_executable_cache(kept)


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


def card(root: Path, name: str, table: Table) -> None:
    folder = root / "class/infiniband" / name / "ports/1"
    (folder / "counters").mkdir(parents=True)
    for index, row in {15: (ZERO, "", ""), **table}.items():
        for part, value in zip(("gids", "gid_attrs/types", "gid_attrs/ndevs"), row, strict=True):
            (folder / part).mkdir(parents=True, exist_ok=True)
            if value:
                (folder / part / str(index)).write_text(f"{value}\n")


@given(index=st.integers(0, 255))
def test_roce_v2_over_ipv4_is_found_at_any_index(tmp_path_factory: pytest.TempPathFactory, index: int) -> None:
    """A table has 256 entries, of which most are empty; there may be gaps anywhere, and another pod's address."""
    root = tmp_path_factory.mktemp("sys")
    others = {(index + 5) % 256: (LINK_LOCAL, V2, "net1"), (index + 9) % 256: (OTHER_V4, V2, "veth1a")}
    card(root, "mlx5_0", {**others, index: (V4, V2, "net1")})
    assert find_cards(root, "mlx5", ("net1",)) == (["mlx5_0:1"], index)


def test_without_such_an_address_it_fails_and_shows_the_table(tmp_path: Path) -> None:
    table = {0: (LINK_LOCAL, V2, "net1"), 3: (OTHER_V4, V2, "veth1a"), 8: (V4, V1, "net1")}
    card(tmp_path, "mlx5_0", table)
    with pytest.raises(NodeError, match=r"no address of mlx5\* is RoCE v2 over IPv4 on net1 in the table") as error:
        find_cards(tmp_path, "mlx5", ("net1",))
    for row in table.values():
        assert all(word in str(error.value) for word in row)


def test_nccl_gets_all_cards_unless_the_user_chose(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_1", USUAL)
    card(tmp_path, "mlx5_10", USUAL)
    assert rdma(NETWORK, {}, tmp_path) == {"NCCL_IB_HCA": "=mlx5_1:1,mlx5_10:1", "NCCL_IB_GID_INDEX": "9"}
    assert rdma(NETWORK, {"NCCL_IB_HCA": "mlx5_10"}, tmp_path)["NCCL_IB_HCA"] == "=mlx5_10:1"
    assert rdma(NETWORK, {"NCCL_IB_GID_INDEX": "3"}, tmp_path) == {}
    assert rdma(NETWORK, {"NCCL_IB_HCA": "^mlx5_3"}, tmp_path) == {}


def sent(root: Path, *, by_card: int, by_kernel: int) -> None:
    """What the counters say by now, in megabytes; the card's counts words of four."""
    statistics = root / "class/net/net1/statistics"
    statistics.mkdir(parents=True, exist_ok=True)
    port = root / "class/infiniband/mlx5_0/ports/1/counters"
    (port / "port_xmit_data").write_text(f"{by_card * 10**6 // 4}\n")
    (statistics / "tx_bytes").write_text(f"{by_kernel * 10**6}\n")


MB = 10**6


@pytest.fixture
def use(tmp_path: Path) -> NetworkUse:
    """What watches a node whose ranks say that they use RDMA, and whose counters do not begin at zero."""
    card(tmp_path, "mlx5_0", USUAL)
    sent(tmp_path, by_card=4_000, by_kernel=9_000)
    log = tmp_path / "logs/r_x/attempt_0/0/stdout.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"pod-0:71:71 [0] NCCL INFO Using network {NETWORK.nccl_net}\n")
    return NetworkUse(NETWORK, tmp_path / "logs", nodes=2, cards="=mlx5_0:1", sys=str(tmp_path))


@pytest.mark.parametrize(
    ("by_card", "by_kernel", "stopped"),
    [
        (4_800, 9_000, False),
        (4_100, 9_900, False),  # a checkpoint goes to the bucket
        (4_001, 9_900, True),
        (4_000, 9_000, True),
    ],
)
def test_traffic_beside_the_cards_ports_ends_the_run(
    use: NetworkUse, tmp_path: Path, by_card: int, by_kernel: int, stopped: bool
) -> None:
    assert use.look(steps=1, sends=400 * MB) is None
    sent(tmp_path, by_card=by_card, by_kernel=by_kernel)
    assert use.look(steps=2, sends=400 * MB) is None, "one step may have been half done"
    failure = use.look(steps=3, sends=400 * MB)
    assert (failure is not None) is stopped
    assert failure is None or (
        failure.fault is FailureClass.NODE and "the ranks do not send by RDMA" in failure.message
    )


def test_a_checkpoint_fetched_before_the_first_step_ends_no_run(use: NetworkUse, tmp_path: Path) -> None:
    """Its acknowledgements go through the kernel, and no rank has sent anything yet."""
    sent(tmp_path, by_card=4_000, by_kernel=9_315)
    assert use.look(steps=0) is None
    assert use.look(steps=5000, sends=400 * MB) is None, "a resumed run begins at its checkpoint's step"
    sent(tmp_path, by_card=4_800, by_kernel=9_320)
    assert use.look(steps=5002, sends=400 * MB) is None


def test_a_script_that_sends_unknown_amounts_is_warned(
    use: NetworkUse, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert use.look(steps=1) is None
    sent(tmp_path, by_card=4_000, by_kernel=9_900)
    assert [use.look(steps=step) for step in (3, 4)] == [None, None]
    assert capsys.readouterr().out.count("warning [network.unused] the ranks may not send by RDMA: 0 MB by the") == 1
