"""The measurement before a training, by real nodes in network namespaces with links of their own, which needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from nodes import ended_nodes

from litgpt_demo.metrics import parsed
from litgpt_demo.node.collectives import read_result
from litgpt_demo.node.network import NETWORK, NodeNetwork


@dataclass(frozen=True)
class Place:
    """Where a node of the test runs."""

    name: str
    """Of its namespace."""
    address: str


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def namespace(stack: ExitStack, name: str, number: int, bridge: str, rate: str) -> Place:
    """A namespace with one interface, whose packets leave at `rate` at most."""
    ip("netns", "add", name)
    stack.callback(ip, "netns", "del", name)
    ip("link", "add", f"{name}h", "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("link", "set", f"{name}h", "master", bridge, "up")
    ip("-n", name, "addr", "add", f"10.213.7.{number + 1}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "up")
    ip("-n", name, "link", "set", "lo", "up")
    shaping = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
    ip("netns", "exec", name, *shaping)
    return Place(name, f"10.213.7.{number + 1}")


@pytest.fixture
def slow_second() -> Iterator[list[Place]]:
    """Three machines, the second of which has a link of a twentieth of the others' speed."""
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    tag, rates = f"g{os.getpid() % 100000}", ("1gbit", "50mbit", "1gbit")
    with ExitStack() as stack:
        try:
            ip("link", "add", f"{tag}b", "type", "bridge")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        stack.callback(ip, "link", "del", f"{tag}b")
        ip("link", "set", f"{tag}b", "up")
        yield [namespace(stack, f"{tag}n{number}", number, f"{tag}b", rate) for number, rate in enumerate(rates)]


def run_nodes(places: list[Place], folder: Path, network: NodeNetwork) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of one node per place; the port is one of namespaces that nobody else is in."""
    (folder / "rank.py").write_text("print('trained')")
    return ended_nodes(
        folder / "d", str(folder / "rank.py"), nodes=len(places), master=f"{places[0].address}:29517",
        prefixes=[("ip", "netns", "exec", place.name) for place in places],
        environ={"GLOO_SOCKET_IFNAME": "eth0", NETWORK: network.model_dump_json(exclude_defaults=True)},
        of_node=[{"LITGPT_HOST": f"machine-{number}"} for number in range(len(places))],
    )  # fmt: skip


def test_a_slow_node_is_named_and_no_training_begins(slow_second: list[Place], tmp_path: Path) -> None:
    network = NodeNetwork(name="plain", gate_seconds=20, floor_gbytes={2: 0.04})
    codes, said = run_nodes(slow_second, tmp_path, network)
    assert codes == [44, 43, 44], "\n".join(said)
    assert "this node is the slow one" in said[1]
    assert "node 1 (machine-1) is slow" in said[0]
    assert not any("trained" in text for text in said)
    path = tmp_path / "d" / "node-2" / "network.json"
    assert read_result(path.read_bytes(), str(path)).slow == [1]


def test_a_good_network_is_measured_the_training_told_and_ranks_ordered_by_place(tmp_path: Path) -> None:
    network = NodeNetwork(name="plain", gate_seconds=4, floor_gbytes={2: 0.001}, place="env:LITGPT_HOST")
    (tmp_path / "rank.py").write_text(
        "import os, sys\nsys.stdout.write('rank ' + os.environ['RANK'] + open(os.environ['LITGPT_MEASURED']).read())"
    )
    codes, said = ended_nodes(
        tmp_path / "d", str(tmp_path / "rank.py"), nodes=3, environ={NETWORK: network.model_dump_json()},
        of_node=[{"LITGPT_HOST": f"/block-{block}/host-{number}"} for number, block in enumerate("aba")],
    )  # fmt: skip
    assert codes == [0, 0, 0], "\n".join(said)
    assert ["rank 0" in said[0], "rank 2" in said[1], "rank 1" in said[2]] == [True] * 3
    row = next(row for line in said[0].splitlines() if (row := parsed(line)) is not None)
    assert (row["kind"], row["ranks"], row["floor"]) == ("network", 3, 0.001)
