"""RDMA over Ethernet: which card to use, which entry of its table of addresses (GIDs), and whether it is used.

The entry that is RoCE v2 over IPv4 has another number in each pod (k8snetworkplumbingwg/multus-cni#1100, and
NVIDIA/nccl#1573 for tables with gaps), so it is found on the node and never configured. The kernel's layout of
/sys/class/infiniband: https://docs.kernel.org/admin-guide/abi-stable.html
"""

from __future__ import annotations

import contextlib
import re
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

    device: str
    port: int
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

    @property
    def card(self) -> str:
        """The port as NCCL names it."""
        return f"{self.device}:{self.port}"

    def __str__(self) -> str:
        return f"{self.card:<16} {self.index:>3}  {self.address}  {self.kind:<11}  {self.interface or '-'}"


@dataclass(frozen=True, kw_only=True)
class Cards:
    """The ports to use, and the index that is right for all of them."""

    names: tuple[str, ...]
    """`device:port` each."""
    index: int

    def environment(self) -> dict[str, str]:
        """NCCL's variables. `=` makes the names exact: `mlx5_1` alone would mean mlx5_10 as well."""
        return {"NCCL_IB_HCA": f"={','.join(self.names)}", "NCCL_IB_GID_INDEX": str(self.index)}


def gids(sys: Path, prefix: str) -> list[Gid]:
    """The addresses on every port of every card whose name begins with `prefix`; entries not in use are left out."""
    found = []
    for device in sorted((sys / "class/infiniband").glob(f"{prefix}*")):
        for port in sorted((device / "ports").glob("*"), key=lambda path: int(path.name)):
            for path in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
                # The type of an entry that is not in use cannot be read (EINVAL).
                with contextlib.suppress(OSError):
                    if (address := path.read_text().strip()) != _UNUSED:
                        kind = (port / "gid_attrs/types" / path.name).read_text().strip()
                        found.append(_gid(port, path.name, address, kind))
    return found


def _gid(port: Path, index: str, address: str, kind: str) -> Gid:
    interface = ""
    with contextlib.suppress(OSError):
        interface = (port / "gid_attrs/ndevs" / index).read_text().strip()
    device = port.parent.parent.name
    return Gid(device=device, port=int(port.name), index=int(index), address=address, kind=kind, interface=interface)


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
    told = f" in the table\n{table(listed)}\n"
    mine = _of_interfaces([gid for gid in listed if gid.usable], interfaces)
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


def _of_interfaces(usable: Sequence[Gid], interfaces: Sequence[str]) -> list[Gid]:
    """Those of the pod's own interfaces; where the kernel tells no interface at all, there is nothing to choose by."""
    if not interfaces or not any(gid.interface for gid in usable):
        return list(usable)
    return [gid for gid in usable if gid.interface in interfaces]


def table(listed: Sequence[Gid]) -> str:
    """The addresses, for a person who has to find out which one was meant."""
    return "\n".join(f"  {gid}" for gid in listed) or "  (empty)"


def is_card_prefix(text: str) -> bool:
    """Return True if a value of NCCL_IB_HCA is a plain prefix, and not one of its lists, exclusions or exact names."""
    return re.fullmatch(r"[A-Za-z0-9_]+", text) is not None


# --- is it used? ------------------------------------------------------------------------------------------------------

# Bytes that have to have moved between the ranks before anything is said: less is set-up, or a small model.
ENOUGH = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes that went out, by card and by network interface."""

    cards: int
    interfaces: int

    @property
    def total(self) -> int:
        return self.cards + self.interfaces


class PortCounters:
    """Return the bytes that the cards' ports and the network interfaces have sent since this was made.

    RDMA bypasses the kernel's network stack: a port's own counters move, those of its interface stay still. Where a pod
    may not read the port's, nothing is known.
    """

    def __init__(self, sys: Path, names: Sequence[str], interfaces: Sequence[str]) -> None:
        ports = [name.rpartition(":") for name in names]
        self._cards = [sys / f"class/infiniband/{card}/ports/{port}/counters/port_xmit_data" for card, _, port in ports]
        self._interfaces = [sys / f"class/net/{name}/statistics/tx_bytes" for name in interfaces]
        self._first = self._read()

    def moved(self) -> Moved | None:
        """None where the counters cannot be read."""
        now = self._read()
        if now is None or self._first is None:
            return None
        return Moved(cards=now.cards - self._first.cards, interfaces=now.interfaces - self._first.interfaces)

    def _read(self) -> Moved | None:
        try:
            # port_xmit_data counts words of four bytes (InfiniBand's PortXmitData).
            cards = [4 * int(path.read_text()) for path in self._cards]
            interfaces = [int(path.read_text()) for path in self._interfaces]
        except (OSError, ValueError):
            return None
        return Moved(cards=sum(cards), interfaces=sum(interfaces)) if cards and interfaces else None


def bypassed(moved: Moved) -> bool | None:
    """Return True if the ranks sent through the cards and not through the kernel; None while too little has moved.

    Most of it has to: logs, checkpoints and a data loader's reads go through the kernel as well.
    """
    return None if moved.total < ENOUGH else moved.cards > moved.interfaces
