"""Requirements files."""

from __future__ import annotations


def requirements(text: str) -> list[str]:
    """The lines of a requirements file without its comments."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]
