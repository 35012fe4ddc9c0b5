"""NCCL as a rank will get it: which library is loaded, and which plug-in it will find.

    python -m litgpt_demo.node.nccl          what the library that torch loads says of itself, as JSON

Neither the image's NCCL_VERSION nor torch's own figure is asked: the first may be another's (pytorch/pytorch#122571),
the second is what torch was built with.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from litgpt_demo.errors import Fault
from litgpt_demo.findings import Finding
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.node.versions import within

PLUGIN = "libnccl-net.so"

# Seconds. Importing torch from an image that was just pulled reads gigabytes.
_PATIENCE = 300.0


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The NCCL that torch loads."""

    version: str | None
    """None if it loads none."""
    path: str
    torch: str
    """torch's version."""


def loaded(environ: Mapping[str, str], *, python: str = sys.executable) -> Loaded | None:
    """Return what a rank would load, asked of a process like it; None if even that does not start."""
    try:
        done = subprocess.run(
            [python, "-m", "litgpt_demo.node.nccl"],
            env=dict(environ), capture_output=True, text=True, timeout=_PATIENCE, check=True,
        )  # fmt: skip
        return Loaded(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError):
        return None


def version_text(code: int) -> str:
    """Return the version that ncclGetVersion encodes since 2.9: major, two digits of minor, two of patch."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def check_nccl(network: NodeNetwork, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what would keep NCCL from using the network; nothing is asked of networks that need no plug-in."""
    if not network.plugged_in:
        return
    yield from check_plugin(network, environ)
    if not network.nccl_versions:
        return
    found = loaded(environ)
    qualified = " or ".join(network.nccl_versions)
    if found is None:
        fix = "run `python -c 'import torch'` in the image, and fix what it says"
        yield _finding(Fault.USER, "nccl.torch", "torch cannot be imported here", fix)
    elif found.version is None:
        what = f"torch {found.torch} comes without NCCL"
        yield _finding(Fault.USER, "nccl.missing", what, "build the image with a CUDA build of torch")
    elif not within(found.version, network.nccl_versions):
        what = f"torch loads NCCL {found.version} from {found.path}, and the {network.name} plug-in is for {qualified}"
        fix = "use an image whose torch has such an NCCL, or a plug-in release that knows this one (network_plugin)"
        yield _finding(Fault.USER, "nccl.version", what, fix)


def check_plugin(network: NodeNetwork, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that NCCL finds the profile's plug-in first. Images of NVIDIA's bring one of HPC-X, which wins if
    it stands before."""
    folders = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    # NCCL_NET_PLUGIN=x means libnccl-net-x.so, or a file's name (NCCL's manual, "NCCL_NET_PLUGIN").
    wanted = environ.get("NCCL_NET_PLUGIN", "")
    name = wanted if wanted.endswith(".so") else f"libnccl-net-{wanted}.so" if wanted else PLUGIN
    first = next((folder for folder in folders if (Path(folder) / name).exists()), None)
    ours = network.library_paths
    if first is None:
        what = f"NCCL's plug-in {name} is in none of {', '.join(folders) or 'no folders: LD_LIBRARY_PATH is empty'}"
        fix = f"see whether the {network.name} installer's DaemonSet is ready on this node, and mounted in the pod"
        yield _finding(Fault.NODE, "nccl.plugin", what, fix)
    elif ours and first not in ours:
        what = f"NCCL would load {first}/{name}, which is not the {network.name} plug-in of {' or '.join(ours)}"
        fix = "remove it from the image, or see why the node lacks the right one"
        yield _finding(Fault.NODE, "nccl.plugin-other", what, fix)


def _finding(fault: Fault, code: str, what: str, fix: str) -> Finding:
    return Finding("error", code, what, fix, fault)


def main() -> int:
    """Import torch as a rank would, and ask the NCCL that came with it."""
    import torch

    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"(/\S*libnccl\.so\S*)$", maps, re.MULTILINE)
    told, path = None, ""
    if found is not None:
        path, code = found[1], ctypes.c_int()
        if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(code)) == 0:
            told = version_text(code.value)
    print(json.dumps({"version": told, "path": path, "torch": torch.__version__}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
