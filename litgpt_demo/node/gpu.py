"""The GPUs of a node: how many, which driver, memory errors, and whether a rank's torch can use them.

Child processes query them, because a driver may hang, and because only a process like a rank gets true answers: the
image's NCCL_VERSION may be another's (pytorch/pytorch#122571), torch's own figure is that of its build, and nvidia-smi
shows GPUs that torch cannot use. `python -m litgpt_demo.node.gpu torch` prints torch's answer as JSON.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from litgpt_demo import PYTHON, timeouts
from litgpt_demo.errors import FailureClass, Finding, NodeError, UserError
from litgpt_demo.node.network import NodeNetwork, within

LIBCUDA = "libcuda.so.1"
_MOUNTED = "usr/local/nvidia/lib64"
"""The folder in which GKE mounts the driver's libraries into containers that request GPUs."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
_REPAIR = "run elsewhere: exclude this node, and have it repaired"

# Least drivers for a CUDA by its first number: all its minor versions run on them (table "Minimum Required Driver
# Version for CUDA Minor Version Compatibility", https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/index.html).
DRIVER_FLOORS: Mapping[str, str] = MappingProxyType({"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"})


@dataclass(frozen=True, kw_only=True)
class TorchSeen:
    """The torch of a rank on this machine."""

    torch: str
    cuda: str | None
    """The CUDA that it was built with; None for a build for CPUs or for GPUs of other makers."""
    nccl: str | None
    """The version of the NCCL that it loads; None if it loads none."""
    nccl_path: str
    gpus: int
    """The GPUs that it can use."""
    gpu_error: str
    """Its error if it can use none; empty if it was built without CUDA."""


def torch_seen(environ: Mapping[str, str]) -> TorchSeen:
    """Return the torch of a rank; a NodeError if it does not answer, a UserError if torch cannot be imported."""
    code, output, errors = _query("torch", environ, patience=timeouts.TORCH_PROBE)
    if code == 0:
        with suppress(ValueError, IndexError, TypeError):  # a preloaded library may print too
            return TorchSeen(**json.loads(output.splitlines()[-1]))
    lines = [line.strip() for line in (output + "\n" + errors).splitlines() if line.strip()]
    reason = lines[-1][:500] if lines else "no output"
    fix = "run `python -m litgpt_demo.node.gpu torch` in the image, and fix its error"
    raise UserError(f"torch cannot report its GPUs here (exit code {code}): {reason}", fix=fix)


def _query(what: str, environ: Mapping[str, str], *, patience: float) -> tuple[int, str, str]:
    command, pipe = [*PYTHON, "-m", __name__, what], subprocess.PIPE
    process = subprocess.Popen(command, env=dict(environ), stdout=pipe, stderr=pipe, text=True, errors="replace")
    try:
        output, errors = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired as error:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process in an uninterruptible call does not die
            process.communicate(timeout=1)
        hung = f"{what} did not answer for {patience:.0f} s: a GPU of this machine hangs, or its disk does"
        raise NodeError(hung, fix=_REPAIR) from error
    return process.returncode, output, errors


