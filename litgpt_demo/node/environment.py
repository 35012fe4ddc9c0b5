"""The environment of a node's ranks: the platform's, the network's scripts, its variables, and the user's own last."""

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

# Variables of ranks: the seconds that they have to save when they are asked to leave, and their node's NodeTimer.
GRACE, TIMES = "LITGPT_GRACE", "LITGPT_NODE_TIMES"

# Source the scripts one after the other, and write down what came of it. A script that cannot do its work exits, and
# takes the shell with it; the status of its last line means nothing. What it prints goes to the node's log.
_SOURCE = 'target="$1"; shift; for script in "$@"; do . "$script"; done; env -0 > "$target"'


def of_network(network: NodeNetwork, environ: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, str]:
    """`environ` as the network wants it. Scripts overwrite what was set: the profile's and the user's come later."""

    def with_libraries(environ: Mapping[str, str]) -> dict[str, str]:
        there = filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))
        path = ":".join(dict.fromkeys((*network.library_paths, *there)))
        return {**environ, "LD_LIBRARY_PATH": path} if path else dict(environ)

    mine = with_libraries(environ)
    if network.scripts:
        mine = with_libraries(sourced(network.scripts, mine))
    mine |= network.environment | network.overrides
    if network.hca is not None:
        mine |= rdma(network, mine, root / "sys")
    return mine


def sourced(scripts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that shell scripts leave."""
    if missing := [script for script in scripts if not Path(script).is_file()]:
        what = f"the network's script {', '.join(missing)} is not on this node"
        raise NodeError(what, fix="see whether the plug-in is installed on this node, and its folder mounted")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "environment"
        try:
            code = subprocess.call(["bash", "-c", _SOURCE, "source", str(target), *scripts], env=dict(environ))
        except FileNotFoundError as error:
            raise UserError("the network's scripts need bash, and the image has none", fix="install it") from error
        if code != 0 or not target.exists():
            what = f"the network's scripts {', '.join(scripts)} ended with {code}"
            raise UserError(what, fix="what they printed is above")
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


def find_cards(sys: Path, prefix: str, interfaces: Sequence[str]) -> tuple[list[str], int]:
    """The ports for NCCL to use, `device:port` each, and the index that is right for all of them.

    NCCL can reach peers in other subnets by RoCE v2 over IPv4. The pod's own `interfaces` are on that network; other
    pods' addresses can be in the same table.
    """

    there = sorted((sys / "class/infiniband").glob("*"))
    if not (cards := [card for card in there if card.name.startswith(prefix)]):
        what = f"no RDMA card is called {prefix}*: there are {', '.join(card.name for card in there) or 'none'}"
        raise NodeError(what, fix=f"look at {_CARDS}, or set the right prefix as NCCL_IB_HCA")
    rows: list[str] = []
    usable: list[tuple[str, int, str]] = []
    for card in cards:
        for port in sorted((card / "ports").glob("*")):
            for path in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
                # The type of an entry that is not in use cannot be read (EINVAL).
                with contextlib.suppress(OSError):
                    if (address := path.read_text().strip()) == _UNUSED:
                        continue
                    kind, interface = (port / "gid_attrs/types" / path.name).read_text().strip(), ""
                    with contextlib.suppress(OSError):  # of an interface in another network namespace
                        interface = (port / "gid_attrs/ndevs" / path.name).read_text().strip()
                    name = f"{card.name}:{port.name}"
                    rows.append(f"  {name:<16} {path.name:>3}  {address}  {kind:<11}  {interface or '-'}")
                    if kind == "RoCE v2" and address.startswith(_IPV4) and not address.endswith(":0000:0000"):
                        usable.append((name, int(path.name), interface))
    # Where the kernel tells no interface at all, there is nothing to choose by.
    if interfaces and any(interface for _, _, interface in usable):
        usable = [one for one in usable if one[2] in interfaces]
    names, indices = [name for name, _, _ in usable], {index for _, index, _ in usable}
    if not usable:
        what = f"no address of {prefix}* is RoCE v2 over IPv4 on {' or '.join(interfaces) or 'any interface'}"
        fix = f"look at {_CARDS}: the second interface has got no IPv4 address"
    elif len(names) > len(set(names)):
        what = f"one of the ports {', '.join(names)} has more than one address that is RoCE v2 over IPv4"
        fix = "give the interface one address, or say which is meant: set NCCL_IB_GID_INDEX in platform.overrides"
    elif len(indices) > 1:
        what = f"the ports {', '.join(names)} have their address that is RoCE v2 over IPv4 at different indices"
        fix = "set NCCL_IB_HCA in platform.overrides to one card, or NCCL_IB_GID_INDEX=-1 with NCCL 2.21 or newer"
    else:
        return names, indices.pop()
    raise NodeError("\n".join([f"{what} in the table", *(rows or ["  (empty)"])]), fix=fix)


def infiniband_ports(sys: Path, prefix: str) -> list[str]:
    """Return `device:port` of every native InfiniBand port that is up; a NodeError shows what each port says."""

    def told(port: Path, name: str) -> str:
        with contextlib.suppress(OSError):
            return (port / name).read_text().strip()
        return "unknown"

    ports = sorted((sys / "class/infiniband").glob(f"{prefix}*/ports/*"))
    found = {f"{one.parent.parent.name}:{one.name}": (told(one, "link_layer"), told(one, "state")) for one in ports}
    if up := [name for name, (layer, state) in found.items() if layer == "InfiniBand" and state.endswith("ACTIVE")]:
        return up
    rows = [f"  {name:<16} {layer}  {state}" for name, (layer, state) in found.items()] or ["  none"]
    fix = "see `ibstat` on this node; set platform.ib_hca to the cards' names, or network: roce for Ethernet"
    raise NodeError("\n".join([f"no InfiniBand port of {prefix}* is up; the ports are", *rows]), fix=fix)


def rdma(network: NodeNetwork, environ: Mapping[str, str], sys: Path) -> dict[str, str]:
    """NCCL's card and GID index, where the user has not set them."""
    prefix = environ.get("NCCL_IB_HCA") or network.hca or ""
    # The author of a list of cards, or of an exclusion, knows their indices.
    if "NCCL_IB_GID_INDEX" in environ or not re.fullmatch(r"[A-Za-z0-9_]+", prefix):
        return {}
    if network.infiniband:
        return {"NCCL_IB_HCA": f"={','.join(infiniband_ports(sys, prefix))}"}
    names, index = find_cards(sys, prefix, network.interfaces)
    # `=` makes the names exact: `mlx5_1` alone would mean mlx5_10 as well.
    return {"NCCL_IB_HCA": f"={','.join(names)}", "NCCL_IB_GID_INDEX": str(index)}


_COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def with_compile_cache(environ: Mapping[str, str]) -> dict[str, str]:
    """Let torch.compile keep the code that it makes, and loads again, where no other user of this machine can write.

    Its own choice is a folder that is taken whoever made it (torch/_inductor/runtime/cache_dir_utils.py, of 2.13).
    """
    with contextlib.suppress(FileNotFoundError):  # there is no temporary folder, and so no cache
        if _COMPILED not in environ:
            return {**environ, _COMPILED: str(make_temporary("torchinductor"))}
    return dict(environ)


def require_executable_cache(environ: Mapping[str, str]) -> None:
    """Check that code which torch.compile makes can be run from where it is kept."""
    folder = Path(environ.get(_COMPILED) or tempfile.gettempdir()).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0):
        what = f"train.compile keeps the programs that it makes in {folder}, from which none may be run (noexec)"
        raise UserError(what, fix=f"set TMPDIR or {_COMPILED} to a folder elsewhere, or train.compile=none")


