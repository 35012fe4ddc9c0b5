"""Ranks measure the bandwidth among them: before a training (litgpt_demo.node.network_test), and for the benchmark, by
`torchrun … -m litgpt_demo collectives --seconds 60 --floor 40`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from litgpt_demo.errors import NetworkError
from litgpt_demo.heartbeat import NODE_DIRECTORY, Heartbeat
from litgpt_demo.metrics import to_log_line
from litgpt_demo.node.network_test import PLACE, RESULT, NetworkTestResult, NodePair, Speed
from litgpt_demo.node.rendezvous import machine_name
from litgpt_demo.storage.local import atomic_write_json

# Bytes. A GiB is where published figures are taken; gloo gains nothing beyond some MiB.
_SMALLEST, _LARGEST = 2**20, {"cuda": 2**30, "cpu": 2**26}


def rounds(nodes: int, *, most: int) -> list[list[NodePair]]:
    """At most `most` rounds in each of which every node has one partner or none, all pairs different.

    With fewer than all they are spread evenly, so that partners are near and far.
    """
    # The numbers of two partners have one sum in a round, modulo the number of nodes.
    every = [[(one, (turn - one) % nodes) for one in range(nodes)] for turn in range(nodes)]
    every = [pairs for turn in every if (pairs := [pair for pair in turn if pair[0] < pair[1]])]
    return every if len(every) <= most else [every[number * len(every) // most] for number in range(most)]


class Ranks:
    """The process group, seen from one rank. What all ranks have to decide alike follows from sums among them."""

    def __init__(self, *, seconds: float, largest: int | None, heart: Heartbeat) -> None:
        """Meet all ranks, and see that a sum comes out right; `seconds` are for all that is measured from now on."""
        self._heart = heart
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self.node, self.nodes = self.rank // self.per_node, self.world // self.per_node
        cuda = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        self._synchronize: Callable[[], None] = partial(torch.cuda.synchronize, self.device) if cuda else lambda: None
        self.largest = largest or _LARGEST[self.device.type]
        self._small = torch.full((1,), self.rank + 1, dtype=torch.float64, device=self.device)
        dist.all_reduce(self._small)
        if (found := float(self._small)) != (right := self.world * (self.world + 1) / 2):
            what = f"the sum over {self.world} ranks is {found:g}, not {right:g}: the network or a GPU corrupts data"
            raise NetworkError(what, fix="run NVIDIA's dcgmi diag on the nodes")
        self._buffer = torch.zeros(self.largest // 4, dtype=torch.float32, device=self.device)
        self._begun = time.monotonic()
        self._end = self._begun + seconds

    def _most(self, mine: float, group: Any = None) -> float:
        self._small.fill_(mine)
        dist.all_reduce(self._small, op=dist.ReduceOp.MAX, group=group)
        return float(self._small)

    def _of_nodes(self, mine: float) -> dict[int, float]:
        told = torch.zeros(self.nodes, dtype=torch.float64, device=self.device)
        told[self.node] = mine
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return dict(enumerate(told.tolist()))

    def _seconds(self, action: Callable[[], object], group: Any, *, repeats: int = 1) -> float:
        self._most(0.0, group)
        self._synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            action()
        self._synchronize()
        return (time.perf_counter() - start) / repeats

    def _all_reduce(
        self, members: Sequence[int], group: Any, *, budget: float, largest: int | None = None
    ) -> list[Speed]:
        """Speeds of growing sizes, as far as `budget` seconds reach. Every rank of `members` calls this, no other."""
        size, spent, predicted = min(_SMALLEST, self.largest), 0.0, 0.0
        found: list[Speed] = []
        while size <= (largest or self.largest) and (not found or spent + 3 * predicted < budget):
            reduce = partial(dist.all_reduce, self._buffer[: size // 4], group=group)
            first = self._most(self._seconds(reduce, group), group)
            # At most 2 s, and without the first one, which sets up connections.
            repeats = max(1, min(20, int(min(2.0, (budget - spent) / 4) / first)))
            seconds = self._most(self._seconds(reduce, group, repeats=repeats), group)
            found.append(Speed(ranks=len(members), bytes=size, seconds=seconds, repeats=repeats))
            self._heart.beat(1, f"reducing {size} bytes")
            spent += first + repeats * seconds
            size, predicted = size * 4, seconds * 4
        return found

    def _exchange(self, partner: int | None, count: int) -> None:
        if partner is None:
            return
        peer = partner * self.per_node + self.rank % self.per_node
        send, receive = self._buffer[:count], self._buffer[count : 2 * count]
        both = [dist.P2POp(dist.isend, send, peer), dist.P2POp(dist.irecv, receive, peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def _pairs(self, algbw: float) -> dict[NodePair, float]:
        """GB/s between pairs of nodes, all their ranks sending and receiving at once, every rank over its own card."""
        # By the all-reduce's `algbw` it takes 0.25 s: long against a round trip, short against the gate.
        count = int(min(max(algbw * 1e9 * 0.25, 2**16), self.largest) // 8)
        found: dict[NodePair, float] = {}
        for pairs in rounds(self.nodes, most=7):
            if self._most(self._end - time.monotonic()) <= 0:
                break
            partner = next((sum(pair) - self.node for pair in pairs if self.node in pair), None)
            self._seconds(partial(self._exchange, partner, count // 8), None)  # sets up the connections
            seconds = self._of_nodes(self._seconds(partial(self._exchange, partner, count), None))
            for pair in pairs:
                found[pair] = count * 4 * self.per_node / max(seconds[node] for node in pair) / 1e9
            self._heart.beat(1, "measuring pairs")
        return found

    def measure(self, *, floor: float | None, table: bool) -> NetworkTestResult:
        """The all-reduce among all ranks; and, if it is too slow, who is. A `table` has the first 2, 4, 8, … ranks too,
        and pairs of nodes whatever comes of it.
        """
        everyone = list(range(self.world))
        sizes = [2**power for power in range(1, self.world.bit_length()) if 2**power < self.world] if table else []
        groups = [*((everyone[:size], dist.new_group(everyone[:size])) for size in sizes), (everyone, None)]
        # Half for the all-reduce; the other is for naming the slow node, if there is one.
        budget = self._most(self._end - time.monotonic()) / 2 / len(groups)
        speeds: list[Speed] = []
        for members, group in groups:
            speeds += self._all_reduce(members, group, budget=budget) if self.rank in members else []
            self._most(0.0)  # the others wait here
        # Name and place of each node's machine, as numbers, because torch turns objects into tensors by way of numpy,
        # which an image need not have. A host name has 253 bytes at most, three names of GCE's in a place 63 each.
        mine = f"{machine_name()}\n{os.environ.get(PLACE, '')}".encode()[:1024].ljust(1024)
        numbers = torch.tensor(list(mine), dtype=torch.uint8, device=self.device)
        told = [torch.empty_like(numbers) for _ in range(self.world)]
        dist.all_gather(told, numbers)
        lines = [bytes(one.tolist()).decode(errors="replace").rstrip() for one in told[:: self.per_node]]
        result = NetworkTestResult(
            backend="nccl" if self.device.type == "cuda" else "gloo",
            nodes=self.nodes,
            hosts=tuple(line.partition("\n")[0] for line in lines),
            places=tuple(line.partition("\n")[2] for line in lines),
            speeds=tuple(speeds),
            floor=floor,
            seconds=0.0,
        )
        if self.nodes > 1 and (table or not result.enough):
            if self.per_node > 1:  # within each node, all nodes at the same time
                each = [everyone[first : first + self.per_node] for first in everyone[:: self.per_node]]
                within = [dist.new_group(ranks) for ranks in each]
                found = self._all_reduce(each[self.node], within[self.node], budget=2.0, largest=2**24)
                result = replace(result, alone=self._of_nodes(max(speed.busbw for speed in found)))
            result = replace(result, pairs=self._pairs(result.best.algbw))
        return replace(result, seconds=time.monotonic() - self._begun)


def main(argv: Sequence[str]) -> int:
    """Measure in every rank, report, and leave the result in the node's folder."""
    parser = argparse.ArgumentParser(prog="python -m litgpt_demo collectives", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for the whole measurement (default: 60)")
    parser.add_argument("--floor", type=float, help="least busbw in GB/s; below it the slow node is looked for")
    parser.add_argument("--largest", type=int, help="bytes of the largest tensor (default: 1 GiB on GPUs, else 64 MiB)")
    parser.add_argument("--table", action="store_true", help="among 2, 4, 8, … ranks too, and between pairs of nodes")
    asked = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=2 * asked.seconds + 120))
    try:
        with Heartbeat(max_silence=asked.seconds + 15.0) as heart:
            ranks = Ranks(seconds=asked.seconds, largest=asked.largest, heart=heart)
            heart.beat(1, "measuring the network")
            result = ranks.measure(floor=asked.floor, table=asked.table)
            if ranks.rank % ranks.per_node == 0 and (folder := os.environ.get(NODE_DIRECTORY)):
                atomic_write_json(Path(folder) / RESULT, result.document())
            if ranks.rank == 0:
                print(to_log_line(result.row()), flush=True)
            dist.barrier()
    finally:
        # Seconds for Gloo's threads to let go of the tensors of work that has just ended, for which they need Python's
        # lock: torch 2.2.2 joins them with the lock held. A group that is destroyed sooner may never end (seen).
        time.sleep(0.3)
        dist.destroy_process_group()
    return 0
