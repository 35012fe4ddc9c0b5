"""Run a command so that it and all its descendants end with the process that started it: `subreaper.py COMMAND …`.

A daemon's children that leave its session, as slurmstepd does, become children of this process and not of init. The end
of standard input, which comes however the starter dies, kills them all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

import psutil

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def kill_descendants() -> None:
    """Kill until none is left: a child may have forked between the look and its death."""
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            if process.is_running():
                os.kill(process.pid, signal.SIGKILL)
        reap()


def reap(*_: object) -> None:
    """Collect the processes that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def main() -> None:
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit("this kernel has no PR_SET_CHILD_SUBREAPER")
    subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGCHLD, reap)
    for ignored in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # the end of input alone ends it
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.read()
    kill_descendants()


if __name__ == "__main__":
    main()
