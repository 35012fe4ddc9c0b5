"""The network of a node's job, which the environment names; its version ranges; and the check that ranks use it."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import Field, ValidationError

from litgpt_demo.config import Settings
from litgpt_demo.documents import first_problem
from litgpt_demo.errors import FailureClass, Finding, RankFailure, UserError

NETWORK = "LITGPT_NETWORK"
"""Environment variable that holds a NodeNetwork as JSON."""


def version(text: str) -> Version:
    """Return the numbers at the beginning of a version, without the rest."""
    numbers = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    if numbers is None:
        raise ValueError(f"{text!r} is not a version; write numbers with dots between them, as in 2.19.4")
    return Version(numbers[1])


def within(found: str, ranges: Collection[str]) -> bool:
    """Return True if a version is in one of the ranges, as `>=2.19,<2.20`. No ranges allow all; 2.19 is 2.19.0."""
    return not ranges or any(version(found) in SpecifierSet(specifiers) for specifiers in ranges)


class NcclFit(StrEnum):
    """The fit of an NCCL to a network's plugin."""

    QUALIFIED = "qualified"
    UNSTATED = "not stated"
    """The plugin's publisher names no versions, or the network needs no plugin."""
    UNKNOWN = "not known"
    """Versions are known for other releases of the plugin, but not for this one."""
    UNQUALIFIED = "not qualified"
    """Its publisher has tested other versions. It may load without working."""
    FAILS = "known to fail"


class NodeNetwork(Settings):
    """The node's part of a network profile: what to set up, what has to be there, what has to come out."""

    name: str = "tcp"
    nccl_net: str | None = None
    """The name that NCCL must report as `Using network …`; None where plain sockets are right."""
    nccl_net_aliases: tuple[str, ...] = ()
    """Names that other releases of the network's plugin report."""
    scripts: tuple[str, ...] = ()
    """Shell scripts to source, in order, before anything else is set."""
    library_paths: tuple[str, ...] = ()
    """Folders that come first in LD_LIBRARY_PATH, before what the image has there."""
    environment: dict[str, str] = Field({})
    """Variables that are set after the scripts, which would overwrite them."""
    user_env: dict[str, str] = Field({})
    """The user's own variables: set last, so that they win over profile and scripts."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces that this node must have."""
    hca: str | None = None
    """Prefix of the RDMA devices (`mlx5`) whose RoCE v2 GID index the node has to find; it differs from pod to pod."""
    infiniband: bool = False
    """The devices are native InfiniBand's: their ports that are up are used, and no GID index is chosen."""
    socket: str | None = None
    """The address of the receive daemon: a Unix socket's path, or `host:port`."""
    nccl_versions: tuple[str, ...] = ()
    """NCCL versions that the plugin is qualified for, as ranges (`>=2.19,<2.20`); empty is any."""
    nccl_elsewhere: tuple[str, ...] = ()
    """NCCL versions that another release of the plugin is qualified for, where none is known of this one."""
    nccl_loads: tuple[str, ...] = ()
    """NCCL versions that are known to load the plugin, qualified or not, as ranges; others are not known to."""
    nccl_fails: tuple[str, ...] = ()
    """NCCL versions that are known to fail with the plugin, as ranges."""
    allow_unqualified: bool = False
    """Go on, with a warning, with an NCCL that the plugin is not qualified for."""
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
    allow_tcp_fallback: bool = False
    """Go on, with a warning, where the network is found not to be in use."""
    location_source: Literal["gce"] | None = None
    """The source of this machine's location in the fabric, for the order of ranks: GCE's metadata server."""
    test_seconds: int = 60
    """Seconds that the measurement before the training may take; 0 leaves it out."""

    def floor(self, nodes: int) -> float | None:
        """Return the least bus bandwidth for a job of `nodes` nodes, in GB/s; None if none is known."""
        known = [least for least in self.floor_gbytes if least <= nodes]
        return self.floor_gbytes[max(known)] if known else None

    @property
    def plugged_in(self) -> bool:
        """True if NCCL has to load a plugin for this network; InfiniBand and sockets are its own."""
        return self.nccl_net not in {None, "IB", "Socket"}

    def nccl_fit(self, version: str) -> NcclFit:
        """Return how this version of NCCL fits."""
        if self.nccl_fails and within(version, self.nccl_fails):
            return NcclFit.FAILS
        if not (self.plugged_in and self.nccl_versions):
            return NcclFit.UNKNOWN if self.nccl_elsewhere else NcclFit.UNSTATED
        return NcclFit.QUALIFIED if within(version, self.nccl_versions) else NcclFit.UNQUALIFIED


NO_NETWORK_PROFILE = NodeNetwork(test_seconds=0)
"""The network of a job that names none; it is not tested."""


