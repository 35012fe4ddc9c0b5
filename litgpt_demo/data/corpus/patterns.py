"""Patterns of file names, for places that Python's glob cannot list."""

from __future__ import annotations

import fnmatch


def matches(name: str, pattern: str) -> bool:
    """Return True if a pattern selects the file called `name`, as Python's recursive glob would.

    `*`, `?` and `[…]` stay inside a component, the component `**` is any number of folders, and a name that begins with
    a dot is only matched by a component that does too.
    """
    return _match(name.split("/"), pattern.split("/"))


def _match(parts: list[str], pattern: list[str]) -> bool:
    if not parts or not pattern:
        return not parts and not pattern
    visible, deeper = not parts[0].startswith("."), parts[1:]
    if pattern == ["**"]:
        return visible and (not deeper or _match(deeper, pattern))
    if pattern[0] == "**":
        return _match(parts, pattern[1:]) or (visible and _match(deeper, pattern))
    fits = fnmatch.fnmatchcase(parts[0], pattern[0]) and (visible or pattern[0].startswith("."))
    return fits and _match(deeper, pattern[1:])
