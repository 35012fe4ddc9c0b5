"""The software stacks of our images: versions that were installed and tried together, one per need of a network.

The NCCL that a torch wheel loads is its own: libtorch_cuda.so names its folder by DT_RPATH, which comes before
LD_LIBRARY_PATH, and uses symbols that older releases lack. So another NCCL means another torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Self

from litgpt_demo.node.gpu import DRIVER_FLOORS

LABELS = "io.github.train-litgpt."
"""The prefix of the labels by which an image declares its contents, in the form of OCI's annotation rules
(https://github.com/opencontainers/image-spec/blob/main/annotations.md)."""


# Anybody may have written a label. The forms are bounded: a number of thousands of digits is none for Python.
_VERSION = re.compile(r"\d{1,6}(\.\d{1,6}){0,4}[\w.+-]{0,40}", re.ASCII)
_WORD = re.compile(r"[\w.-]{1,60}", re.ASCII)
_FORMS = {"stack": _WORD, "architecture": _WORD}


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The versions that an image says it holds; empty where it does not say."""

    stack: str = ""
    torch: str = ""
    nccl: str = ""
    cuda: str = ""
    python: str = ""
    glibc: str = ""
    architecture: str = ""
    """The processor by Docker's name: amd64, arm64."""

    @property
    def labels(self) -> dict[str, str]:
        return {LABELS + name: value for name, value in asdict(self).items() if value}

    @classmethod
    def of_labels(cls, labels: Mapping[str, str], *, architecture: str = "") -> Self:
        """Return the valid values of an image's labels. `architecture`, of its config, wins over its label."""
        values = {field.name: labels.get(LABELS + field.name, "") for field in fields(cls)}
        valid = {name: value for name, value in values.items() if _FORMS.get(name, _VERSION).fullmatch(value)}
        if architecture:
            valid["architecture"] = architecture
        return cls(**valid)

    def __str__(self) -> str:
        named = {"torch": self.torch, "NCCL": self.nccl, "CUDA": self.cuda, "Python": self.python, "glibc": self.glibc}
        versions = ", ".join(f"{name} {version}" for name, version in named.items() if version)
        return f"stack {self.stack}: {versions}" if self.stack else versions


@dataclass(frozen=True, kw_only=True)
class Stack(Contents):
    """The versions of one image: Python and glibc are those of the product's own base image, CUDA is what torch's wheel
    was built with, and NCCL what it requires (its metadata, nvidia-nccl-cu13)."""

    least_glibc: str = ""
    """The oldest C library that the plugin loads in which this stack is made for."""

    @property
    def driver(self) -> str:
        """Return the oldest GPU driver that this CUDA runs on; empty for a stack without CUDA."""
        return DRIVER_FLOORS[self.cuda.partition(".")[0]] if self.cuda else ""

    def __str__(self) -> str:
        return f"stack {self.stack} (torch {self.torch})"

    @property
    def lock(self) -> str:
        """Every package of the image with its hashes; a path in the checkout."""
        return f"litgpt_demo/stacks/{self.stack}.lock"

    @property
    def pins(self) -> tuple[str, ...]:
        """The requirements that set this stack apart; they go before those of constraints.txt."""
        return f"torch=={self.torch}", f"nvidia-nccl-cu13=={self.nccl}"

    def contents(self, architecture: str = "", *, own_base: bool = True) -> Contents:
        """Return what an image of this stack holds. Python and glibc are known of the product's own base."""
        base = {"python": self.python, "glibc": self.glibc} if own_base else {}
        wheels = {"torch": self.torch, "nccl": self.nccl, "cuda": self.cuda}
        return Contents(stack=self.stack, architecture=architecture, **wheels, **base)


# The tag of the base image, python:3.11.15-bookworm, is Debian 12 (https://packages.debian.org/bookworm/libc6).
_BASE = {"python": "3.11.15", "glibc": "2.36"}
DEFAULT_STACK = Stack(stack="default", **_BASE, torch="2.13.0", cuda="13.0", nccl="2.29.7")
# The plugin of GPUDirect-TCPXO is qualified for NCCL 2.28, which came only with this torch: 2.10 has 2.27.5,
# 2.12 has 2.29 (nvidia-nccl-cu12 and -cu13 in the wheels' metadata).
_TCPXO = Stack(stack="tcpxo", **_BASE, least_glibc="2.35", torch="2.11.0", cuda="13.0", nccl="2.28.9")

STACKS: Mapping[str, Stack] = MappingProxyType({stack.stack: stack for stack in (DEFAULT_STACK, _TCPXO)})
