"""A user's own code: a folder as an archive under the root, named by its hash. It ships without a new image.

    code/<sha256>.tar    created once, never changed: runs of the same code share it

The tar is written as that of an image's context is: the same files make the same bytes on every machine.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Self

import google_crc32c

from launcher.errors import ConfigProblem
from launcher.formatting import bytes_text
from launcher.images.context import read_ignore_file, walk, write_files
from litgpt_demo.errors import DataError
from litgpt_demo.node.code import MOST_ARCHIVE, MOST_BYTES, MOST_FILES
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.storage.local import translate_os_errors
from litgpt_demo.storage.private import make_private

CODE = "code"

_SECRETS = (
    # Credentials: the readers of a bucket must not get them. Pass them by platform.secrets.
    *(".env", ".env.*", ".envrc", ".netrc", ".pypirc", ".npmrc", ".condarc", "pip.conf", "pip.ini", "secrets.toml"),
    *(".git-credentials", ".pgpass", ".my.cnf", ".boto", ".s3cfg", ".ssh", ".gnupg", ".aws", ".azure", ".oci"),
    *(".kube", "kubeconfig", "*.kubeconfig", ".docker", ".dockercfg", ".htpasswd", ".terraform", "*.tfstate"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *("application_default_credentials.json", "credentials.json", "client_secret*.json", "service-account*.json"),
    *(".config/gcloud", ".huggingface", ".cache/huggingface"),
)
_CACHES = (
    # Files that no program needs, and that change without a change of the code.
    *(".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", "*.pyc", ".ipynb_checkpoints"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache"),
)

_IN_ANY_CASE = [re.sub("[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", name) for name in _SECRETS]
SECRETS_AND_CACHES = tuple(f"**/{pattern}" for pattern in (*_IN_ANY_CASE, *_CACHES))
"""Patterns of what is left out whatever a .dockerignore says: `!src` there must not bring back src/.env."""

_KEY_BYTES = 64 << 10
"""Bytes of the largest file that is looked into for a key; those of Google and of OpenSSL have 2 to 6 kB."""
_KEYS = re.compile(
    # RFC 7468 for PEM; https://google.aip.dev/auth/4110 for the types of Google's key files.
    rb"^-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY( BLOCK)?-----\s*$"
    rb"|\A\s*\{[^\0]*\"type\"\s*:\s*\"(service_account|authorized_user)\"",
    re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True)
class CodeArchive:
    """The files of a folder as they were when they were read."""

    sha256: str
    content: bytes = field(repr=False)
    paths: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def stored(cls, root: Storage, address: str) -> Self:
        """Return the archive that an attempt was started with, from under the root; a DataError if it is missing."""
        digest = PurePosixPath(address).stem
        path = f"{CODE}/{digest}.tar"
        content = root.read(path, most=MOST_ARCHIVE) if root.exists(path) else b""
        if hashlib.sha256(content).hexdigest() != digest:
            what = f"{root.address(path)} was removed or changed after this flow run had started"
            raise DataError(what, fix="cancel this flow run, and start a new one")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            return cls(sha256=digest, content=content, paths=tuple(tar.getnames()))

    @property
    def path(self) -> str:
        """Below the root."""
        return f"{CODE}/{self.sha256}.tar"

    def ship(self, root: Storage) -> bool:
        """Put the archive under the root unless it exists; return whether it was put. A new folder is private to its
        owner."""
        if not root.exists(self.path):
            if (folder := root.within(CODE).local_path()) is not None:
                with translate_os_errors(root.address(CODE)):
                    make_private(folder)
            if root.create(self.path, self.content):
                return True
        stored = root.stat(self.path)
        if (stored.size, stored.crc32c) != (len(self.content), f"{google_crc32c.value(self.content):08x}"):
            what = f"{root.address(self.path)} has other content than its name, which is a checksum, says"
            raise DataError(what, fix="remove it, and run again")
        return False


def pack_code(setting: str, *, root: str) -> CodeArchive:
    """Return the archive of a folder: all of its files but the root, and what .dockerignore and our own list name."""
    content = io.BytesIO()
    try:
        folder = Path(setting).expanduser().resolve()
        sizes = _sizes(setting, folder, root)
        digest = write_files(folder, list(sizes), to=content, links=False, more={})
    # The last for an unknown ~user, or a link to itself; the first of tarfile too, of a file that became shorter.
    except (OSError, ValueError, RuntimeError) as error:
        fix = "make it readable, or list it in .dockerignore; if its files change, wait, then run again"
        raise ConfigProblem(f"code.folder={setting!r} cannot be read: {error}", fix=fix) from error
    if content.tell() > MOST_ARCHIVE:
        raise ConfigProblem(f"code.folder={setting} has many files with very long paths; give a folder further down")
    # A key whatever its file is called: Google names those of service accounts after the project.
    with tarfile.open(fileobj=io.BytesIO(content.getvalue()), mode="r:") as tar:
        for member in tar:
            file = tar.extractfile(member) if member.size <= _KEY_BYTES else None
            if file is not None and _KEYS.search(file.read()):
                what = f"code.folder={setting}: {member.name} holds a private key, which readers of the root could read"
                fix = "remove it, or list it in .dockerignore (platform.secrets brings secrets to nodes)"
                raise ConfigProblem(what, fix=fix)
    return CodeArchive(sha256=digest, content=content.getvalue(), paths=tuple(sizes))


def _sizes(setting: str, folder: Path, root: str) -> dict[str, int]:
    if not folder.is_dir():
        raise ConfigProblem(f"code.folder={setting}: {folder} is not a folder", fix="give the folder of your script")
    left_out, below = list(SECRETS_AND_CACHES), open_storage(root).local_path()
    if below == folder:
        what = f"root={root} and code.folder are one folder, so that each run would be part of the next one's code"
        raise ConfigProblem(what, fix="give the root a folder of its own, such as output")
    if below is not None and below.is_relative_to(folder):  # what a run writes would make other code of it each time
        left_out.append(re.sub(r"([][*?\\!#])", r"\\\1", below.relative_to(folder).as_posix()))
    paths = sorted(islice(walk(folder, read_ignore_file(folder, after=left_out)), MOST_FILES + 1))
    fix = f"list files that the job does not need in {folder / '.dockerignore'}, or give a smaller folder"
    if not paths:
        raise ConfigProblem(f"code.folder={setting} has only files that are left out; check its .dockerignore")
    if len(paths) > MOST_FILES:
        raise ConfigProblem(f"code.folder={setting} has more than {MOST_FILES:,} files, too many for code; {fix}")
    # A link to what does not ship itself may lead out of the folder, or to a secret under another name.
    ships = {folder / path for path in paths}
    for path in paths:
        if (target := (folder / path).resolve()) not in ships:
            what = f"code.folder={setting}: {path} is a link to {target}, which is not sent to the nodes"
            raise ConfigProblem(what, fix="replace the link by the file, or list it in .dockerignore")
    sizes = {path: (folder / path).stat().st_size for path in paths}
    if (total := sum(sizes.values())) > MOST_BYTES:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
        named = ", ".join(f"{path} ({bytes_text(sizes[path])})" for path in largest)
        what = f"code.folder={setting} has {bytes_text(total)}, but code may have at most {bytes_text(MOST_BYTES)}"
        raise ConfigProblem(f"{what}; the largest are {named}: {fix}")
    return sizes
