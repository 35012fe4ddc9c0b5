"""The measurement before a training, by real nodes; for a slow link, nodes get network namespaces with links of their
own, which needs root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import until

from litgpt_demo.errors import DataError, NetworkError, NodeError
from litgpt_demo.heartbeat import read_beats
from litgpt_demo.metrics import parsed
from litgpt_demo.node.collectives import Result, Speed, read_result
from litgpt_demo.node.gate import verdict
from litgpt_demo.node.network import NETWORK, NodeNetwork

pytestmark = pytest.mark.timeout(240)

PORT = 29517


@dataclass(frozen=True)
class Place:
    """Where a node of the test runs: a prefix for its command line, its address, and its network interface."""

    prefix: tuple[str, ...]
    address: str
    interface: str
    host: str


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def namespace(stack: ExitStack, name: str, number: int, bridge: str, rate: str) -> Place:
    """A namespace with one interface, whose packets leave at `rate` at most."""
    ip("netns", "add", name)
    stack.callback(ip, "netns", "del", name)
    ip("link", "add", f"{name}h", "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("link", "set", f"{name}h", "master", bridge, "up")
    inside = ("netns", "exec", name)
    ip("-n", name, "addr", "add", f"10.213.7.{number + 1}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "up")
    ip("-n", name, "link", "set", "lo", "up")
    shaping = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
    ip(*inside, *shaping)
    return Place(("ip", *inside), f"10.213.7.{number + 1}", "eth0", f"machine-{number}")


@pytest.fixture
def slow_second() -> Iterator[list[Place]]:
    """Three machines, the second of which has a link of a twentieth of the others' speed."""
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    tag, rates = f"g{os.getpid() % 100000}", ("1gbit", "50mbit", "1gbit")
    with ExitStack() as stack:
        ip("link", "add", f"{tag}b", "type", "bridge")
        stack.callback(ip, "link", "del", f"{tag}b")
        ip("link", "set", f"{tag}b", "up")
        yield [namespace(stack, f"{tag}n{number}", number, f"{tag}b", rate) for number, rate in enumerate(rates)]


def run_nodes(places: list[Place], folder: Path, network: NodeNetwork, text: str) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of one node per place."""
    (folder / "rank.py").write_text(text)
    started = []
    for number, place in enumerate(places):
        flags = f"--nodes {len(places)} --node-rank {number} --processes 1 --run-id r --directory d --grace 5"
        argv = [sys.executable, "-m", "litgpt_demo", "node", *flags.split(), "--master", f"{places[0].address}:{PORT}"]
        env = {
            "GLOO_SOCKET_IFNAME": place.interface,
            "LITGPT_HOST": place.host,
            NETWORK: network.model_dump_json(exclude_defaults=True),
        }
        started.append(
            subprocess.Popen(
                [*place.prefix, *argv, "--", "rank.py"],
                cwd=folder,
                env={**os.environ, **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate(timeout=200)[0] for process in started]
    return [process.returncode for process in started], said


@pytest.mark.long
@pytest.mark.training
def test_a_slow_node_is_named_and_no_training_begins(slow_second: list[Place], tmp_path: Path) -> None:
    network = NodeNetwork(name="plain", gate_seconds=20, floor_gbytes={2: 0.04})
    codes, said = run_nodes(slow_second, tmp_path, network, "print('trained')")
    assert codes == [44, 43, 44], "\n".join(said)
    assert "this node is the slow one" in said[1]
    assert "Exclude machine-1" in said[1]
    assert "node 1 (machine-1) is slow" in said[0]
    assert "plain has to reach 0.04 GB/s" in said[0]
    assert not any("trained" in text for text in said)
    path = tmp_path / "d" / "node-2" / "network.json"
    result = read_result(path.read_bytes(), str(path))
    assert result.slow == [1]
    assert not result.enough
    assert result.pairs[0, 2] > 4 * max(result.pairs[0, 1], result.pairs[1, 2])
    assert result.seconds < 20


@pytest.mark.long
@pytest.mark.training
def test_a_good_network_is_measured_the_training_told_and_ranks_ordered_by_place(tmp_path: Path) -> None:
    places = [Place((), "127.0.0.1", "lo", f"/block-{block}/host-{number}") for number, block in enumerate("aba")]
    network = NodeNetwork(name="plain", gate_seconds=4, floor_gbytes={2: 0.001}, place="env:LITGPT_HOST")
    text = "import os, sys\nsys.stdout.write('rank ' + os.environ['RANK'] + open(os.environ['LITGPT_MEASURED']).read())"
    codes, said = run_nodes(places, tmp_path, network, text)
    assert codes == [0, 0, 0], "\n".join(said)
    assert ["rank 0" in said[0], "rank 2" in said[1], "rank 1" in said[2]] == [True] * 3
    row = next(row for line in said[0].splitlines() if (row := parsed(line)) is not None)
    assert row["kind"] == "network"
    assert (row["ranks"], row["floor"]) == (3, 0.001)
    assert row["busbw"] == pytest.approx(row["algbw"] * 4 / 3, abs=2e-4)
    assert '"hosts"' in said[1]


@pytest.mark.training
@pytest.mark.long
def test_a_link_that_goes_dead_while_it_is_measured_ends_as_the_networks_fault(
    slow_second: list[Place], tmp_path: Path
) -> None:
    network = NodeNetwork(name="plain", gate_seconds=3, floor_gbytes={2: 0.04})
    cut = threading.Thread(target=cut_when_measuring, args=(slow_second[1], tmp_path / "d" / "node-1"))
    cut.start()
    codes, said = run_nodes(slow_second, tmp_path, network, "print('trained')")
    cut.join()
    assert set(codes) == {44}, "\n".join(said)
    assert "the network could not be measured" in said[0]
    assert not any("trained" in text for text in said)


def cut_when_measuring(place: Place, own: Path) -> None:
    """Take a node's link away as soon as its rank has met the others."""
    until(lambda: read_beats(own))
    subprocess.run([*place.prefix, "ip", "link", "set", "eth0", "down"], check=True)


