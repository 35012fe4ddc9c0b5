"""The traces that a bad end leaves outside the ranks' own error files: lines of the kernel's log, the container's count
of processes killed for want of memory, the lines of the ranks' output that torch and NCCL write when they give up, and
what their flight recorders dumped then.

They are picked here and judged on the launching side (launcher.runs.diagnosis). Every list and line is bounded.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Never

from litgpt_demo.secrets import redacted

MOST_TRACES = 64
"""Traces of one node's report: what all its ranks say, and the kernel."""
_LONGEST = 500  # characters of a trace
_OF_A_RANK = 8  # lines that are picked from one rank's output, the last ones
_OF_THE_KERNEL = 16
_OUTPUT_BYTES = 262_144  # the end of a rank's error output that is looked through
_KERNEL_BYTES = 1 << 20  # the kernel's ring buffer is no larger by default (CONFIG_LOG_BUF_SHIFT)
_DUMP_BYTES = 64 << 20  # 2000 entries, torch's default, with the stack of each take 2 MB
_READ_ALL = 3  # SYSLOG_ACTION_READ_ALL, syslog(2)

# NVIDIA's driver: https://docs.nvidia.com/deploy/xid-errors/. The kernel: mm/oom_kill.c, drivers/edac/edac_mc.c,
# arch/x86/kernel/cpu/mce, arch/x86/mm/fault.c, fs/ext4, drivers/nvme and drivers/net/ethernet/mellanox of Linux 6.
_KERNEL = re.compile(
    r"NVRM: (?:Xid|GPU .*(?:fallen off|lost))|Out of memory: Killed process|oom-kill:|Memory cgroup out of memory"
    r"|EDAC .*\b[CU]E\b|\[Hardware Error\]|mce: .*(?:error|exception)|segfault at|I/O error|EXT4-fs error"
    r"|XFS .*(?:shutdown|corruption)|mlx5_core .*(?:health|error|down)|AER: .*(?:Fatal|Uncorrect)",
    re.IGNORECASE,
)

# torch 2.13's ProcessGroupNCCL.cpp, ProcessGroupWrapper.cpp and data loader, gloo, NCCL, CPython's faulthandler.
_OUTPUT = re.compile(
    r"Watchdog caught collective operation timeout|last enqueued (?:NCCL )?work|monitoredBarrier"
    r"|Timed out waiting \d+ms for|DataLoader worker \(pid|CUDA error|NCCL WARN|terminate called|what\(\):"
    r"|Fatal Python error|Segmentation fault|Bus error|Detected mismatch between collectives",
)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One line that tells of a node's end."""

    source: Literal["kernel", "memory", "output", "recorder"]
    text: str
    rank: int | None = None
    """The rank whose output it is, within the whole job."""


def recorder_prefix(folder: Path) -> Path:
    """Return the path to which torch appends a rank's number for the dump of its flight recorder."""
    return folder / "recorder-of-rank-"


def gather(ranks: Mapping[int, Path], *, recorders: Path, since: float, killed: int) -> list[Trace]:
    """Return the traces of a node that ended badly.

    Args:
        ranks: the folder of each rank's output, by rank within the whole job.
        recorders: the folder of the dumps of their flight recorders.
        since: seconds since the epoch; what the kernel said before is of an earlier job.
        killed: processes of this container that the kernel killed for want of memory since then.
    """
    found = []
    if killed:
        text = f"the kernel killed {killed} of this container's processes for want of memory"
        found.append(Trace(source="memory", text=text))
    log, klogctl = ctypes.create_string_buffer(_KERNEL_BYTES), getattr(ctypes.CDLL(None), "klogctl", None)
    # Linux alone has it, and it may not be read in most containers.
    if klogctl is not None and (read := klogctl(_READ_ALL, log, _KERNEL_BYTES)) > 0:
        lines = kernel_lines(log.raw[:read].decode(errors="replace"), since=since)
        found += [Trace(source="kernel", text=text) for text in lines]
    for rank in ranks:
        if come := recorded(Path(f"{recorder_prefix(recorders)}{rank}")):
            found.append(Trace(source="recorder", text=come, rank=rank))
    for rank, folder in ranks.items():
        with suppress(OSError), (folder / "stderr.log").open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _OUTPUT_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            telling = list(dict.fromkeys(_short(line) for line in lines if _OUTPUT.search(line)))[-_OF_A_RANK:]
            found += [Trace(source="output", text=text, rank=rank) for text in telling]
    return found[:MOST_TRACES]


def _short(line: str) -> str:
    return redacted(line.strip())[:_LONGEST]


def kernel_lines(log: str, *, since: float) -> list[str]:
    """Return the last lines of the kernel's log that tell of a fault, of those written after `since`."""
    begun = since - (time.time() - time.clock_gettime(time.CLOCK_MONOTONIC))
    found = []
    for line in log.splitlines():
        # `<6>[  123.456789] words`; seconds since the start of the machine (printk.time, on in every distribution)
        told = re.match(r"(?:<\d+>)?\[\s*(\d+\.\d+)\] ?(.*)", line)
        if told is not None and float(told[1]) >= begun and _KERNEL.search(told[2]):
            found.append(_short(told[2]))
    return found[-_OF_THE_KERNEL:]


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, text, lists and dictionaries, and calls nothing."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(f"{module}.{name} is not data")


def recorded(dump: Path) -> str | None:
    """Return how far a rank had come in the default process group by its flight recorder; None without a sound dump.

    torch writes a pickle of dictionaries (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, 2.13), here below the
    node's own folder; a rank's program could have written anything.
    """
    try:
        if dump.stat().st_size > _DUMP_BYTES:
            return None
        with dump.open("rb") as file:
            status = _PlainUnpickler(file).load()["pg_status"]["0"]
        begun, ended = int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
    except Exception:  # damaged pickles raise whatever the step that they broke raises
        return None
    return f"its flight recorder: last enqueued work: {begun}, last completed work: {ended}"


def out_of_memory_kills() -> int:
    """Return how often the kernel killed a process of this container for want of memory; 0 where nobody counts.

    The count is in cgroup v2's memory.events or v1's memory.oom_control. A container with a namespace of its own is the
    root of what it sees; without one the group's path leads to it.
    """
    root, groups, told = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), dict[str, str]()
    for line in groups.read_text().splitlines() if groups.exists() else ():
        # Controllers and path of each hierarchy: `4:memory:/docker/1f…`, `0::/` in version 2.
        _, controllers, path = line.split(":", 2)
        told |= dict.fromkeys(controllers.split(","), path)
    for folder, controller, name in ((root, "", "memory.events"), (root / "memory", "memory", "memory.oom_control")):
        for counter in (folder / told.get(controller, "/").strip("/") / name, folder / name):
            words = counter.read_text().split() if counter.exists() else []
            if "oom_kill" in words:
                return int(words[words.index("oom_kill") + 1])
    return 0
