"""RDMA over Ethernet: which entry of a card's table of addresses (GIDs) is RoCE v2 over IPv4.

The number differs from pod to pod (k8snetworkplumbingwg/multus-cni#1100), so it is found on the node and never
configured. The kernel's layout of /sys/class/infiniband: https://docs.kernel.org/admin-guide/abi-stable.html
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from litgpt_demo.faults import NodeError

_IPV4 = "0000:0000:0000:0000:0000:ffff:"


@dataclass(frozen=True, kw_only=True)
class Gid:
    """One address of a card's port."""

    device: str
    index: int
    address: str
    kind: str
    """`RoCE v2`, or `IB/RoCE v1`."""
    interface: str
    """Of the network; empty if the kernel does not tell."""

    @property
    def usable(self) -> bool:
        """Whether NCCL can reach peers in other subnets by it: RoCE v2, over IPv4."""
        mapped = self.address.startswith(_IPV4) and not self.address.endswith(":0000:0000")
        return mapped and self.kind == "RoCE v2"


def gids(sys: Path, prefix: str) -> list[Gid]:
    """The addresses on the first port of every card whose name begins with `prefix`."""
    found = []
    for device in sorted((sys / "class/infiniband").glob(f"{prefix}*")):
        port = device / "ports/1"
        for path in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
            # An entry that is not in use cannot be read (EINVAL).
            with contextlib.suppress(OSError):
                attributes = port / "gid_attrs"
                kind = (attributes / "types" / path.name).read_text().strip()
                interface = attributes / "ndevs" / path.name
                found.append(
                    Gid(
                        device=device.name,
                        index=int(path.name),
                        address=path.read_text().strip(),
                        kind=kind,
                        interface=interface.read_text().strip() if interface.exists() else "",
                    )
                )
    return found


def gid_index(sys: Path, prefix: str, interfaces: Sequence[str]) -> int:
    """The index to give NCCL as NCCL_IB_GID_INDEX.

    Args:
        interfaces: those that the pod has; other pods' addresses can be in the same table.

    Raises:
        NodeError: no card, no such address, or cards whose indices differ, which one variable cannot say.
    """
    cards = sorted(path.name for path in (sys / "class/infiniband").glob("*"))
    if not any(card.startswith(prefix) for card in cards):
        there = f"there are {', '.join(cards)}" if cards else "there are none"
        raise NodeError(
            f"no RDMA card is called {prefix}*: {there}; look at the pod's annotation k8s.v1.cni.cncf.io/networks and "
            "its request for rdma/rdma, or set the right prefix as NCCL_IB_HCA"
        )
    usable = [gid for gid in gids(sys, prefix) if gid.usable]
    mine = [gid for gid in usable if gid.interface in interfaces] or usable
    first = {device: min(gid.index for gid in mine if gid.device == device) for device in {one.device for one in mine}}
    table = "; ".join(f"{gid.device} {gid.index}: {gid.address} {gid.kind}" for gid in gids(sys, prefix))
    if not first:
        raise NodeError(
            f"no address of {prefix}* is RoCE v2 over IPv4 ({table or 'the table is empty'}); "
            "look at the pod's annotation k8s.v1.cni.cncf.io/networks: the second interface has got no IPv4 address"
        )
    if len(set(first.values())) > 1:
        told = ", ".join(f"{device} {index}" for device, index in sorted(first.items()))
        raise NodeError(
            f"the RoCE v2 addresses of the cards have different indices ({told}); set NCCL_IB_HCA to one card's name, "
            "or leave NCCL_IB_GID_INDEX to NCCL 2.21 or newer by platform.overrides"
        )
    return min(first.values())


def is_card_prefix(text: str) -> bool:
    """Whether a value of NCCL_IB_HCA is a plain prefix, and not one of its lists, exclusions or exact names."""
    return re.fullmatch(r"[A-Za-z0-9_]+", text) is not None
