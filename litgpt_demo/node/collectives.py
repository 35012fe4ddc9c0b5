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
from litgpt_demo.node.network_test import LOCATION, RESULT, NetworkTestResult, NodePair, Speed
from litgpt_demo.node.rendezvous import machine_name
from litgpt_demo.storage.local import atomic_write_json

# Bytes. A GiB is where published figures are taken; gloo gains nothing beyond some MiB.
_SMALLEST, _LARGEST = 2**20, {"cuda": 2**30, "cpu": 2**26}


def rounds(nodes: int, *, most: int) -> list[list[NodePair]]:
    """Return at most `most` rounds, in each of which every node has one partner or none; all pairs are different.

    If these are not all rounds, they are spread evenly, so that partners are near and far.
    """
    every: list[list[NodePair]] = []
    for turn in range(nodes):
        # Within a round the numbers of any two partners have the same sum, modulo the number of nodes.
        pairs = [(node, (turn - node) % nodes) for node in range(nodes) if node < (turn - node) % nodes]
        if pairs:
            every.append(pairs)
    if len(every) <= most:
        return every
    return [every[number * len(every) // most] for number in range(most)]


class CollectiveBenchmark:
    """The measurement in one rank. Decisions that all ranks must share follow from collectives among them."""

    def __init__(self, *, seconds: float, largest: int | None, heart: Heartbeat) -> None:
        """Meet all ranks and check a sum; `seconds` are for all measurements from now on."""
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
        total, expected = float(self._small), self.world * (self.world + 1) / 2
        if total != expected:
            what = f"the sum over {self.world} ranks is {total:g}, not {expected:g}: the network or a GPU corrupts data"
            raise NetworkError(what, fix="run NVIDIA's dcgmi diag on the nodes")
        self._buffer = torch.zeros(self.largest // 4, dtype=torch.float32, device=self.device)
        self._started_at = time.monotonic()
        self._end = self._started_at + seconds

    def _maximum(self, value: float, group: Any = None) -> float:
        self._small.fill_(value)
        dist.all_reduce(self._small, op=dist.ReduceOp.MAX, group=group)
        return float(self._small)

    def _by_node(self, value: float) -> dict[int, float]:
        values = torch.zeros(self.nodes, dtype=torch.float64, device=self.device)
        values[self.node] = value
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return dict(enumerate(values.tolist()))

    def _seconds(self, action: Callable[[], object], group: Any, *, repeats: int = 1) -> float:
        self._maximum(0.0, group)
        self._synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            action()
        self._synchronize()
        return (time.perf_counter() - start) / repeats

    def _all_reduce(
        self, members: Sequence[int], group: Any, *, budget: float, largest: int | None = None
    ) -> list[Speed]:
        """Return the speeds of growing sizes within `budget` seconds. Only the ranks of `members` call this."""
        size, spent, predicted = min(_SMALLEST, self.largest), 0.0, 0.0
        speeds: list[Speed] = []
        while size <= (largest or self.largest) and (not speeds or spent + 3 * predicted < budget):
            reduce = partial(dist.all_reduce, self._buffer[: size // 4], group=group)
            first = self._maximum(self._seconds(reduce, group), group)
            # At most 2 s, without the first one, which sets up connections.
            repeats = max(1, min(20, int(min(2.0, (budget - spent) / 4) / first)))
            seconds = self._maximum(self._seconds(reduce, group, repeats=repeats), group)
            speeds.append(Speed(ranks=len(members), bytes=size, seconds=seconds, repeats=repeats))
            self._heart.beat(1, f"reducing {size} bytes")
            spent += first + repeats * seconds
            size, predicted = size * 4, seconds * 4
        return speeds

    def _exchange(self, partner: int | None, count: int) -> None:
        if partner is None:
            return
        peer = partner * self.per_node + self.rank % self.per_node
        send, receive = self._buffer[:count], self._buffer[count : 2 * count]
        both = [dist.P2POp(dist.isend, send, peer), dist.P2POp(dist.irecv, receive, peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def _pairs(self, algbw: float) -> dict[NodePair, float]:
        """Return GB/s between pairs of nodes; all their ranks send and receive at once, each over its own card."""
        # With the all-reduce's `algbw` it takes 0.25 s: much longer than a round trip, much shorter than the test.
        count = int(min(max(algbw * 1e9 * 0.25, 2**16), self.largest) // 8)
        speeds: dict[NodePair, float] = {}
        for pairs in rounds(self.nodes, most=7):
            if self._maximum(self._end - time.monotonic()) <= 0:
                break
            partner = next((sum(pair) - self.node for pair in pairs if self.node in pair), None)
            self._seconds(partial(self._exchange, partner, count // 8), None)  # sets up the connections
            seconds = self._by_node(self._seconds(partial(self._exchange, partner, count), None))
            for pair in pairs:
                speeds[pair] = count * 4 * self.per_node / max(seconds[node] for node in pair) / 1e9
            self._heart.beat(1, "measuring pairs")
        return speeds

    def measure(self, *, floor: float | None, table: bool) -> NetworkTestResult:
        """Measure the all-reduce among all ranks; if it is too slow, find the slow nodes.

        A `table` also has the first 2, 4, 8, … ranks, and always pairs of nodes.
        """
        everyone = list(range(self.world))
        sizes = [2**power for power in range(1, self.world.bit_length()) if 2**power < self.world] if table else []
        groups = [*((everyone[:size], dist.new_group(everyone[:size])) for size in sizes), (everyone, None)]
        # Half is for the all-reduce, the other half for finding a slow node.
        budget = self._maximum(self._end - time.monotonic()) / 2 / len(groups)
        speeds: list[Speed] = []
        for members, group in groups:
            if self.rank in members:
                speeds += self._all_reduce(members, group, budget=budget)
            self._maximum(0.0)  # the others wait here
        # Name and location of each node's machine, as numbers, because torch converts objects to tensors with numpy,
        # which an image may lack. A host name has 253 bytes at most, three names of GCE's in a location 63 each.
        text = f"{machine_name()}\n{os.environ.get(LOCATION, '')}".encode()[:1024].ljust(1024)
        numbers = torch.tensor(list(text), dtype=torch.uint8, device=self.device)
        gathered = [torch.empty_like(numbers) for _ in range(self.world)]
        dist.all_gather(gathered, numbers)
        lines = [bytes(tensor.tolist()).decode(errors="replace").rstrip() for tensor in gathered[:: self.per_node]]
        result = NetworkTestResult(
            backend="nccl" if self.device.type == "cuda" else "gloo",
            nodes=self.nodes,
            hosts=tuple(line.partition("\n")[0] for line in lines),
            locations=tuple(line.partition("\n")[2] for line in lines),
            speeds=tuple(speeds),
            floor=floor,
            seconds=0.0,
        )
        if self.nodes > 1 and (table or not result.is_enough):
            if self.per_node > 1:  # within each node, all nodes at the same time
                nodes = [everyone[first : first + self.per_node] for first in everyone[:: self.per_node]]
                groups_of_nodes = [dist.new_group(ranks) for ranks in nodes]
                local = self._all_reduce(nodes[self.node], groups_of_nodes[self.node], budget=2.0, largest=2**24)
                result = replace(result, alone=self._by_node(max(speed.busbw for speed in local)))
            result = replace(result, pairs=self._pairs(result.best.algbw))
        return replace(result, seconds=time.monotonic() - self._started_at)


def main(argv: Sequence[str]) -> int:
    """Measure in every rank, print the result, and write it into the node's folder."""
    parser = argparse.ArgumentParser(prog="python -m litgpt_demo collectives", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="seconds for the whole measurement (default: 60)")
    parser.add_argument("--floor", type=float, help="least busbw in GB/s, below which slow nodes are searched")
    parser.add_argument("--largest", type=int, help="bytes of the largest tensor (default: 1 GiB on GPUs, else 64 MiB)")
    parser.add_argument("--table", action="store_true", help="also among 2, 4, 8, … ranks, and between pairs of nodes")
    options = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=2 * options.seconds + 120))
    try:
        with Heartbeat(max_silence=options.seconds + 15.0) as heart:
            benchmark = CollectiveBenchmark(seconds=options.seconds, largest=options.largest, heart=heart)
            heart.beat(1, "measuring the network")
            result = benchmark.measure(floor=options.floor, table=options.table)
            folder = os.environ.get(NODE_DIRECTORY)
            if folder and benchmark.rank % benchmark.per_node == 0:
                atomic_write_json(Path(folder) / RESULT, result.document())
            if benchmark.rank == 0:
                print(to_log_line(result.row()), flush=True)
            dist.barrier()
    finally:
        # Gloo's threads release the tensors of finished work, for which they need Python's lock: torch 2.2.2 joins them
        # with the lock held. Without this pause the destruction of a group may never end (seen).
        time.sleep(0.3)
        dist.destroy_process_group()
    return 0
