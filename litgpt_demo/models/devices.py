"""The peak speed of devices: model FLOPs utilisation is a share of it, and memory is compared with it.

Figures are the makers' own for dense matrix products (datasheets print the figure with sparsity first, twice as much),
in FLOP/s with float32 sums, and memory in bytes as they sell it. No torch here: `plan` reads this too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GB, TERA = 10**9, 10**12


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of accelerator."""

    name: str
    pattern: str
    """The name by `torch.cuda.get_device_name()`, and the names that platforms have for it; as a regular expression."""
    memory: int
    """Bytes; the least of the versions that share a name."""
    half: float
    """Peak TFLOP/s in products of 16 bits."""
    float32: float
    float8: float | None = None
    bfloat16: bool = True
    """Whether those 16 bits may be bfloat16, as well as float16."""
    source: str

    def peak(self, multiplied: str) -> float | None:
        """FLOP/s in products of this type; None where it is not fast on the device."""
        figures = {"float16": self.half, "float32": self.float32, "float8": self.float8}
        figure = self.half if multiplied == "bfloat16" and self.bfloat16 else figures.get(multiplied)
        return None if figure is None else figure * TERA


_HOPPER = "https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306"
_H200 = "https://resources.nvidia.com/en-us-data-center-overview/hpc-datasheet-sc23-h200"
_A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf"
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"

# The first that matches counts, so a variant stands before what it is a variant of.
DEVICES = (
    Device(name="GB200", pattern=r"GB200|a4x", memory=186 * GB,
           half=2500, float32=80, float8=5000,  # of the 72 in a rack, each
           source="https://www.nvidia.com/en-us/data-center/gb200-nvl72/"),
    Device(name="B200", pattern=r"B200|a4-highgpu", memory=180 * GB,
           half=2250, float32=75, float8=4500,  # of the eight in an HGX board, each
           source="https://www.nvidia.com/en-us/data-center/hgx/"),
    Device(name="H200 NVL", pattern=r"H200[ -]NVL", memory=141 * GB,
           half=835.5, float32=60, float8=1670.5, source=_H200),
    Device(name="H200", pattern=r"H200|a3-ultragpu", memory=141 * GB,
           half=989.5, float32=67, float8=1979, source=_H200),
    Device(name="H100 PCIe", pattern=r"H100[ -]PCIe", memory=80 * GB,
           half=756.5, float32=51, float8=1513, source=_HOPPER),
    Device(name="H100 NVL", pattern=r"H100[ -]NVL", memory=94 * GB,
           half=835.5, float32=60, float8=1670.5, source=_HOPPER),
    Device(name="H100", pattern=r"H100|a3-(high|mega|edge)gpu", memory=80 * GB,
           half=989.5, float32=67, float8=1979, source=_HOPPER),
    Device(name="A100 80GB", pattern=r"A100.*80\s?GB|a2-ultragpu", memory=80 * GB,
           half=312, float32=19.5, source=_A100),
    Device(name="A100", pattern=r"A100|a2-(high|mega)gpu", memory=40 * GB,
           half=312, float32=19.5, source=_A100),
    Device(name="L40S", pattern=r"\bL40S\b", memory=48 * GB,
           half=362, float32=91.6, float8=733,
           source="https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"),
    Device(name="L4", pattern=r"\bL4\b|g2-standard", memory=24 * GB,
           half=121, float32=30.3, float8=242.5,
           source="https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet"),
    Device(name="A10", pattern=r"\bA10G?\b", memory=24 * GB,
           half=125, float32=31.2,
           source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf"),
    Device(name="T4", pattern=r"\bT4\b", memory=16 * GB,
           half=65, float32=8.1, bfloat16=False,
           source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"),
    Device(name="V100 PCIe", pattern=r"V100[ -]PCIe", memory=16 * GB,
           half=112, float32=14, bfloat16=False, source=_V100),
    Device(name="V100", pattern=r"V100", memory=16 * GB,
           half=125, float32=15.7, bfloat16=False, source=_V100),
)  # fmt: skip


def device_named(name: str) -> Device | None:
    """The device that a driver or a platform calls so; None where the table has no figure."""
    return next((device for device in DEVICES if re.search(device.pattern, name, re.IGNORECASE)), None)


def multiplied_in(precision: str, *, float8: bool = False) -> str:
    """The type of a training's matrix products, for Fabric's word for its precision."""
    if float8:
        return "float8"
    return {"16": "float16", "bf": "bfloat16"}.get(precision[:2], "float32")
