"""InfiniBand: the ports that NCCL is to use, found on the node, because their names differ from machine to machine.

A machine may have cards of both kinds: its storage or management by Ethernet, and its GPUs' cards by InfiniBand. What
each is stands in /sys/class/infiniband/<card>/ports/<port>/{link_layer,state,rate,gids/0}:
https://docs.kernel.org/admin-guide/abi-stable.html
"""

from __future__ import annotations

import fcntl
import resource
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from litgpt_demo.errors import Fault, NodeError
from litgpt_demo.findings import Finding

LINK: Final = "InfiniBand"
"""The kernel's word for the link layer of these ports."""
_ACTIVE = "ACTIVE"
# What a port that cannot be used waits for: InfiniBand Architecture Specification 1, section 7.2.7 (link states).
_WAITS = {"DOWN": "no link: see its cable and switch", "INIT": "no subnet manager has set it up: see opensm or UFM"}

_PINNED = 1 << 30
"""Bytes that a process may pin at least; with less NCCL cannot register its buffers (ibv_reg_mr: out of memory)."""


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port of one card."""

    device: str
    number: int
    link: str
    """`InfiniBand` or `Ethernet`."""
    state: str
    """`ACTIVE`, `INIT`, `DOWN`, …"""
    rate: str
    """Its speed as the kernel writes it: `400 Gb/sec (4X NDR)`."""
    subnet: str
    """The first half of its first address (GID); ports of one fabric share it."""

    @property
    def name(self) -> str:
        """The port as NCCL names it."""
        return f"{self.device}:{self.number}"

    @property
    def active(self) -> bool:
        return self.state == _ACTIVE

    def __str__(self) -> str:
        return f"{self.name:<14} {self.link:<11} {self.state:<7} {self.rate:<22} {self.subnet or '-'}"


def ports(sys: Path) -> list[Port]:
    """Return every port of every RDMA card, in the order of their names."""
    found = []
    for folder in sorted((sys / "class/infiniband").glob("*/ports/*"), key=lambda path: (path.parts[-3], path.name)):
        link, state, rate, gid = (_read(folder / name) for name in ("link_layer", "state", "rate", "gids/0"))
        found.append(
            Port(
                device=folder.parts[-3], number=int(folder.name), link=link, state=state.partition(": ")[2], rate=rate,
                subnet=":".join(gid.split(":")[:4]),
            )
        )  # fmt: skip
    return found


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def find_ports(sys: Path, prefix: str = "") -> dict[str, str]:
    """Return NCCL's variable with the active InfiniBand ports of the cards whose names begin so.

    `=` makes the names exact: `mlx5_1` alone would mean mlx5_10 as well
    (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-ib-hca). The index of the address is NCCL's
    own choice: InfiniBand finds its way by it only between subnets.

    Raises:
        NodeError: there is none; shows what there is.
    """
    there = ports(sys)
    mine = [port.name for port in there if port.link == LINK and port.active and port.device.startswith(prefix)]
    if not mine:
        named = f" of the cards {prefix}*" if prefix else ""
        seen = f"these ports\n{_table(there)}\n" if there else "no RDMA card at all"
        raise NodeError(
            f"platform.network=ib, and no InfiniBand port{named} is active on this node; it has {seen}; exclude the "
            "node if others have them, take the nodes that do (platform.constraint or platform.partition), or set "
            "platform.network to roce or plain. In a container, /sys and /dev/infiniband have to be the machine's"
        )
    return {"NCCL_IB_HCA": f"={','.join(mine)}"}


def _table(there: Sequence[Port]) -> str:
    return "\n".join(f"  {port}" for port in there)


def check_ports(sys: Path, *, locked: int | None = None) -> Iterator[Finding]:
    """Yield what makes InfiniBand slow or fail here, although some port is active.

    Args:
        locked: bytes that this process may pin; None asks the kernel.
    """
    there = [port for port in ports(sys) if port.link == LINK]
    active = [port for port in there if port.active]
    if len({port.subnet for port in active}) > 1:
        # NCCL takes any port for a way to any other (https://github.com/NVIDIA/nccl/issues/366).
        what = f"the active ports are of several fabrics, by the first half of their GIDs:\n{_table(active)}"
        fix = "if one of them is for storage, name the others' prefix as NCCL_IB_HCA in platform.overrides"
        yield Finding("warning", "network.fabrics", what, fix)
    if active:
        for port in there:
            if not port.active:
                what = f"{port.name} is {port.state or 'in an unknown state'}, and other InfiniBand ports are active"
                fix = _WAITS.get(port.state, "see `ibstat` there") + "; without it the node may be the slow one"
                yield Finding("warning", "network.port-down", what, fix)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if locked is None else locked
    if limit != resource.RLIM_INFINITY and limit < _PINNED:
        what = f"a process may pin {limit / 2**20:,.0f} MiB of memory here (ulimit -l), and InfiniBand pins its buffers"
        # https://slurm.schedmd.com/faq.html#memlock
        fix = "have the node's limit raised; Slurm hands on the login node's, unless slurm.conf has "
        fix += "PropagateResourceLimitsExcept=MEMLOCK or the job --propagate=NONE"
        yield Finding("warning", "network.memlock", what, fix, Fault.NODE)


# --- the interface for NCCL's own beginning ---------------------------------------------------------------------------

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def interface_to(host: str) -> str | None:
    """Return the interface by which this machine reaches a host; None where that is not known.

    NCCL begins over sockets, and takes an interface whose name begins with `ib` first, which not every node need have.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # nothing is sent: the kernel looks up the way
            mine = probe.getsockname()[0]
            return next((name for _, name in socket.if_nameindex() if _address(probe, name) == mine), None)
    except OSError:
        return None


def _address(probe: socket.socket, name: str) -> str | None:
    """Return the first IPv4 address of an interface."""
    with suppress(OSError):
        asked = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(asked[20:24])
    return None


def environment(sys: Path, environ: Mapping[str, str], *, prefix: str, master: str | None) -> dict[str, str]:
    """Return NCCL's ports, and the interface for its beginning where nobody has set one.

    Raises:
        NodeError: no port is active.
    """
    found = find_ports(sys, prefix)
    interface = interface_to(master) if master and "NCCL_SOCKET_IFNAME" not in environ else None
    return {**found, **({"NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {})}
