"""The check that ranks use the network asked for. NCCL falls back to plain sockets without failing, at a tenth of
the speed; its own log says so, and with RDMA so do the counters of the cards.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from litgpt_demo.errors import Fault, RankFailure
from litgpt_demo.node.network import NodeNetwork

# `host:pid:tid [device] NCCL INFO Using network <name>`: once per communicator and rank, with NCCL_DEBUG=INFO and
# NCCL_DEBUG_SUBSYS that has INIT. The words are the same from NCCL 2.18 to 2.30
# (https://github.com/NVIDIA/nccl/blob/master/src/init.cc, commAlloc).
_USING = re.compile(r"NCCL INFO Using network (?P<name>.+?)\s*$")

_TELLING = re.compile(r"NCCL (INFO|WARN) .*(NET/|Plugin|plugin|Using network|Bootstrap)")
_LINES = 30

# What NCCL and the plug-ins print, and what is behind it. Sources: NVIDIA/nccl#1231 and #1267 (plug-in not found, or of
# another version), GoogleCloudPlatform/container-engine-accelerators#414 (TCPX and a newer NCCL) and
# GoogleCloudPlatform/cluster-toolkit#3032 (TCPX and a newer driver).
_NOT_THERE = "the plug-in is on no folder of LD_LIBRARY_PATH: is its DaemonSet ready on this node?"
_MISFIT = "the plug-in does not fit the GPU driver of this node; never use `latest` of either"
_HINTS = {
    "ould not find: libnccl-net": _NOT_THERE,
    "No plugin found": _NOT_THERE,
    "Failed to find ncclNetPlugin": "the plug-in is of another version than this NCCL: see network_plugin",
    "NET/IB : No device found": "the pod has no RDMA devices: look at its network annotations, or its resource claim",
    "Inappropriate ioctl": _MISFIT,
    "gpu_tx_reg_mr failed": _MISFIT,
    "onnection refused, retrying": "the receive daemon does not answer: look at the sidecar's log",
}

# Bytes that have to have moved between the ranks before anything is said: less is set-up, or a small model.
_ENOUGH = 256 * 2**20


class PortCounters:
    """Counts the bytes that the cards' ports and the network interfaces have sent since this was made.

    RDMA bypasses the kernel's network stack: a port's own counters move, those of its interface stay still. Where a pod
    may not read the port's, nothing is known.
    """

    def __init__(self, sys: Path, names: Sequence[str], interfaces: Sequence[str]) -> None:
        ports = [name.rpartition(":") for name in names]
        self._cards = [sys / f"class/infiniband/{card}/ports/{port}/counters/port_xmit_data" for card, _, port in ports]
        self._interfaces = [sys / f"class/net/{name}/statistics/tx_bytes" for name in interfaces]
        self._first = self._read()

    def moved(self) -> tuple[int, int] | None:
        """Bytes of the cards and of the interfaces; None where the counters cannot be read."""
        now, first = self._read(), self._first
        return None if now is None or first is None else (now[0] - first[0], now[1] - first[1])

    def _read(self) -> tuple[int, int] | None:
        try:
            # port_xmit_data counts words of four bytes (InfiniBand's PortXmitData).
            cards = [4 * int(path.read_text()) for path in self._cards]
            interfaces = [int(path.read_text()) for path in self._interfaces]
        except (OSError, ValueError):
            return None
        return (sum(cards), sum(interfaces)) if cards and interfaces else None


class NetworkUse:
    """Reads along in what the ranks of one node print into `logs`, and looks at the cards that NCCL was told to use."""

    def __init__(self, network: NodeNetwork, logs: Path, *, nodes: int, counters: PortCounters | None = None) -> None:
        self._counters = counters if nodes > 1 else None
        # Within one node NCCL names a network too, and does not use it.
        self._expected = network.nccl_net if nodes > 1 else None
        self._logs, self._network = logs, network
        self._offsets: dict[Path, int] = {}
        self._tail: deque[str] = deque(maxlen=_LINES)
        self._seen: set[str] = set()

    def look(self, *, steps: int = 0) -> RankFailure | None:
        """Read what is new; what is told if the network is not the one asked for.

        After the first of the ranks' `steps` NCCL has begun, and has to have said so.
        """
        if self._expected is None:
            return None
        for path in sorted(self._logs.glob("*/attempt_0/*/std*.log")):
            self._read_on(path)
        if wrong := sorted(self._seen - {self._expected}):
            return self._finding(f"NCCL uses {', '.join(wrong)}, not {self._expected}", Fault.NODE)
        if steps > 0 and not self._seen:
            what = f"the ranks have done a step, and NCCL has not said that it uses {self._expected}"
            return self._finding(
                f"{what}: NCCL_DEBUG has to be INFO, NCCL_DEBUG_SUBSYS to have INIT, NCCL_DEBUG_FILE to be unset, "
                "and the script to use the nccl backend",
                Fault.USER,
            )
        moved = self._counters.moved() if self._counters else None
        if moved is None or sum(moved) < _ENOUGH:
            return None
        self._counters = None  # that is said once
        cards, interfaces = moved
        told = f"{cards / 1e6:,.0f} MB by the cards, {interfaces / 1e6:,.0f} MB through the kernel"
        # Most of it has to go by the cards: logs, checkpoints and a data loader's reads go through the kernel as well.
        if cards > interfaces:
            print(f"network {self._network.name} is in use: the ranks sent {told}", flush=True)
            return None
        return self._finding(f"the ranks do not send by RDMA: {told}", Fault.NODE)

    def _read_on(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if "NCCL" in line and _TELLING.search(line):
                self._tail.append(line)
                if said := _USING.search(line):
                    self._seen.add(said["name"])

    def _finding(self, what: str, fault: Fault) -> RankFailure | None:
        hints = dict.fromkeys(hint for words, hint in _HINTS.items() if any(words in line for line in self._tail))
        message = f"{what} (platform.network={self._network.name})" + "".join(f"; {hint}" for hint in hints)
        if self._network.allow_sockets:
            self._expected = None  # that is said once
            print(f"warning [network.unused] {message} -> allow_sockets is set: the job goes on, slower", flush=True)
            return None
        name = "NodeError" if fault is Fault.NODE else "UserError"
        fix = "To train over plain sockets all the same, set platform.allow_sockets"
        return RankFailure(
            local_rank=0,
            exit_code=fault.exit_code,
            message=f"{name}: {message}. {fix}",
            traceback=tuple(self._tail),
            time=time.time(),
        )
