"""Folders and files that other users cannot read, and environments without keys."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from litgpt_demo.errors import UserError
from litgpt_demo.storage.local import atomic_write, translate_os_errors

# Names to keep. Google's are those of google-auth 2 that lead to credentials, to a project's quota and to the metadata
# server; proxies and certificates are as requests, urllib and OpenSSL know them.
_KEPT = re.compile(
    r"""
    GOOGLE_APPLICATION_CREDENTIALS | GOOGLE_CLOUD_(PROJECT|QUOTA_PROJECT) | GCLOUD_PROJECT | GOOGLE_API_(USE|CERT)\w+
    | GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES | CLOUDSDK_CONFIG
    | GCE_METADATA_\w+ | NO_GCE_CHECK | STORAGE_EMULATOR_HOST
    | (https?|all|no)_proxy | (HTTPS?|ALL|NO)_PROXY | SSL_CERT_(FILE|DIR) | (REQUESTS|CURL)_CA_BUNDLE
    | PATH | HOME | USER | LOGNAME | SHELL | LANG | LANGUAGE | LC_\w+ | TZ | TMPDIR | TERM | LD_LIBRARY_PATH
    | VIRTUAL_ENV | XDG_CACHE_HOME | MPLCONFIGDIR | PYTHON\w+ | (OMP|KMP|MKL|OPENBLAS)_\w+ | CUDA_VISIBLE_DEVICES
    | (HF_HUB|HF_DATASETS|TRANSFORMERS)_OFFLINE | HF_(HOME|ENDPOINT|HUB_CACHE|DATASETS_CACHE)
    """,
    re.VERBOSE,
)

_AWS = re.compile(r"AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|REGION|DEFAULT_REGION)")
"""From these google-auth 2 takes what it exchanges for Google's credentials where AWS vouches for the account."""


def own_temporary() -> Path:
    """Return this user's part of the temporary folder, whether it is there or not. All its processes name it alike."""
    return Path(tempfile.gettempdir()) / f"train-litgpt-{os.geteuid()}"


def make_temporary(name: str) -> Path:
    """Make the folder `name` in this user's part of the temporary folder, or take the one that is there.

    Other users can neither enter it nor put another in its place, as long as the temporary folder is private itself or
    has the sticky bit, as /tmp has. A UserError where the part's name is taken by what another user can change.
    """
    own = own_temporary()
    with translate_os_errors(str(own)):
        with suppress(FileExistsError):
            own.mkdir(mode=0o700)
        found, problem = own.lstat(), ""
        if not stat.S_ISDIR(found.st_mode):
            problem = "is not a folder"
        elif found.st_uid != os.geteuid():
            problem = f"belongs to the user {found.st_uid}"
        elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            problem = f"has mode {stat.S_IMODE(found.st_mode):o}, which lets others write"
        if problem:
            raise UserError(
                f"{own} {problem}, so that another user of this machine could change what is kept there",
                fix="remove it, or set TMPDIR to a folder of your own",
            )
        own.chmod(stat.S_IRWXU)  # it is this user's, so no other user can have replaced it
        folder = own / name
        folder.mkdir(exist_ok=True)
    return folder


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can enter, and its missing parents; an existing one stays as it is.

    Below a shared folder the umask decides: pods that write to a mounted PVC are other users. A folder is shared if
    it has the setgid bit, or may be written by a group that is not the user's own, or by all without the sticky bit.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    above = folder.parent.stat()
    if above.st_mode & stat.S_IWOTH:
        shared = not above.st_mode & stat.S_ISVTX
    else:  # by most systems' default the user's own group has no other member
        shared = bool(above.st_mode & stat.S_IWGRP) and above.st_gid != os.getegid()
    folder.mkdir(mode=0o777 if shared or above.st_mode & stat.S_ISGID else 0o700, exist_ok=True)


def close_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter; an existing one is closed if it is this user's.

    A link is followed, for users put PREFECT_HOME on a larger disk with one. The folder is opened once, so that
    no other can take its place between the check and the change.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(PermissionError):  # another user's
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if os.fstat(opened).st_uid == os.geteuid():
                os.fchmod(opened, stat.S_IRWXU)
        finally:
            os.close(opened)


def write_private(file: Path, text: str) -> None:
    close_folder(file.parent)
    with atomic_write(file) as aside:
        os.fchmod(aside.fileno(), 0o600)
        aside.write(text.encode())


def environment_of_readers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that a process needs to open storages and compute.

    Keys and tokens of clusters, registries, trackers and Prefect's server are left out. The storage's credentials stay,
    as do those in files of the home directory. Keys of AWS stay only if Google's credentials are exchanged for them.
    """
    kept = [_KEPT]
    if credentials := environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        with suppress(OSError, ValueError, AttributeError):  # opening the storage reports what is wrong with it
            source = json.loads(Path(credentials).read_bytes()).get("credential_source")
            if isinstance(source, dict) and str(source.get("environment_id")).startswith("aws"):
                kept.append(_AWS)
    return {name: value for name, value in environ.items() if any(pattern.fullmatch(name) for pattern in kept)}
