"""A user's own code on a node: an archive that is fetched by its hash and unpacked where the ranks find it first.

The archive is a tar under the root, named by its sha256. Everybody who may write to the root could have changed it.
So it is used only if the hash is right, and only plain files below one folder are unpacked.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from litgpt_demo.errors import DataError, UserError

CODE = "LITGPT_CODE"
"""The environment variable with the folder of the code, for ranks and the torchrun that starts them."""

MOST_FILES = 10_000
MOST_BYTES = 64 << 20
"""Bytes of all files. It is source code: the largest Python packages have a few MB of it."""
MOST_ARCHIVE = MOST_BYTES + MOST_FILES * 4096
"""Bytes of an archive: a header for each file, two more where its path is long, and what fills its last block."""

_REMOVE = "remove it, and run the same command again"


@contextlib.contextmanager
def unpacked_code(address: str, folder: Path) -> Iterator[None]:
    """Unpack the archive at `address` into `folder`, which is replaced and belongs to its owner only.

    At the end the unpacked files are removed, with Python's cache of them. Files that the program changed stay.
    """
    content = _fetch(address)
    if not hasattr(tarfile, "data_filter"):  # PEP 706
        raise UserError("this Python cannot unpack an archive safely", fix="take an image with Python 3.11.4 or newer")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    try:
        times = _unpack(content, address, folder)
    except (tarfile.TarError, EOFError, ValueError, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise DataError(f"{address} cannot be unpacked: {error}", fix=_REMOVE) from error
    try:
        yield
    finally:
        for name, modified in times.items():
            file = folder / name
            with contextlib.suppress(OSError):
                if file.stat().st_mtime == modified:
                    file.unlink()
        for directory, _, _ in os.walk(folder, topdown=False):
            if Path(directory).name == "__pycache__":
                shutil.rmtree(directory, ignore_errors=True)
            with contextlib.suppress(OSError):  # it is not empty
                Path(directory).rmdir()


def _fetch(address: str) -> bytes:
    from litgpt_demo.storage import open_storage

    root, _, name = address.rpartition("/")
    named = re.fullmatch(r"([0-9a-f]{64})\.tar", name)
    if named is None or not root:
        what = f"--code={address} does not name an archive by its hash"
        raise UserError(what, fix="give …/<sha256>.tar, as the launcher does")
    try:
        content = open_storage(root).read(name, most=MOST_ARCHIVE)
    except FileNotFoundError:
        raise DataError(f"{address} does not exist", fix="run the same command again, which writes it") from None
    digest = sha256(content).hexdigest()
    if digest != named[1]:
        what = f"{address} has the sha256 {digest}, so it was changed"
        raise DataError(what, fix=f"check who writes there, {_REMOVE}")
    return content


def _unpack(content: bytes, address: str, folder: Path) -> dict[str, float]:
    """Return the names of the unpacked files with their modification times."""
    size = 0
    times: dict[str, float] = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
        # One by one: a list of all members would be made before the first could be refused.
        for files, member in enumerate(tar, 1):
            size += member.size
            if files > MOST_FILES or not 0 <= member.size <= MOST_BYTES or size > MOST_BYTES:
                raise DataError(f"{address} unpacks to more than {MOST_FILES:,} files or {MOST_BYTES:,} bytes")
            if member.type != tarfile.REGTYPE:
                raise DataError(f"{address} holds {member.name!r}, which is not a plain file as the launcher writes it")
            tar.extract(member, folder, set_attrs=True, filter="data")
            times[member.name.lstrip("/")] = member.mtime
    return times
