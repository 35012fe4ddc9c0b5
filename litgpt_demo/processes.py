"""A process of this machine and no other: a pid alone may belong to another process by the time that it is used."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil


def started(pid: int) -> float:
    """Return when a process began, by a clock that nobody sets; with its pid that tells it from every other.

    On Linux the unit is the kernel's tick after the start of the machine, because the time of day that is made of it
    moves when the machine's clock is set.
    """
    try:
        if sys.platform == "linux":
            # The name, in parentheses, may hold anything; the start is the 20th word behind it (proc_pid_stat(5)).
            return float(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
        return psutil.Process(pid).create_time()
    except (FileNotFoundError, psutil.NoSuchProcess) as error:
        raise ProcessLookupError(f"there is no process {pid}") from error


def is_there(pid: int, began: float) -> bool:
    """Return whether `pid` is still the process that began then."""
    with suppress(ProcessLookupError):
        return started(pid) == began
    return False


def send_signals(pid: int, began: float, numbers: Sequence[signal.Signals]) -> None:
    """Send signals to the process of this pid that began then, and to no other."""
    process = None
    try:
        if hasattr(os, "pidfd_open"):  # no other system has a descriptor that keeps what it means whatever a pid does
            process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        pass  # kernels before 5.3 and some sandboxes know no such call, and old seccomp profiles refuse it
    try:
        for number in numbers:
            if not is_there(pid, began):
                raise ProcessLookupError(f"process {pid} is not the one that began at {began:g}")
            if process is None:  # what is left is the moment between the look and the signal
                os.kill(pid, number)
            else:
                signal.pidfd_send_signal(process, number)
    finally:
        if process is not None:
            os.close(process)
