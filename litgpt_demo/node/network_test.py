"""The measurement before the training: same ranks, same cards, a minute at most. A network that is too slow costs GPU
hours, and nothing else would say so. It also tells in which order the machines' ranks are neighbours.

Ranks measure (litgpt_demo.node.collectives). Here is what is made of their figures, for the benchmark too.
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
# Variables of ranks: the file of what was measured before a training, and the place of their machine in the fabric.
MEASURED, PLACE = "LITGPT_MEASURED", "LITGPT_PLACE"
# The gate meets on a port of its own, above the job's: a node that is through must not find its peers' last meeting.
PORT_OFFSET = 1

NodePair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One size, reduced among some number of ranks.

    algbw is the tensor's bytes by the time an all-reduce of it takes. busbw is algbw · 2(n-1)/n for n ranks: what each
    link carries, whatever n is, because a ring moves each byte n-1 times to reduce it and n-1 times to spread it, a
    share of 1/n at a time (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md#bandwidth). Floors and
    links compare with busbw. Both are in GB/s, 10^9 bytes per second; 1 GB/s = 8 Gbit/s.
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
    """The result of the measurement, as it is stored with the run."""

    backend: str
    nodes: int
    hosts: tuple[str, ...]
    """Machine of each node."""
    speeds: tuple[Speed, ...]
    floor: float | None
    """Least busbw in GB/s; None where no figure is known."""
    seconds: float
    """Seconds that the measurement took."""
    places: tuple[str, ...] = ()
    """The place of each node in the fabric; empty text where it is not known."""
    pairs: Mapping[NodePair, float] = field(default_factory=dict)
    """GB/s between two nodes, both ways at once, where that was measured."""
    alone: Mapping[int, float] = field(default_factory=dict)
    """busbw in GB/s within each node; empty where nodes have one rank, or that was not measured."""

    @property
    def best(self) -> Speed:
        """The largest busbw among all ranks."""
        world = max(speed.ranks for speed in self.speeds)
        return max((speed for speed in self.speeds if speed.ranks == world), key=lambda speed: speed.busbw)

    @property
    def enough(self) -> bool:
        return self.floor is None or self.best.busbw >= self.floor

    @property
    def slow(self) -> list[int]:
        """Nodes that hold up the others."""
        return slow_nodes(self.pairs, self.alone)

    def document(self) -> dict[str, Any]:
        """The content of RESULT."""
        return {
            **asdict(self),
            "enough": self.enough,
            "slow": self.slow,
            "seconds": round(self.seconds, 2),
            "speeds": [{**asdict(one), "algbw": one.algbw, "busbw": one.busbw} for one in self.speeds],
            "pairs": [{"nodes": list(pair), "gbytes": speed} for pair, speed in sorted(self.pairs.items())],
            "alone": [{"node": node, "busbw": speed} for node, speed in sorted(self.alone.items())],
        }

    def row(self) -> dict[str, Any]:
        """Return the result for the metrics: GB/s, bytes and seconds."""
        best = self.best
        floor = {} if self.floor is None else {"floor": self.floor}
        return {
            "kind": "network", "step": 0, "ranks": best.ranks, "nodes": self.nodes, "bytes": best.bytes,
            "algbw": round(best.algbw, 4), "busbw": round(best.busbw, 4), "seconds": round(self.seconds, 2), **floor,
        }  # fmt: skip


def read_result(content: bytes, where: str) -> NetworkTestResult:
    """The NetworkTestResult whose `document` was stored at the address `where`."""
    fix = "measure the network again"
    document = parse_json(content, dict[str, Any], where=where, fix=fix)
    names = ("ranks", "bytes", "seconds", "repeats")
    try:
        return NetworkTestResult(
            **{name: document[name] for name in ("backend", "nodes", "floor", "seconds")},
            hosts=tuple(document["hosts"]),
            places=tuple(document["places"]),
            speeds=tuple(Speed(**{name: one[name] for name in names}) for one in document["speeds"]),
            pairs={(one["nodes"][0], one["nodes"][1]): one["gbytes"] for one in document["pairs"]},
            alone={one["node"]: one["busbw"] for one in document["alone"]},
        )
    except (KeyError, TypeError, IndexError) as error:
        raise DataError(f"{where} is not the result of a measurement of this version ({error!r})", fix=fix) from error


def network_test_row(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what was measured before this training, as a metrics row; empty if nothing was."""
    path = Path(environ.get(MEASURED, ""))
    return read_result(path.read_bytes(), str(path)).row() if path.is_file() else {}


