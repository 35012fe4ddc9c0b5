"""The GPUs of a node: how many, which driver, with errors or without, and the driver's library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from litgpt_demo.errors import Fault, NodeError
from litgpt_demo.findings import Finding
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.node.versions import within

# Where GKE mounts the driver's programs and libraries into containers that ask for GPUs.
NVIDIA = "usr/local/nvidia"

LIBCUDA = "libcuda.so.1"

# `nvidia-smi --help-query-gpu` lists the fields; a counter that the GPU has not got reads [N/A] or [Not Supported].
_FIELDS = ("index", "name", "driver_version", "ecc.errors.uncorrected.volatile.total")

# Seconds. It takes 10 with eight GPUs and no persistence daemon; forever, when a GPU has fallen off the bus.
_PATIENCE = 60.0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, as its driver tells of it."""

    index: int
    name: str
    driver: str
    errors: int | None
    """Memory errors since the driver was loaded that ECC could not correct; None where they are not counted."""


def program(environ: Mapping[str, str], root: Path) -> str | None:
    """nvidia-smi; None if this machine has none."""
    there = shutil.which("nvidia-smi", path=environ.get("PATH"))
    mounted = root / NVIDIA / "bin/nvidia-smi"
    return there or (str(mounted) if os.access(mounted, os.X_OK) else None)


def gpus(nvidia_smi: str, environ: Mapping[str, str], *, patience: float = _PATIENCE) -> list[Gpu]:
    """The driver's facts about a GPU.

    Raises:
        NodeError: the driver does not answer, or answers with an error.
    """
    command = [nvidia_smi, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired as error:
        raise NodeError(f"nvidia-smi did not answer for {patience:.0f} s: a GPU of this machine has hung") from error
    except OSError as error:
        raise NodeError(f"{nvidia_smi} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        words = " ".join((done.stdout + done.stderr).split())[-300:]
        raise NodeError(f"nvidia-smi ended with {done.returncode}: {words}")
    return [_gpu(line) for line in done.stdout.splitlines() if line.strip()]


def _gpu(line: str) -> Gpu:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(_FIELDS) or not fields[0].isdecimal():
        raise NodeError(f"nvidia-smi answered {line!r}, which is not {', '.join(_FIELDS)}")
    errors = int(fields[3]) if fields[3].isdecimal() else None
    return Gpu(index=int(fields[0]), name=fields[1], driver=fields[2], errors=errors)


def check_gpus(network: NodeNetwork, environ: Mapping[str, str], *, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield what is wrong with the GPUs, if the node is to have any."""
    if not network.gpus:
        return
    if (nvidia_smi := program(environ, root)) is None:
        found = len(list((root / "dev").glob("nvidia[0-9]*")))
        if found < network.gpus:
            yield _too_few(found, network.gpus)
        else:
            what = "this image has no nvidia-smi: driver and memory errors were not looked at"
            yield _finding("gpu.unseen", what, f"let the image's PATH have /{NVIDIA}/bin", severity="warning")
        return
    try:
        there = gpus(nvidia_smi, environ)
    except NodeError as error:
        yield _finding("gpu.driver", str(error), "run elsewhere: exclude this node, and have it repaired")
        return
    if len(there) < network.gpus:
        yield _too_few(len(there), network.gpus)
    for gpu in there:
        if gpu.errors:
            what = f"GPU {gpu.index} ({gpu.name}) has {gpu.errors} memory errors that ECC could not correct"
            yield _finding("gpu.ecc", what, "run elsewhere: exclude this node, and have the GPU reset or replaced")
    for driver in sorted({gpu.driver for gpu in there}):
        if not within(driver, network.drivers):
            what = f"the GPU driver is {driver}, and {network.name} works with {' or '.join(network.drivers)}"
            yield _finding("gpu.driver-version", what, "use node pools whose driver version is not `latest`")


def _too_few(found: int, wanted: int) -> Finding:
    what = f"{found} GPUs are here, and the job was given machines with {wanted}"
    return _finding("gpu.count", what, "run elsewhere: exclude this node; one of its GPUs has fallen off the bus")


def _finding(code: str, what: str, fix: str, *, severity: Literal["error", "warning"] = "error") -> Finding:
    return Finding(severity, code, what, fix, Fault.NODE)


# --- the driver's library ---------------------------------------------------------------------------------------------


def cached_libraries(ldconfig: str, name: str = LIBCUDA) -> list[str]:
    """Return where the loader's cache has a library."""
    try:
        listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:  # an image without ldconfig, such as a distroless one
        return []
    return re.findall(rf"^\s*{re.escape(name)} .*=> (\S+)$", listed, re.MULTILINE)


def folder_of(name: str, folders: Iterator[str] | tuple[str, ...] | list[str]) -> str | None:
    """The first of these folders that has a library; None if none has."""
    return next((folder for folder in folders if folder and (Path(folder) / name).is_file()), None)
