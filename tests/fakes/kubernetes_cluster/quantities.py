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