def with_libcuda(environ: Mapping[str, str]) -> dict[str, str]:
    """Let triton and the linker find libcuda where only LD_LIBRARY_PATH leads to it, as on GKE (triton#2507).

    triton asks TRITON_LIBCUDA_PATH first, then the loader's cache; a compiler asks LIBRARY_PATH.
    """
    mine = dict(environ)
    if gpu.libcuda_is_cached() or (folder := gpu.libcuda_folder(environ)) is None:
        return mine
    if os.geteuid() == 0:
        # Folders apart: ldconfig takes `a:b` for one folder, and says nothing. Failing is no harm: see below.
        subprocess.run(["/sbin/ldconfig", folder], capture_output=True, check=False)
    mine.setdefault("TRITON_LIBCUDA_PATH", folder)
    mine["LIBRARY_PATH"] = ":".join(dict.fromkeys((*filter(None, environ.get("LIBRARY_PATH", "").split(":")), folder)))
    return mine


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
    gate: float = 0.0
    """Seconds of the network test."""
    stage: float = 0.0
    """Seconds in which the datasets were brought here and verified."""

    @classmethod
    def from_environ(cls) -> NodeTimer | None:
        """Return the timer of this rank's node; None for a rank that no node of ours started."""
        document = os.environ.get(TIMES)
        return cls(**json.loads(document)) if document else None

    def elapsed(self, moment: float | None = None) -> float:
        """Return the seconds from the node's start to a moment of the monotonic clock, by default now."""
        if moment is None:
            moment = time.monotonic()
        return round(moment - self.started_monotonic, 3)

    @contextlib.contextmanager
    def spent_on(self, phase: Literal["gate", "stage"]) -> Iterator[None]:
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
        return {"gate_seconds": round(self.gate, 3), "stage_seconds": round(self.stage, 3)}