def check_gpus(network: NodeNetwork, environ: Mapping[str, str], *, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield what is wrong with the GPUs, if the node is to have any."""
    if not network.gpus:
        return
    folders = filter(None, (environ.get("LD_LIBRARY_PATH"), str(root / _MOUNTED)))
    try:
        code, output, errors = _query(
            "driver", {**environ, "LD_LIBRARY_PATH": ":".join(folders)}, patience=timeouts.DRIVER_PROBE
        )
        if code != 0:
            raise NodeError(f"the driver answered with an error: {' '.join(errors.split())[-300:]}", fix=_REPAIR)
    except NodeError as error:
        yield Finding.of(error, "gpu.driver")
        return
    gpus: list[dict[str, Any]] | None = json.loads(output.splitlines()[-1])
    count = len(list((root / "dev").glob("nvidia[0-9]*"))) if gpus is None else len(gpus)
    if count < network.gpus:
        what = f"this node has {count} GPUs, but its machine type has {network.gpus}: one may have fallen off the bus"
        yield Finding("error", "gpu.count", what, _REPAIR, FailureClass.NODE)
    elif gpus is None:
        what = "libnvidia-ml.so.1 was not found, so driver and memory errors were not checked"
        yield Finding("warning", "gpu.unseen", what, f"add /{_MOUNTED} to LD_LIBRARY_PATH", FailureClass.NODE)
    for gpu in gpus or ():
        if gpu["errors"]:
            what = f"GPU {gpu['index']} ({gpu['name']}) has {gpu['errors']} memory errors that ECC could not correct"
            fix = "run elsewhere: exclude this node, and have the GPU reset or replaced"
            yield Finding("error", "gpu.ecc", what, fix, FailureClass.NODE)
    for driver in sorted({gpu["driver"] for gpu in gpus or ()}):
        if not within(driver, network.drivers):
            what = f"the GPU driver is {driver}, but {network.name} works with {' or '.join(network.drivers)}"
            fix = "use node pools whose driver version is not `latest`"
            yield Finding("error", "gpu.driver-version", what, fix, FailureClass.NODE)


def check_used(
    network: NodeNetwork, seen: TorchSeen, environ: Mapping[str, str], *, processes: int
) -> Iterator[Finding]:
    """Check that torch can use the node's GPUs: without them it silently continues on CPUs, with gloo."""
    if seen.gpus == 0:
        what, fix, fault = _why_unused(seen, environ)
        if network.gpus:
            yield Finding("error", "gpu.unused", f"{what}; the ranks would run on CPUs", fix, fault)
        else:
            fix = f"{fix}, or set {VISIBLE} to an empty value to run on CPUs"
            yield Finding("warning", "gpu.unused", f"{what}; the ranks run on CPUs", fix, fault)
    # Ranks may see fewer GPUs than the node has, if each of them has one.
    elif network.gpus and seen.gpus < (processes if VISIBLE in environ else network.gpus):
        what = f"torch can use {seen.gpus} of the {network.gpus} GPUs that the job was given for {processes} ranks"
        fault = FailureClass.USER if VISIBLE in environ else FailureClass.NODE
        if VISIBLE in environ:
            what += f" ({VISIBLE}={environ[VISIBLE]})"
        yield Finding("error", "gpu.visible", what, f"check which GPUs {VISIBLE} names, and MIG", fault)


def _why_unused(seen: TorchSeen, environ: Mapping[str, str]) -> tuple[str, str, FailureClass]:
    if seen.cuda is None:
        what = f"torch {seen.torch} was built without CUDA, but this node has GPUs"
        return what, "install a CUDA build of torch in the image", FailureClass.USER
    what = f"torch {seen.torch}, built with CUDA {seen.cuda}, cannot use the GPUs here ({seen.gpu_error})"
    if "driver on your system is too old" in seen.gpu_error:
        major = seen.cuda.partition(".")[0]
        needs = f"CUDA {major} needs driver {DRIVER_FLOORS[major]} or newer: " if major in DRIVER_FLOORS else ""
        return what, f"{needs}upgrade the node's driver, or use an image with an older CUDA", FailureClass.NODE
    if "no kernel image is available" in seen.gpu_error:
        fix = "use an image whose torch was built for this GPU: torch.cuda.get_arch_list() names what this one knows"
        return what, fix, FailureClass.USER
    if VISIBLE in environ and "No CUDA GPUs are available" in seen.gpu_error:
        return (
            f"{what} with {VISIBLE}={environ[VISIBLE]!r}",
            f"unset {VISIBLE}, or set it to GPUs of this node",
            FailureClass.USER,
        )
    return what, "run elsewhere: exclude this node, and check its driver", FailureClass.NODE


def libcuda_is_cached() -> bool:
    """Return True if the loader finds the driver's library without LD_LIBRARY_PATH."""
    try:
        listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:  # an image without ldconfig, such as a distroless one
        return False
    return re.search(rf"^\s*{re.escape(LIBCUDA)} .*=> \S+$", listed, re.MULTILINE) is not None


def libcuda_folder(environ: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return the first folder of LD_LIBRARY_PATH, or GKE's, that has the driver's library; None if none has."""
    folders = (*environ.get("LD_LIBRARY_PATH", "").split(":"), str(root / _MOUNTED))
    return next((folder for folder in folders if folder and (Path(folder) / LIBCUDA).is_file()), None)


def _print_driver() -> None:
    """Print NVML's data of every GPU; null if its library does not exist. Errors are those of memory since the driver
    was loaded that ECC could not correct; null if they are not counted.
    """
    import pynvml as nvml

    gpus: list[dict[str, Any]] | None = None
    queried = "the driver"
    try:
        nvml.nvmlInit()
        driver, gpus = nvml.nvmlSystemGetDriverVersion(), []
        for index in range(nvml.nvmlDeviceGetCount()):
            queried, errors = f"GPU {index}", None
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            with suppress(nvml.NVMLError_NotSupported):
                errors = nvml.nvmlDeviceGetTotalEccErrors(
                    gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            gpus.append({"index": index, "name": nvml.nvmlDeviceGetName(gpu), "driver": driver, "errors": errors})
    except nvml.NVMLError_LibraryNotFound:
        pass
    except nvml.NVMLError as error:
        sys.exit(f"{queried}: {error}")
    print(json.dumps(gpus))


def _print_torch() -> None:
    import torch

    nccl, path = _nccl()
    # `torch.cuda.is_available()` gives no reason, and `device_count()` may be the driver's answer. A driver may start
    # although the build lacks code for the GPU.
    gpus, queried, error = 0, "", ""
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            gpus = torch.cuda.device_count()
            for index in range(gpus):
                queried = f"GPU {index}: "
                torch.ones(2, device=f"cuda:{index}").sum().item()
        except RuntimeError as raised:
            gpus, error = 0, f"{queried}{' '.join(str(raised).split())[:500]}"
    seen = TorchSeen(
        torch=torch.__version__, cuda=torch.version.cuda, nccl=nccl, nccl_path=path, gpus=gpus, gpu_error=error
    )
    print(json.dumps(asdict(seen)))


def _nccl() -> tuple[str | None, str]:
    """Return the version of the NCCL that torch calls, a preloaded one first, and the paths of all."""
    maps = Path("/proc/self/maps").read_text()
    paths = list(dict.fromkeys(re.findall(r"(/\S*libnccl\.so\S*)$", maps, re.MULTILINE)))
    library, code = ctypes.CDLL(None), ctypes.c_int()
    if paths and not hasattr(library, "ncclGetVersion"):  # only torch brought it
        library = ctypes.CDLL(paths[0])
    if not paths or library.ncclGetVersion(ctypes.byref(code)) != 0:
        return None, ""
    number = code.value  # since 2.9: major, two digits of minor, two of patch
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}", " and ".join(paths)


if __name__ == "__main__":
    {"driver": _print_driver, "torch": _print_torch}[sys.argv[1]]()