# --- what is made of the figures --------------------------------------------------------------------------------------


def result(busbw: float, *, pairs: dict[tuple[int, int], float], alone: dict[int, float] | None = None) -> Result:
    nodes = max(max(pair) for pair in pairs) + 1
    speed = Speed(
        ranks=nodes * 8, bytes=2**30, seconds=2**30 / 1e9 / busbw * 2 * (nodes * 8 - 1) / (nodes * 8), repeats=5
    )
    hosts = tuple(f"machine-{number}" for number in range(nodes))
    return Result(
        backend="nccl", nodes=nodes, hosts=hosts, speeds=(speed,), floor=190, seconds=9, pairs=pairs, alone=alone or {}
    )


def test_a_network_that_is_slow_as_a_whole_blames_no_node() -> None:
    found = verdict(result(23.0, pairs={(0, 1): 4.1, (1, 2): 4.0, (0, 2): 3.9}), 1, name="tcpxo")
    assert isinstance(found, NetworkError)
    assert "reached 23.00 GB/s (busbw; 184 Gbit/s), and tcpxo has to reach 190.00 GB/s" in str(found)
    assert "all nodes are alike" in str(found)


def test_of_two_nodes_the_one_that_is_slow_within_itself_is_to_blame() -> None:
    sick = result(23.0, pairs={(0, 1): 4.0}, alone={0: 430.0, 1: 41.0})
    assert isinstance(verdict(sick, 1, name="tcpxo"), NodeError)
    assert "node 1 (machine-1) is slow" in str(verdict(sick, 0, name="tcpxo"))
    alike = result(23.0, pairs={(0, 1): 4.0}, alone={0: 430.0, 1: 428.0})
    assert "of two nodes it cannot be told which" in str(verdict(alike, 0, name="tcpxo"))


def test_a_result_is_read_back_as_it_was_stored() -> None:
    told = result(23.0, pairs={(0, 1): 4.1, (1, 2): 4.0}, alone={0: 430.0})
    assert read_result(json.dumps(told.document()).encode(), "there") == told


@pytest.mark.parametrize(
    "damaged", [b"", b"[]", b"null", b"\xff", b"{}", b'{"backend": "gloo", "nodes": 1, "hosts": 3}']
)
def test_a_damaged_measurement_is_named_with_its_address(damaged: bytes) -> None:
    with pytest.raises(DataError, match=r"gs://b/network\.json is not .*measure the network again"):
        read_result(damaged, "gs://b/network.json")


def test_what_reaches_the_floor_is_left_alone() -> None:
    assert verdict(result(318.0, pairs={(0, 1): 4.1}), 0, name="tcpxo") is None
