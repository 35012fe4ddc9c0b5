"""The environment of a node's ranks: the platform's, the network's scripts, its variables, and the user's own last."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from litgpt_demo.errors import NodeError, UserError
from litgpt_demo.node import gpu
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.storage.private import make_temporary

GRACE = "LITGPT_GRACE"
"""The environment variable of a node's ranks with the seconds that they have to save when they are asked to leave."""

# Source the scripts one after the other, and write down what came of it. A script that cannot do its work exits, and
# takes the shell with it; the status of its last line means nothing. What it prints goes to the node's log.
_SOURCE = 'target="$1"; shift; for script in "$@"; do . "$script"; done; env -0 > "$target"'

# bash's own, which a rank has no use for.
_OF_BASH = frozenset(("_", "SHLVL", "PWD", "OLDPWD"))


def of_network(network: NodeNetwork, environ: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, str]:
    """`environ` as the network wants it.

    What a script sets it sets whatever was set before: so the profile's variables that must hold come after, and the
    user's last of all.
    """
    mine = _with_libraries(environ, network.library_paths)
    if network.scripts:
        mine = _with_libraries(sourced(network.scripts, mine), network.library_paths)
    mine |= network.environment | network.overrides
    if network.hca is not None:
        mine |= rdma(network, mine, root / "sys")
    return mine


def _with_libraries(environ: Mapping[str, str], folders: Sequence[str]) -> dict[str, str]:
    """LD_LIBRARY_PATH with these folders first, each of them once."""
    there = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    path = ":".join(dict.fromkeys((*folders, *there)))
    return {**environ, "LD_LIBRARY_PATH": path} if path else dict(environ)


def sourced(scripts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that shell scripts leave."""
    if missing := [script for script in scripts if not Path(script).is_file()]:
        raise NodeError(
            f"the network's script {', '.join(missing)} is not on this node; see whether the installer's DaemonSet is "
            "ready here, and its folder mounted"
        )
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "environment"
        try:
            command = ["bash", "-c", _SOURCE, "source", str(target), *scripts]
            done = subprocess.run(command, env=dict(environ), check=False)
        except FileNotFoundError as error:
            raise UserError(f"the network's scripts need bash, and the image has none ({error}); install it") from error
        if done.returncode != 0 or not target.exists():
            raise UserError(
                f"the network's scripts {', '.join(scripts)} ended with {done.returncode}; what they printed is above"
            )
        entries = target.read_bytes().decode(errors="surrogateescape").split("\0")
    pairs = (entry.partition("=") for entry in entries if "=" in entry)
    return {name: value for name, _, value in pairs if name not in _OF_BASH or name in environ}


# --- RDMA over Ethernet: which card, and which entry of its table of addresses (GIDs) ---------------------------------
# The entry that is RoCE v2 over IPv4 has another number in each pod (k8snetworkplumbingwg/multus-cni#1100, and
# NVIDIA/nccl#1573 for tables with gaps), so it is found on the node and never configured. The kernel's layout of
# /sys/class/infiniband: https://docs.kernel.org/admin-guide/abi-stable.html

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


def find_cards(sys: Path, prefix: str, interfaces: Sequence[str]) -> tuple[list[str], int]:
    """The ports for NCCL to use, `device:port` each, and the index that is right for all of them.

    Args:
        interfaces: the pod's own on the RoCE network; other pods' addresses can be in the same table.
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
    return names, mine[0].index


def rdma(network: NodeNetwork, environ: Mapping[str, str], sys: Path) -> dict[str, str]:
    """NCCL's card and GID index, where the user has not set them."""
    if "NCCL_IB_GID_INDEX" in environ:
        return {}
    prefix = environ.get("NCCL_IB_HCA") or network.hca or ""
    if not re.fullmatch(r"[A-Za-z0-9_]+", prefix):  # a list of cards or an exclusion; its author knows their indices
        return {}
    names, index = find_cards(sys, prefix, network.interfaces)
    # `=` makes the names exact: `mlx5_1` alone would mean mlx5_10 as well.
    return {"NCCL_IB_HCA": f"={','.join(names)}", "NCCL_IB_GID_INDEX": str(index)}


# --- what torch.compile leaves for the next start ---------------------------------------------------------------------

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def with_compile_cache(environ: Mapping[str, str]) -> dict[str, str]:
    """Let torch.compile keep the code that it makes, and loads again, where no other user of this machine can write.

    Its own choice, `torchinductor_<user>` in the temporary folder, is taken whoever made it
    (torch/_inductor/runtime/cache_dir_utils.py, of 2.13).
    """
    mine = dict(environ)
    with contextlib.suppress(FileNotFoundError):  # there is no temporary folder, and so no cache
        if _COMPILED not in mine:
            mine[_COMPILED] = str(make_temporary("torchinductor"))
    return mine


def require_executable_cache(environ: Mapping[str, str]) -> None:
    """Check that code which torch.compile makes can be run from where it is kept."""
    folder = Path(environ.get(_COMPILED) or tempfile.gettempdir()).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise UserError(
            f"train.compile makes programs and keeps them in {folder}, on a file system from which none may be run "
            f"(noexec); set TMPDIR or {_COMPILED} to a folder elsewhere, or train.compile=none"
        )


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
