"""Nodes of a job as processes of this machine, for tests of how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from waiting import free_port


def start_node(
    directory: Path,
    *program: str,
    processes: int = 2,
    nodes: int = 1,
    number: int = 0,
    port: int | None = None,
    grace: int = 5,
    flags: Sequence[str] = (),
    python: str = sys.executable,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[str]:
    """One of `nodes` nodes, with everything its ranks print; nodes of a job share `directory` and `port`."""
    command = [
        python, "-m", "litgpt_demo", "node",
        "--nodes", str(nodes),
        "--node-rank", str(number),
        "--processes", str(processes),
        "--run-id", "r",
        "--grace", str(grace),
        "--master", f"127.0.0.1:{port or free_port()}",
        "--directory", str(directory),
        *flags, "--", *program,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | dict(environ)
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def report_of(directory: Path, number: int = 0) -> dict[str, Any]:
    """What a node wrote of its end."""
    told: dict[str, Any] = json.loads((directory / f"node-{number}.json").read_text())
    return told
