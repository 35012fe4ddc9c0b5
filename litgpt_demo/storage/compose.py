"""Objects joined by the bucket itself, in a tree where they are more than one call takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

from litgpt_demo.storage.base import ObjectInfo, absent
from litgpt_demo.storage.checksums import EMPTY, combined_crc32c
from litgpt_demo.storage.objects import Objects, metadata

# https://cloud.google.com/storage/docs/composite-objects
_AT_ONCE = 32


def members(objects: Objects, names: Sequence[str]) -> list[Any]:
    """The objects of these names as they are now, asked for by folder.

    Raises:
        FileNotFoundError: names the full address of one that is not there.
    """
    folders = sorted({name.rpartition("/")[0] for name in names})
    lists = objects.each(lambda folder: objects.listed(f"{folder}/" if folder else "", direct=True), folders)
    there = {blob.name: blob for blobs in lists for blob in blobs}
    for name in names:
        if name not in there:
            raise absent(objects.address(name))
    return [there[name] for name in names]


def join(objects: Objects, parts: Sequence[Any], name: str) -> ObjectInfo:
    """Make the object `name` be `parts` (one at least) behind one another; what was made on the way is removed."""
    wanted = whole(name, map(metadata, parts))
    there = objects.look(name)
    if there is None or metadata(there) != wanted:
        while len(parts) > _AT_ONCE:
            groups = [parts[first : first + _AT_ONCE] for first in range(0, len(parts), _AT_ONCE)]
            parts = objects.each(lambda group: _intermediate(objects, group, name), groups)
        if there is not None:  # which is replaced by nothing that is not known to be right
            parts = [_intermediate(objects, parts, name)]
        objects.compose(parts, wanted)
    sweep(objects, name)
    return wanted


def whole(path: str, parts: Iterable[ObjectInfo]) -> ObjectInfo:
    """Return size and checksum of `parts` after one another."""
    size, crc32c = 0, EMPTY
    for part in parts:
        size, crc32c = size + part.size, combined_crc32c(crc32c, part.crc32c, part.size)
    return ObjectInfo(path, size, crc32c)


def hidden(name: str, purpose: str) -> str:
    """The name of an object that is made on the way to the object `name`, next to it and shown by no verb."""
    folder, slash, _ = name.rpartition("/")
    return f"{folder}{slash}.{sha256(name.encode()).hexdigest()[:16]}-{purpose}.partial"


def sweep(objects: Objects, name: str) -> None:
    """Remove all that was made on the way to the object `name`, by whom and when ever."""
    objects.each(objects.delete, objects.listed(hidden(name, "").removesuffix(".partial")))


def _intermediate(objects: Objects, group: Sequence[Any], name: str) -> Any:
    """These parts as one object, which is found again by a later attempt."""
    wanted = whole("", map(metadata, group))
    path = hidden(name, f"{wanted.size}-{wanted.crc32c}")
    return objects.compose(group, ObjectInfo(path, wanted.size, wanted.crc32c))
