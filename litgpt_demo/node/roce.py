"""RDMA over Ethernet: which card to use, and which entry of its table of addresses (GIDs).

The entry that is RoCE v2 over IPv4 has another number in each pod (k8snetworkplumbingwg/multus-cni#1100, and
NVIDIA/nccl#1573 for tables with gaps), so it is found on the node and never configured. The kernel's layout of
/sys/class/infiniband: https://docs.kernel.org/admin-guide/abi-stable.html
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from litgpt_demo.errors import NodeError

_IPV4 = "0000:0000:0000:0000:0000:ffff:"
_UNUSED = "0000:0000:0000:0000:0000:0000:0000:0000"

_ANNOTATION = "the pod's annotation k8s.v1.cni.cncf.io/networks and its request for the extended resource (rdma/rdma)"


@dataclass(frozen=True, kw_only=True)
class Gid:
    """One address of a card's port."""

    card: str
    """The port as NCCL names it: `device:port`."""
    index: int
    address: str
    kind: str
    """`RoCE v2`, or `IB/RoCE v1`."""
    interface: str
    """The interface of the network; empty if the kernel does not tell, as for one of another network namespace."""

    @property
    def usable(self) -> bool:
        """Return True if NCCL can reach peers in other subnets by it: RoCE v2, over IPv4."""
        mapped = self.address.startswith(_IPV4) and not self.address.endswith(":0000:0000")
        return mapped and self.kind == "RoCE v2"

    def __str__(self) -> str:
        return f"{self.card:<16} {self.index:>3}  {self.address}  {self.kind:<11}  {self.interface or '-'}"


@dataclass(frozen=True, kw_only=True)
class Cards:
    """The ports to use, `device:port` each, and the index that is right for all of them."""

    names: tuple[str, ...]
    index: int


def gids(sys: Path, prefix: str) -> list[Gid]:
    """The addresses on every port of every card whose name begins with `prefix`; entries not in use are left out."""
    found = []
    for device in sorted((sys / "class/infiniband").glob(f"{prefix}*")):
        for port in sorted((device / "ports").glob("*"), key=lambda path: int(path.name)):
            for path in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
                # The type of an entry that is not in use cannot be read (EINVAL).
                with contextlib.suppress(OSError):
                    if (address := path.read_text().strip()) == _UNUSED:
                        continue
                    kind, interface = (port / "gid_attrs/types" / path.name).read_text().strip(), ""
                    with contextlib.suppress(OSError):
                        interface = (port / "gid_attrs/ndevs" / path.name).read_text().strip()
                    card, index = f"{device.name}:{port.name}", int(path.name)
                    found.append(Gid(card=card, index=index, address=address, kind=kind, interface=interface))
    return found


def find_cards(sys: Path, prefix: str, interfaces: Sequence[str]) -> Cards:
    """The cards and the index for NCCL.

    Args:
        interfaces: the pod's own on the RoCE network; other pods' addresses can be in the same table.

    Raises:
        NodeError: no card, no such address, several on one port, or ports whose indices differ, which one variable
            cannot say. Shows the table.
    """
    cards = sorted(path.name for path in (sys / "class/infiniband").glob("*"))
    if not any(card.startswith(prefix) for card in cards):
        there = f"there are {', '.join(cards)}" if cards else "there are none"
        raise NodeError(
            f"no RDMA card is called {prefix}*: {there}; look at {_ANNOTATION}, or set the right prefix as NCCL_IB_HCA"
        )
    listed = gids(sys, prefix)
    table = "\n".join(f"  {gid}" for gid in listed) or "  (empty)"
    told = f" in the table\n{table}\n"
    mine = [gid for gid in listed if gid.usable]
    # Where the kernel tells no interface at all, there is nothing to choose by.
    if interfaces and any(gid.interface for gid in mine):
        mine = [gid for gid in mine if gid.interface in interfaces]
    if not mine:
        raise NodeError(
            f"no address of {prefix}* is RoCE v2 over IPv4 on {' or '.join(interfaces) or 'any interface'}{told}"
            f"Look at {_ANNOTATION}: the second interface has got no IPv4 address"
        )
    names = [gid.card for gid in mine]
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise NodeError(
            f"{', '.join(double)} has more than one address that is RoCE v2 over IPv4{told}Give the interface one "
            "address, or say which is meant: set NCCL_IB_GID_INDEX in platform.overrides"
        )
    if len({gid.index for gid in mine}) > 1:
        raise NodeError(
            f"the ports {', '.join(names)} have it at different indices{told}Set NCCL_IB_HCA in platform.overrides to "
            "one card's name, or leave the index to NCCL 2.21 or newer by NCCL_IB_GID_INDEX=-1"
        )
    return Cards(names=tuple(names), index=mine[0].index)
