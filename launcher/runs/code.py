"""A user's own code: a folder as an archive under the root, named by its hash. It ships without a new image.

    code/<sha256>.tar    created once, never changed: runs of the same code share it

The tar is written as that of an image's context is: the same files make the same bytes on every machine.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import google_crc32c

from launcher.errors import ConfigProblem
from launcher.formatting import bytes_text
from launcher.images.context import read_ignore_file, walk, write_files
from litgpt_demo.errors import DataError
from litgpt_demo.node.code import MOST_BYTES, MOST_FILES, archive_name
from litgpt_demo.storage import Storage, open_storage

CODE = "code"

NEVER = tuple(
    f"**/{pattern}"
    for pattern in (
        # What lets its holder in somewhere: a bucket's readers must not get it, and platform.secrets is its way.
        *(".env", ".env.*", ".netrc", ".pypirc", ".git-credentials", ".ssh", ".aws", ".azure", ".kube", ".docker"),
        *("*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
        *("application_default_credentials.json", "credentials.json", "service-account*.json", ".config/gcloud"),
        # What no program reads, and what changes without it.
        *(".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", "*.pyc", ".ipynb_checkpoints"),
        *(".mypy_cache", ".pytest_cache", ".ruff_cache"),
    )
)
"""Patterns of what is left out whatever a .dockerignore says: `!src` there must not bring back src/.env."""


@dataclass(frozen=True, kw_only=True)
class CodeArchive:
    """The files of a folder as they were when they were read."""

    sha256: str
    content: bytes = field(repr=False)

    @property
    def path(self) -> str:
        """The archive below the root."""
        return f"{CODE}/{archive_name(self.sha256)}"

    def ship(self, root: Storage) -> bool:
        """Put the archive under the root unless it is there; return whether it was put.

        Raises:
            DataError: what is there under its name is something else.
        """
        try:
            there = root.stat(self.path)
        except FileNotFoundError:
            if root.create(self.path, self.content):
                return True
            there = root.stat(self.path)
        if (there.size, there.crc32c) != (len(self.content), f"{google_crc32c.value(self.content):08x}"):
            raise DataError(
                f"{root.address(self.path)} is not the code that its name says; see who writes there, remove it, and "
                "run again"
            )
        return False


def pack_code(mount: str, *, root: str) -> CodeArchive:
    """Return the archive of a folder.

    Raises:
        ConfigProblem: see `code_paths`, or a file cannot be read.
    """
    paths = code_paths(mount, root=root)
    content = io.BytesIO()
    try:
        digest = write_files(_folder(mount), paths, to=content)
    except OSError as error:
        raise ConfigProblem(f"code.mount={mount}: {error}; make it readable, or leave it out") from error
    return CodeArchive(sha256=digest, content=content.getvalue())


def code_paths(mount: str, *, root: str) -> list[str]:
    """Return the files of a folder that ship, sorted: all but what its .dockerignore and NEVER name, and the root.

    Raises:
        ConfigProblem: it is no folder, has no files, has too many or too large ones, or links that lead elsewhere.
    """
    folder = _folder(mount)
    if not folder.is_dir():
        raise ConfigProblem(f"code.mount={mount}: {folder} is no folder; give the one that holds your script")
    try:
        rules = read_ignore_file(folder, after=(*NEVER, *_own_output(folder, root)))
        paths = sorted(islice(walk(folder, rules), MOST_FILES + 1))
        _require_fit(mount, folder, paths)
    except (OSError, ValueError) as error:
        raise ConfigProblem(f"code.mount={mount} cannot be read: {error}; mend it, or leave it out") from error
    return paths


def _folder(mount: str) -> Path:
    return Path(mount).expanduser().resolve()


def _own_output(folder: Path, root: str) -> Iterator[str]:
    """Yield the pattern of a root in the folder: what a run writes there would make other code of it each time."""
    below = open_storage(root).local_path()
    if below is not None and below != folder and below.is_relative_to(folder):
        yield re.sub(r"([][*?\\!#])", r"\\\1", below.relative_to(folder).as_posix())


def _require_fit(mount: str, folder: Path, paths: list[str]) -> None:
    fix = f"name what the job does not need in {folder / '.dockerignore'}, or give a smaller folder"
    if not paths:
        raise ConfigProblem(f"code.mount={mount} has no files but those that are left out; look into its .dockerignore")
    if len(paths) > MOST_FILES:
        raise ConfigProblem(f"code.mount={mount} has more than {MOST_FILES:,} files, which is no source code; {fix}")
    for path in paths:
        # A link would lead elsewhere on a node; what it leads to here may be nobody's to see.
        if not (target := (folder / path).resolve()).is_file() or not target.is_relative_to(folder):
            raise ConfigProblem(
                f"code.mount={mount}: {path} is a link to {target}, and only links to files in the folder ship; "
                "put the file there, or name the link in .dockerignore"
            )
    sizes = {path: (folder / path).stat().st_size for path in paths}
    if (total := sum(sizes.values())) > MOST_BYTES:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
        named = ", ".join(f"{path} ({bytes_text(sizes[path])})" for path in largest)
        raise ConfigProblem(
            f"code.mount={mount} has {bytes_text(total)}, and code may have {bytes_text(MOST_BYTES)}; the largest are "
            f"{named}: {fix}"
        )
