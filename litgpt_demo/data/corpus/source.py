"""One file of a corpus."""

from __future__ import annotations

from dataclasses import dataclass

from litgpt_demo.storage import is_remote


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of a corpus."""

    address: str
    """Local path, `gs://bucket/object`, or `hf://datasets/owner/name@commit/path`."""
    name: str
    """The same wherever the corpus lies: the path below the library's folder, below the part of a pattern that has no
    wildcard, or in the repository. Part of the dataset's key."""
    size: int
    """Bytes as stored, compressed if the file is."""
    version: str
    """`crc32c:…`, `sha256:…` or `git:…` (a blob's id): differs when the content does. Part of the dataset's key."""

    @property
    def is_remote(self) -> bool:
        return is_remote(self.address)
