"""The network of a node's job, as it arrives in the environment, and the ranges of versions that it states."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum

from pydantic import Field, ValidationError

from litgpt_demo.config import Settings
from litgpt_demo.errors import UserError
from litgpt_demo.findings import Finding

NETWORK = "LITGPT_NETWORK"
"""Environment variable that holds a NodeNetwork as JSON."""


Version = tuple[int, ...]

_COMPARED: Mapping[str, Callable[[Version, Version], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


def version(text: str) -> Version:
    """`535.161.08` as (535, 161, 8); what follows the numbers is left out."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no version; write numbers with dots between them, as in 2.19.4")
    return tuple(int(number) for number in found[1].split("."))


def within(found: str, ranges: Iterable[str]) -> bool:
    """Return True if a version lies in one of the ranges, as `>=2.19,<2.20`. No ranges allow all; 2.19 and 2.19.0 are
    the same.
    """
    ranges = tuple(ranges)
    return not ranges or any(all(_holds(found, bound) for bound in one.split(",")) for one in ranges)


def _holds(found: str, bound: str) -> bool:
    split = re.match(r"\s*(>=|<=|==|>|<)\s*(.+?)\s*$", bound)
    if split is None:
        raise ValueError(f"{bound!r} is no bound of a range; write >=2.19 or <2.20")
    mine, theirs = version(found), version(split[2])
    length = max(len(mine), len(theirs))
    return _COMPARED[split[1]](mine + (0,) * (length - len(mine)), theirs + (0,) * (length - len(theirs)))


class NcclFit(StrEnum):
    """The verdict on an NCCL for a network's plug-in."""

    QUALIFIED = "qualified"
    UNSTATED = "not stated"
    """The plug-in's publisher names no versions, or the network needs no plug-in."""
    UNKNOWN = "not known"
    """Other releases of the plug-in name versions; of this one we know none."""
    UNQUALIFIED = "not qualified"
    """Its publisher has tested others: it may load, and need not work."""
    FAILS = "known to fail"


class NodeNetwork(Settings):
    """The node's part of a network profile: what to set up, what has to be there, what has to come out."""

    name: str = "plain"
    """The name of the profile."""
    nccl_net: str | None = None
    """The name that NCCL must report as `Using network …`; None where plain sockets are right."""
    scripts: tuple[str, ...] = ()
    """Shell scripts to source, in order, before anything else is set."""
    library_paths: tuple[str, ...] = ()
    """Folders that come first in LD_LIBRARY_PATH, before what the image has there."""
    environment: dict[str, str] = Field({})
    """Variables that are set after the scripts, which would overwrite them."""
    overrides: dict[str, str] = Field({})
    """The user's own variables: set last, so that they win over profile and scripts."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces that this node must have."""
    hca: str | None = None
    """Prefix of the RDMA devices (`mlx5`) whose RoCE v2 GID index the node has to find; it differs from pod to pod."""
    socket: str | None = None
    """The address of the receive daemon: a Unix socket's path, or `host:port`."""
    nccl_versions: tuple[str, ...] = ()
    """NCCL versions that the plug-in is qualified for, as ranges (`>=2.19,<2.20`); empty is any."""
    nccl_elsewhere: tuple[str, ...] = ()
    """NCCL versions that another release of the plug-in is qualified for, where none is known of this one."""
    nccl_loads: tuple[str, ...] = ()
    """NCCL versions that are known to load the plug-in, qualified or not, as ranges; others are not known to."""
    nccl_fails: tuple[str, ...] = ()
    """NCCL versions that are known to fail with the plug-in, as ranges."""
    allow_unqualified: bool = False
    """Go on, with a warning, with an NCCL that the plug-in is not qualified for."""
    glibc: str | None = None
    """Least glibc of the image (`2.35`)."""
    cpus: str | None = None
    """Cores that the ranks may use (`0-7,104-111`); the others belong to the network's own threads."""
    disable_pmtu: bool = False
    """TCP is not to probe for the MTU of its path."""
    drivers: tuple[str, ...] = ()
    """GPU drivers that the network is qualified for, as ranges (`>=535`); empty is any."""
    shm_bytes: int = 0
    """Least size of /dev/shm."""
    gpus: int = 0
    """GPUs that this node must have."""
    floor_gbytes: dict[int, float] = Field({})
    """Least bus bandwidth of a large all-reduce in GB/s, by the node count from which on it holds: {2: 40.0}."""
    allow_sockets: bool = False
    """Go on, with a warning, where the network is found not to be in use."""
    place: str | None = Field(None, pattern=r"^(gce|env:\w+)$")
    """The source of this machine's place in the fabric, for the order of ranks: `gce` (metadata server), `env:NAME`."""
    gate_seconds: int = 60
    """Seconds that the measurement before the training may take; 0 leaves it out."""

    def floor(self, nodes: int) -> float | None:
        """The least bus bandwidth for a job of so many nodes, in GB/s; None where no figure is known."""
        known = [least for least in self.floor_gbytes if least <= nodes]
        return self.floor_gbytes[max(known)] if known else None

    @property
    def plugged_in(self) -> bool:
        """True if NCCL has to load a plug-in for this network; InfiniBand and sockets are its own."""
        return self.nccl_net not in {None, "IB", "Socket"}

    def nccl_fit(self, version: str) -> NcclFit:
        """Return the verdict on an NCCL of this version."""
        if self.nccl_fails and within(version, self.nccl_fails):
            return NcclFit.FAILS
        if not (self.plugged_in and self.nccl_versions):
            return NcclFit.UNKNOWN if self.nccl_elsewhere else NcclFit.UNSTATED
        return NcclFit.QUALIFIED if within(version, self.nccl_versions) else NcclFit.UNQUALIFIED


