"""The software stacks of our images: versions that were installed and tried together, one per need of a network.

The NCCL that a torch wheel loads is its own: libtorch_cuda.so names its folder by DT_RPATH, which comes before
LD_LIBRARY_PATH, and uses symbols that older releases lack. So another NCCL means another torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The versions of one image."""

    name: str
    python: str
    """The version in the tag of the base image: 3.11.15."""
    torch: str
    cuda: str
    """The CUDA that torch's wheel was built with: 13.0."""
    nccl: str
    """The NCCL that torch's wheel requires (its metadata, nvidia-nccl-cu13)."""
    driver: str
    """The oldest GPU driver that this CUDA runs on."""
    source: str
    """Address of the page that gives the driver."""

    @property
    def lock(self) -> str:
        """Every package of the image with its hashes; a path in the checkout."""
        return f"litgpt_demo/stacks/{self.name}.lock"


# Minor versions of CUDA 13 run on every driver since that of 13.0.
_CUDA_13 = "https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/index.html"

_ALL = (
    Stack(
        name="default",
        python="3.11.15",
        torch="2.13.0",
        cuda="13.0",
        nccl="2.29.7",
        driver="580.65.06",
        source=_CUDA_13,
    ),
)

STACKS: Mapping[str, Stack] = MappingProxyType({stack.name: stack for stack in _ALL})
DEFAULT_STACK = STACKS["default"]
