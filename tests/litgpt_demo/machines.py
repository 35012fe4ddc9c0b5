"""Machines of a network as network namespaces of this one, each with an address of its own; making them needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Place:
    """Where a node of the test runs: a prefix for its command line, its address, and its network interface."""

    prefix: tuple[str, ...]
    address: str
    interface: str
    host: str


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def namespace(stack: ExitStack, name: str, number: int, *, bridge: str, address: str, rate: str | None) -> Place:
    """Return a namespace with one interface, whose packets leave at `rate` at most (None: as fast as they can)."""
    ip("netns", "add", name)
    stack.callback(ip, "netns", "del", name)
    ip("link", "add", f"{name}h", "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("link", "set", f"{name}h", "master", bridge, "up")
    inside = ("netns", "exec", name)
    ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "up")
    ip("-n", name, "link", "set", "lo", "up")
    if rate is not None:
        ip(*inside, *f"tc qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 100ms".split())
    return Place(("ip", *inside), address, "eth0", f"machine-{number}")


@contextmanager
def machines(addresses: Sequence[str], rates: Sequence[str | None] = ()) -> Iterator[list[Place]]:
    """Yield one machine for each of these addresses, which share a network that leads nowhere else."""
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    tag = f"g{os.getpid() % 100000}"
    with ExitStack() as stack:
        ip("link", "add", f"{tag}b", "type", "bridge")
        stack.callback(ip, "link", "del", f"{tag}b")
        ip("link", "set", f"{tag}b", "up")
        yield [
            namespace(stack, f"{tag}n{number}", number, bridge=f"{tag}b", address=address, rate=rate)
            for number, (address, rate) in enumerate(zip(addresses, rates or [None] * len(addresses), strict=True))
        ]
