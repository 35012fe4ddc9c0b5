"""One file of a corpus, and the patterns of file names, for places that Python's glob cannot list."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of a corpus, and the patterns of file names, for places that Python's glob cannot list."""

    address: str
    """As shown: local path, `gs://bucket/object`, or `hf://datasets/owner/name@commit/path`."""
    name: str
    """The same wherever the corpus lies: the path below the library's folder, below the part of a pattern that has no
    wildcard, or in the repository. Part of the dataset's key."""
    size: int
    """Bytes as stored, compressed if the file is."""
    version: str
    """`crc32c:…`, `sha256:…` or `git:…` (a blob's id): differs when the content does. Part of the dataset's key."""

    file: Path | None = None
    """Where a local one is opened: what is no UTF-8 in its path is escaped (`\\xe9`) in address and name."""

    @property
    def is_remote(self) -> bool:
        return self.file is None


# Hidden files, and what Spark, Hive, Delta Lake and Databricks keep beside the data. Not every name that begins with an
# underscore, as in Hive: `__init__.py` is text that people train on.
_BESIDE = re.compile(r"\.|_(SUCCESS|(common_)?metadata|temporary|delta_log|spark_metadata|(started|committed)_.*)$")


def is_beside(name: str) -> bool:
    """Return True if a file or folder of this name is no data, but what a system or a writer keeps beside them."""
    return _BESIDE.match(name) is not None


def matches(name: str, pattern: str) -> bool:
    """Return True if a pattern selects the file called `name`, as Python's recursive glob would.

    `*`, `?` and `[…]` stay inside a component, the component `**` is any number of folders, and a name that begins with
    a dot is only matched by a component that does too; so it is with `_SUCCESS` and others that writers keep beside.
    """
    return _match(name.split("/"), pattern.split("/"))


def _match(parts: list[str], pattern: list[str]) -> bool:
    if not parts or not pattern:
        return not parts and not pattern
    visible, deeper = not is_beside(parts[0]), parts[1:]
    if pattern == ["**"]:
        return visible and (not deeper or _match(deeper, pattern))
    if pattern[0] == "**":
        return _match(parts, pattern[1:]) or (visible and _match(deeper, pattern))
    fits = fnmatch.fnmatchcase(parts[0], pattern[0]) and (visible or pattern[0].startswith(parts[0][0]))
    return fits and _match(deeper, pattern[1:])
