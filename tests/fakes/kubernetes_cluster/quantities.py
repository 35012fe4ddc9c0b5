"""Kubernetes' quantities: `500m`, `16Gi`, `8`."""

from __future__ import annotations

_FACTORS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_FACTORS |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGT", start=1)}


def amount(given: str | float) -> float:
    """Return the number that a quantity stands for."""
    text = str(given)
    digits = text.rstrip("mkKMGTi")
    return float(digits) * _FACTORS.get(text.removeprefix(digits), 1.0)
