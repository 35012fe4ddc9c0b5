"""Checks of a node before its ranks are started: machine, network, libraries, the call itself."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from litgpt_demo.errors import Fault, NodeError, UserError
from litgpt_demo.findings import Finding
from litgpt_demo.node import gpu, nccl
from litgpt_demo.node.environment import driver_folders
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.node.rendezvous import Node
from litgpt_demo.node.torch_seen import torch_seen
from litgpt_demo.node.versions import within
from litgpt_demo.storage.local import NO_ROOM

# Seconds that a network's daemon has to come up, where the platform has not waited for it: TCPXO's takes 30.
DAEMON_PATIENCE = 120.0


def check_call(node: Node) -> Iterator[Finding]:
    """Yield what in the call would make this node fail, as far as a moment's look shows it."""
    meet = node.meet
    if meet.node_rank >= meet.nodes:
        what = f"--node-rank={meet.node_rank} is not one of --nodes={meet.nodes}"
        yield Finding("error", "node.rank", what, f"nodes are numbered 0 to {meet.nodes - 1}")
    if node.processes < 1:
        what = f"--processes={node.processes} leaves nothing to run"
        yield Finding("error", "node.processes", what, "give one per GPU, or at least 1")
    script = node.program[0]
    # Code that is still to be fetched has the program in it.
    if node.code is None and not script.startswith("-") and not Path(script).is_file():
        what = f"the program {script} is no file in {Path.cwd()}"
        yield Finding("error", "node.program", what, "give its absolute path, or `-m module`")
    try:
        node.own.mkdir(parents=True, exist_ok=True)
        (node.own / ".writable").touch()
    except OSError as error:
        what = f"--directory={node.directory} cannot be written: {error.strerror}"
        full = error.errno in NO_ROOM
        fix = "make room on its disk" if full else "mount or create a folder that can"
        yield Finding("error", "node.directory", what, fix, Fault.DISK_FULL if full else Fault.NODE)
    if meet.node_rank == 0 and not port_is_free(meet.port):
        what = f"port {meet.port} of --master={meet.host}:{meet.port} is taken on this node"
        fix = "end what listens there, or choose another port"
        yield Finding("error", "node.port", what, fix, Fault.NODE)


def port_is_free(port: int) -> bool:
    """Return True if a server could listen on this TCP port of this machine; lingering connections do not count."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


# --- the machine and its network --------------------------------------------------------------------------------------


def check_machine(node: Node, environ: Mapping[str, str], *, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield what this machine lacks of what its network profile requires.

    Args:
        environ: as the ranks will have it.
        root: of the file system; tests make one up.
    """
    network = node.network
    sick = [*gpu.check_gpus(network, environ, root=root), *check_libcuda(network, environ, root)]
    yield from sick
    # A sick GPU may hang whoever uses it, and has been named.
    if not any(finding.severity == "error" for finding in sick):
        yield from check_torch(node, environ, root)
    yield from check_interfaces(network, root)
    yield from check_shared_memory(network, root)
    yield from stop_probing(network, root)
    yield from check_glibc(network, os.confstr("CS_GNU_LIBC_VERSION") or "")
    if node.meet.nodes > 1:
        yield from check_daemon(network)
        yield from nccl.check_plugin(network, environ)


def check_torch(node: Node, environ: Mapping[str, str], root: Path) -> Iterator[Finding]:
    """Yield what torch itself says against this machine, if anything depends on it: importing it takes seconds."""
    network, several = node.network, node.meet.nodes > 1
    about_gpus = gpu.wants_torch(network, environ, root)
    if not (about_gpus or (several and nccl.wants_version(network))):
        return
    try:
        seen = torch_seen(environ)
    except NodeError as error:
        fix = "run elsewhere: exclude this node, and have it repaired"
        yield Finding("error", "torch.hangs", str(error), fix, Fault.NODE)
        return
    except UserError as error:
        fix = "run `python -m litgpt_demo.node.torch_seen` in the image, and fix what it says"
        yield Finding("error", "torch.import", str(error), fix)
        return
    if about_gpus:
        yield from gpu.check_used(network, seen, environ, processes=node.processes)
    if several:
        yield from nccl.check_nccl(network, seen)


def check_libcuda(network: NodeNetwork, environ: Mapping[str, str], root: Path) -> Iterator[Finding]:
    """Check that the driver's library can be loaded, if the node is to have GPUs."""
    on_path = gpu.folder_of(gpu.LIBCUDA, list(driver_folders(environ, root)))
    if network.gpus and not (gpu.cached_libraries("/sbin/ldconfig") or on_path):
        yield Finding(
            "error",
            "gpu.libcuda",
            what=f"{gpu.LIBCUDA} is neither in the loader's cache nor on LD_LIBRARY_PATH",
            fix="see that the pod asks for nvidia.com/gpu: the driver's libraries are mounted then",
            fault=Fault.NODE,
        )


