"""Samples of real GPUs, in NVML's words and units, and samples that are made of them.

`H100` and `H200` are recorded: the values that nvidia-smi 590.48.01, which asks NVML, printed on one machine each while
the GPU was idle and while gpu-burn ran, as CSV. They are from the captures of
https://github.com/utkuozdemir/nvidia_gpu_exporter (MIT), internal/captures:
linux-x86_64__nvidia-h100-80gb-hbm3__590.48.01.txt, 2026-07-14 08:12:38 and 08:12:53 UTC, and
linux-x86_64__nvidia-h200__590.48.01.txt, 2026-07-03 22:10:46 and 22:11:09 UTC.
NVML counts memory in bytes and power in milliwatts where nvidia-smi prints MiB and W; nothing else was changed.

What `with_trouble` returns was measured nowhere: it is a recorded sample with one of NVML's values replaced, because no
recording of a GPU in trouble was to be had.
"""

from __future__ import annotations

from typing import Any

MIB = 1 << 20


def _sample(utilization: int, used: int, total: int, power: int, temperature: int, clock: int, reasons: int) -> Any:
    return {
        "utilization": utilization, "used": used * MIB, "total": total * MIB, "power": power,
        "temperature": temperature, "clock": clock, "reasons": reasons, "corrected": 0, "uncorrected": 0,
    }  # fmt: skip


H100 = (_sample(0, 0, 81_559, 69_850, 41, 345, 0x1), _sample(100, 19_818, 81_559, 631_950, 59, 1980, 0x0))
H200 = (_sample(0, 0, 143_771, 77_710, 28, 345, 0x1), _sample(100, 32_362, 143_771, 627_400, 52, 1980, 0x0))


def with_trouble(sample: dict[str, Any], **values: int) -> dict[str, Any]:
    """Return a sample that was not recorded: this one with some values replaced."""
    return {**sample, **values}
