"""NCCL on a node: is the one that torch loads right for the network, and which plug-in will it find."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from litgpt_demo.errors import Fault
from litgpt_demo.findings import Finding
from litgpt_demo.node.network import NodeNetwork, check_nccl_version
from litgpt_demo.node.torch_seen import TorchSeen

PLUGIN = "libnccl-net.so"


def wants_version(network: NodeNetwork) -> bool:
    """Return True if it matters to the network which NCCL there is."""
    return bool(network.nccl_fails or (network.plugged_in and network.nccl_versions))


def check_nccl(network: NodeNetwork, seen: TorchSeen) -> Iterator[Finding]:
    """Yield what is wrong with the NCCL that torch loads; the same comparison as before the job was submitted."""
    if not wants_version(network):
        return
    if seen.nccl is None:
        fix = "build the image with a CUDA build of torch"
        yield Finding("error", "nccl.missing", f"torch {seen.torch} comes without NCCL", fix)
        return
    owner = f"torch {seen.torch} here, which loads {seen.nccl_path},"
    yield from check_nccl_version(network, seen.nccl, owner=owner)


def check_plugin(network: NodeNetwork, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that NCCL finds the profile's plug-in first. Images of NVIDIA's bring one of HPC-X, which wins if
    it stands before. Networks that need no plug-in are not asked."""
    if not network.plugged_in:
        return
    folders = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    # NCCL_NET_PLUGIN=x means libnccl-net-x.so, or a file's name (NCCL's manual, "NCCL_NET_PLUGIN").
    wanted = environ.get("NCCL_NET_PLUGIN", "")
    name = wanted if wanted.endswith(".so") else f"libnccl-net-{wanted}.so" if wanted else PLUGIN
    first = next((folder for folder in folders if (Path(folder) / name).exists()), None)
    ours = network.library_paths
    if first is None:
        what = f"NCCL's plug-in {name} is in none of {', '.join(folders) or 'no folders: LD_LIBRARY_PATH is empty'}"
        fix = f"see whether the {network.name} installer's DaemonSet is ready on this node, and mounted in the pod"
        yield Finding("error", "nccl.plugin", what, fix, Fault.NODE)
    elif ours and first not in ours:
        what = f"NCCL would load {first}/{name}, which is not the {network.name} plug-in of {' or '.join(ours)}"
        fix = "remove it from the image, or see why the node lacks the right one"
        yield Finding("error", "nccl.plugin-other", what, fix, Fault.NODE)
