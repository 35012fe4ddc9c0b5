"""The environment of a process that reads and writes storages, and is to have no other access."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError

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
    | (HF_HUB|TRANSFORMERS)_OFFLINE
    """,
    re.VERBOSE,
)

_AWS = re.compile(r"AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|REGION|DEFAULT_REGION)")
"""The names from which google-auth 2 takes what it exchanges for credentials of Google where an account is AWS's."""


class _AwsSource(BaseModel):
    environment_id: Annotated[str, Field(pattern="^aws")]


class _AwsAccount(BaseModel):
    """The part of a credentials file that says that AWS vouches for the account (workload identity federation)."""

    credential_source: _AwsSource


def environment_of_readers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of an environment a process needs that opens storages and computes.

    Keys and tokens of clusters, registries, trackers and Prefect's server stay behind. The credentials of the storage
    go along, and whatever lies in the files of the home directory. Keys of AWS are among them only where the storage's
    credentials are had for these.
    """
    kept = (_KEPT, _AWS) if _is_of_aws(environ.get("GOOGLE_APPLICATION_CREDENTIALS")) else (_KEPT,)
    return {name: value for name, value in environ.items() if any(one.fullmatch(name) for one in kept)}


def _is_of_aws(credentials: str | None) -> bool:
    """Return True if a credentials file names an account that AWS vouches for."""
    if not credentials:
        return False
    with suppress(OSError, DataError):  # who opens the storage tells what is wrong with it
        parse_json(Path(credentials).read_bytes(), _AwsAccount, where=credentials, fix="see your credentials")
        return True
    return False
