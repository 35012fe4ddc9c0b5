"""How well a training uses its device: the device's peak, and the memory that is held. Neither waits for the device."""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path
from time import perf_counter

import torch

from litgpt_demo.config import TrainConfig
from litgpt_demo.devices import device_named, multiplied_in
from litgpt_demo.training.rounding import rounds_by_hand

_SIDE = 1024  # of the matrices: past what caches favour, and a tenth of a second on one slow core
_LONG_ENOUGH = 0.1  # seconds of products


def device_name(device: torch.device) -> str:
    """What the driver calls a GPU; a CPU's model."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    said = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return said or platform.processor() or platform.machine()


def peak_flops(device: torch.device, train: TrainConfig) -> float | None:
    """The most FLOP/s that this process could do in the products of this training; None for a GPU not in our table.

    A CPU's is measured, in the threads that this process has, for its clock and its neighbours decide.
    """
    if device.type == "cuda":
        known = device_named(device_name(device))
        return None if known is None else known.peak(multiplied_in(train.precision, float8=train.float8))
    narrow = multiplied_in(train.precision) == "bfloat16" and not rounds_by_hand(torch.bfloat16, device.type)
    return _measured(torch.bfloat16 if narrow else torch.float32)


def _measured(dtype: torch.dtype) -> float:
    """The fastest of some matrix products."""
    one = torch.ones(_SIDE, _SIDE, dtype=dtype)
    out, best, began = torch.empty_like(one), float("inf"), perf_counter()
    while True:
        start = perf_counter()
        torch.mm(one, one, out=out)
        best = min(best, perf_counter() - start)
        if start - began > _LONG_ENOUGH:
            return 2.0 * _SIDE**3 / best


def held_bytes(device: torch.device) -> int:
    """The most that was held at once so far: tensors on a GPU, as its allocator counts them; this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # getrusage begins with the peak of the process that started this one.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    if peak := next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None):
        return int(peak) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
