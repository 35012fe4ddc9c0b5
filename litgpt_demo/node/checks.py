"""Checks of a node before its ranks are started: machine, network, libraries, the call itself."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from litgpt_demo import timeouts
from litgpt_demo.errors import FailureClass, Finding, TrainLitgptError
from litgpt_demo.node import gpu
from litgpt_demo.node.network import NodeNetwork, check_nccl_version, within
from litgpt_demo.node.rendezvous import Node
from litgpt_demo.storage.local import NO_ROOM


def check_call(node: Node) -> Iterator[Finding]:
    """Yield what in the call would make this node fail, as far as a moment's look shows it."""
    if node.node_rank >= node.nodes:
        what = f"--node-rank={node.node_rank} is not one of --nodes={node.nodes}"
        yield Finding("error", "node.rank", what, f"nodes are numbered 0 to {node.nodes - 1}")
    if node.processes < 1:
        what = f"--processes={node.processes} leaves nothing to run"
        yield Finding("error", "node.processes", what, "give one per GPU, or at least 1")
    # Code that is still to be fetched has the program in it.
    if node.code is None and not (script := node.program[0]).startswith("-") and not Path(script).is_file():
        what = f"the program {script} is no file in {Path.cwd()}"
        yield Finding("error", "node.program", what, "give its absolute path, or `-m module`")
    try:
        node.own.mkdir(parents=True, exist_ok=True)
        (node.own / ".writable").touch()
    except OSError as error:
        what = f"--directory={node.directory} cannot be written: {error.strerror}"
        full = error.errno in NO_ROOM
        fix = "make room on its disk" if full else "mount or create a folder that can"
        yield Finding("error", "node.directory", what, fix, FailureClass.DISK_FULL if full else FailureClass.NODE)
    if node.node_rank == 0 and not port_is_free(node.port):
        what = f"port {node.port} of --master={node.host}:{node.port} is taken on this node"
        yield Finding("error", "node.port", what, "end what listens there, or choose another port", FailureClass.NODE)


def port_is_free(port: int) -> bool:
    """Return True if a server could listen on this TCP port of this machine; lingering connections do not count."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


# What computes the weights, and what the checkpoints and the model card name the versions of.
_RECORDED = ("torch", "lightning", "litgpt", "numpy", "transformers", "tokenizers", "safetensors")


def check_packages(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that Python loads the packages of a training from where their recorded versions are installed.

    A version is that of the first metadata on the path, a module is the first of its name, and the two may be apart.
    """
    folders = [folder for folder in (*environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path) if folder]
    for name in _RECORDED:
        installed = next(iter(distributions(name=name, path=folders)), None)
        # An editable installation may have a finder of its own, which knows no folders.
        module = PathFinder.find_spec(name, folders) or find_spec(name)
        if installed is None or module is None:
            continue
        recorded, loaded = Path(str(installed.locate_file(f"{name}/__init__.py"))), Path(module.origin or "a namespace")
        if loaded.resolve() != recorded.resolve() and not _is_editable(installed, loaded):
            what = f"Python would load {name} from {loaded}, but {name} {installed.version}, which the run records, is "
            fix = f"take that folder off PYTHONPATH, or install your {name} in its place"
            yield Finding("error", "python.packages", f"{what}installed in {recorded.parent}", fix)


def _is_editable(installed: Distribution, loaded: Path) -> bool:
    # https://packaging.python.org/en/latest/specifications/direct-url/
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    folder = Path(unquote(urlsplit(origin.get("url", "")).path))
    return bool(origin.get("dir_info", {}).get("editable")) and loaded.resolve().is_relative_to(folder.resolve())


