"""Distributions that a requirements file stands for."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def requirements(text: str) -> list[str]:
    """The lines of a requirements file without its comments."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def closure(wanted: Iterable[Requirement]) -> set[str]:
    """The distributions that pip would install, by what the installed ones say they need (extras left out)."""
    found: set[str] = set()
    queue = list(wanted)
    while queue:
        needed = queue.pop()
        name = canonicalize_name(needed.name)
        if name in found or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        with suppress(PackageNotFoundError):
            queue += map(Requirement, requires(name) or ())
    return found
