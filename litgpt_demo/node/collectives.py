"""The bandwidth among ranks: the measurement before a training, and the benchmark.

    torchrun … -m litgpt_demo collectives --seconds 60 --floor 40

algbw is the tensor's bytes by the time an all-reduce of it takes. busbw is algbw · 2(n-1)/n for n ranks: what each link
carries, whatever n is, because a ring moves each byte n-1 times to reduce it and n-1 times to spread it, a share of 1/n
at a time (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md#bandwidth). Floors and links compare with
busbw. GB/s are 10^9 bytes per second; 1 GB/s = 8 Gbit/s.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError, NetworkError
from litgpt_demo.heartbeat import NODE_DIRECTORY, Heartbeat
from litgpt_demo.metrics import marked
from litgpt_demo.node.rendezvous import machine_name
from litgpt_demo.storage.local import write_whole

if TYPE_CHECKING:
    import torch

RESULT = "network.json"
"""The name of the result in every node's own folder; it is the same in all of them."""

MEASURED = "LITGPT_MEASURED"
"""The environment variable of a training's ranks with the file of what was measured before."""

PLACE = "LITGPT_PLACE"
"""The environment variable of ranks with the place of their machine in the fabric."""

# Bytes. A GiB is where published figures are taken; gloo gains nothing beyond some MiB.
_SMALLEST, _LARGEST = 2**20, {"cuda": 2**30, "cpu": 2**26}

_ITERATIONS = 20
# Seconds for the repeats of one size, after a first one that is not counted: it sets up connections.
_REPEATS = 2.0
_ROUNDS = 7
# Seconds beyond the budget after which a rank that says nothing hangs.
_HUNG = 15.0
# Seconds for Gloo's threads to let go of the tensors of work that has just ended, for which they need Python's lock:
# torch 2.2.2 joins them with the lock held. A group that is destroyed sooner may never end (seen under load).
_DROPPED = 0.3
# Seconds that a transfer between a pair should take; long against a round trip, short against the gate.
_PAIR = 0.25
# Bytes for a machine's name and place; a host name has 253 at most, three names of GCE's in a place 63 each.
_NAMES = 1024
# A node counts as slow below this share of what is usual. Links of one fabric are alike to some percent; a card that
# has fallen back to a lower rate, or a cable that drops packets, costs more than half.
_SHARE = 0.5

NodePair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One size, reduced among some number of ranks."""

    ranks: int
    bytes: int
    seconds: float
    """Of one all-reduce, on the slowest rank."""
    repeats: int

    @property
    def algbw(self) -> float:
        """GB/s."""
        return self.bytes / self.seconds / 1e9

    @property
    def busbw(self) -> float:
        """GB/s."""
        return self.algbw * 2 * (self.ranks - 1) / self.ranks


@dataclass(frozen=True, kw_only=True)
class Result:
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
    """busbw in GB/s within each node."""

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
        return culprits(self.pairs, self.alone)

    def document(self) -> dict[str, Any]:
        """The content of RESULT."""
        return {
            "backend": self.backend,
            "nodes": self.nodes,
            "hosts": list(self.hosts),
            "places": list(self.places),
            "floor": self.floor,
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


def read_result(content: bytes, where: str) -> Result:
    """The Result whose `document` was stored at the address `where`."""
    fix = "measure the network again"
    document = parse_json(content, dict[str, Any], where=where, fix=fix)
    names = ("ranks", "bytes", "seconds", "repeats")
    try:
        return Result(
            **{name: document[name] for name in ("backend", "nodes", "floor", "seconds")},
            hosts=tuple(document["hosts"]),
            places=tuple(document["places"]),
            speeds=tuple(Speed(**{name: one[name] for name in names}) for one in document["speeds"]),
            pairs={(one["nodes"][0], one["nodes"][1]): one["gbytes"] for one in document["pairs"]},
            alone={one["node"]: one["busbw"] for one in document["alone"]},
        )
    except (KeyError, TypeError, IndexError) as error:
        raise DataError(f"{where} is not the result of a measurement of this version ({error!r}); {fix}") from error


def measured_row(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what was measured before this training, as a metrics row; empty if nothing was."""
    path = Path(environ.get(MEASURED, ""))
    return read_result(path.read_bytes(), str(path)).row() if path.is_file() else {}


# --- the slow node of many: each is measured with several others, and a slow one is slow with all --------------------