def check_machine(node: Node, environ: Mapping[str, str], *, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield what this machine lacks of what its network profile requires, with the environment of the ranks."""
    network = node.network
    if node.is_ours:  # what a user's own program imports is the user's affair
        yield from check_packages(environ)
    sick = list(gpu.check_gpus(network, environ, root=root))
    if network.gpus and not (gpu.libcuda_is_cached() or gpu.libcuda_folder(environ, root)):
        what = f"{gpu.LIBCUDA} is neither in the loader's cache nor on LD_LIBRARY_PATH"
        fix = "see that the container has the driver's libraries; a pod that requests nvidia.com/gpu has them"
        sick.append(Finding("error", "gpu.libcuda", what, fix, FailureClass.NODE))
    yield from sick
    # A sick GPU may hang whoever uses it, and has been named.
    if not any(finding.severity == "error" for finding in sick):
        yield from check_torch(node, environ, root)
    yield from check_interfaces(network, root)
    folder = root / "dev/shm"
    size = shutil.disk_usage(folder).total if folder.exists() else 0
    # NCCL fails with too little of it, by `No space left on device`, data loaders by a bus error (NVIDIA/nccl#290).
    if size < network.shm_bytes:
        what = f"/dev/shm has {size / 2**20:,.0f} MiB, and {network.name} needs {network.shm_bytes / 2**20:,.0f} MiB"
        fix = "mount an emptyDir of medium Memory at /dev/shm (platform.shm), or give docker --shm-size"
        yield Finding("error", "node.shared-memory", what, fix)
    # TCP is kept from probing for its path's MTU, where the network is to be so (https://www.kernel.org/doc/html/latest/
    # networking/ip-sysctl.html). A new network namespace does not probe, whatever its machine does (tried), and its
    # container may not write; a container on the machine's own network is privileged, and may.
    probing = root / "proc/sys/net/ipv4/tcp_mtu_probing"
    try:
        if network.disable_pmtu and probing.read_text().strip() != "0":
            probing.write_text("0\n")
    except OSError as error:
        what = f"TCP probes for its path's MTU, and {probing} cannot be set to 0: {error.strerror}"
        fix = "set it on the machine, take platform.host_network, or leave out platform.disable_pmtu"
        yield Finding("error", "network.pmtu", what, fix)
    # A plug-in built for a newer C library than the image has does not load, and NCCL uses sockets instead.
    name, number = platform.libc_ver()
    if network.glibc is not None and not (name == "glibc" and within(number, (f">={network.glibc}",))):
        what = f"the image has {name or 'no glibc'} {number}, and {network.name}'s plug-in needs glibc {network.glibc}"
        yield Finding("error", "image.glibc", what, "build the image on Ubuntu 22.04, Debian 12 or newer")
    if node.nodes > 1:
        yield from check_daemon(network)
        yield from check_plugin(network, environ)


def check_torch(node: Node, environ: Mapping[str, str], root: Path) -> Iterator[Finding]:
    """Yield what torch itself says against this machine, if anything depends on it: importing it takes seconds."""
    network = node.network
    # About GPUs that were asked for, or are just there. An empty list of visible ones, or -1, is a wish for CPUs.
    visible = environ.get(gpu.VISIBLE) not in {"", "-1"} and any((root / "dev").glob("nvidia[0-9]*"))
    about_gpus = network.gpus > 0 or visible
    named = network.plugged_in and (network.nccl_versions or network.nccl_elsewhere)
    about_nccl = node.nodes > 1 and bool(network.nccl_fails or named)
    if not (about_gpus or about_nccl):
        return
    try:
        seen = gpu.torch_seen(environ)
    except TrainLitgptError as error:
        yield Finding.of(error, "torch.hangs" if error.fault is FailureClass.NODE else "torch.import")
        return
    if about_gpus:
        yield from gpu.check_used(network, seen, environ, processes=node.processes)
    if about_nccl:
        yield from check_nccl(network, seen)


def check_nccl(network: NodeNetwork, seen: gpu.TorchSeen) -> Iterator[Finding]:
    """Yield what is wrong with the NCCL that torch loads; the same comparison as before the job was submitted."""
    if seen.nccl is None:
        fix = "build the image with a CUDA build of torch"
        yield Finding("error", "nccl.missing", f"torch {seen.torch} comes without NCCL", fix)
    else:
        owner = f"torch {seen.torch} here, which loads {seen.nccl_path},"
        yield from check_nccl_version(network, seen.nccl, owner=owner)


def check_plugin(network: NodeNetwork, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that NCCL finds the profile's plug-in first: images of NVIDIA's bring one of HPC-X."""
    if not network.plugged_in:
        return
    folders = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    # NCCL_NET_PLUGIN=x means libnccl-net-x.so, or a file's name (NCCL's manual, "NCCL_NET_PLUGIN").
    name = "libnccl-net.so"
    if wanted := environ.get("NCCL_NET_PLUGIN"):
        name = wanted if wanted.endswith(".so") else f"libnccl-net-{wanted}.so"
    first = next((folder for folder in folders if (Path(folder) / name).exists()), None)
    ours = network.library_paths
    if first is None:
        what = f"NCCL's plug-in {name} is in none of {', '.join(folders) or 'no folders: LD_LIBRARY_PATH is empty'}"
        fix = f"see whether {network.name}'s plug-in is installed on this node, and mounted in the node's container"
        yield Finding("error", "nccl.plugin", what, fix, FailureClass.NODE)
    elif ours and first not in ours:
        what = f"NCCL would load {first}/{name}, which is not the {network.name} plug-in of {' or '.join(ours)}"
        fix = "remove it from the image, or see why the node lacks the right one"
        yield Finding("error", "nccl.plugin-other", what, fix, FailureClass.NODE)


def check_interfaces(network: NodeNetwork, root: Path) -> Iterator[Finding]:
    """Interfaces that are missing, or down."""
    there = sorted(path.name for path in (root / "sys/class/net").glob("*"))
    if missing := [name for name in network.interfaces if name not in there]:
        what = f"the interfaces {', '.join(missing)} are missing; there are {', '.join(there) or 'none'}"
        fix = "name interfaces of this node, or see a pod's annotation networking.gke.io/interfaces or "
        fix += "k8s.v1.cni.cncf.io/networks, and its node pool's"
        yield Finding("error", "network.interfaces", what, fix, FailureClass.NODE)
    for name in network.interfaces:
        state = root / "sys/class/net" / name / "operstate"
        # Virtual interfaces read `unknown` while they work.
        if name in there and state.exists() and state.read_text().strip() == "down":
            fix = "run elsewhere: exclude this node, and have its network card looked at"
            yield Finding("error", "network.interface-down", f"the interface {name} is down", fix, FailureClass.NODE)


def check_daemon(network: NodeNetwork, *, patience: float = timeouts.NETWORK_DAEMON) -> Iterator[Finding]:
    """Check that the network's receive daemon answers, which has `patience` seconds to come up."""

    def unanswered(place: str) -> str:
        try:
            if re.fullmatch(r"[^/]+:\d+", place):
                host, _, port = place.rpartition(":")
                socket.create_connection((host, int(port)), timeout=5).close()
                return ""
            # Not connected to: a daemon may take a client that says nothing for one that died.
            return "" if stat.S_ISSOCK(Path(place).stat().st_mode) else "it is no socket"
        except OSError as error:
            return error.strerror or str(error)

    deadline = time.monotonic() + patience
    while (problem := unanswered(network.socket) if network.socket else "") and time.monotonic() < deadline:
        time.sleep(min(1.0, patience))
    if problem:
        what = f"the {network.name} daemon does not answer at {network.socket} after {patience:.0f} s: {problem}"
        fix = "read the daemon's log, and see that its container mounts the same folder for the socket"
        yield Finding("error", "network.daemon", what, fix, FailureClass.NODE)


def usable_cores() -> int:
    """CPU cores this process may use: its affinity, and its container's quota (cgroup v2), which affinity hides."""
    cpu_max = Path("/sys/fs/cgroup/cpu.max")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = cpu_max.read_text().split() if cpu_max.exists() else ("max", "")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def cores_of(text: str) -> set[int]:
    """`0-3,8` as {0, 1, 2, 3, 8}: the kernel's way to write sets of cores."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def pin_cpus(cpus: str | None) -> Iterator[Finding]:
    """Keep this process and all that it starts off the cores that the network's own threads are bound to."""
    if cpus is None or not hasattr(os, "sched_setaffinity"):
        return
    if mine := os.sched_getaffinity(0) & cores_of(cpus):
        os.sched_setaffinity(0, mine)
    else:
        what = f"none of the cores {cpus} is this container's, so ranks and the network's threads share theirs"
        fix = "use the machine type that the network profile is made for"
        yield Finding("warning", "node.cores", what, fix, FailureClass.NODE)
