"""The process that runs one local job: it starts the nodes, ends the others when one fails, and writes the result.

    python -m launcher.platforms.local.supervisor <directory>

It has its own session, no terminal and no parent, so that a training survives a cancelled flow and a dead worker. The
lock on `<directory>/lock` shows that the supervisor lives; it inherits the lock from the submitter. A lock cannot be
stale or belong to another process, as a pid can. The nodes do not inherit it.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.job import JobState
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import fault_of_exit_code
from litgpt_demo.node.agent import kill_by_env_marker
from litgpt_demo.node.network_test import PORT_OFFSET
from litgpt_demo.storage.local import atomic_write_json

# In the environment of every process of a job: how they are found, and proved gone.
JOB_TAG = "TRAIN_LITGPT_JOB"

# In the environment of every node: the address of node 0, where the config does not name its port.
MASTER = "TRAIN_LITGPT_MASTER"

LOCK, SUBMISSION, SUPERVISOR, RESULT = "lock", "submission.json", "supervisor.json", "result.json"

# Seconds that the other nodes get when one has failed: first to end by themselves, then after SIGTERM.
PEER_GRACE = 5.0


def main(argv: Sequence[str]) -> int:
    """Fork a process that runs the job in `argv[0]` to its end, and return at once. `result.json` is written last."""
    directory, parent = Path(argv[0]), os.getpid()
    if os.fork():
        return 0
    while os.getppid() == parent:
        time.sleep(0.005)  # the parent has the job's mark too, and the end of a very short job must not kill it
    cancellations: list[float] = []  # when SIGTERM came, on the monotonic clock
    signal.signal(signal.SIGTERM, lambda *_: cancellations.append(time.monotonic()))
    # The command line starts everything with SIGINT blocked, so that its terminal's Ctrl-C does not reach it. This
    # process has no terminal, and the scripts that it starts may want the signal.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    path = directory / SUBMISSION
    submission = parse_json(path.read_bytes(), dict[str, Any], where=str(path), fix="submit the job again")
    body, started = submission["body"], time.time()
    nodes: dict[int, subprocess.Popen[bytes]] = {}
    start_error = ""
    with reserved_ports() as port:
        os.environ[MASTER] = f"127.0.0.1:{port}"
        atomic_write_json(directory / SUPERVISOR, {"pid": os.getpid(), "started": started, "port": port})
        try:
            for node in body["nodes"]:
                # Each agent in a session of its own, its output appended to its log.
                with (directory / f"node-{node['node']}.log").open("ab") as log:
                    nodes[node["node"]] = subprocess.Popen(
                        node["argv"],
                        env={**os.environ, **node["env"]},
                        cwd=body["working_directory"],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
            failed, terminated = math.inf, False
            while running := [process for process in nodes.values() if process.poll() is None]:
                now = time.monotonic()
                if any(process.poll() for process in nodes.values()):
                    failed = min(failed, now)
                cancelled = min(cancellations, default=math.inf)
                if now >= min(cancelled, failed + PEER_GRACE) and not terminated:
                    terminated = True
                    for process in running:
                        process.terminate()
                # Ranks have the grace after SIGTERM on a cancel; two seconds more let the node report them.
                if now >= min(cancelled + body["grace"] + 2, failed + 2 * PEER_GRACE):
                    for process in running:
                        os.killpg(process.pid, signal.SIGKILL)
                time.sleep(0.1)
        except OSError as error:
            start_error = f"a node could not be started: {error}"
        finally:
            succeeded = not start_error and all(process.poll() == 0 for process in nodes.values())
            kill_by_env_marker(JOB_TAG, submission["job_id"], grace=2 if succeeded else 0)
        codes = {number: process.wait() for number, process in nodes.items()}
        outcome = result(codes, cancelled=bool(cancellations), start_error=start_error)
        atomic_write_json(directory / RESULT, {**outcome, "started": started, "ended": time.time()})
    return 0


@contextmanager
def reserved_ports() -> Iterator[int]:
    """Reserve a port of loopback for node 0, and the next one for the network test.

    Linux gives a bound port to no program that requests any free port. A program that names the port may listen there:
    both have SO_REUSEADDR, and this one does not listen (socket(7), ip(7); net/ipv4/inet_connection_sock.c).
    """
    while True:
        with socket.socket() as first, socket.socket() as second:
            for reserved in (first, second):
                reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + PORT_OFFSET))
            except (OSError, OverflowError):  # it is taken, or beyond 65535
                continue
            yield port
            return


def result(codes: Mapping[int, int], *, cancelled: bool, start_error: str = "") -> dict[str, Any]:
    """Return the state, the platform's own word and the exit code of each node, after all have ended."""
    failed = {number: code for number, code in codes.items() if code != 0}
    if not failed and not start_error:
        return {"state": JobState.SUCCEEDED, "native": "succeeded", "exit_codes": codes}
    if cancelled:
        return {"state": JobState.CANCELLED, "native": "cancelled", "exit_codes": codes}
    ends = [f"node {number} ended with {code} ({fault_of_exit_code(code)})" for number, code in failed.items()]
    return {"state": JobState.FAILED, "native": start_error or ", ".join(ends), "exit_codes": codes}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
