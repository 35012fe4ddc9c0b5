"""The environment of a process that reads and writes storages, and is to have no other access."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Names to keep. Google's are those of google-auth 2 that lead to credentials, to a project's quota and to the metadata
# server; proxies and certificates are as requests, urllib and OpenSSL know them.
_KEPT = re.compile(
    r"""
    GOOGLE_APPLICATION_CREDENTIALS | GOOGLE_CLOUD_(PROJECT|QUOTA_PROJECT) | GOOGLE_API_(USE|CERT)\w+ | CLOUDSDK_CONFIG
    | GCE_METADATA_\w+ | NO_GCE_CHECK | STORAGE_EMULATOR_HOST
    | (https?|all|no)_proxy | (HTTPS?|ALL|NO)_PROXY | SSL_CERT_(FILE|DIR) | (REQUESTS|CURL)_CA_BUNDLE
    | PATH | HOME | USER | LOGNAME | SHELL | LANG | LANGUAGE | LC_\w+ | TZ | TMPDIR | TERM | LD_LIBRARY_PATH
    | VIRTUAL_ENV | XDG_CACHE_HOME | MPLCONFIGDIR | PYTHON\w+ | (OMP|KMP|MKL|OPENBLAS)_\w+ | CUDA_VISIBLE_DEVICES
    | (HF_HUB|TRANSFORMERS)_OFFLINE
    """,
    re.VERBOSE,
)


def environment_of_readers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of an environment a process needs that opens storages and computes.

    Keys and tokens of clusters, registries, trackers and Prefect's server stay behind. The credentials of the storage
    go along, and whatever lies in the files of the home directory.
    """
    return {name: value for name, value in environ.items() if _KEPT.fullmatch(name)}
