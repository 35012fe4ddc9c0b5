"""Real text for measurements, gathered from the machine: documentation and sources, each file once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOTS = [Path(sys.prefix), Path(sys.base_prefix), Path("/usr"), Path("/opt")]
KINDS = {
    "", ".c", ".cc", ".cpp", ".css", ".cuh", ".go", ".h", ".hpp", ".html", ".java", ".js", ".md", ".pl", ".pm", ".pod",
    ".py", ".pyi", ".rs", ".rst", ".sh", ".tcl", ".tex", ".ts", ".txt", ".xml", ".yaml",
}  # fmt: skip
SMALLEST, LARGEST = 500, 400_000  # bytes of a document
ROWS = 1000  # of a row group, as the Hub's own conversion writes them


def gather(folder: Path, *, size: int, files: int) -> int:
    """Write `size` bytes of text as `files` parquet files; returns how much it came to.

    The order is by a hash of the path, so that each file holds a sample of everything.
    """
    documents: list[str] = []
    seen: set[bytes] = set()
    gathered = 0
    for path in sorted(_paths(), key=lambda path: blake2b(os.fsencode(path)).digest()):
        text = _text(path)
        digest = blake2b((text or "").encode()).digest()
        if text is None or digest in seen:
            continue
        seen.add(digest)
        documents.append(text)
        gathered += len(text.encode())
        if gathered >= size:
            break
    each = -(-len(documents) // files)
    for number in range(files):
        table = pa.table({"text": documents[number * each : (number + 1) * each]})
        pq.write_table(table, folder / f"{number:02d}.parquet", row_group_size=ROWS, compression="zstd")
    return gathered


def _paths() -> Iterator[Path]:
    for root in ROOTS:
        for folder, _, names in os.walk(root):
            yield from (Path(folder, name) for name in names if Path(name).suffix in KINDS)


def _text(path: Path) -> str | None:
    try:
        if path.is_symlink() or not SMALLEST <= path.stat().st_size <= LARGEST:
            return None
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\0" in text else text
