"""Dotted versions and ranges of them, as profiles state them: `>=2.19,<2.20`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping

Version = tuple[int, ...]

_COMPARED: Mapping[str, Callable[[Version, Version], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


def version(text: str) -> Version:
    """`535.161.08` as (535, 161, 8); what follows the numbers is left out.

    Raises:
        ValueError: it does not begin with a number.
    """
    found = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no version; write numbers with dots between them, as in 2.19.4")
    return tuple(int(number) for number in found[1].split("."))


def within(found: str, ranges: Iterable[str]) -> bool:
    """Return True if a version lies in one of the ranges. No ranges allow all; 2.19 and 2.19.0 are the same."""
    ranges = tuple(ranges)
    return not ranges or any(all(_holds(found, bound) for bound in one.split(",")) for one in ranges)


def _holds(found: str, bound: str) -> bool:
    split = re.match(r"\s*(>=|<=|==|>|<)\s*(.+?)\s*$", bound)
    if split is None:
        raise ValueError(f"{bound!r} is no bound of a range; write >=2.19 or <2.20")
    mine, theirs = version(found), version(split[2])
    length = max(len(mine), len(theirs))
    return _COMPARED[split[1]](mine + (0,) * (length - len(mine)), theirs + (0,) * (length - len(theirs)))
