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
    """Yield the mistakes in the call that can be found at once."""
    if node.node_rank >= node.nodes:
        what = f"--node-rank={node.node_rank} is not one of --nodes={node.nodes}"
        yield Finding("error", "node.rank", what, f"give a number from 0 to {node.nodes - 1}")
    if node.processes < 1:
        what = f"--processes={node.processes} starts nothing"
        yield Finding("error", "node.processes", what, "give the number of GPUs, at least 1")
    # Code that is still to be fetched contains the program.
    script = node.program[0]
    if node.code is None and not script.startswith("-") and not Path(script).is_file():
        what = f"the program {script} is not a file in {Path.cwd()}"
        yield Finding("error", "node.program", what, "give its absolute path, or `-m module`")
    try:
        node.own.mkdir(parents=True, exist_ok=True)
        (node.own / ".writable").touch()
    except OSError as error:
        what = f"--directory={node.directory} cannot be written: {error.strerror}"
        fix, fault = "mount or create a writable folder", FailureClass.NODE
        if error.errno in NO_ROOM:
            fix, fault = "make room on its disk", FailureClass.DISK_FULL
        yield Finding("error", "node.directory", what, fix, fault)
    if node.node_rank == 0 and not port_is_free(node.port):
        what = f"port {node.port} of --master={node.host}:{node.port} is taken on this node"
        yield Finding("error", "node.port", what, "end the process there, or choose another port", FailureClass.NODE)


def port_is_free(port: int) -> bool:
    """Return True if a server could listen on this TCP port of this machine; lingering connections do not count."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


# Packages that compute the weights, and whose versions checkpoints and the model card have.
_RECORDED = ("torch", "lightning", "litgpt", "numpy", "transformers", "tokenizers", "safetensors")


def check_packages(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that Python loads the packages of a training from where their recorded versions are installed.

    The version is that of the first metadata on the path, and the module the first of its name. They may differ.
    """
    folders = [folder for folder in (*environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path) if folder]
    for name in _RECORDED:
        installed = next(iter(distributions(name=name, path=folders)), None)
        # An editable installation may have a finder of its own, without folders.
        module = PathFinder.find_spec(name, folders) or find_spec(name)
        if installed is None or module is None:
            continue
        recorded, loaded = Path(str(installed.locate_file(f"{name}/__init__.py"))), Path(module.origin or "a namespace")
        if loaded.resolve() != recorded.resolve() and not _is_editable(installed, loaded):
            what = (
                f"Python would load {name} from {loaded}, but {name} {installed.version}, which the run records, is "
                f"installed in {recorded.parent}"
            )
            fix = f"remove that folder from PYTHONPATH, or install your {name} in its place"
            yield Finding("error", "python.packages", what, fix)


def _is_editable(installed: Distribution, loaded: Path) -> bool:
    # https://packaging.python.org/en/latest/specifications/direct-url/
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    folder = Path(unquote(urlsplit(origin.get("url", "")).path))
    return bool(origin.get("dir_info", {}).get("editable")) and loaded.resolve().is_relative_to(folder.resolve())


