"""Small files that say how something ended, which have to be written even where the disk has filled up since."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Bytes: a node's report with the last 40 lines of a traceback of each of 8 ranks takes about 30 KiB, its traces 40 KiB
# at the most (litgpt_demo.node.evidence).
_ROOM = 96 * 1024


def reserve(path: Path) -> None:
    """Take the room that `write_whole` will need for `path`, so that nothing else can take it first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _aside(path).write_bytes(b" " * _ROOM)


def write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file so that a reader sees all of it or none, into the room that was reserved if any was."""
    aside = _aside(path)
    data = json.dumps(content, indent=1).encode()
    # Not truncated before it is written: most file systems give blocks back then, and would have to find them again.
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
        file.write(data)
        file.truncate()
    aside.replace(path)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")
