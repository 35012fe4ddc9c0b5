"""The GPUs of a node: how many, which driver, with errors or without, and the driver's library."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from litgpt_demo import PYTHON
from litgpt_demo.errors import Fault, NodeError
from litgpt_demo.findings import Finding
from litgpt_demo.node.network import NodeNetwork, within
from litgpt_demo.node.torch_seen import TorchSeen, answer_of

LIBCUDA = "libcuda.so.1"
_MOUNTED = "usr/local/nvidia/lib64"
"""The folder in which GKE mounts the driver's libraries into containers that ask for GPUs."""

# Seconds. It takes 10 with eight GPUs and no persistence daemon; forever, when a GPU has fallen off the bus.
_PATIENCE = 60.0


def _asked(environ: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """What `main` finds of each GPU, None if the driver's library is not here. A process is asked that can be left
    behind, hung."""
    hung = f"the driver did not answer for {_PATIENCE:.0f} s: a GPU of this machine has hung"
    code, told, words = answer_of([*PYTHON, "-m", __name__], environ, patience=_PATIENCE, hung=hung)
    if code != 0:
        raise NodeError(f"the driver answered with an error: {' '.join(words.split())[-300:]}")
    found: list[dict[str, Any]] | None = json.loads(told.splitlines()[-1])
    return found


def main() -> None:
    """Print what NVML, the driver's library for questions, says of every GPU; null if there is no such library.

    Of errors, those of memory since the driver was loaded that ECC could not correct; null where they are not counted.
    """
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
    folders = filter(None, (environ.get("LD_LIBRARY_PATH"), str(root / _MOUNTED)))
    try:
        gpus = _asked({**environ, "LD_LIBRARY_PATH": ":".join(folders)})
    except NodeError as error:
        fix = "run elsewhere: exclude this node, and have it repaired"
        yield Finding("error", "gpu.driver", str(error), fix, Fault.NODE)
        return
    count = len(list((root / "dev").glob("nvidia[0-9]*")) if gpus is None else gpus)
    if count < network.gpus:
        what = f"{count} GPUs are here, and the job was given machines with {network.gpus}"
        fix = "run elsewhere: exclude this node; one of its GPUs has fallen off the bus"
        yield Finding("error", "gpu.count", what, fix, Fault.NODE)
    elif gpus is None:
        what = "libnvidia-ml.so.1 is not here: driver and memory errors were not looked at"
        yield Finding("warning", "gpu.unseen", what, f"let LD_LIBRARY_PATH have /{_MOUNTED}", Fault.NODE)
    for gpu in gpus or ():
        if gpu["errors"]:
            what = f"GPU {gpu['index']} ({gpu['name']}) has {gpu['errors']} memory errors that ECC could not correct"
            fix = "run elsewhere: exclude this node, and have the GPU reset or replaced"
            yield Finding("error", "gpu.ecc", what, fix, Fault.NODE)
    for driver in sorted({gpu["driver"] for gpu in gpus or ()}):
        if not within(driver, network.drivers):
            what = f"the GPU driver is {driver}, and {network.name} works with {' or '.join(network.drivers)}"
            fix = "use node pools whose driver version is not `latest`"
            yield Finding("error", "gpu.driver-version", what, fix, Fault.NODE)


# --- the GPUs as torch has them ---------------------------------------------------------------------------------------

# Least drivers for a CUDA by its first number: all its minor versions run on them (table "Minimum Required Driver
# Version for CUDA Minor Version Compatibility", https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/index.html).
DRIVER_FLOORS: Mapping[str, str] = MappingProxyType({"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"})

VISIBLE = "CUDA_VISIBLE_DEVICES"


def check_used(
    network: NodeNetwork, seen: TorchSeen, environ: Mapping[str, str], *, processes: int
) -> Iterator[Finding]:
    """Check that torch can use the node's GPUs: it goes on without a word on CPUs, with gloo, if it cannot.

    What the job did not ask for is a warning: it may be meant.
    """
    if not network.gpus:
        if seen.gpus == 0:
            what, fix, fault = _why_unused(seen, environ)
            fix = f"{fix}; or set {VISIBLE} to nothing, if CPUs are meant"
            yield Finding("warning", "gpu.unused", f"{what}; the ranks run on CPUs", fix, fault)
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


# --- the driver's library ---------------------------------------------------------------------------------------------


def libcuda_is_cached() -> bool:
    """Return True if the loader finds the driver's library by itself."""
    try:
        listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:  # an image without ldconfig, such as a distroless one
        return False
    return re.search(rf"^\s*{re.escape(LIBCUDA)} .*=> \S+$", listed, re.MULTILINE) is not None


def libcuda_folder(environ: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return the first folder of LD_LIBRARY_PATH, or GKE's, that has the driver's library; None if none has."""
    folders = (*environ.get("LD_LIBRARY_PATH", "").split(":"), str(root / _MOUNTED))
    return next((folder for folder in folders if folder and (Path(folder) / LIBCUDA).is_file()), None)


if __name__ == "__main__":
    main()
