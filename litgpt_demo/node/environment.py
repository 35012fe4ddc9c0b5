"""The environment of a node's ranks: the platform's, then the network's scripts and variables, then the user's own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from litgpt_demo.errors import NodeError, UserError
from litgpt_demo.node import gpu
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.storage.private import make_temporary

# Variables of ranks: the seconds that they have to save after SIGTERM, and their node's NodeTimer.
GRACE, TIMES = "LITGPT_GRACE", "LITGPT_NODE_TIMES"

# Source the scripts in order, and write the resulting environment. A script that fails exits, and the shell with it.
# The status of its last line means nothing. Its output goes to the node's log.
_SOURCE = 'target="$1"; shift; for script in "$@"; do . "$script"; done; env -0 > "$target"'


def of_network(network: NodeNetwork, environ: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, str]:
    """Return `environ` with the network's variables. Scripts overwrite variables, so the profile's and the user's are
    set after them."""
    variables = _with_libraries(environ, network.library_paths)
    if network.scripts:
        variables = _with_libraries(sourced(network.scripts, variables), network.library_paths)
    variables |= network.environment | network.user_env
    if network.hca is not None:
        variables |= rdma(network, variables, root / "sys")
    return variables


def _with_libraries(environ: Mapping[str, str], folders: Sequence[str]) -> dict[str, str]:
    existing = filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))
    path = ":".join(dict.fromkeys((*folders, *existing)))
    return {**environ, "LD_LIBRARY_PATH": path} if path else dict(environ)


def sourced(scripts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment after shell scripts."""
    missing = [script for script in scripts if not Path(script).is_file()]
    if missing:
        what = f"the network's script {', '.join(missing)} is not on this node"
        raise NodeError(what, fix="check whether the plugin is installed on this node, and its folder mounted")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "environment"
        try:
            code = subprocess.call(["bash", "-c", _SOURCE, "source", str(target), *scripts], env=dict(environ))
        except FileNotFoundError as error:
            raise UserError("the network's scripts need bash, but the image lacks it", fix="install it") from error
        if code != 0 or not target.exists():
            what = f"the network's scripts {', '.join(scripts)} ended with {code}"
            raise UserError(what, fix="read their output above")
        entries = target.read_bytes().decode(errors="surrogateescape").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


# --- RDMA over Ethernet: which card, and which entry of its table of addresses (GIDs) ---------------------------------
# The entry that is RoCE v2 over IPv4 has another number in each pod (k8snetworkplumbingwg/multus-cni#1100, and
# NVIDIA/nccl#1573 for tables with gaps), so it is found on the node and never configured. The kernel's layout of
# /sys/class/infiniband: https://docs.kernel.org/admin-guide/abi-stable.html

_IPV4 = "0000:0000:0000:0000:0000:ffff:"
_UNUSED = "0000:0000:0000:0000:0000:0000:0000:0000"

_CARDS = (
    "the RDMA cards of this node (of a pod: the annotation k8s.v1.cni.cncf.io/networks and the request for an extended "
    "resource such as rdma/rdma)"
)


@dataclass(frozen=True, kw_only=True)
class _Gid:
    port: str
    """`device:port`"""
    index: int
    address: str
    kind: str
    interface: str

    @property
    def is_usable(self) -> bool:
        """NCCL reaches peers in other subnets by RoCE v2 over IPv4."""
        is_ipv4 = self.address.startswith(_IPV4) and not self.address.endswith(":0000:0000")
        return self.kind == "RoCE v2" and is_ipv4

    def __str__(self) -> str:
        return f"  {self.port:<16} {self.index:>3}  {self.address}  {self.kind:<11}  {self.interface or '-'}"


def _gids(card: Path) -> Iterator[_Gid]:
    """Yield the entries of a card that are in use."""
    for port in sorted((card / "ports").glob("*")):
        for path in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
            # The type of an entry that is not in use cannot be read (EINVAL).
            with contextlib.suppress(OSError):
                address = path.read_text().strip()
                if address == _UNUSED:
                    continue
                kind, interface = (port / "gid_attrs/types" / path.name).read_text().strip(), ""
                with contextlib.suppress(OSError):  # an interface of another network namespace
                    interface = (port / "gid_attrs/ndevs" / path.name).read_text().strip()
                name = f"{card.name}:{port.name}"
                yield _Gid(port=name, index=int(path.name), address=address, kind=kind, interface=interface)