def run_network_test(node: Node, environ: Mapping[str, str], shutdown: ShutdownState) -> NetworkTestResult | None:
    """Measure, and go on if the network is good; the result is in the node's folder too, and None where none is needed.

    It is a NodeError if this node is the slow one, else a NetworkError, also if the measurement did not end.
    """
    network = node.network
    if node.nodes < 2 or network.gate_seconds == 0:
        return None
    path = node.own / RESULT
    path.unlink(missing_ok=True)
    floor = network.floor(node.nodes)
    flags = ["--seconds", str(network.gate_seconds), *(["--floor", str(floor)] if floor is not None else [])]
    program = ("-m", "litgpt_demo", "collectives", *flags)
    gate = replace(node, port=node.port + PORT_OFFSET, run_id=f"{node.run_id}-gate", program=program)
    ending = run_ranks(gate, environ, shutdown, folder="gate")
    shutdown.torchrun = None
    fault = fault_of(ending)
    if fault is not None or not path.exists():
        clear = {FailureClass.NODE: NodeError, FailureClass.USER: UserError, FailureClass.PREEMPTED: Preempted}
        kind = NetworkError if fault is None else clear.get(fault, NetworkError)  # what is unclear is the network's
        raise kind(f"the network could not be measured: {ending.cause or 'no result was left'}")
    result = read_result(path.read_bytes(), str(path))
    if problem := check_bandwidth(result, node.node_rank, name=network.name):
        if not network.allow_sockets:
            raise problem
        print(f"warning [network.slow] {problem} -> allow_sockets is set: the job goes on, slower", flush=True)
    return result


def slow_nodes(speeds: Mapping[NodePair, float], alone: Mapping[int, float]) -> list[int]:
    """The slow nodes, as far as the measurements tell: each is measured with several others, and slow with all.

    Two nodes have one pair, which does not say whose fault it is; what each of them does alone may.
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
    """Return this node's error, None if the network is good enough; the slow node's lets an attempt leave it out."""
    if result.enough:
        return None

    def evidence(node: int) -> str:
        mine = {sum(pair) - node: speed for pair, speed in result.pairs.items() if node in pair}
        told = [f"{speed:.2f} GB/s with node {other}" for other, speed in mine.items()]
        if others := [speed for pair, speed in result.pairs.items() if node not in pair]:
            told.append(f"others have {median(others):.2f}")
        if node in result.alone:
            told.append(f"{result.alone[node]:.2f} GB/s within the node")
        return ", ".join(told) or "nothing else was measured"

    best, slow, hosts = result.best, result.slow, result.hosts
    what = (
        f"an all-reduce of {best.bytes / 2**20:,.0f} MiB over {result.nodes} nodes reached {best.busbw:.2f} GB/s "
        f"(busbw; {best.busbw * 8:.0f} Gbit/s), and {name} has to reach {result.floor:.2f} GB/s"
    )
    if node in slow:
        return NodeError(f"{what}; this node is the slow one: {evidence(node)}. Exclude {hosts[node]}")
    if slow:
        named = ", ".join(f"node {number} ({hosts[number]})" for number in slow)
        return NetworkError(f"{what}; {named} is slow: {evidence(slow[0])}")
    if result.nodes == 2:
        fix = f"measure {' and '.join(hosts)} with a third one each"
        return NetworkError(f"{what}, and of two nodes it cannot be told which is slow", fix=fix)
    fix = "look at what they share: the fabric's settings (render --explain), the plug-in's release, the placement"
    return NetworkError(f"{what}; all nodes are alike ({evidence(0)})", fix=fix)


# --- the order of ranks -----------------------------------------------------------------------------------------------
# A platform numbers nodes as they come. NCCL's rings and trees go through nodes in the order of their ranks, so a ring
# over machines of two blocks in arbitrary order crosses between the blocks at every other step instead of twice. The
# topology-aware scheduling of Kueue orders pods by their completion index already, and nothing is left to do here.


def fabric_location(source: str | None, environ: Mapping[str, str]) -> str:
    """Return the place of this machine in the fabric; empty if not known. None as `source` asks nobody.

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
        print(f"warning [node.place] this machine's place is not known: {error} -> ranks keep their order", flush=True)
        return ""


def rank_order(places: Sequence[str]) -> list[int]:
    """The rank of each node: machines that share a block are next to each other, and within it those of one rack.

    Node 0 stays rank 0, because the others meet there; its block and rack come first. Machines whose place is not known
    come last, in their own order.
    """
    parts = [tuple(part for part in place.split("/") if part) for place in places]

    def order(node: int) -> tuple[object, ...]:
        mine, first = parts[node], parts[0]
        near = tuple((mine[: depth + 1] != first[: depth + 1], part) for depth, part in enumerate(mine))
        return node != 0, not mine, near, node

    ordered = sorted(range(len(places)), key=order)
    return [ordered.index(node) for node in range(len(places))]
