"""Addresses: a path of this machine, or gs://bucket/prefix."""

from __future__ import annotations

SCHEME = "gs://"


def is_remote(address: str) -> bool:
    """Return whether the address names a service by a scheme, known here or not, and so is no path of this machine."""
    return "://" in address


def bucket_path(address: str) -> str | None:
    """Return `bucket/prefix` of an address in a bucket; None for every other address."""
    return address.removeprefix(SCHEME) if address.startswith(SCHEME) else None
