"""The utilisation of a device: its peak, and the memory that is held. Neither waits for the device."""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path
from time import perf_counter

import torch

from litgpt_demo.config import TrainConfig
from litgpt_demo.models.devices import device_named, multiplied_in

_SIDES = (256, 384, 512, 768, 1024)
"""Sizes of the matrices. Which is fastest depends on caches and threads; a short product may escape other load."""
_LONG_ENOUGH = 0.3  # seconds of products


def device_name(device: torch.device) -> str:
    """Return the driver's name of a GPU; a CPU's model."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    said = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return said or platform.processor() or platform.machine()


class Peak:
    """The most FLOP/s that this process could do in the products of this training.

    A GPU's is in our table. A CPU's is measured, in the threads that this process has, for its clock and its neighbours
    decide. Other load can only make the measurement too small. A training that beats it proves it wrong: no share is
    told until it is measured again.
    """

    def __init__(self, device: torch.device, train: TrainConfig) -> None:
        self._dtype: torch.dtype | None = None
        self._beaten = False
        if device.type == "cuda":
            known = device_named(device_name(device))
            self.flops = None if known is None else known.peak(multiplied_in(train.precision, float8=train.float8))
            return
        self._dtype = torch.bfloat16 if multiplied_in(train.precision) == "bfloat16" else torch.float32
        self.flops = measured_flops(self._dtype)

    def share(self, flops: float) -> float | None:
        """Return what share of the peak `flops` a second are; None where the peak is not known or proved wrong."""
        if self.flops is None:
            return None
        self._beaten = self._beaten or flops > self.flops
        return None if self._beaten else flops / self.flops

    def measure_again(self) -> None:
        """Measure a CPU again if its peak was beaten. It takes a moment: call it where the training stands still."""
        if self._beaten and self._dtype is not None and self.flops is not None:
            self.flops = max(self.flops, measured_flops(self._dtype))
        self._beaten = False


def measured_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of many square matrix products of several sizes."""
    pairs = [(torch.ones(side, side, dtype=dtype), torch.empty(side, side, dtype=dtype)) for side in _SIDES]
    best, began = 0.0, perf_counter()
    while perf_counter() - began < _LONG_ENOUGH:
        for one, out in pairs:
            start = perf_counter()
            torch.mm(one, one, out=out)
            best = max(best, 2.0 * len(one) ** 3 / (perf_counter() - start))
    return best


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
