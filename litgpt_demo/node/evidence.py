"""What the ranks of a node left: how each that failed ended, and other traces of a bad end. They are picked here and
judged on the launching side (launcher.runs.diagnosis). Every list and line is bounded.
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
from typing import Any, Literal, Never

from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError, FailureClass, RankFailure, fault_of_exception
from litgpt_demo.node.torchrun import FAILURES
from litgpt_demo.secrets import redacted

RECORDER = "recorder-of-rank-"
"""The name in the node's folder to which torch appends a rank's number for the dump of its flight recorder."""

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

# Words of a loader or an abort, for a rank that left neither an error file nor a traceback.
_LAST_WORDS = re.compile(
    r"terminate called|what\(\):|can't open file|No module named|Fatal Python error"
    r"|^(?:Syntax|Indentation|Tab)Error:"
)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One line that tells of a node's end."""

    source: Literal["kernel", "memory", "output", "recorder"]
    text: str
    rank: int | None = None
    """The rank whose output it is, within the whole job."""


def rank_folders(log_dir: Path) -> dict[int, Path]:
    """By local rank, the `<run id>_<random>/attempt_0/<local rank>/` of the newest run; there may be older ones too."""
    runs = sorted(log_dir.glob("*/attempt_0"), key=lambda folder: folder.stat().st_mtime)
    folders = runs[-1].iterdir() if runs else ()
    return dict(sorted((int(folder.name), folder) for folder in folders if folder.name.isdigit()))


def read_failures(log_dir: Path) -> tuple[list[RankFailure], str | None]:
    """Return what is known of the ranks that failed under `log_dir`, by local rank, and the exception that torchrun
    itself fell over, such as a rendezvous that timed out, as `Name: message`.

    Exit codes are torchrun's; where it was stopped before it could tell, the error files of torch's `@record` are all.
    """
    path, told = log_dir / FAILURES, dict[str, Any]()
    with suppress(FileNotFoundError, DataError):
        told = parse_json(path.read_bytes(), dict[str, Any], where=str(path), fix="the ranks' own logs tell the rest")
    ended, folders = {one["local_rank"]: one for one in told.get("ranks", ())}, rank_folders(log_dir)
    found = []
    for rank in sorted(ended.keys() | folders.keys()):
        message, traceback, when = _words(folders[rank], failed=rank in ended) if rank in folders else ("", [], None)
        if rank not in ended and not message:
            continue
        one = ended.get(rank, {"exit_code": None, "time": time.time()})
        found.append(
            RankFailure(
                local_rank=rank,
                exit_code=one["exit_code"],
                message=message,
                traceback=tuple(traceback[-40:]),
                time=one["time"] if when is None else when,
                # Who was found silent may have been the one that the others waited for.
                waits=fault_of_exception(message) is FailureClass.HANG and not re.match(r"(?:\w+\.)*Hung:", message),
            )
        )
    return found, told.get("agent")


def _words(folder: Path, *, failed: bool) -> tuple[str, list[str], float | None]:
    """A rank's exception, its traceback, and the time of its error file (None without one), which torch's `@record`
    writes, and may be killed meanwhile. Without one there is the rank's error output, from its last traceback on if it
    has one; else the words of a loader or an abort in it.
    """
    file = folder / "error.json"
    with suppress(FileNotFoundError, DataError, KeyError):
        content = parse_json(file.read_bytes(), dict[str, Any], where=str(file), fix="the rank's log tells the rest")
        if isinstance(message := content["message"], str):
            return message, [], file.stat().st_mtime
        traceback = message.get("extraInfo", {}).get("py_callstack", "")
        return message["message"], traceback.splitlines(), file.stat().st_mtime
    if not failed:
        return "", [], None
    # A rank in a process group prefixes its traceback (torch/distributed/distributed_c10d.py, _distributed_excepthook).
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in _last_lines(folder, 32_768)]
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if starts:
        lines = lines[starts[-1] :]
        telling = [line for line in lines[1:] if line and not line.startswith(" ")]
    else:
        telling = [line.strip() for line in lines if _LAST_WORDS.search(line)]
    return "\n".join(telling)[:2000], lines, None


def _last_lines(folder: Path, size: int) -> list[str]:
    with suppress(OSError), (folder / "stderr.log").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read().decode(errors="replace").splitlines()
    return []


def gather(ranks: Mapping[int, Path], *, recorders: Path, since: float, killed: int) -> list[Trace]:
    """Return the traces of a node that ended badly: of its `ranks` by number within the whole job, with the folder of
    each one's output; of their dumps in `recorders`; of the kernel `since` then (by the epoch), and what it `killed`.
    """
    found = []
    if killed:
        text = f"the kernel killed {killed} of this container's processes for want of memory"
        found.append(Trace(source="memory", text=text))
    # Linux alone has it, and it may not be read in most containers. 3 is SYSLOG_ACTION_READ_ALL, syslog(2); the ring
    # buffer is no larger by default (CONFIG_LOG_BUF_SHIFT).
    log, klogctl = ctypes.create_string_buffer(1 << 20), getattr(ctypes.CDLL(None), "klogctl", None)
    if klogctl is not None and (read := klogctl(3, log, len(log))) > 0:
        lines = kernel_lines(log.raw[:read].decode(errors="replace"), since=since)
        found += [Trace(source="kernel", text=text) for text in lines]
    for rank in ranks:
        if come := recorded(recorders / f"{RECORDER}{rank}"):
            found.append(Trace(source="recorder", text=come, rank=rank))
    for rank, folder in ranks.items():
        lines = [_short(line) for line in _last_lines(folder, 262_144) if _OUTPUT.search(line)]
        found += [Trace(source="output", text=text, rank=rank) for text in [*dict.fromkeys(lines)][-8:]]
    return found[:64]  # what all ranks of a node say, and the kernel


def _short(line: str) -> str:
    return redacted(line.strip())[:500]


def kernel_lines(log: str, *, since: float) -> list[str]:
    """Return the last lines of the kernel's log that tell of a fault, of those written after `since`."""
    begun = since - (time.time() - time.clock_gettime(time.CLOCK_MONOTONIC))
    found = []
    for line in log.splitlines():
        # `<6>[  123.456789] words`; seconds since the start of the machine (printk.time, on in every distribution)
        told = re.match(r"(?:<\d+>)?\[\s*(\d+\.\d+)\] ?(.*)", line)
        if told is not None and float(told[1]) >= begun and _KERNEL.search(told[2]):
            found.append(_short(told[2]))
    return found[-16:]


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, text, lists and dictionaries, and calls nothing."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(f"{module}.{name} is not data")


def recorded(dump: Path) -> str | None:
    """Return how far a rank had come in the default process group by its flight recorder; None without a sound dump.

    torch writes a pickle of dictionaries (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, 2.13); a rank's program
    could have written anything.
    """
    try:
        if dump.stat().st_size > 64 << 20:  # 2000 entries, torch's default, with the stack of each take 2 MB
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
