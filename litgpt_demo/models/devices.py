"""The peak speed of devices: model FLOPs utilisation is a share of it, and memory is compared with it.

Figures are the makers' own for dense matrix products (datasheets print the figure with sparsity first, twice as much),
in FLOP/s with float32 sums, and memory in bytes as they sell it. No torch here: `plan` reads this too.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Device(NamedTuple):
    name: str
    pattern: str
    """The name by `torch.cuda.get_device_name()`, and the names that platforms have for it; as a regular expression."""
    memory: int
    """Bytes; the least of the versions that share a name."""
    tflops_16bit: float
    """Peak TFLOP/s in products of 16 bits."""
    tflops_32bit: float
    tflops_8bit: float | None
    has_bfloat16: bool
    """Whether those 16 bits may be bfloat16, as well as float16."""
    source: str

    def peak(self, multiplied: str) -> float | None:
        """FLOP/s in products of this type; None where it is not fast on the device."""
        # The trainer multiplies float32 numbers in TF32, which GPUs with bfloat16 do at half the speed of 16 bits.
        wide = max(self.tflops_32bit, self.tflops_16bit / 2) if self.has_bfloat16 else self.tflops_32bit
        figures = {"float16": self.tflops_16bit, "float32": wide, "float8": self.tflops_8bit}
        figure = self.tflops_16bit if multiplied == "bfloat16" and self.has_bfloat16 else figures.get(multiplied)
        return None if figure is None else figure * 1e12


_NVIDIA, _MORE = "https://www.nvidia.com", "https://resources.nvidia.com"
_SHEETS = f"{_NVIDIA}/content/dam/en-zz/Solutions/Data-Center"
_GB300 = f"{_NVIDIA}/en-us/data-center/gb300-nvl72/"  # of the 72 in a rack, each
_GB200 = f"{_NVIDIA}/en-us/data-center/gb200-nvl72/"  # of the 72 in a rack, each
_HGX = f"{_NVIDIA}/en-us/data-center/hgx/"  # of the eight in an HGX board, each
_PRO = f"{_NVIDIA}/en-us/data-center/rtx-pro-6000-blackwell-server-edition/"  # an eighth of its FP4 with sparsity
_GH200 = f"{_MORE}/en-us-grace-cpu/grace-hopper-superchip"
_H200 = f"{_MORE}/en-us-data-center-overview/hpc-datasheet-sc23-h200"
_H100 = f"{_MORE}/en-us-gpu-resources/h100-datasheet-24306"
# Sold in China, without datasheets of the maker's that are open to all.
_H800 = "https://github.com/citsjtu2020/LLM-Prof/blob/main/hardware_spec.md"
_A100 = f"{_SHEETS}/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf"
_L40S = f"{_MORE}/en-us-l40s/l40s-datasheet-28413"
_L40 = f"{_NVIDIA}/content/dam/en-zz/Solutions/design-visualization/support-guide/NVIDIA-L40-Datasheet-January-2023.pdf"
_L4 = f"{_MORE}/en-us-data-center-overview/l4-gpu-datasheet"
_A10 = f"{_SHEETS}/a10/pdf/a10-datasheet.pdf"
_A10G = "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"
_T4 = f"{_SHEETS}/tesla-t4/t4-tensor-core-datasheet-951643.pdf"
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"

GB = 10**9

# The first that matches counts, so a variant stands before what it is a variant of. A name ends where its word does:
# GH200 is not an H200, and its 480GB are the CPU's memory.
DEVICES = (
    Device("GB300", r"\bGB300\b|a4x-maxgpu", 279 * GB, 2500, 80, 5000, True, _GB300),
    Device("B300", r"\bB300\b", 270 * GB, 2250, 75, 4500, True, _HGX),
    Device("GB200", r"\bGB200\b|a4x", 186 * GB, 2500, 80, 5000, True, _GB200),
    Device("B200", r"\bB200\b|a4-highgpu", 180 * GB, 2250, 75, 4500, True, _HGX),
    Device("RTX PRO 6000", r"RTX PRO 6000(?!.*Max-Q)|g4-standard", 96 * GB, 500, 120, 1000, True, _PRO),
    Device("GH200 144GB", r"\bGH200\b.*\b144\s?GB?\b", 144 * GB, 989.5, 67, 1979, True, _GH200),
    Device("GH200", r"\bGH200\b", 96 * GB, 989.5, 67, 1979, True, _GH200),
    Device("H200 NVL", r"\bH200[ -]NVL\b", 141 * GB, 835.5, 60, 1670.5, True, _H200),
    Device("H200", r"\bH200\b|a3-ultragpu", 141 * GB, 989.5, 67, 1979, True, _H200),
    Device("H100 PCIe", r"\bH100[ -]PCIe\b", 80 * GB, 756.5, 51, 1513, True, _H100),
    Device("H100 NVL", r"\bH100[ -]NVL\b", 94 * GB, 835.5, 60, 1670.5, True, _H100),
    Device("H100", r"\bH100\b|a3-(high|mega|edge)gpu", 80 * GB, 989.5, 67, 1979, True, _H100),
    Device("H800", r"\bH800\b(?![ -]PCIe)", 80 * GB, 989.5, 67, 1979, True, _H800),
    Device("H20", r"\bH20\b", 96 * GB, 148, 44, 296, True, _H800),
    Device("A100 80GB", r"\bA100\b.*80\s?GB|a2-ultragpu", 80 * GB, 312, 19.5, None, True, _A100),
    Device("A100", r"\bA100\b|a2-(high|mega)gpu", 40 * GB, 312, 19.5, None, True, _A100),
    Device("L40S", r"\bL40S\b", 48 * GB, 362, 91.6, 733, True, _L40S),
    Device("L40", r"\bL40\b", 48 * GB, 181, 90.5, 362, True, _L40),
    Device("L4", r"\bL4\b|g2-standard", 24 * GB, 121, 30.3, 242.5, True, _L4),
    Device("A10G", r"\bA10G\b", 24 * GB, 70, 35, None, True, _A10G),
    Device("A10", r"\bA10\b", 24 * GB, 125, 31.2, None, True, _A10),
    Device("T4", r"\bT4\b", 16 * GB, 65, 8.1, None, False, _T4),
    Device("V100 PCIe", r"\bV100S?[ -]PCIe\b", 16 * GB, 112, 14, None, False, _V100),
    Device("V100", r"\bV100\b", 16 * GB, 125, 15.7, None, False, _V100),
)


def device_named(name: str) -> Device | None:
    """The device that a driver or a platform calls so; None where the table has no figure."""
    return next((device for device in DEVICES if re.search(device.pattern, name, re.IGNORECASE)), None)


def matmul_dtype(precision: str, *, float8: bool = False) -> str:
    """The type of a training's matrix products, for Fabric's word for its precision."""
    if float8:
        return "float8"
    return {"16": "float16", "bf": "bfloat16"}.get(precision[:2], "float32")
