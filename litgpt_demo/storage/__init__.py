"""Files under one root, a local folder or gs://bucket/prefix, behind the same few verbs.

A reader sees a file's old or new content, never a part of one. Bytes that came over a network were compared by crc32c.
"""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from litgpt_demo.errors import UserError
from litgpt_demo.storage.base import MANIFEST as MANIFEST
from litgpt_demo.storage.base import ObjectInfo as ObjectInfo
from litgpt_demo.storage.base import ReadCursor as ReadCursor
from litgpt_demo.storage.base import Storage as Storage
from litgpt_demo.storage.base import bucket_path as bucket_path
from litgpt_demo.storage.base import combine_crc32c as combine_crc32c
from litgpt_demo.storage.base import crc32c_of as crc32c_of
from litgpt_demo.storage.base import is_remote as is_remote
from litgpt_demo.storage.base import sha256_of as sha256_of
from litgpt_demo.storage.bucket import BucketStorage as BucketStorage
from litgpt_demo.storage.local import LocalStorage as LocalStorage


def open_storage(address: str) -> Storage:
    """Return the storage at gs://bucket/prefix or at a local path, which is resolved; no request yet."""
    if not address.strip():
        raise UserError("the address of a storage is empty; give gs://bucket/prefix or a local path")
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", address):
        try:
            return LocalStorage(root=str(Path(address).expanduser().resolve()))
        except (RuntimeError, OSError) as error:  # no such user, or a symbolic link that leads to itself
            fix = f"write the path out, or ./{address} for a folder of that name"
            raise UserError(f"{address!r} cannot be resolved ({error}); {fix}") from error
    path = bucket_path(address)
    if path is None:
        raise UserError(f"{address!r} has an unknown scheme; give gs://bucket/prefix or a local path")
    bucket, _, prefix = path.partition("/")
    # https://cloud.google.com/storage/docs/buckets#naming
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", bucket):
        raise UserError(
            f"{address!r} names no bucket: {bucket!r} is not 3 or more lower-case letters, digits, '-', '_' and '.'"
        )
    client = None
    with suppress(ModuleNotFoundError):  # no package of Google's is installed
        client = find_spec("google.cloud.storage")
    if client is None:
        raise UserError(f"{address} needs a package: run `pip install google-cloud-storage`")
    return BucketStorage(root=f"gs://{bucket}").within(prefix)
