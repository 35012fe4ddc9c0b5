"""The network test before a training: same ranks, same cards, a minute at most. A network that is too slow costs GPU
hours, and nothing else would show it. The test also sets the order of the machines' ranks.

Ranks measure (litgpt_demo.node.collectives). This module evaluates their figures, for the benchmark too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError, FailureClass, NetworkError, NodeError, Preempted, TrainLitgptError, UserError
from litgpt_demo.node.agent import ShutdownState, fault_of, run_ranks
from litgpt_demo.node.rendezvous import Node

RESULT = "network.json"  # in every node's own folder; it is the same in all of them
# Variables of ranks: the file with the result, and the location of their machine in the fabric.
MEASUREMENT, LOCATION = "LITGPT_NETWORK_TEST_RESULT", "LITGPT_FABRIC_LOCATION"
# The test has a port of its own, above the job's: a node that is done must not meet its peers' earlier rendezvous.
PORT_OFFSET = 1

NodePair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of an all-reduce of one size.

    algbw is the tensor's bytes divided by the time. busbw is algbw · 2(n-1)/n for n ranks: the load of each link in a
    ring (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md#bandwidth). Floors and links compare with
    busbw. Both are in GB/s, 10^9 bytes per second; 1 GB/s = 8 Gbit/s.
    """

    ranks: int
    bytes: int
    seconds: float
    """Of one all-reduce, on the slowest rank."""
    repeats: int

    @property
    def algbw(self) -> float:
        return self.bytes / self.seconds / 1e9

    @property
    def busbw(self) -> float:
        return self.algbw * 2 * (self.ranks - 1) / self.ranks


@dataclass(frozen=True, kw_only=True)
class NetworkTestResult:
    """The result of the network test, as it is stored with the run."""

    backend: str
    nodes: int
    hosts: tuple[str, ...]
    """Machine of each node."""
    speeds: tuple[Speed, ...]
    floor: float | None
    """Least busbw in GB/s; None if none is known."""
    seconds: float
    """Duration of the test."""
    locations: tuple[str, ...] = ()
    """The location of each node in the fabric; empty text if it is unknown."""
    pairs: Mapping[NodePair, float] = field(default_factory=dict)
    """GB/s between two nodes, in both directions at once; empty if not measured."""
    alone: Mapping[int, float] = field(default_factory=dict)
    """busbw in GB/s within each node; empty if nodes have one rank, or it was not measured."""

    @property
    def best(self) -> Speed:
        """The largest busbw among all ranks."""
        world = max(speed.ranks for speed in self.speeds)
        return max((speed for speed in self.speeds if speed.ranks == world), key=lambda speed: speed.busbw)

    @property
    def is_enough(self) -> bool:
        return self.floor is None or self.best.busbw >= self.floor

    @property
    def slow(self) -> list[int]:
        """The nodes that slow down the others."""
        return slow_nodes(self.pairs, self.alone)

    def document(self) -> dict[str, Any]:
        """The content of RESULT."""
        return {
            **asdict(self),
            "enough": self.is_enough,
            "slow": self.slow,
            "seconds": round(self.seconds, 2),
            "speeds": [{**asdict(speed), "algbw": speed.algbw, "busbw": speed.busbw} for speed in self.speeds],
            "pairs": [{"nodes": list(pair), "gbytes": speed} for pair, speed in sorted(self.pairs.items())],
            "alone": [{"node": node, "busbw": speed} for node, speed in sorted(self.alone.items())],
        }

    def row(self) -> dict[str, Any]:
        """Return the result for the metrics: GB/s, bytes and seconds."""
        best = self.best
        row = {
            "kind": "network", "step": 0, "ranks": best.ranks, "nodes": self.nodes, "bytes": best.bytes,
            "algbw": round(best.algbw, 4), "busbw": round(best.busbw, 4), "seconds": round(self.seconds, 2),
        }  # fmt: skip
        if self.floor is not None:
            row["floor"] = self.floor
        return row


def read_result(content: bytes, where: str) -> NetworkTestResult:
    """Return the result whose `document` was stored at the address `where`."""
    fix = "test the network again"
    document = parse_json(content, dict[str, Any], where=where, fix=fix)
    names = ("ranks", "bytes", "seconds", "repeats")
    try:
        return NetworkTestResult(
            **{name: document[name] for name in ("backend", "nodes", "floor", "seconds")},
            hosts=tuple(document["hosts"]),
            locations=tuple(document["locations"]),
            speeds=tuple(Speed(**{name: speed[name] for name in names}) for speed in document["speeds"]),
            pairs={(pair["nodes"][0], pair["nodes"][1]): pair["gbytes"] for pair in document["pairs"]},
            alone={node["node"]: node["busbw"] for node in document["alone"]},
        )
    except (KeyError, TypeError, IndexError) as error:
        raise DataError(f"{where} is not the result of a network test ({error!r})", fix=fix) from error


