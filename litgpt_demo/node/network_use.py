"""The check that ranks use the network asked for. NCCL falls back to plain sockets without failing, at a tenth of
the speed; its own log says so, and with RDMA so do the counters of the cards.
"""

from __future__ import annotations

import re
import time
from collections import deque
from pathlib import Path

from litgpt_demo.errors import EXIT_CODES, Fault, RankFailure
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.node.roce import Moved, PortCounters, bypassed

# `host:pid:tid [device] NCCL INFO Using network <name>`: once per communicator and rank, with NCCL_DEBUG=INFO and
# NCCL_DEBUG_SUBSYS that has INIT. The words are the same from NCCL 2.18 to 2.30
# (https://github.com/NVIDIA/nccl/blob/master/src/init.cc, commAlloc).
_USING = re.compile(r"NCCL INFO Using network (?P<name>.+?)\s*$")

_TELLING = re.compile(r"NCCL (INFO|WARN) .*(NET/|Plugin|plugin|Using network|Bootstrap)")
_LINES = 30

# What NCCL and the plug-ins print, and what is behind it. Sources: NVIDIA/nccl#1231 and #1267 (plug-in not found, or of
# another version), GoogleCloudPlatform/container-engine-accelerators#414 (TCPX and a newer NCCL) and
# GoogleCloudPlatform/cluster-toolkit#3032 (TCPX and a newer driver).
_HINTS = (
    (
        "ould not find: libnccl-net",
        "the plug-in is on no folder of LD_LIBRARY_PATH: is its DaemonSet ready on this node?",
    ),
    ("No plugin found", "the plug-in is on no folder of LD_LIBRARY_PATH: is its DaemonSet ready on this node?"),
    ("Failed to find ncclNetPlugin", "the plug-in is of another version than this NCCL: see network_plugin"),
    ("NET/IB : No device found", "the pod has no RDMA devices: look at its network annotations, or its resource claim"),
    ("Inappropriate ioctl", "the plug-in does not fit the GPU driver of this node; never use `latest` of either"),
    ("gpu_tx_reg_mr failed", "the plug-in does not fit the GPU driver of this node; never use `latest` of either"),
    ("onnection refused, retrying", "the receive daemon does not answer: look at the sidecar's log"),
)


class NetworkUse:
    """Reads along in what the ranks of one node print."""

    def __init__(self, network: NodeNetwork, logs: Path, *, nodes: int, counters: PortCounters | None = None) -> None:
        """
        Args:
            logs: where torchrun keeps its ranks' output.
            counters: of the cards that NCCL was told to use, where it was told any.
        """
        self._counters = counters if nodes > 1 else None
        # Within one node NCCL names a network too, and does not use it.
        self._expected = network.nccl_net if nodes > 1 else None
        self._allowed, self._logs, self._network = network.allow_sockets, logs, network.name
        self._offsets: dict[Path, int] = {}
        self._tail: deque[str] = deque(maxlen=_LINES)
        self._told = False
        self.seen: set[str] = set()
        """Names that NCCL reported."""

    def look(self, *, steps: int = 0) -> RankFailure | None:
        """Read what is new; what is told if the network is not the one asked for.

        Args:
            steps: how many steps the ranks have done. After the first one NCCL has begun, and has to have said so.
        """
        if self._expected is None or self._told:
            return None
        for path in sorted(self._logs.glob("*/attempt_0/*/std*.log")):
            self._read(path)
        if wrong := sorted(self.seen - {self._expected}):
            return self._finding(f"NCCL uses {', '.join(wrong)}, not {self._expected}", Fault.NODE)
        if steps > 0 and not self.seen:
            what = f"the ranks have done a step, and NCCL has not said that it uses {self._expected}"
            return self._finding(
                f"{what}: NCCL_DEBUG has to be INFO, NCCL_DEBUG_SUBSYS to have INIT, NCCL_DEBUG_FILE to be unset, "
                "and the script to use the nccl backend",
                Fault.USER,
            )
        moved = self._counters.moved() if self._counters else None
        return None if moved is None else self._judged(moved)

    def _judged(self, moved: Moved) -> RankFailure | None:
        """The counters' word, once and for all when enough has moved for one."""
        used = bypassed(moved)
        if used is None:
            return None
        self._counters = None
        told = f"{moved.cards / 1e6:,.0f} MB by the cards, {moved.interfaces / 1e6:,.0f} MB through the kernel"
        if used:
            print(f"network {self._network} is in use: the ranks sent {told}", flush=True)
            return None
        return self._finding(f"the ranks do not send by RDMA: {told}", Fault.NODE)

    def _read(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if "NCCL" in line and _TELLING.search(line):
                self._tail.append(line)
                if said := _USING.search(line):
                    self.seen.add(said["name"])

    def _finding(self, what: str, fault: Fault) -> RankFailure | None:
        hints = dict.fromkeys(hint for words, hint in _HINTS if any(words in line for line in self._tail))
        message = f"{what} (platform.network={self._network})" + "".join(f"; {hint}" for hint in hints)
        if self._allowed:
            self._told = True
            print(f"warning [network.unused] {message} -> allow_sockets is set: the job goes on, slower", flush=True)
            return None
        name = "NodeError" if fault is Fault.NODE else "UserError"
        fix = "To train over plain sockets all the same, set platform.allow_sockets"
        return RankFailure(
            local_rank=0,
            exit_code=EXIT_CODES[fault],
            message=f"{name}: {message}. {fix}",
            traceback=tuple(self._tail),
            time=time.time(),
        )