def check_machine(node: Node, environ: Mapping[str, str], *, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield what its network profile requires and this machine lacks, with the environment of the ranks."""
    network = node.network
    if node.is_ours:  # a user's own program may import any version
        yield from check_packages(environ)
    gpu_findings = list(gpu.check_gpus(network, environ, root=root))
    if network.gpus and not (gpu.libcuda_is_cached() or gpu.libcuda_folder(environ, root)):
        what = f"{gpu.LIBCUDA} is neither in the loader's cache nor on LD_LIBRARY_PATH"
        fix = "check that the container has the driver's libraries, as a pod that requests nvidia.com/gpu has"
        gpu_findings.append(Finding("error", "gpu.libcuda", what, fix, FailureClass.NODE))
    yield from gpu_findings
    # A broken GPU, which was just reported, may hang a process that uses it.
    if not any(finding.severity == "error" for finding in gpu_findings):
        yield from check_torch(node, environ, root)
    yield from check_interfaces(network, root)
    folder = root / "dev/shm"
    size = shutil.disk_usage(folder).total if folder.exists() else 0
    # NCCL fails with too little of it, by `No space left on device`, data loaders by a bus error (NVIDIA/nccl#290).
    if size < network.shm_bytes:
        what = f"/dev/shm has {size / 2**20:,.0f} MiB, but {network.name} needs {network.shm_bytes / 2**20:,.0f} MiB"
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
    # A plugin built for a newer C library than the image has does not load, and NCCL uses sockets instead.
    name, number = platform.libc_ver()
    if network.glibc is not None and not (name == "glibc" and within(number, (f">={network.glibc}",))):
        what = f"the image has {name or 'no glibc'} {number}, and {network.name}'s plugin needs glibc {network.glibc}"
        yield Finding("error", "image.glibc", what, "build the image on Ubuntu 22.04, Debian 12 or newer")
    if node.nodes > 1:
        yield from check_daemon(network)
        yield from check_plugin(network, environ)


def check_torch(node: Node, environ: Mapping[str, str], root: Path) -> Iterator[Finding]:
    """Yield the findings of torch itself. It is imported only if needed, because that takes seconds."""
    network = node.network
    # GPUs that the job requests, or that exist. An empty list of visible ones, or -1, requests CPUs.
    is_visible = environ.get(gpu.VISIBLE) not in {"", "-1"} and any((root / "dev").glob("nvidia[0-9]*"))
    needs_gpus = network.gpus > 0 or is_visible
    has_versions = network.plugged_in and (network.nccl_versions or network.nccl_elsewhere)
    needs_nccl = node.nodes > 1 and bool(network.nccl_fails or has_versions)
    if not (needs_gpus or needs_nccl):
        return
    try:
        seen = gpu.torch_seen(environ)
    except TrainLitgptError as error:
        yield Finding.of(error, "torch.hangs" if error.fault is FailureClass.NODE else "torch.import")
        return
    if needs_gpus:
        yield from gpu.check_used(network, seen, environ, processes=node.processes)
    if needs_nccl:
        yield from check_nccl(network, seen)


def check_nccl(network: NodeNetwork, seen: gpu.TorchSeen) -> Iterator[Finding]:
    """Yield what is wrong with the NCCL that torch loads, by the same rules as before the job was submitted."""
    if seen.nccl is None:
        fix = "build the image with a CUDA build of torch"
        yield Finding("error", "nccl.missing", f"torch {seen.torch} comes without NCCL", fix)
    else:
        owner = f"torch {seen.torch} here, which loads {seen.nccl_path},"
        yield from check_nccl_version(network, seen.nccl, owner=owner)


def check_plugin(network: NodeNetwork, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that NCCL finds the profile's plugin first: images of NVIDIA's bring one of HPC-X."""
    if not network.plugged_in:
        return
    folders = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    # NCCL_NET_PLUGIN=x means libnccl-net-x.so, or a file's name (NCCL's manual, "NCCL_NET_PLUGIN").
    name = environ.get("NCCL_NET_PLUGIN") or "libnccl-net.so"
    if not name.endswith(".so"):
        name = f"libnccl-net-{name}.so"
    first = next((folder for folder in folders if (Path(folder) / name).exists()), None)
    expected = network.library_paths
    if first is None:
        what = f"NCCL's plugin {name} is not in {', '.join(folders) or 'LD_LIBRARY_PATH, which is empty'}"
        fix = f"check whether {network.name}'s plugin is installed on this node, and mounted in the node's container"
        yield Finding("error", "nccl.plugin", what, fix, FailureClass.NODE)
    elif expected and first not in expected:
        what = f"NCCL would load {first}/{name}, which is not the {network.name} plugin of {' or '.join(expected)}"
        fix = "remove it from the image, or check why the node lacks the right one"
        yield Finding("error", "nccl.plugin-other", what, fix, FailureClass.NODE)


def check_interfaces(network: NodeNetwork, root: Path) -> Iterator[Finding]:
    """Yield the interfaces that are missing, or down."""
    existing = sorted(path.name for path in (root / "sys/class/net").glob("*"))
    missing = [name for name in network.interfaces if name not in existing]
    if missing:
        what = f"the interfaces {', '.join(missing)} are missing; this node has {', '.join(existing) or 'none'}"
        fix = "name interfaces of this node, or check the pod's annotation networking.gke.io/interfaces or "
        fix += "k8s.v1.cni.cncf.io/networks, and the networks of its node pool"
        yield Finding("error", "network.interfaces", what, fix, FailureClass.NODE)
    for name in network.interfaces:
        state = root / "sys/class/net" / name / "operstate"
        # Virtual interfaces read `unknown` while they work.
        if name in existing and state.exists() and state.read_text().strip() == "down":
            fix = "run elsewhere: exclude this node, and have its network card repaired"
            yield Finding("error", "network.interface-down", f"the interface {name} is down", fix, FailureClass.NODE)


def check_daemon(network: NodeNetwork, *, patience: float = timeouts.NETWORK_DAEMON) -> Iterator[Finding]:
    """Check that the network's receive daemon answers within `patience` seconds."""

    def problem_of(address: str) -> str:
        try:
            if re.fullmatch(r"[^/]+:\d+", address):
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=5).close()
                return ""
            # No connection: a daemon may assume that a client which sends nothing has died.
            return "" if stat.S_ISSOCK(Path(address).stat().st_mode) else "it is not a socket"
        except OSError as error:
            return error.strerror or str(error)

    if not network.socket:
        return
    deadline = time.monotonic() + patience
    problem = problem_of(network.socket)
    while problem and time.monotonic() < deadline:
        time.sleep(min(1.0, patience))
        problem = problem_of(network.socket)
    if problem:
        what = f"the {network.name} daemon does not answer at {network.socket} after {patience:.0f} s: {problem}"
        fix = "read the daemon's log, and check that its container mounts the same folder for the socket"
        yield Finding("error", "network.daemon", what, fix, FailureClass.NODE)


def usable_cores() -> int:
    """Return how many cores this process may use: by affinity, and its container's quota (cgroup v2)."""
    cpu_max = Path("/sys/fs/cgroup/cpu.max")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = cpu_max.read_text().split() if cpu_max.exists() else ("max", "")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def cores_of(text: str) -> set[int]:
    """Parse the kernel's notation of sets of cores: `0-3,8` is {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def pin_cpus(cpus: str | None) -> Iterator[Finding]:
    """Pin this process and its children to `cpus`; the network's own threads are bound to the other cores."""
    if cpus is None or not hasattr(os, "sched_setaffinity"):
        return
    cores = os.sched_getaffinity(0) & cores_of(cpus)
    if cores:
        os.sched_setaffinity(0, cores)
    else:
        what = f"this container has no core of {cpus}, so ranks and the network's threads share cores"
        fix = "use the machine type that the network profile is made for"
        yield Finding("warning", "node.cores", what, fix, FailureClass.NODE)