def network_test_row(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the result of the network test before this training as a metrics row; empty without a test."""
    path = Path(environ.get(MEASUREMENT, ""))
    return read_result(path.read_bytes(), str(path)).row() if path.is_file() else {}


def run_network_test(node: Node, environ: Mapping[str, str], shutdown: ShutdownState) -> NetworkTestResult | None:
    """Test the network, and return the result, which is also in the node's folder; None if no test is needed.

    Raises NodeError if this node is the slow one, else NetworkError, also if the test did not end.
    """
    network = node.network
    if node.nodes < 2 or network.test_seconds == 0:
        return None
    path = node.own / RESULT
    path.unlink(missing_ok=True)
    floor = network.floor(node.nodes)
    program = ["-m", "litgpt_demo", "collectives", "--seconds", str(network.test_seconds)]
    if floor is not None:
        program += ["--floor", str(floor)]
    job = replace(node, port=node.port + PORT_OFFSET, run_id=f"{node.run_id}-network-test", program=tuple(program))
    end = run_ranks(job, environ, shutdown, folder="network-test")
    shutdown.torchrun = None
    fault = fault_of(end)
    if fault is not None or not path.exists():
        kinds = {FailureClass.NODE: NodeError, FailureClass.USER: UserError, FailureClass.PREEMPTED: Preempted}
        kind = kinds.get(fault or FailureClass.NETWORK, NetworkError)
        raise kind(f"the network could not be tested: {end.cause or 'no result was written'}")
    result = read_result(path.read_bytes(), str(path))
    problem = check_bandwidth(result, node.node_rank, name=network.name)
    if problem is not None:
        if not network.allow_tcp_fallback:
            raise problem
        print(f"warning [network.slow] {problem} -> platform.allow_tcp_fallback lets the job continue", flush=True)
    return result


def slow_nodes(speeds: Mapping[NodePair, float], alone: Mapping[int, float]) -> list[int]:
    """Return the nodes that are slow with each of several partners, or by themselves.

    Two nodes have one pair, which does not show which of them is slow. The speed within each node may.
    """
    best: dict[int, float] = {}
    for pair, speed in speeds.items():
        for node in pair:
            best[node] = max(speed, best.get(node, 0.0))
    slow: set[int] = set()
    for figures in (best, alone):
        if len(figures) > 1:
            # Links of one fabric are alike to some percent; a card that has fallen back to a lower rate, or a cable
            # that drops packets, costs more than half.
            least = 0.5 * median(figures.values())
            slow |= {node for node, speed in figures.items() if speed < least}
    return sorted(slow)


def check_bandwidth(result: NetworkTestResult, node: int, *, name: str) -> TrainLitgptError | None:
    """Return this node's error; None if the network is good enough. The slow node's error allows to exclude it."""
    if result.is_enough:
        return None

    def evidence(node: int) -> str:
        with_node = {sum(pair) - node: speed for pair, speed in result.pairs.items() if node in pair}
        without_node = [speed for pair, speed in result.pairs.items() if node not in pair]
        facts = [f"{speed:.2f} GB/s with node {partner}" for partner, speed in with_node.items()]
        if without_node:
            facts.append(f"others have {median(without_node):.2f}")
        if node in result.alone:
            facts.append(f"{result.alone[node]:.2f} GB/s within the node")
        return ", ".join(facts) or "nothing else was measured"

    best, slow, hosts = result.best, result.slow, result.hosts
    what = (
        f"an all-reduce of {best.bytes / 2**20:,.0f} MiB over {result.nodes} nodes reached {best.busbw:.2f} GB/s "
        f"(busbw; {best.busbw * 8:.0f} Gbit/s), but {name} has to reach {result.floor:.2f} GB/s"
    )
    if node in slow:
        return NodeError(f"{what}; this node is the slow one: {evidence(node)}. Exclude {hosts[node]}")
    if slow:
        named = ", ".join(f"node {number} ({hosts[number]})" for number in slow)
        return NetworkError(f"{what}; {named} is slow: {evidence(slow[0])}")
    if result.nodes == 2:
        fix = f"measure each of {' and '.join(hosts)} with a third node"
        return NetworkError(f"{what}, but two nodes do not show which of them is slow", fix=fix)
    fix = "check what they share: the fabric's settings (render --explain), the plugin's release, the placement"
    return NetworkError(f"{what}; all nodes are alike ({evidence(0)})", fix=fix)


# --- the order of ranks -----------------------------------------------------------------------------------------------
# A platform numbers nodes in any order. NCCL's rings and trees follow the order of ranks. A ring over machines of two
# blocks in arbitrary order crosses between the blocks at every other step instead of twice. With the topology-aware
# scheduling of Kueue, pods already have the right order.


def fabric_location(source: str | None, environ: Mapping[str, str]) -> str:
    """Return the location of this machine in the fabric; empty if it is unknown, or `source` is None.

    It is `/block/subblock/host`, as GKE's node labels cloud.google.com/gce-topology-* have it:
    https://docs.cloud.google.com/compute/docs/instances/use-compact-placement-policies#verify-vm-location
    """
    if source is None:
        return ""
    from urllib.request import Request, urlopen

    host = environ.get("GCE_METADATA_HOST", "169.254.169.254")  # as Google's own libraries find another server
    url = f"http://{host}/computeMetadata/v1/instance/attributes/physical_host"
    request = Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urlopen(request, timeout=5) as answer:
            return str(answer.read().decode()).strip()
    except OSError as error:  # machines without a placement policy have no such attribute
        print(f"warning [node.location] unknown location of this node: {error} -> ranks keep their order", flush=True)
        return ""


def rank_order(locations: Sequence[str]) -> list[int]:
    """Return the rank of each node: machines of one block are neighbours, and within it those of one rack.

    Node 0 keeps rank 0, because the others meet there. Its block and rack come first. Machines of unknown location
    come last, in their own order.
    """
    parts = [tuple(part for part in location.split("/") if part) for location in locations]

    def order(node: int) -> tuple[object, ...]:
        path, first = parts[node], parts[0]
        distance = tuple((path[: depth + 1] != first[: depth + 1], part) for depth, part in enumerate(path))
        return node != 0, not path, distance, node

    ordered = sorted(range(len(locations)), key=order)
    return [ordered.index(node) for node in range(len(locations))]