UNTOLD = NodeNetwork(gate_seconds=0)
"""The network of a job that names none; nothing is measured on it."""


def check_nccl_version(network: NodeNetwork, version: str, *, owner: str, instead: str = "") -> Iterator[Finding]:
    """Yield what is wrong with an NCCL for the network's plug-in: before a job is submitted, and again on its nodes.

    Args:
        owner: who has it, for the message: `the image's torch 2.13.0`.
        instead: what to do, where the caller knows better than this network.
    """
    fit, name = network.nccl_fit(version), network.name
    tested = " or ".join(network.nccl_versions)
    use = f"use an image whose torch has NCCL {tested}, or a plug-in release for this one (platform.network_plugin)"
    use = instead or (use if tested else "use an image with another NCCL")
    if fit is NcclFit.FAILS:
        what = f"{owner} has NCCL {version}, which is known to fail with the {name} plug-in"
        yield Finding("error", "nccl.version", what, use)
    elif fit is NcclFit.UNKNOWN:
        what = f"{owner} has NCCL {version}, and which NCCL this release of the {name} plug-in works with is not known"
        other = " or ".join(network.nccl_elsewhere)
        fix = f"another release is qualified for {other} (docs/network.md)"
        yield Finding("warning", "nccl.version", what, f"{fix}: take that one, or let a short job prove this")
    elif fit is NcclFit.UNQUALIFIED:
        loads = bool(network.nccl_loads) and within(version, network.nccl_loads)
        what = f"{owner} has NCCL {version}, and the {name} plug-in is qualified for {tested}: this one "
        what += "loads it, which is no proof that it works" if loads else "is not known to load it"
        allowed = network.allow_unqualified
        fix = f"{use}; platform.allow_unqualified_nccl tries it all the same"
        fix = "platform.allow_unqualified_nccl is set: the job goes on" if allowed else fix
        yield Finding("warning" if allowed else "error", "nccl.version", what, fix)


def job_network(environ: Mapping[str, str]) -> NodeNetwork:
    """Return the network that the environment names; a plain one, that is not measured, where it names none."""
    if NETWORK not in environ:
        return UNTOLD
    try:
        return NodeNetwork.model_validate_json(environ[NETWORK])
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{NETWORK}={environ[NETWORK]!r} cannot be used ({first['msg']} at "
            f"{'.'.join(map(str, first['loc'])) or 'its start'}); "
            "the launcher that submits and the image that runs have to be of one version"
        ) from error