def check_nccl_version(network: NodeNetwork, version: str, *, owner: str, instead: str = "") -> Iterator[Finding]:
    """Yield what is wrong with an NCCL for the network's plugin: before a job is submitted, and again on its nodes.

    `owner` has this NCCL, as `the image's torch 2.13.0`. `instead` replaces the general advice.
    """
    fit, name, has = network.nccl_fit(version), network.name, f"{owner} has NCCL {version}"
    tested = " or ".join(network.nccl_versions)
    use = instead or "use an image with another NCCL"
    if tested and not instead:
        use = f"use an image whose torch has NCCL {tested}, or a plugin release for this one (platform.network_plugin)"
    if fit is NcclFit.FAILS:
        yield Finding("error", "nccl.version", f"{has}, which is known to fail with the {name} plugin", use)
    elif fit is NcclFit.UNKNOWN:
        what = f"{has}, but it is not known with which NCCL this release of the {name} plugin works"
        versions = " or ".join(network.nccl_elsewhere)
        fix = (
            f"take the release that is qualified for {versions} (docs/reference/stacks.md), or prove it by a short job"
        )
        yield Finding("warning", "nccl.version", what, fix)
    elif fit is NcclFit.UNQUALIFIED:
        known = "is not known to load it"
        if network.nccl_loads and within(version, network.nccl_loads):
            known = "loads it, which does not prove that it works"
        what = f"{has}, but the {name} plugin is qualified for {tested}: this one {known}"
        if network.allow_unqualified:
            yield Finding("warning", "nccl.version", what, "platform.allow_unqualified_nccl lets the job continue")
        else:
            fix = f"{use}, or set platform.allow_unqualified_nccl to try it anyway"
            yield Finding("error", "nccl.version", what, fix)


def job_network(environ: Mapping[str, str]) -> NodeNetwork:
    """Return the network that the environment names; NO_NETWORK_PROFILE if it names none."""
    if NETWORK not in environ:
        return NO_NETWORK_PROFILE
    try:
        return NodeNetwork.model_validate_json(environ[NETWORK])
    except ValidationError as error:
        what = f"{NETWORK}={environ[NETWORK]!r} cannot be used ({first_problem(error)})"
        raise UserError(what, fix="submit with the same version of train-litgpt that the image has") from error


# --- whether ranks use it ---------------------------------------------------------------------------------------------
# NCCL falls back to plain sockets without failing, at a tenth of the speed. Its own log shows it, and with RDMA the
# counters of the cards do too.

# Once per communicator and rank, with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS that has INIT. The words are the same from
# NCCL 2.18 to 2.30 (https://github.com/NVIDIA/nccl/blob/master/src/init.cc, commAlloc).
_USING = re.compile(r"NCCL INFO Using network (?P<name>.+?)\s*$")

_OF_NETWORK = re.compile(r"NCCL (INFO|WARN) .*(NET/|Plugin|plugin|Using network|Bootstrap)")

# Messages of NCCL and the plugins, and their causes. Sources: NVIDIA/nccl#1231 and #1267 (plugin not found, or of
# another version), GoogleCloudPlatform/container-engine-accelerators#414 (TCPX and a newer NCCL) and
# GoogleCloudPlatform/cluster-toolkit#3032 (TCPX and a newer driver).
_NOT_INSTALLED = "the plugin is on no folder of LD_LIBRARY_PATH: is it installed on this node?"
_MISFIT = "the plugin does not fit the GPU driver of this node; never use `latest` of either"
_HINTS = {
    "ould not find: libnccl-net": _NOT_INSTALLED,
    "No plugin found": _NOT_INSTALLED,
    "Failed to find ncclNetPlugin": "the plugin is of another version than this NCCL: see network_plugin",
    "NET/IB : No device found": "this node has no RDMA devices; a pod gets them by its annotations or resource claim",
    "Inappropriate ioctl": _MISFIT,
    "gpu_tx_reg_mr failed": _MISFIT,
    "onnection refused, retrying": "the receive daemon does not answer: read its log",
}


