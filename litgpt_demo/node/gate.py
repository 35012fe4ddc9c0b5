"""The measurement before the training: same ranks, same cards, a minute at most. A network that is too slow costs GPU
hours, and nothing else would say so. It also tells in which order the machines' ranks are neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from litgpt_demo.errors import Fault, NetworkError, NodeError, Preempted, TrainLitgptError, UserError, decisive
from litgpt_demo.node.agent import Leave, fault_of, run_ranks
from litgpt_demo.node.collectives import RESULT, Result, read_result
from litgpt_demo.node.rendezvous import Node

# The gate meets on a port of its own, above the job's: a node that is through must not find its peers' last meeting.
PORT = 1


def measured(node: Node, environ: Mapping[str, str], leave: Leave) -> Result | None:
    """Measure, and go on if the network is good; the result is in the node's folder too, and None where none is needed.

    Raises:
        NodeError: this node is the slow one.
        NetworkError: another node is, or the network as a whole, or the measurement did not end.
    """
    network = node.network
    if node.meet.nodes < 2 or network.gate_seconds == 0:
        return None
    path = node.own / RESULT
    path.unlink(missing_ok=True)
    floor = network.floor(node.meet.nodes)
    flags = ["--seconds", str(network.gate_seconds), *(["--floor", str(floor)] if floor is not None else [])]
    meet = replace(node.meet, port=node.meet.port + PORT, run_id=f"{node.meet.run_id}-gate")
    gate = replace(node, meet=meet, program=("-m", "litgpt_demo", "collectives", *flags))
    ending = run_ranks(gate, environ, leave, folder="gate")
    leave.torchrun = None
    fault = fault_of(ending)
    if fault is not None or not path.exists():
        cause = decisive(ending.failures)
        clear = {Fault.NODE: NodeError, Fault.USER: UserError, Fault.PREEMPTED: Preempted}
        kind = NetworkError if fault is None else clear.get(fault, NetworkError)  # what is unclear is the network's
        raise kind(f"the network could not be measured: {cause or ending.agent or 'no result was left'}")
    result = read_result(path.read_bytes(), str(path))
    if problem := verdict(result, node.meet.node_rank, name=network.name):
        if not network.allow_sockets:
            raise problem
        print(f"warning [network.slow] {problem} -> allow_sockets is set: the job goes on, slower", flush=True)
    return result


def verdict(result: Result, node: int, *, name: str) -> TrainLitgptError | None:
    """Return what this node has to say of the result; None if the network is good enough.

    The slow node ends with a fault of its own, so that the next attempt can leave it out; the others only lost a peer.
    """
    if result.enough:
        return None
    best, slow = result.best, result.slow
    what = (
        f"an all-reduce of {best.bytes / 2**20:,.0f} MiB over {result.nodes} nodes reached {best.busbw:.2f} GB/s "
        f"(busbw; {best.busbw * 8:.0f} Gbit/s), and {name} has to reach {result.floor:.2f} GB/s"
    )
    if node in slow:
        return NodeError(f"{what}; this node is the slow one: {_evidence(result, node)}. Exclude {result.hosts[node]}")
    if slow:
        named = ", ".join(f"node {number} ({result.hosts[number]})" for number in slow)
        return NetworkError(f"{what}; {named} is slow: {_evidence(result, slow[0])}")
    if result.nodes == 2:
        hosts = " and ".join(result.hosts)
        return NetworkError(
            f"{what}; of two nodes it cannot be told which is slow: measure {hosts} with a third one each"
        )
    return NetworkError(
        f"{what}; all nodes are alike ({_evidence(result, 0)}), so look at what they share: the fabric's settings "
        "(render --explain), the plug-in's release, the placement"
    )


def _evidence(result: Result, node: int) -> str:
    """The figures that speak of one node."""
    told = []
    if mine := {pair: speed for pair, speed in result.pairs.items() if node in pair}:
        others = sorted(speed for pair, speed in result.pairs.items() if node not in pair)
        words = ", ".join(
            f"{speed:.2f} GB/s with node {pair[0] if pair[1] == node else pair[1]}" for pair, speed in mine.items()
        )
        told.append(words + (f", others have {others[len(others) // 2]:.2f}" if others else ""))
    if node in result.alone:
        told.append(f"{result.alone[node]:.2f} GB/s within the node")
    return "; ".join(told) or "nothing else was measured"


# --- the order of ranks -----------------------------------------------------------------------------------------------
# A platform numbers nodes as they come. NCCL's rings and trees go through nodes in the order of their ranks, so a ring
# over machines of two blocks in arbitrary order crosses between the blocks at every other step instead of twice. The
# topology-aware scheduling of Kueue orders pods by their completion index already, and nothing is left to do here.

# Blocks, racks and hosts, as `/block/subblock/host`; the same as GKE's node labels cloud.google.com/gce-topology-*:
# https://docs.cloud.google.com/compute/docs/instances/use-compact-placement-policies#verify-vm-location
_METADATA = "http://{host}/computeMetadata/v1/instance/attributes/physical_host"


def place_of(source: str | None, environ: Mapping[str, str]) -> str:
    """Return the place of this machine in the fabric, largest part first, with slashes between; empty if not known.

    Args:
        source: `gce` asks the machine's metadata server, `env:NAME` reads a variable, None asks nobody.
    """
    if source is None:
        return ""
    if source.startswith("env:"):
        return environ.get(source.removeprefix("env:"), "")
    from urllib.request import Request, urlopen

    # Google's own libraries find another server by this variable too.
    host = environ.get("GCE_METADATA_HOST", "169.254.169.254")
    request = Request(_METADATA.format(host=host), headers={"Metadata-Flavor": "Google"})
    try:
        with urlopen(request, timeout=5) as answer:
            return str(answer.read().decode()).strip()
    except OSError as error:  # machines without a placement policy have no such attribute
        words = f"the place of this machine is not known: {error} -> ranks keep their order"
        print(f"warning [node.place] {words}", flush=True)
        return ""


def ranks_by_place(places: Sequence[str]) -> list[int]:
    """The rank of each node: machines that share a block are next to each other, and within it those of one rack.

    Node 0 stays rank 0, because the others meet there; its block and rack come first. Machines whose place is not known
    come last, in their own order.
    """
    parts = [tuple(part for part in place.split("/") if part) for place in places]

    def order(node: int) -> tuple[bool, bool, tuple[tuple[bool, str], ...], int]:
        mine, first = parts[node], parts[0]
        shared = [mine[: depth + 1] != first[: depth + 1] for depth in range(len(mine))]
        return node != 0 and not mine, node != 0 and not first, tuple(zip(shared, mine, strict=True)), node

    ordered = sorted(range(len(places)), key=order)
    return [ordered.index(node) for node in range(len(places))]
