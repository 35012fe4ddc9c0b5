"""Torch as a rank will get it: the NCCL that it loads, and the GPUs that it can compute on.

    python -m litgpt_demo.node.torch_seen     what it says, as JSON

A process like a rank is asked, because nothing else knows. The image's NCCL_VERSION may be another's
(pytorch/pytorch#122571), torch's own figure is what it was built with, and nvidia-smi shows GPUs that torch cannot use.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from litgpt_demo import PYTHON
from litgpt_demo.errors import NodeError, UserError


@dataclass(frozen=True, kw_only=True)
class TorchSeen:
    """The torch of this image, on this machine."""

    torch: str
    """Its version."""
    cuda: str | None
    """The CUDA that it was built with; None of a build for CPUs, or for other makers' GPUs."""
    nccl: str | None
    """The version of the NCCL that it loads; None if it loads none."""
    nccl_path: str
    gpus: int
    """The GPUs that it can use."""
    gpu_error: str
    """Its error where it can use none; empty where it was built without CUDA."""


def torch_seen(environ: Mapping[str, str], *, python: str | None = None) -> TorchSeen:
    """Return what a rank would get.

    Raises:
        NodeError: it does not answer.
        UserError: torch cannot be imported or asked; the message has the last line that it left.
    """
    patience = 300.0  # importing torch from an image that was just pulled reads gigabytes
    hung = f"torch did not say within {patience:.0f} s what it can use: a GPU of this machine hangs, or its disk does"
    command = [*((python,) if python else PYTHON), "-m", __name__]
    try:
        code, told, errors = answer_of(command, environ, patience=patience, hung=hung)
    except OSError as error:
        raise UserError(f"{python} cannot be run: {error}") from error
    if code == 0:
        with suppress(ValueError, IndexError, TypeError):  # a preloaded library may print too
            return TorchSeen(**json.loads(told.splitlines()[-1]))
    words = next((line for line in reversed([*told.splitlines(), *errors.splitlines()]) if line.strip()), "no word")
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    raise UserError(f"torch cannot be asked here what it can use ({ended}): {words.strip()[:500]}")


def answer_of(
    command: Sequence[str], environ: Mapping[str, str], *, patience: float, hung: str
) -> tuple[int, str, str]:
    """Return the exit code of a process, its output and its errors; one that waits for a driver is left behind."""
    process = subprocess.Popen(
        command, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        told, errors = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired as error:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process in an uninterruptible call does not die
            process.communicate(timeout=1)
        raise NodeError(hung) from error
    return process.returncode, told, errors


# --- in that process --------------------------------------------------------------------------------------------------


def main() -> int:
    """Import torch as a rank would, and ask it."""
    import torch

    nccl, path = _nccl()
    # `torch.cuda.is_available()` says no and not why, and `device_count()` may be the driver's answer. A driver may
    # start, and the build lack code for the GPU.
    gpus, asked, error = 0, "", ""
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            gpus = torch.cuda.device_count()
            for index in range(gpus):
                asked = f"GPU {index}: "
                torch.ones(2, device=f"cuda:{index}").sum().item()
        except RuntimeError as raised:
            gpus, error = 0, f"{asked}{' '.join(str(raised).split())[:500]}"
    told = TorchSeen(
        torch=torch.__version__, cuda=torch.version.cuda, nccl=nccl, nccl_path=path, gpus=gpus, gpu_error=error
    )
    print(json.dumps(asdict(told)))
    return 0


def _nccl() -> tuple[str | None, str]:
    """Return version and path of the NCCL whose functions torch calls: of several, the one that was preloaded."""
    maps = Path("/proc/self/maps").read_text()
    paths = list(dict.fromkeys(re.findall(r"(/\S*libnccl\.so\S*)$", maps, re.MULTILINE)))
    if not paths:
        return None, ""
    library, code, path = ctypes.CDLL(None), ctypes.c_int(), paths[0]
    if hasattr(library, "ncclGetVersion"):
        address = ctypes.cast(library.ncclGetVersion, ctypes.c_void_p).value or 0
        for start, end, mapped in re.findall(r"^(\w+)-(\w+) .* (/\S*libnccl\.so\S*)$", maps, re.MULTILINE):
            if int(start, 16) <= address < int(end, 16):
                path = mapped
    else:  # it came with torch alone
        library = ctypes.CDLL(path)
    if library.ncclGetVersion(ctypes.byref(code)) != 0:
        return None, path
    number = code.value  # since 2.9: major, two digits of minor, two of patch
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}", path


if __name__ == "__main__":
    sys.exit(main())
