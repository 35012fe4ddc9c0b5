"""Kubernetes' quantities: `500m`, `16Gi`, `8`."""

from __future__ import annotations

import re

_FACTORS = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_FACTORS |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTP", start=1)}
_QUANTITY = re.compile(r"([0-9.]+(?:e[0-9]+)?)([A-Za-z]*)")


def amount(given: str | int | float) -> float:
    """The number that a quantity stands for.

    Raises:
        ValueError: It is not a quantity.
    """
    match = _QUANTITY.fullmatch(str(given))
    if match is None or match[2] not in _FACTORS:
        raise ValueError(f"{given!r} is not a quantity")
    return float(match[1]) * _FACTORS[match[2]]


def binary(given: str | int | float) -> bool:
    """Whether the quantity is written in powers of 1024."""
    return str(given).endswith("i")


def written(value: float, *, in_binary: bool = False) -> str:
    """The number as Kubernetes writes it: with the largest suffix that leaves a whole number."""
    if value != int(value):
        return f"{value * 1000:.0f}m"
    whole = int(value)
    suffixes = [(1024**power, f"{letter}i") for power, letter in enumerate("KMGTP", start=1)]
    if not in_binary:
        suffixes = [(1000**power, letter) for power, letter in enumerate("kMGTP", start=1)]
    for factor, suffix in reversed(suffixes):
        if whole and whole % factor == 0:
            return f"{whole // factor}{suffix}"
    return str(whole)
