"""The bandwidth among ranks: the measurement before a training, and the benchmark.

    torchrun … -m litgpt_demo collectives --seconds 60 --floor 40

algbw is the tensor's bytes by the time an all-reduce of it takes. busbw is algbw · 2(n-1)/n for n ranks: what each link
carries, whatever n is, because a ring moves each byte n-1 times to reduce it and n-1 times to spread it, a share of 1/n
at a time (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md#bandwidth). Floors and links compare with
busbw. GB/s are 10^9 bytes per second; 1 GB/s = 8 Gbit/s.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError, NetworkError
from litgpt_demo.heartbeat import NODE_DIRECTORY, Heartbeat
from litgpt_demo.metrics import marked
from litgpt_demo.node.pairs import NodePair, culprits, rounds
from litgpt_demo.node.rendezvous import machine_name
from litgpt_demo.node.topology import PLACE

if TYPE_CHECKING:
    import torch

RESULT = "network.json"
"""The name of the result in every node's own folder; it is the same in all of them."""

MEASURED = "LITGPT_MEASURED"
"""The environment variable of a training's ranks with the file of what was measured before."""

SMALLEST = 2**20
LARGEST = {"cuda": 2**30, "cpu": 2**26}
"""Bytes. A GiB is where published figures are taken; gloo gains nothing beyond some MiB."""

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


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One size, reduced among some number of ranks."""

    ranks: int
    bytes: int
    seconds: float
    """Bandwidth of one all-reduce, by the slowest rank."""
    repeats: int

    @property
    def algbw(self) -> float:
        """GB/s."""
        return self.bytes / self.seconds / 1e9

    @property
    def busbw(self) -> float:
        """GB/s."""
        return self.algbw * bus_factor(self.ranks)


def bus_factor(ranks: int) -> float:
    """busbw by algbw of an all-reduce; of one rank nothing crosses a link."""
    return 2 * (ranks - 1) / ranks


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
        """Return it as JSON."""
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
    """The Result whose `document` was stored at the address `where`.

    Raises:
        DataError: it is damaged.
    """
    fix = "measure the network again"
    document = parse_json(content, dict[str, Any], where=where, fix=fix)
    try:
        return _result(document)
    except (KeyError, TypeError, IndexError) as error:
        raise DataError(f"{where} is not the result of a measurement of this version ({error!r}); {fix}") from error


def _result(document: Mapping[str, Any]) -> Result:
    names = ("ranks", "bytes", "seconds", "repeats")
    return Result(
        backend=document["backend"],
        nodes=document["nodes"],
        hosts=tuple(document["hosts"]),
        places=tuple(document["places"]),
        speeds=tuple(Speed(**{name: one[name] for name in names}) for one in document["speeds"]),
        floor=document["floor"],
        seconds=document["seconds"],
        pairs={(one["nodes"][0], one["nodes"][1]): one["gbytes"] for one in document["pairs"]},
        alone={one["node"]: one["busbw"] for one in document["alone"]},
    )


def measured_row(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what was measured before this training, as a metrics row; empty if nothing was."""
    path = Path(environ.get(MEASURED, ""))
    return read_result(path.read_bytes(), str(path)).row() if path.is_file() else {}


# --- measuring --------------------------------------------------------------------------------------------------------


