"""The check of this machine's environment (`doctor`): what is installed, what is missing, how to fix it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from launcher.checks.arithmetic import gpu_names
from launcher.checks.preflight import check_root
from launcher.formatting import bytes_text
from litgpt_demo.errors import Finding, one_line
from litgpt_demo.node.checks import check_packages
from litgpt_demo.secrets import redacted

_GIB = 2**30
# The required packages, and the versions that are known to work together.
_NEEDED = {"torch": "2.13", "lightning": "2.6", "litgpt": "0.5.13", "gigatoken": "0.10", "prefect": "3.8"}
_TOOLS = {"git": "without it, runs do not record the commit of the code", "docker": "for image.kind=docker only"}


def examine_environment(root: str = "output", *, served: str | None = None) -> Iterator[Finding]:
    """Yield a finding for each part of the environment, also for those without a problem. `served` is the address of
    the server that `train-litgpt serve` started."""
    yield Finding("info", "python.version", f"Python {'.'.join(map(str, sys.version_info[:3]))}")
    for name, known in _NEEDED.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            fix = "make train installs everything into .venv"
            yield Finding("error", f"package.{name}", f"{name} is not installed", fix)
            continue
        if found.startswith(known):
            yield Finding("info", f"package.{name}", f"{name} {found}")
        else:
            yield Finding("warning", f"package.{name}", f"{name} {found}", f"tested with {known}")
    yield from check_packages(os.environ)
    yield from check_root(root)
    memory = psutil.virtual_memory()
    what = f"{bytes_text(memory.available)} of {bytes_text(memory.total)} memory free"
    fix = "close other programs: four ranks take 2 GB for torch itself" if memory.available < 4 * _GIB else ""
    yield Finding("warning" if fix else "info", "machine.memory", what, fix)
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        if size < _GIB:
            fix = "NCCL and data loaders need at least 1 GB; in a container, use docker run --shm-size=4g"
            yield Finding("warning", "machine.shm", f"/dev/shm has {bytes_text(size)}", fix)
    yield Finding("info", "machine.cores", f"{os.cpu_count()} cores")
    gpus = ", ".join(f"{count} {name}" for name, count in Counter(gpu_names()).items())
    yield Finding("info", "machine.gpus", gpus or "no NVIDIA GPU: training runs on the CPU")
    try:  # connect too: listening succeeds even where the interface is down
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=3).close()
        yield Finding("info", "network.loopback", "ranks can meet on 127.0.0.1")
    except OSError as error:
        what = f"processes cannot meet on 127.0.0.1 ({error.strerror or error})"
        fix = "bring the loopback interface up, over which ranks meet: ip link set lo up"
        yield Finding("error", "network.loopback", what, fix)
    address = os.environ.get("PREFECT_API_URL") or served
    server_name = f"Prefect's server at {redacted(address or '')}"  # the address may contain a password
    try:
        if address:
            urlopen(f"{address.rstrip('/')}/health", timeout=3).close()
            yield Finding("info", "prefect.server", f"{server_name} answers")
        else:
            what = "no Prefect server is configured or running: `run` starts a temporary one"
            yield Finding("info", "prefect.server", what, "`train-litgpt serve` starts a permanent one, with the UI")
    except (URLError, HTTPException, OSError, ValueError) as error:
        what = f"{server_name} does not answer ({one_line(error)})"
        yield Finding("error", "prefect.server", what, "start it with `train-litgpt serve`, or unset PREFECT_API_URL")
    for name, why in _TOOLS.items():
        path = shutil.which(name)
        if path is not None:
            yield Finding("info", f"tool.{name}", f"{name}: {path}")
        else:
            yield Finding("warning" if name == "git" else "info", f"tool.{name}", f"{name} is not installed", why)