class NetworkUse:
    """Follows the output of a node's ranks in `logs`, and the counters of the cards that NCCL uses.

    `cards` is NCCL_IB_HCA as this node has set it (`=device:port,…`). A user's own value names no cards.
    """

    def __init__(self, network: NodeNetwork, logs: Path, *, nodes: int, cards: str = "", sys: str = "/sys") -> None:
        ports = cards[1:].split(",") if network.hca is not None and cards.startswith("=") else []
        counters = (f"class/infiniband/{port.replace(':', '/ports/')}/counters/port_xmit_data" for port in ports)
        self._cards = [Path(sys) / counter for counter in counters]
        # All interfaces, because sockets could use any of them.
        interfaces = (folder for folder in Path(sys, "class/net").glob("*") if folder.name != "lo")
        self._interfaces = [folder / "statistics/tx_bytes" for folder in interfaces]
        # The first step that was seen, and the bytes that had been sent by then.
        self._mark: tuple[int, tuple[int, int]] | None = None
        self._judged = self._sent() is None
        # Within one node NCCL names a network too, but does not use it.
        self._expected = network.nccl_net if nodes > 1 else None
        self._accepted = {network.nccl_net, *network.nccl_net_aliases}
        self._logs, self._network = logs, network
        self._offsets: dict[Path, int] = {}
        self._tail: deque[str] = deque(maxlen=30)
        self._used: set[str] = set()

    def _sent(self) -> tuple[int, int] | None:
        """Return the bytes that cards and interfaces have sent; None if a container may not read them.

        Only cards count bytes of RDMA.
        """
        try:
            cards = [int(file.read_text()) for file in self._cards]
            kernel = [int(file.read_text()) for file in self._interfaces]
        except (OSError, ValueError):
            return None
        return (4 * sum(cards), sum(kernel)) if cards and kernel else None  # port_xmit_data counts words of four bytes

    def look(self, *, steps: int = 0, sends: float = 0.0) -> RankFailure | None:
        """Read new lines; return the failure if NCCL uses another network, or reports none after the first step.

        The ranks have done `steps`. In each, the node must send `sends` bytes, 0 if that is not known.
        """
        if self._expected is None:
            return None
        for path in sorted(self._logs.glob("*/attempt_0/*/std*.log")):
            self._read(path)
        unexpected = sorted(self._used - self._accepted)
        if unexpected:
            return self._finding(f"NCCL uses {', '.join(unexpected)}, not {self._expected}", FailureClass.NODE)
        if steps > 0 and not self._used:
            what = f"the ranks have done a step, but NCCL has not reported that it uses {self._expected}"
            needed = "set NCCL_DEBUG=INFO, add INIT to NCCL_DEBUG_SUBSYS, unset NCCL_DEBUG_FILE"
            return self._finding(f"{what}: {needed}, and use the nccl backend in the script", FailureClass.USER)
        return self._check_counters(steps, sends)

    def _read(self, path: Path) -> None:
        """Take NCCL's lines from the complete lines that are new in a log."""
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read()
        end = text.rfind(b"\n") + 1
        self._offsets[path] = offset + end
        for line in text[:end].decode(errors="replace").splitlines():
            if "NCCL" in line and _OF_NETWORK.search(line):
                self._tail.append(line)
                using = _USING.search(line)
                if using:
                    self._used.add(using["name"])

    def _check_counters(self, steps: int, sends: float) -> RankFailure | None:
        """Return the failure if the cards have not sent what a training sends in its steps.

        Before the first step only the kernel sends: acknowledgements of a fetched checkpoint, logs. Later it sends
        checkpoints too, so only missing bytes of the cards prove anything.
        """
        sent = None if self._judged or steps < 1 else self._sent()
        if sent is None:
            return None
        if self._mark is None or steps < self._mark[0]:
            self._mark = steps, sent
            return None
        first_step, sent_before = self._mark
        passed, cards, kernel = steps - first_step, sent[0] - sent_before[0], sent[1] - sent_before[1]
        needed = passed * sends
        if passed < 2 or (needed or cards + kernel) < 256 * 2**20:  # a small model
            return None
        self._judged = True
        traffic = f"{cards / 1e6:,.0f} MB by the cards, {kernel / 1e6:,.0f} MB through the kernel in {passed} steps"
        if needed and cards < needed / 10:
            what = f"the ranks do not send by RDMA: {traffic}, of {needed / 1e6:,.0f} MB that the strategy sends"
            return self._finding(what, FailureClass.NODE)
        if cards > kernel:
            print(f"network {self._network.name} is in use: the ranks sent {traffic}", flush=True)
        else:
            what = f"the ranks may not send by RDMA: {traffic} (platform.network={self._network.name})"
            fix = "compare the time of a step with other jobs, or run the flow benchmark-network"
            print(f"warning [network.unused] {what} -> {fix}", flush=True)
        return None

    def _finding(self, what: str, fault: FailureClass) -> RankFailure | None:
        hints = dict.fromkeys(hint for phrase, hint in _HINTS.items() if any(phrase in line for line in self._tail))
        message = "; ".join([f"{what} (platform.network={self._network.name})", *hints])
        if self._network.allow_tcp_fallback:
            self._expected = None  # one warning is enough
            print(
                f"warning [network.unused] {message} -> platform.allow_tcp_fallback lets the job continue, slower",
                flush=True,
            )
            return None
        name = "NodeError" if fault is FailureClass.NODE else "UserError"
        fix = "To train over plain TCP anyway, set platform.allow_tcp_fallback"
        return RankFailure(
            local_rank=0,
            exit_code=fault.exit_code,
            message=f"{name}: {message}. {fix}",
            traceback=tuple(self._tail),
            time=time.time(),
        )
