"""The GPUs of a node: how many, which driver, with errors or without, and the driver's library."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from litgpt_demo import PYTHON
from litgpt_demo.errors import Fault, NodeError
from litgpt_demo.findings import Finding
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.node.torch_seen import TorchSeen, answer_of
from litgpt_demo.node.versions import within

# Where GKE mounts the driver's programs and libraries into containers that ask for GPUs.
NVIDIA = "usr/local/nvidia"

LIBCUDA = "libcuda.so.1"

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


def gpus(environ: Mapping[str, str], *, patience: float = _PATIENCE) -> list[Gpu] | None:
    """Return what the driver says, None if its library is not here; a process asks that can be left behind, hung.

    Raises:
        NodeError: the driver does not answer, or answers with an error.
    """
    hung = f"the driver did not answer for {patience:.0f} s: a GPU of this machine has hung"
    code, told, words = answer_of([*PYTHON, "-m", __name__], environ, patience=patience, hung=hung)
    if code != 0:
        raise NodeError(f"the driver answered with an error: {' '.join(words.split())[-300:]}")
    found = json.loads(told.splitlines()[-1])
    return None if found is None else [Gpu(**gpu) for gpu in found]


def main() -> None:
    """Print what NVML, the driver's library for questions, says of every GPU; null if there is no such library."""
    import pynvml as nvml

    found, asked = None, "the driver"
    try:
        nvml.nvmlInit()
        driver, found = nvml.nvmlSystemGetDriverVersion(), []
        for index in range(nvml.nvmlDeviceGetCount()):
            asked, errors = f"GPU {index}", None
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            with suppress(nvml.NVMLError_NotSupported):
                errors = nvml.nvmlDeviceGetTotalEccErrors(
                    gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            found.append({"index": index, "name": nvml.nvmlDeviceGetName(gpu), "driver": driver, "errors": errors})
    except nvml.NVMLError_LibraryNotFound:
        pass
    except nvml.NVMLError as error:
        sys.exit(f"{asked}: {error}")
    print(json.dumps(found))


def check_gpus(network: NodeNetwork, environ: Mapping[str, str], *, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield what is wrong with the GPUs, if the node is to have any."""
    if not network.gpus:
        return
    folders = filter(None, (environ.get("LD_LIBRARY_PATH"), str(root / NVIDIA / "lib64")))
    try:
        there = gpus({**environ, "LD_LIBRARY_PATH": ":".join(folders)})
    except NodeError as error:
        yield _finding("gpu.driver", str(error), "run elsewhere: exclude this node, and have it repaired")
        return
    if there is None:
        found = len(list((root / "dev").glob("nvidia[0-9]*")))
        if found < network.gpus:
            yield _too_few(found, network.gpus)
        else:
            what = "libnvidia-ml.so.1 is not here: driver and memory errors were not looked at"
            yield _finding("gpu.unseen", what, f"let LD_LIBRARY_PATH have /{NVIDIA}/lib64", severity="warning")
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


# --- the GPUs as torch has them ---------------------------------------------------------------------------------------

# Least drivers for a CUDA by its first number: all its minor versions run on them (table "Minimum Required Driver
# Version for CUDA Minor Version Compatibility", https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/index.html).
DRIVER_FLOORS: Mapping[str, str] = MappingProxyType({"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"})

VISIBLE = "CUDA_VISIBLE_DEVICES"


def wants_torch(network: NodeNetwork, environ: Mapping[str, str], root: Path) -> bool:
    """Return True if torch has to say whether it can use GPUs: those that were asked for, or that are just there.

    An empty list of visible GPUs, or -1, is how a user asks for CPUs.
    """
    if network.gpus:
        return True
    return environ.get(VISIBLE) not in {"", "-1"} and any((root / "dev").glob("nvidia[0-9]*"))


def check_used(
    network: NodeNetwork, seen: TorchSeen, environ: Mapping[str, str], *, processes: int
) -> Iterator[Finding]:
    """Check that torch can use the node's GPUs: it goes on without a word on CPUs, with gloo, if it cannot.

    What the job did not ask for is a warning: it may be meant.
    """
    if not network.gpus:
        if seen.gpus == 0:
            what, fix, _ = _why_unused(seen, environ)
            fix = f"{fix}; or set {VISIBLE} to nothing, if CPUs are meant"
            yield _finding("gpu.unused", f"{what}; the ranks run on CPUs", fix, severity="warning")
    elif seen.gpus == 0:
        what, fix, fault = _why_unused(seen, environ)
        yield Finding("error", "gpu.unused", f"{what}; the ranks would run on CPUs", fix, fault)
    # Fewer may be shown to the ranks than the node has, as long as each of them has one.
    elif seen.gpus < (processes if VISIBLE in environ else network.gpus):
        what = f"torch can use {seen.gpus} of the {network.gpus} GPUs that the job was given for {processes} ranks"
        fault = Fault.USER if VISIBLE in environ else Fault.NODE
        said = f" ({VISIBLE}={environ[VISIBLE]})" if VISIBLE in environ else ""
        yield Finding("error", "gpu.visible", f"{what}{said}", f"see which GPUs {VISIBLE} names, and MIG", fault)


def _why_unused(seen: TorchSeen, environ: Mapping[str, str]) -> tuple[str, str, Fault]:
    """Return why torch can use no GPU, what to do, and whose fault it is."""
    has = f"torch {seen.torch}, built with CUDA {seen.cuda}, cannot use the GPUs here"
    if seen.cuda is None:
        what = f"torch {seen.torch} was built without CUDA, and there are GPUs here"
        return what, "install a CUDA build of torch in the image", Fault.USER
    if old := re.search(r"driver on your system is too old(?: \(found version (\d+)\))?", seen.gpu_error):
        known = f" (it knows CUDA {int(old[1]) // 1000}.{int(old[1]) % 1000 // 10} at most)" if old[1] else ""
        major = seen.cuda.partition(".")[0]
        needs = f"CUDA {major} needs driver {DRIVER_FLOORS[major]} or newer" if major in DRIVER_FLOORS else "upgrade it"
        fix = f"{needs}. All nodes of a pool have the same one: upgrade the pool's, or use an image with an older CUDA"
        return f"{has}: the machine's driver is too old for it{known}", fix, Fault.NODE
    if "no kernel image is available" in seen.gpu_error:
        fix = "use an image whose torch was built for it: torch.cuda.get_arch_list() names what this one knows"
        return f"{has}: it has no code for this kind of GPU", fix, Fault.USER
    if VISIBLE in environ and "No CUDA GPUs are available" in seen.gpu_error:
        fix = f"leave {VISIBLE} out, or name GPUs that are here"
        return f"{has} with {VISIBLE}={environ[VISIBLE]!r} ({seen.gpu_error})", fix, Fault.USER
    return f"{has} ({seen.gpu_error})", "run elsewhere: exclude this node, and look at its driver", Fault.NODE


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


if __name__ == "__main__":
    main()
