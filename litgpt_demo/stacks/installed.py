"""Compare what is installed with the labels that the image is given: `python installed.py torch=2.13.0 nccl=2.29.7 …`.

Runs while the image is built, before our code is in it: the standard library and torch only.
"""

from __future__ import annotations

import platform
import re
import sys
from importlib import metadata

_PROCESSORS = {"x86_64": "amd64", "aarch64": "arm64"}  # by the kernel's name: Docker's


def installed() -> dict[str, str]:
    """Return what is installed here. Importing torch proves that it loads, with the NCCL that it finds."""
    import torch

    nccl = [found.version for found in metadata.distributions() if re.match(r"nvidia-nccl-cu\d+$", found.name)]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "cuda": torch.version.cuda or "",
        "nccl": nccl[0] if nccl else "",
        "glibc": platform.libc_ver()[1],
        "architecture": _PROCESSORS.get(platform.machine(), platform.machine()),
    }


def differences(labels: dict[str, str], found: dict[str, str]) -> list[str]:
    """Return a sentence for each label that is not true: `3.11` is true of 3.11.15, but not of 3.1."""
    wrong = [
        f"the label {name} says {labels[name]!r}, but the image has {found[name]!r}"
        for name in sorted(found.keys() & labels.keys())
        if found[name] != labels[name] and not (labels[name] and found[name].startswith(f"{labels[name]}."))
    ]
    least = labels.get("least-glibc", "")
    if least and numbers(found["glibc"]) < numbers(least):
        wrong.append(f"the network's plugin needs glibc {least}, but the image has {found['glibc'] or 'none'}")
    return wrong


def numbers(version: str) -> list[int]:
    """Return 2.35 as [2, 35]; a C library that is not glibc has no version, and comes before all."""
    return [int(number) for number in re.findall(r"\d+", version)]


if __name__ == "__main__":
    wrong = differences(dict(word.split("=", 1) for word in sys.argv[1:]), installed())
    if wrong:
        sys.exit("; ".join(wrong) + "\n-> take another image.base, or correct the stack in launcher/images/stacks.py")
