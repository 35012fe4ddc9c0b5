"""The environment of a process that reads and writes storages, and is to have no other access."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

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
"""From these google-auth 2 takes what it exchanges for Google's credentials where AWS vouches for the account."""


def environment_of_readers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of an environment a process needs that opens storages and computes.

    Keys and tokens of clusters, registries, trackers and Prefect's server stay behind. The credentials of the storage
    go along, and whatever lies in the files of the home directory. Keys of AWS are among them only where the storage's
    credentials are had for these.
    """
    kept = [_KEPT]
    if credentials := environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        with suppress(OSError, DataError):  # who opens the storage tells what is wrong with it
            content = Path(credentials).read_bytes()
            account = parse_json(content, dict[str, Any], where=credentials, fix="see your credentials")
            source = account.get("credential_source")
            if isinstance(source, dict) and str(source.get("environment_id")).startswith("aws"):
                kept.append(_AWS)
    return {name: value for name, value in environ.items() if any(one.fullmatch(name) for one in kept)}
