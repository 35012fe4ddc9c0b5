"""The evidence of a failed node: how each failed rank ended, and traces of the cause. The launching side judges them
(launcher.runs.diagnosis). Every list and line is bounded.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Never

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

# Lines of a loader or an abort, for a rank that left neither an error file nor a traceback.
_LAST_LINES = re.compile(
    r"terminate called|what\(\):|can't open file|No module named|Fatal Python error"
    r"|^(?:Syntax|Indentation|Tab)Error:"
)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One line of evidence."""

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
    """Return the failed ranks under `log_dir` by local rank, and the exception that ended torchrun itself, such as a
    rendezvous that timed out, as `Name: message`.

    Exit codes are torchrun's. If it was stopped before it wrote them, only the error files of torch's `@record` exist.
    """
    path = log_dir / FAILURES
    findings: dict[str, Any] = {}
    with suppress(FileNotFoundError, DataError):
        findings = parse_json(path.read_bytes(), dict[str, Any], where=str(path), fix="read the ranks' own logs")
    ended = {rank["local_rank"]: rank for rank in findings.get("ranks", ())}
    folders = rank_folders(log_dir)
    failures = []
    for local_rank in sorted(ended.keys() | folders.keys()):
        report = _Report()
        if local_rank in folders:
            report = _report(folders[local_rank], is_failed=local_rank in ended)
        if local_rank not in ended and not report.message:
            continue
        end = ended.get(local_rank, {"exit_code": None, "time": time.time()})
        failures.append(
            RankFailure(
                local_rank=local_rank,
                exit_code=end["exit_code"],
                message=report.message,
                traceback=tuple(report.traceback[-40:]),
                time=end["time"] if report.time is None else report.time,
                # The others may have waited for a silent rank.
                waits=fault_of_exception(report.message) is FailureClass.HANG
                and not re.match(r"(?:\w+\.)*Hung:", report.message),
            )
        )
    return failures, findings.get("agent")


class _Report(NamedTuple):
    """A rank's exception, its traceback, and the time of its error file."""

    message: str = ""
    traceback: Sequence[str] = ()
    time: float | None = None


def _report(folder: Path, *, is_failed: bool) -> _Report:
    """Read a rank's error file, which torch's `@record` writes, unless it is killed meanwhile. Without one, return the
    last traceback of its error output, or the lines of a loader or an abort.
    """
    file = folder / "error.json"
    with suppress(FileNotFoundError, DataError, KeyError):
        content = parse_json(file.read_bytes(), dict[str, Any], where=str(file), fix="read the rank's log")
        message = content["message"]
        if isinstance(message, str):
            return _Report(message, time=file.stat().st_mtime)
        traceback = message.get("extraInfo", {}).get("py_callstack", "")
        return _Report(message["message"], traceback.splitlines(), file.stat().st_mtime)
    if not is_failed:
        return _Report()
    # A rank in a process group prefixes its traceback (torch/distributed/distributed_c10d.py, _distributed_excepthook).
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in _last_lines(folder, 32_768)]
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if starts:
        lines = lines[starts[-1] :]
        messages = [line for line in lines[1:] if line and not line.startswith(" ")]
    else:
        messages = [line.strip() for line in lines if _LAST_LINES.search(line)]
    return _Report("\n".join(messages)[:2000], lines)


def _last_lines(folder: Path, size: int) -> list[str]:
    with suppress(OSError), (folder / "stderr.log").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read().decode(errors="replace").splitlines()
    return []


def gather(ranks: Mapping[int, Path], *, recorders: Path, since: float, killed: int) -> list[Trace]:
    """Return the traces of a node that failed.

    `ranks` maps a rank within the job to the folder of its output. Its dump is in `recorders`. `since` (of the epoch)
    limits the kernel's log; `killed` is the number of processes that the kernel killed.
    """
    traces = []
    if killed:
        text = f"the kernel killed {killed} of this container's processes, because memory was full"
        traces.append(Trace(source="memory", text=text))
    # Only Linux has it, and most containers may not read it. 3 is SYSLOG_ACTION_READ_ALL, syslog(2). The ring buffer is
    # no larger by default (CONFIG_LOG_BUF_SHIFT).
    log, klogctl = ctypes.create_string_buffer(1 << 20), getattr(ctypes.CDLL(None), "klogctl", None)
    size = klogctl(3, log, len(log)) if klogctl is not None else 0
    if size > 0:
        lines = kernel_lines(log.raw[:size].decode(errors="replace"), since=since)
        traces += [Trace(source="kernel", text=text) for text in lines]
    for rank in ranks:
        progress = recorded(recorders / f"{RECORDER}{rank}")
        if progress is not None:
            traces.append(Trace(source="recorder", text=progress, rank=rank))
    for rank, folder in ranks.items():
        lines = [_short(line) for line in _last_lines(folder, 262_144) if _OUTPUT.search(line)]
        traces += [Trace(source="output", text=text, rank=rank) for text in [*dict.fromkeys(lines)][-8:]]
    return traces[:64]


def _short(line: str) -> str:
    return redacted(line.strip())[:500]


def kernel_lines(log: str, *, since: float) -> list[str]:
    """Return the last lines of the kernel's log that report a fault after `since`."""
    start = since - (time.time() - time.clock_gettime(time.CLOCK_MONOTONIC))
    lines = []
    for line in log.splitlines():
        # `<6>[  123.456789] message`; seconds since the start of the machine (printk.time, on in every distribution)
        entry = re.match(r"(?:<\d+>)?\[\s*(\d+\.\d+)\] ?(.*)", line)
        if entry is not None and float(entry[1]) >= start and _KERNEL.search(entry[2]):
            lines.append(_short(entry[2]))
    return lines[-16:]


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, text, lists and dictionaries, and calls nothing."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(f"{module}.{name} is not data")


def recorded(dump: Path) -> str | None:
    """Return the progress of a rank in the default process group by its flight recorder; None without a valid dump.

    torch writes a pickle of dictionaries (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, 2.13). A rank's program
    could have written anything.
    """
    try:
        if dump.stat().st_size > 64 << 20:  # 2000 entries, torch's default, with the stack of each take 2 MB
            return None
        with dump.open("rb") as file:
            status = _PlainUnpickler(file).load()["pg_status"]["0"]
        enqueued, completed = int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
    except Exception:  # a damaged pickle can raise any exception
        return None
    return f"its flight recorder: last enqueued work: {enqueued}, last completed work: {completed}"


def out_of_memory_kills() -> int:
    """Return how often the kernel killed a process of this container because memory was full; 0 if it is not counted.

    The count is in cgroup v2's memory.events or v1's memory.oom_control. A container with a namespace of its own is the
    root of what it sees. Without one the group's path leads to it.
    """
    root, groups = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
    path_of_controller: dict[str, str] = {}
    if groups.exists():
        for line in groups.read_text().splitlines():
            # Controllers and path of each hierarchy: `4:memory:/docker/1f…`, `0::/` in version 2.
            _, controllers, path = line.split(":", 2)
            path_of_controller |= dict.fromkeys(controllers.split(","), path)
    for folder, controller, name in ((root, "", "memory.events"), (root / "memory", "memory", "memory.oom_control")):
        group = path_of_controller.get(controller, "/").strip("/")
        for counter in (folder / group / name, folder / name):
            fields = counter.read_text().split() if counter.exists() else []
            if "oom_kill" in fields:
                return int(fields[fields.index("oom_kill") + 1])
    return 0