def check_interfaces(network: NodeNetwork, root: Path) -> Iterator[Finding]:
    """Interfaces that are missing, or down."""
    there = sorted(path.name for path in (root / "sys/class/net").glob("*"))
    missing = [name for name in network.interfaces if name not in there]
    if missing:
        yield Finding(
            "error",
            "network.interfaces",
            what=f"the interfaces {', '.join(missing)} are missing; there are {', '.join(there) or 'none'}",
            fix="look at the pod's annotation networking.gke.io/interfaces or k8s.v1.cni.cncf.io/networks, and at the "
            "networks that the node pool has",
            fault=Fault.NODE,
        )
    for name in network.interfaces:
        state = root / "sys/class/net" / name / "operstate"
        # Virtual interfaces read `unknown` while they work.
        if name in there and state.exists() and state.read_text().strip() == "down":
            yield Finding(
                "error",
                "network.interface-down",
                what=f"the interface {name} is down",
                fix="run elsewhere: exclude this node, and have its network card looked at",
                fault=Fault.NODE,
            )


def check_shared_memory(network: NodeNetwork, root: Path) -> Iterator[Finding]:
    """Too little of the memory that processes share: NCCL then fails with `No space left on device`, data loaders with
    a bus error (NVIDIA/nccl#290)."""
    folder = root / "dev/shm"
    size = 0
    if folder.exists():
        told = os.statvfs(folder)
        size = told.f_blocks * told.f_frsize
    if size < network.shm_bytes:
        what = f"/dev/shm has {size / 2**20:,.0f} MiB, and {network.name} needs {network.shm_bytes / 2**20:,.0f} MiB"
        fix = "mount an emptyDir of medium Memory at /dev/shm (platform.shm), or give docker --shm-size"
        yield Finding("error", "node.shared-memory", what, fix)


def check_glibc(network: NodeNetwork, found: str) -> Iterator[Finding]:
    """A plug-in built for a newer C library than the image has does not load, and NCCL uses sockets instead."""
    if network.glibc is None:
        return
    name, _, number = found.partition(" ")
    if name != "glibc" or not within(number, (f">={network.glibc}",)):
        yield Finding(
            "error",
            "image.glibc",
            what=f"the image has {found or 'no glibc'}, and the {network.name} plug-in needs glibc {network.glibc}",
            fix="build the image on Ubuntu 22.04, Debian 12 or newer",
        )


def stop_probing(network: NodeNetwork, root: Path) -> Iterator[Finding]:
    """Keep TCP from probing for its path's MTU, where the network is to be so (https://www.kernel.org/doc/html/latest/
    networking/ip-sysctl.html). A new network namespace does not probe, whatever its machine does (tried), and its
    container may not write; a container on the machine's own network is privileged, and may.
    """
    setting = root / "proc/sys/net/ipv4/tcp_mtu_probing"
    if not network.disable_pmtu:
        return
    try:
        if setting.read_text().strip() != "0":
            setting.write_text("0\n")
    except OSError as error:
        yield Finding(
            "error",
            "network.pmtu",
            what=f"TCP probes for its path's MTU, and {setting} cannot be set to 0: {error.strerror}",
            fix="set it on the machine, take platform.host_network, or leave out platform.disable_pmtu",
        )


def check_daemon(network: NodeNetwork, *, patience: float = DAEMON_PATIENCE) -> Iterator[Finding]:
    """Check that the network's receive daemon answers; one that is still starting is waited for."""
    if network.socket is None:
        return
    deadline = time.monotonic() + patience
    while (problem := unanswered(network.socket)) and time.monotonic() < deadline:
        time.sleep(min(1.0, patience))
    if problem:
        yield Finding(
            "error",
            "network.daemon",
            what=f"the {network.name} daemon does not answer at {network.socket} after {patience:.0f} s: {problem}",
            fix="read the log of the pod's daemon container, and see that both mount the same folder for the socket",
            fault=Fault.NODE,
        )


def unanswered(place: str) -> str:
    """Return why nothing answers there; empty if something does."""
    if re.fullmatch(r"[^/]+:\d+", place):
        host, _, port = place.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            return str(error)
        return ""
    try:
        mode = Path(place).stat().st_mode
    except OSError as error:
        return str(error.strerror)
    # Not connected to: a daemon may take a client that says nothing for one that died.
    return "" if stat.S_ISSOCK(mode) else "it is no socket"


# --- cores ------------------------------------------------------------------------------------------------------------


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPU cores this process may use: its affinity, and its container's quota (cgroup v2), which affinity hides."""
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


def keep_to(cpus: str | None) -> Finding | None:
    """Keep this process and all that it starts off the cores that the network's own threads are bound to."""
    if cpus is None or not hasattr(os, "sched_setaffinity"):
        return None
    mine = os.sched_getaffinity(0) & cores_of(cpus)
    if not mine:
        what = f"none of the cores {cpus} is this container's, so ranks and the network's threads share theirs"
        fix = "use the machine type that the network profile is made for"
        return Finding("warning", "node.cores", what, fix, Fault.NODE)
    os.sched_setaffinity(0, mine)
    return None