def rounds(nodes: int, *, most: int) -> list[list[NodePair]]:
    """Rounds in each of which every node has one partner (or none, where their number is odd), all pairs different.

    It is the circle method of tournaments: number 0 keeps its place, the others move on by one.

    Args:
        most: how many rounds at most; with fewer than all they are spread evenly, so that partners are near and far.
    """
    seats = nodes + nodes % 2
    every = []
    for turn in range(seats - 1):
        circle = [0, *((place + turn) % (seats - 1) + 1 for place in range(seats - 1))]
        pairs = [(circle[place], circle[-1 - place]) for place in range(seats // 2)]
        every.append([(min(pair), max(pair)) for pair in pairs if max(pair) < nodes])
    return every if len(every) <= most else [every[number * len(every) // most] for number in range(most)]


def culprits(speeds: Mapping[NodePair, float], alone: Mapping[int, float]) -> list[int]:
    """The slow nodes, as far as the measurements tell.

    Two nodes have one pair, which does not say whose fault it is; what each of them does alone may.

    Args:
        speeds: GB/s between the two nodes of a pair.
        alone: GB/s among the ranks within each node; empty where nodes have one rank.
    """
    best: dict[int, float] = {}
    for pair, speed in speeds.items():
        for node in pair:
            best[node] = max(speed, best.get(node, 0.0))
    slow: set[int] = set()
    for figures in (best, alone):
        if len(figures) > 1:
            usual = median(figures.values())
            slow |= {node for node, speed in figures.items() if speed < _SHARE * usual}
    return sorted(slow)


# --- measuring --------------------------------------------------------------------------------------------------------


class Ranks:
    """The process group, seen from one rank, with a clock that all ranks agree on."""

    def __init__(self, *, seconds: float, largest: int | None, heart: Heartbeat) -> None:
        """Meet all other ranks, and see that a sum comes out right: a link may be fast and wrong.

        The `seconds` are for everything that is measured from now on.
        """
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._heart = torch, dist, heart
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self.node, self.nodes = self.rank // self.per_node, self.world // self.per_node
        cuda = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        self.largest = largest or _LARGEST[self.device.type]
        self._small = torch.full((1,), self.rank + 1, dtype=torch.float64, device=self.device)
        dist.all_reduce(self._small)
        right = self.world * (self.world + 1) / 2
        if float(self._small) != right:
            raise NetworkError(
                f"the sum over {self.world} ranks is {float(self._small):g}, not {right:g}: the network or a GPU "
                "corrupts data; run NVIDIA's dcgmi diag on the nodes"
            )
        self._buffer = torch.zeros(self.largest // 4, dtype=torch.float32, device=self.device)
        self.begun = time.monotonic()
        self._end = self.begun + seconds

    def left(self) -> float:
        """Seconds until the end, by rank 0's clock, the same on all ranks: they have to decide alike."""
        self._small.fill_(self._end - time.monotonic())
        self._dist.broadcast(self._small, src=0)
        return float(self._small)

    def _slowest(self, seconds: float, group: Any) -> float:
        """The longest of the ranks' times."""
        self._small.fill_(seconds)
        self._dist.all_reduce(self._small, op=self._dist.ReduceOp.MAX, group=group)
        return float(self._small)

    def _of_nodes(self, mine: float) -> dict[int, float]:
        """What the ranks of each node say, the largest of it."""
        told = self._torch.zeros(self.nodes, dtype=self._torch.float64, device=self.device)
        told[self.node] = mine
        self._dist.all_reduce(told, op=self._dist.ReduceOp.MAX)
        return dict(enumerate(told.tolist()))

    def _together(self, group: Any) -> float:
        """Let all begin together; returns that moment of `time.perf_counter`."""
        self._slowest(0.0, group)
        self._synchronize()
        return time.perf_counter()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            self._torch.cuda.synchronize(self.device)

    def _timed(self, buffer: torch.Tensor, repeats: int, group: Any) -> float:
        """Seconds that one all-reduce takes, over some repeats."""
        start = self._together(group)
        for _ in range(repeats):
            self._dist.all_reduce(buffer, group=group)
        self._synchronize()
        return self._slowest((time.perf_counter() - start) / repeats, group)

    def all_reduce(
        self, members: Sequence[int], group: Any, *, budget: float, largest: int | None = None
    ) -> list[Speed]:
        """Speeds of growing sizes, as far as `budget` seconds reach; every rank of `members` calls this, and no other.

        The smallest size is measured whatever it takes.
        """
        size, spent, predicted = min(_SMALLEST, self.largest), 0.0, 0.0
        found: list[Speed] = []
        while size <= (largest or self.largest) and (not found or spent + 3 * predicted < budget):
            buffer = self._buffer[: size // 4]
            first = self._timed(buffer, 1, group)
            allowed = min(_REPEATS, (budget - spent) / 4)
            repeats = max(1, min(_ITERATIONS, int(allowed / first)))
            seconds = self._timed(buffer, repeats, group)
            found.append(Speed(ranks=len(members), bytes=size, seconds=seconds, repeats=repeats))
            self._heart.beat(1, f"reducing {size} bytes")
            spent += first + repeats * seconds
            size, predicted = size * 4, seconds * 4
        return found

    def pairs(self, algbw: float) -> dict[NodePair, float]:
        """GB/s between pairs of nodes, all their ranks sending and receiving at once, every rank over its own card.

        How much can be sent follows from the all-reduce's `algbw` in GB/s.
        """
        count = int(min(max(algbw * 1e9 * _PAIR, 2**16), self.largest) // 8)
        send, receive = self._buffer[:count], self._buffer[count : 2 * count]
        found: dict[NodePair, float] = {}
        for pairs in rounds(self.nodes, most=_ROUNDS):
            if self.left() <= 0:
                break
            mine = next((pair for pair in pairs if self.node in pair), None)
            self._exchange(mine, send[: count // 8], receive[: count // 8])  # sets up the connections
            seconds = self._exchange(mine, send, receive)
            for pair in pairs:
                slowest = max(seconds[pair[0]], seconds[pair[1]])
                found[pair] = count * 4 * self.per_node / slowest / 1e9
            self._heart.beat(1, "measuring pairs")
        return found

    def _exchange(self, pair: NodePair | None, send: torch.Tensor, receive: torch.Tensor) -> dict[int, float]:
        """One exchange with the partner node; the time it took on each node, by its slowest rank."""
        start = self._together(None)
        if pair is not None:
            other = pair[0] if self.node == pair[1] else pair[1]
            peer = other * self.per_node + self.rank % self.per_node
            both = [
                self._dist.P2POp(self._dist.isend, send, peer),
                self._dist.P2POp(self._dist.irecv, receive, peer),
            ]
            for work in self._dist.batch_isend_irecv(both):
                work.wait()
            self._synchronize()
        return self._of_nodes(time.perf_counter() - start)

    def alone(self) -> dict[int, float]:
        """busbw in GB/s within each node, all nodes at the same time; empty where they have one rank."""
        if self.per_node == 1:
            return {}
        members = [list(range(first, first + self.per_node)) for first in range(0, self.world, self.per_node)]
        groups = [self._dist.new_group(ranks) for ranks in members]
        found = self.all_reduce(members[self.node], groups[self.node], budget=2.0, largest=2**24)
        return self._of_nodes(max(speed.busbw for speed in found))

    def measure(self, *, floor: float | None, table: bool) -> Result:
        """The all-reduce among all ranks; and, if it is too slow or a whole table is asked for, who is slow.

        Args:
            table: measure among the first 2, 4, 8, … ranks too, one line of the benchmark's table each, and between
                pairs of nodes whatever comes of it.
        """
        groups: list[tuple[list[int], Any]] = []
        if table:
            sizes = [2**power for power in range(1, self.world.bit_length()) if 2**power < self.world]
            groups = [(list(range(size)), self._dist.new_group(list(range(size)))) for size in sizes]
        groups.append((list(range(self.world)), None))
        # Half for the all-reduce; the other is for naming the slow node, if there is one.
        budget = self.left() / 2 / len(groups)
        speeds: list[Speed] = []
        for members, group in groups:
            speeds += self.all_reduce(members, group, budget=budget) if self.rank in members else []
            self.left()  # the others wait here
        best = max((speed for speed in speeds if speed.ranks == self.world), key=lambda speed: speed.algbw)
        look = self.nodes > 1 and (table or (floor is not None and best.busbw < floor))
        alone = self.alone() if look else {}
        pairs = self.pairs(best.algbw) if look else {}
        # Name and place of each node's machine, as numbers, because torch turns objects into tensors by way of numpy,
        # which an image need not have.
        mine = f"{machine_name()}\n{os.environ.get(PLACE, '')}".encode()[:_NAMES].ljust(_NAMES)
        numbers = self._torch.tensor(list(mine), dtype=self._torch.uint8, device=self.device)
        told = [self._torch.empty_like(numbers) for _ in range(self.world)]
        self._dist.all_gather(told, numbers)
        lines = [bytes(one.tolist()).decode(errors="replace").rstrip() for one in told[:: self.per_node]]
        return Result(
            backend="nccl" if self.device.type == "cuda" else "gloo",
            nodes=self.nodes,
            hosts=tuple(line.partition("\n")[0] for line in lines),
            places=tuple(line.partition("\n")[2] for line in lines),
            speeds=tuple(speeds),
            floor=floor,
            seconds=time.monotonic() - self.begun,
            pairs=pairs,
            alone=alone,
        )


def main(argv: Sequence[str]) -> int:
    """Measure in every rank, report, and leave the result in the node's folder."""
    parser = argparse.ArgumentParser(prog="python -m litgpt_demo collectives", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for the whole measurement (default: 60)")
    parser.add_argument("--floor", type=float, help="least busbw in GB/s; below it the slow node is looked for")
    parser.add_argument("--largest", type=int, help="bytes of the largest tensor (default: 1 GiB on GPUs, else 64 MiB)")
    parser.add_argument("--table", action="store_true", help="among 2, 4, 8, … ranks too, and between pairs of nodes")
    asked = parser.parse_args(argv)
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=2 * asked.seconds + 120))
    try:
        with Heartbeat(allow=asked.seconds + _HUNG) as heart:
            ranks = Ranks(seconds=asked.seconds, largest=asked.largest, heart=heart)
            heart.beat(1, "measuring the network")
            result = ranks.measure(floor=asked.floor, table=asked.table)
            if ranks.rank % ranks.per_node == 0 and (folder := os.environ.get(NODE_DIRECTORY)):
                write_whole(Path(folder) / RESULT, result.document())
            if ranks.rank == 0:
                print(marked(result.row()), flush=True)
            dist.barrier()
    finally:
        time.sleep(_DROPPED)
        dist.destroy_process_group()
    return 0
