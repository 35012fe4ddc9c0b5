"""A user's own code on a node: fetched by its hash, unpacked into a folder of the node's own, seen by the ranks first.

The archive is a tar under the root, named by its sha256. Whoever may write to the root may have changed it, so nothing
of it is believed before the hash is right, and nothing but plain files below one folder comes out of it.
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
"""The variable that tells ranks, and the torchrun that starts them, where the code is."""

MOST_FILES = 10_000
MOST_BYTES = 64 << 20
"""Bytes of all files. It is source code: the largest Python packages have a few MB of it."""
MOST_ARCHIVE = MOST_BYTES + MOST_FILES * 4096
"""Bytes of an archive: a header for each file, two more where its path is long, and what fills its last block."""


@contextlib.contextmanager
def unpacked_code(address: str, folder: Path) -> Iterator[None]:
    """Bring the archive at `address` and unpack it into `folder`, which is made anew for its owner alone.

    In the end what was unpacked goes, and Python's cache of it. What the program wrote or changed there stays.
    """
    from litgpt_demo.storage import open_storage

    place, _, name = address.rpartition("/")
    if (named := re.fullmatch(r"([0-9a-f]{64})\.tar", name)) is None or not place:
        raise UserError(
            f"--code={address} names no archive by its hash", fix="give …/<sha256>.tar, as the launcher does"
        )
    try:
        content = open_storage(place).read(name, most=MOST_ARCHIVE)
    except FileNotFoundError:
        raise DataError(f"{address} is not there", fix="run the same command again, which writes it") from None
    if (found := sha256(content).hexdigest()) != named[1]:
        what = f"{address} has the sha256 {found}, so that somebody has changed it"
        raise DataError(what, fix="see who writes there, remove it, and run the same command again")
    if not hasattr(tarfile, "data_filter"):  # PEP 706
        raise UserError("this Python cannot unpack an archive safely", fix="take an image with Python 3.11.4 or newer")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    size, times = 0, dict[str, float]()
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            # One by one: a list of all would be made before anything of it could be refused.
            for files, member in enumerate(tar, 1):
                size += member.size
                if files > MOST_FILES or not 0 <= member.size <= MOST_BYTES or size > MOST_BYTES:
                    raise DataError(f"{address} unpacks to more than {MOST_FILES:,} files or {MOST_BYTES:,} bytes")
                if member.type != tarfile.REGTYPE:
                    raise DataError(
                        f"{address} holds {member.name!r}, which is no plain file as the launcher writes them"
                    )
                tar.extract(member, folder, set_attrs=True, filter="data")
                times[member.name.lstrip("/")] = member.mtime
    except (tarfile.TarError, EOFError, ValueError, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        fix = "remove it, and run the same command again"
        raise DataError(f"{address} cannot be unpacked: {error}", fix=fix) from error
    try:
        yield
    finally:
        for name, changed in times.items():
            with contextlib.suppress(OSError):
                if (file := folder / name).stat().st_mtime == changed:
                    file.unlink()
        for below, _, _ in os.walk(folder, topdown=False):
            if Path(below).name == "__pycache__":
                shutil.rmtree(below, ignore_errors=True)
            with contextlib.suppress(OSError):  # something is left in it
                Path(below).rmdir()