class Ranks:
    """The process group, seen from one rank, with a clock that all ranks agree on."""

    def __init__(self, *, seconds: float, largest: int | None, heart: Heartbeat) -> None:
        """
        Args:
            seconds: for everything that is measured, from now on.
        """
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._heart = torch, dist, heart
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        cuda = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        self.largest = largest or LARGEST[self.device.type]
        self._small = torch.zeros(1, dtype=torch.float64, device=self.device)
        self._greet()
        self._buffer = torch.zeros(self.largest // 4, dtype=torch.float32, device=self.device)
        self._begun = time.monotonic()
        self._end = self._begun + seconds

    @property
    def nodes(self) -> int:
        return self.world // self.per_node

    @property
    def node(self) -> int:
        return self.rank // self.per_node

    def spent(self) -> float:
        return time.monotonic() - self._begun

    def left(self) -> float:
        """Seconds until the end, by rank 0's clock, the same on all ranks: they have to decide alike."""
        self._small.fill_(self._end - time.monotonic())
        self._dist.broadcast(self._small, src=0)
        return float(self._small)

    def _greet(self) -> None:
        """Meet all other ranks, and see that a sum comes out right: a link may be fast and wrong.

        Raises:
            NetworkError: it does not.
        """
        self._small.fill_(self.rank + 1)
        self._dist.all_reduce(self._small)
        right = self.world * (self.world + 1) / 2
        if float(self._small) != right:
            raise NetworkError(
                f"the sum over {self.world} ranks is {float(self._small):g}, not {right:g}: the network or a GPU "
                "corrupts data; run NVIDIA's dcgmi diag on the nodes"
            )

    def _slowest(self, seconds: float, group: Any) -> float:
        """The longest of the ranks' times."""
        self._small.fill_(seconds)
        self._dist.all_reduce(self._small, op=self._dist.ReduceOp.MAX, group=group)
        return float(self._small)

    def _timed(self, buffer: torch.Tensor, repeats: int, group: Any) -> float:
        """Seconds that one all-reduce takes, over some repeats."""
        self._slowest(0.0, group)  # all begin together
        self._synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            self._dist.all_reduce(buffer, group=group)
        self._synchronize()
        return self._slowest((time.perf_counter() - start) / repeats, group)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            self._torch.cuda.synchronize(self.device)

    def all_reduce(
        self, members: Sequence[int], group: Any, *, budget: float, largest: int | None = None
    ) -> list[Speed]:
        """Speeds of growing sizes, as far as `budget` seconds reach; every rank of `members` calls this, and no other.

        The smallest size is measured whatever it takes.
        """
        size, spent, predicted = min(SMALLEST, self.largest), 0.0, 0.0
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

        Args:
            algbw: of the all-reduce in GB/s, from which follows how much can be sent.
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
        self._slowest(0.0, None)
        self._synchronize()
        start = time.perf_counter()
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
        times = self._torch.zeros(self.nodes, dtype=self._torch.float64, device=self.device)
        times[self.node] = time.perf_counter() - start
        self._dist.all_reduce(times, op=self._dist.ReduceOp.MAX)
        return dict(enumerate(times.tolist()))

    def alone(self) -> dict[int, float]:
        """busbw in GB/s within each node, all nodes at the same time; empty where they have one rank."""
        if self.per_node == 1:
            return {}
        members = [list(range(first, first + self.per_node)) for first in range(0, self.world, self.per_node)]
        groups = [self._dist.new_group(ranks) for ranks in members]
        found = self.all_reduce(members[self.node], groups[self.node], budget=2.0, largest=2**24)
        speeds = self._torch.zeros(self.nodes, dtype=self._torch.float64, device=self.device)
        speeds[self.node] = max(speed.busbw for speed in found)
        self._dist.all_reduce(speeds, op=self._dist.ReduceOp.MAX)
        return dict(enumerate(speeds.tolist()))

    def machines(self) -> tuple[tuple[str, str], ...]:
        """Name and place of each node's machine."""
        # As numbers, because torch turns objects into tensors by way of numpy, which an image need not have.
        mine = f"{machine_name()}\n{os.environ.get(PLACE, '')}".encode()[:_NAMES].ljust(_NAMES)
        numbers = self._torch.tensor(list(mine), dtype=self._torch.uint8, device=self.device)
        told = [self._torch.empty_like(numbers) for _ in range(self.world)]
        self._dist.all_gather(told, numbers)
        lines = [bytes(one.tolist()).decode(errors="replace").rstrip() for one in told[:: self.per_node]]
        return tuple((host, place) for host, _, place in (line.partition("\n") for line in lines))

    def groups(self) -> list[tuple[list[int], Any]]:
        """The first 2, 4, 8, … ranks and all of them: one line of the benchmark's table each."""
        sizes = [2**power for power in range(1, self.world.bit_length()) if 2**power < self.world]
        return [
            *((list(range(size)), self._dist.new_group(list(range(size)))) for size in sizes),
            (list(range(self.world)), None),
        ]


def measure(ranks: Ranks, *, floor: float | None, table: bool) -> Result:
    """The all-reduce among all ranks; and, if it is too slow or a whole table is asked for, who is slow.

    Args:
        table: measure among fewer ranks too, and between pairs of nodes whatever comes of it.
    """
    groups = ranks.groups() if table else [(list(range(ranks.world)), None)]
    # Half for the all-reduce; the other is for naming the slow node, if there is one.
    budget = ranks.left() / 2 / len(groups)
    speeds: list[Speed] = []
    for members, group in groups:
        mine = ranks.all_reduce(members, group, budget=budget) if ranks.rank in members else []
        ranks.left()  # the others wait here
        speeds += mine
    best = max(speed.busbw for speed in speeds if speed.ranks == ranks.world)
    algbw = best / bus_factor(ranks.world) if ranks.world > 1 else best
    look = ranks.nodes > 1 and (table or (floor is not None and best < floor))
    alone = ranks.alone() if look else {}
    pairs = ranks.pairs(algbw) if look else {}
    machines = ranks.machines()
    return Result(
        backend="nccl" if ranks.device.type == "cuda" else "gloo",
        nodes=ranks.nodes,
        hosts=tuple(host for host, _ in machines),
        places=tuple(place for _, place in machines),
        speeds=tuple(speeds),
        floor=floor,
        seconds=ranks.spent(),
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
            _tell(measure(ranks, floor=asked.floor, table=asked.table), ranks)
            dist.barrier()
    finally:
        time.sleep(_DROPPED)
        dist.destroy_process_group()
    return 0


def _tell(result: Result, ranks: Ranks) -> None:
    if ranks.rank % ranks.per_node == 0 and (folder := os.environ.get(NODE_DIRECTORY)):
        path = Path(folder) / RESULT
        aside = path.with_name(f".{RESULT}")
        aside.write_text(json.dumps(result.document(), indent=1))
        aside.replace(path)
    if ranks.rank == 0:
        print(marked(result.row()), flush=True)
