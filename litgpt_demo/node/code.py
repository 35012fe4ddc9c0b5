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
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
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

_NAME = re.compile(r"(?P<sha256>[0-9a-f]{64})\.tar")


def archive_name(digest: str) -> str:
    """Return the name of the archive whose sha256 this is."""
    return f"{digest}.tar"


@dataclass(frozen=True, kw_only=True)
class UnpackedCode:
    """The code in a folder of this node's."""

    folder: Path
    times: Mapping[str, float]
    """Each file that was unpacked, with the time of its last change, in seconds since the epoch."""

    def remove(self) -> None:
        """Remove what was unpacked and Python's cache of it. What the program wrote or changed there stays."""
        for path, changed in self.times.items():
            with contextlib.suppress(OSError):
                if (file := self.folder / path).stat().st_mtime == changed:
                    file.unlink()
        for folder, _, _ in os.walk(self.folder, topdown=False):
            if Path(folder).name == "__pycache__":
                shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # something is left in it
                Path(folder).rmdir()


def fetch_code(address: str, folder: Path) -> UnpackedCode:
    """Bring the archive at `address` and unpack it into `folder`, which is made anew for its owner alone.

    Raises:
        DataError: it is not there, is not what its name says, or is no tar of plain files within bounds.
        UserError: the address does not name an archive by its hash, or this Python is too old to unpack what others
            wrote.
    """
    from litgpt_demo.storage import open_storage

    place, _, name = address.rpartition("/")
    if (named := _NAME.fullmatch(name)) is None or not place:
        raise UserError(
            f"--code={address} names no archive by its hash; give …/<sha256>.tar, as the launcher writes it"
        )
    storage = open_storage(place)
    try:
        content = storage.read(name, most=MOST_ARCHIVE)
    except FileNotFoundError:
        raise DataError(f"{storage.address(name)} is not there; run the same command again, which writes it") from None
    if (found := sha256(content).hexdigest()) != named["sha256"]:
        raise DataError(
            f"{storage.address(name)} has the sha256 {found}, so that somebody has changed it; see who writes there, "
            "remove it, and run the same command again"
        )
    if not hasattr(tarfile, "data_filter"):  # PEP 706
        # The image's Python is that of every node: a restart elsewhere would end alike.
        raise UserError("this Python cannot unpack an archive safely; take an image with Python 3.11.4 or newer")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    files, size, times = 0, 0, dict[str, float]()
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            # One by one: a list of all would be made before anything of it could be refused.
            for member in tar:
                files, size = files + 1, size + member.size
                if files > MOST_FILES or not 0 <= member.size <= MOST_BYTES or size > MOST_BYTES:
                    raise DataError(f"{address} unpacks to more than {MOST_FILES:,} files or {MOST_BYTES:,} bytes")
                if member.type != tarfile.REGTYPE:
                    words = "which is no plain file as the launcher writes them"
                    raise DataError(f"{address} holds {member.name!r}, {words}")
                tar.extract(member, folder, set_attrs=True, filter="data")
                times[member.name.lstrip("/")] = member.mtime
    except (tarfile.TarError, EOFError, ValueError, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise DataError(f"{address} cannot be unpacked: {error}; remove it, and run the same command again") from error
    return UnpackedCode(folder=folder, times=times)


def enter_code(environ: MutableMapping[str, str]) -> None:
    """Make the code that `environ` names the working directory, and the first place where ranks look for modules.

    It is torchrun itself that calls this, when it has imported what it needs: a module of the user's that is called
    `random` is meant for their program, and not for ours.
    """
    if folder := environ.get(CODE):
        os.chdir(folder)
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, environ.get("PYTHONPATH"))))