def find_cards(sys: Path, prefix: str, interfaces: Sequence[str]) -> tuple[list[str], int]:
    """Return the ports for NCCL to use, `device:port` each, and the index that is right for all of them.

    Only this node's own `interfaces` count, because a table can also hold addresses of other pods.
    """
    existing = sorted((sys / "class/infiniband").glob("*"))
    cards = [card for card in existing if card.name.startswith(prefix)]
    if not cards:
        what = f"no RDMA card is called {prefix}*; the cards are {', '.join(card.name for card in existing) or 'none'}"
        raise NodeError(what, fix=f"check {_CARDS}, or set the right prefix as NCCL_IB_HCA")
    gids = [gid for card in cards for gid in _gids(card)]
    usable = [gid for gid in gids if gid.is_usable]
    # If the kernel reports no interface at all, all entries are candidates.
    if interfaces and any(gid.interface for gid in usable):
        usable = [gid for gid in usable if gid.interface in interfaces]
    ports, indices = [gid.port for gid in usable], {gid.index for gid in usable}
    if not usable:
        what = f"no address of {prefix}* is RoCE v2 over IPv4 on {' or '.join(interfaces) or 'any interface'}"
        fix = f"check {_CARDS}, and that its second interface has an IPv4 address"
    elif len(ports) > len(set(ports)):
        what = f"one of the ports {', '.join(ports)} has more than one address that is RoCE v2 over IPv4"
        fix = "give the interface one address, or set NCCL_IB_GID_INDEX in platform.env"
    elif len(indices) > 1:
        what = f"the ports {', '.join(ports)} have their address that is RoCE v2 over IPv4 at different indices"
        fix = "set NCCL_IB_HCA in platform.env to one card, or NCCL_IB_GID_INDEX=-1 with NCCL 2.21 or newer"
    else:
        return ports, indices.pop()
    raise NodeError("\n".join([f"{what} in the table", *(map(str, gids) if gids else ["  (empty)"])]), fix=fix)


def infiniband_ports(sys: Path, prefix: str) -> list[str]:
    """Return `device:port` of every native InfiniBand port that is up; a NodeError shows the state of each port."""

    def attribute(port: Path, name: str) -> str:
        with contextlib.suppress(OSError):
            return (port / name).read_text().strip()
        return "unknown"

    up, rows = [], []
    for port in sorted((sys / "class/infiniband").glob(f"{prefix}*/ports/*")):
        name = f"{port.parent.parent.name}:{port.name}"
        layer, state = attribute(port, "link_layer"), attribute(port, "state")
        rows.append(f"  {name:<16} {layer}  {state}")
        if layer == "InfiniBand" and state.endswith("ACTIVE"):
            up.append(name)
    if up:
        return up
    fix = "run `ibstat` on this node, and set platform.ib_hca to the cards' names, or network: roce for Ethernet"
    raise NodeError(
        "\n".join([f"no InfiniBand port of {prefix}* is up; the ports are", *(rows or ["  none"])]), fix=fix
    )


def rdma(network: NodeNetwork, environ: Mapping[str, str], sys: Path) -> dict[str, str]:
    """Return NCCL's card and GID index, unless the user has set them."""
    prefix = environ.get("NCCL_IB_HCA") or network.hca or ""
    # A user who sets a list of cards, or an exclusion, knows their indices.
    if "NCCL_IB_GID_INDEX" in environ or not re.fullmatch(r"[A-Za-z0-9_]+", prefix):
        return {}
    # `=` makes the names exact: `mlx5_1` without it would mean mlx5_10 as well.
    if network.infiniband:
        return {"NCCL_IB_HCA": f"={','.join(infiniband_ports(sys, prefix))}"}
    ports, index = find_cards(sys, prefix, network.interfaces)
    return {"NCCL_IB_HCA": f"={','.join(ports)}", "NCCL_IB_GID_INDEX": str(index)}


_COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def with_compile_cache(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with a cache for torch.compile in which no other user of this machine can write.

    torch's own choice is a folder that it uses whoever made it (torch/_inductor/runtime/cache_dir_utils.py, of 2.13).
    """
    with contextlib.suppress(FileNotFoundError):  # without a temporary folder, there is no cache
        if _COMPILE_CACHE not in environ:
            return {**environ, _COMPILE_CACHE: str(make_temporary("torchinductor"))}
    return dict(environ)


def require_executable_cache(environ: Mapping[str, str]) -> None:
    """Raise a UserError if programs in the cache of torch.compile cannot be executed."""
    folder = Path(environ.get(_COMPILE_CACHE) or tempfile.gettempdir()).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if os.statvfs(existing).f_flag & getattr(os, "ST_NOEXEC", 0):
        what = f"train.compile keeps its compiled programs in {folder}, which is mounted noexec"
        raise UserError(what, fix=f"set TMPDIR or {_COMPILE_CACHE} to a folder elsewhere, or train.compile=none")


def with_libcuda(environ: Mapping[str, str]) -> dict[str, str]:
    """Let triton and the linker find libcuda where only LD_LIBRARY_PATH leads to it, as on GKE (triton#2507).

    triton reads TRITON_LIBCUDA_PATH first, then the loader's cache. A compiler reads LIBRARY_PATH.
    """
    if gpu.libcuda_is_cached():
        return dict(environ)
    folder = gpu.libcuda_folder(environ)
    if folder is None:
        return dict(environ)
    if os.geteuid() == 0:
        # One folder only: ldconfig reads `a:b` as one folder, silently. It may fail without harm: see below.
        subprocess.run(["/sbin/ldconfig", folder], capture_output=True, check=False)
    path = ":".join(dict.fromkeys((*filter(None, environ.get("LIBRARY_PATH", "").split(":")), folder)))
    return {"TRITON_LIBCUDA_PATH": folder, **environ, "LIBRARY_PATH": path}


@dataclass(kw_only=True)
class NodeTimer:
    """The times of a node, which its ranks get by TIMES and write into the metrics.

    The wall clock is read once, at the node's start. All else is measured by the machine's monotonic clock, which its
    processes share, so a change of the wall clock has no effect.
    """

    attempt: int = 0
    """The number of the attempt; 0 if its folder has another name."""
    started_at: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    started_monotonic: float = field(default_factory=time.monotonic)
    """The same moment on the monotonic clock."""
    network_test: float = 0.0
    """Seconds of the network test."""
    stage: float = 0.0
    """Seconds in which the datasets were brought here and verified."""

    @classmethod
    def from_environ(cls) -> NodeTimer | None:
        """Return the timer of this rank's node; None for a rank that node.agent did not start."""
        document = os.environ.get(TIMES)
        return cls(**json.loads(document)) if document else None

    def elapsed(self, moment: float | None = None) -> float:
        """Return the seconds from the node's start to a moment of the monotonic clock, by default now."""
        if moment is None:
            moment = time.monotonic()
        return round(moment - self.started_monotonic, 3)

    @contextlib.contextmanager
    def spent_on(self, phase: Literal["network_test", "stage"]) -> Iterator[None]:
        """Add the seconds of the block to a phase, also if the block raises."""
        start = time.monotonic()
        try:
            yield
        finally:
            setattr(self, phase, getattr(self, phase) + time.monotonic() - start)

    def columns(self) -> dict[str, Any]:
        """Return the columns of the `start` row of the metrics."""
        attempt = {"attempt": self.attempt} if self.attempt else {}
        return {**attempt, "node_started": self.started_at, **self.phases()}

    def phases(self) -> dict[str, float]:
        """Return the seconds of the phases before the ranks' start."""
        return {"network_test_seconds": round(self.network_test, 3), "stage_seconds": round(self.stage, 3)}
