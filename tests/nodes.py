"""Nodes of a job as processes of this machine, for tests of how they end."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.platforms.local.supervisor import reserved_ports


@contextmanager
def started_nodes(
    directory: Path,
    *program: str,
    nodes: int = 1,
    processes: int = 1,
    grace: int = 5,
    flags: Sequence[str] = (),
    python: str = sys.executable,
    environ: Mapping[str, str] = MappingProxyType({}),
    of_node: Sequence[Mapping[str, str]] = (),
) -> Iterator[list[subprocess.Popen[str]]]:
    """The nodes of a job, with all that their ranks print; they are asked to leave when the block ends.

    `report_of` reads in the attempt's `directory`; `of_node` are variables of single nodes.
    """
    shared = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | dict(environ)
    with reserved_ports() as port, ExitStack() as stack:
        started = []
        for number in range(nodes):
            command = [
                python, "-m", "litgpt_demo", "node", f"--nodes={nodes}", f"--node-rank={number}",
                f"--processes={processes}", "--run-id=r", f"--grace={grace}", f"--master=127.0.0.1:{port}",
                f"--directory={directory}", *flags, "--", *program,
            ]  # fmt: skip
            environment = shared | dict(of_node[number] if of_node else {})
            pipe = subprocess.PIPE
            node = subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)
            started.append(stack.enter_context(node))
            stack.callback(node.terminate)
        yield started


def ended_nodes(directory: Path, *program: str, **how: Any) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of nodes that are let run to their end; for `how` see `started_nodes`."""
    with started_nodes(directory, *program, **how) as nodes:
        outputs = [node.communicate()[0] for node in nodes]
    return [node.returncode for node in nodes], outputs


def report_of(directory: Path, number: int = 0) -> dict[str, Any]:
    """What a node wrote of its end."""
    report: dict[str, Any] = json.loads((directory / f"node-{number}.json").read_text())
    return report
