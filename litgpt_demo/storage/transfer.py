"""Large objects in parts, several at a time: joined by the bucket, fetched by ranges, resumed after a kill."""

from __future__ import annotations

import fcntl
import io
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c

from litgpt_demo.storage.base import ObjectInfo
from litgpt_demo.storage.checksums import EMPTY, combined_crc32c, copy_with_crc
from litgpt_demo.storage.local import rename
from litgpt_demo.storage.objects import USER, Objects, UnsettledError, metadata, require_same

# https://cloud.google.com/storage/docs/composite-objects
_AT_ONCE = 32


def join(objects: Objects, parts: Sequence[Any], name: str) -> ObjectInfo:
    """Make the object `name` be `parts` (one at least) behind one another; what was made on the way is removed."""

    def intermediate(group: Sequence[Any]) -> Any:  # which is found again by a later attempt
        part = _whole("", map(metadata, group))
        path = _hidden(name, f"{part.size}-{part.crc32c}.partial")
        return objects.compose(group, ObjectInfo(path, part.size, part.crc32c))

    wanted = _whole(name, map(metadata, parts))
    there = objects.look(name)
    if there is None or metadata(there) != wanted:
        while len(parts) > _AT_ONCE:
            groups = [parts[first : first + _AT_ONCE] for first in range(0, len(parts), _AT_ONCE)]
            parts = objects.each(intermediate, groups)
        if there is not None:  # which is replaced by nothing that is not known to be right
            parts = [intermediate(parts)]
        objects.compose(parts, wanted)
    _sweep(objects, name)
    return wanted


def _whole(path: str, parts: Iterable[ObjectInfo]) -> ObjectInfo:
    """Return size and checksum of `parts` after one another."""
    size, crc32c = 0, EMPTY
    for part in parts:
        size, crc32c = size + part.size, combined_crc32c(crc32c, part.crc32c, part.size)
    return ObjectInfo(path, size, crc32c)


def _hidden(name: str, rest: str = "") -> str:
    """The name of an object that is made on the way to the object `name`, next to it; no verb shows `*.partial`."""
    folder, slash, _ = name.rpartition("/")
    return f"{folder}{slash}.{sha256(name.encode()).hexdigest()[:16]}-{rest}"


def _sweep(objects: Objects, name: str) -> None:
    """Remove all that was made on the way to the object `name`, by whom and when ever."""
    objects.each(objects.delete, objects.listed(_hidden(name)))


# --- up ---------------------------------------------------------------------------------------------------------------


def upload_in_parts(objects: Objects, source: Path, name: str, part_size: int) -> ObjectInfo:
    """Put the content of `source` at `name`: hidden objects of `part_size` bytes, then joined by the bucket.

    They are named after the whole's size and checksum, so that the next upload of the same finds what is there.

    Raises:
        DataError: `source` changes while it is read, or its bytes stay wrong on their way.
    """
    places = _ranges(source.stat().st_size, part_size)
    contents = [_content(source, place) for place in places]
    wanted = _whole(name, contents)
    key = _hidden(name, f"{wanted.size}-{wanted.crc32c}")
    parts = {
        ObjectInfo(f"{key}-{number:05d}.partial", content.size, content.crc32c): place
        for number, (content, place) in enumerate(zip(contents, places, strict=True))
    }

    def stored_parts() -> dict[ObjectInfo, Any]:
        return {metadata(blob): blob for blob in objects.listed(key)}

    def send(part: ObjectInfo) -> None:
        objects.put(part, lambda: io.BufferedReader(_Section(source.open("rb", buffering=0), parts[part])))

    def attempt() -> None:
        there = objects.look(name)
        if there is not None and metadata(there) == wanted:
            _sweep(objects, name)
            return
        stored = stored_parts()
        objects.each(send, [part for part in parts if part not in stored])
        stored = stored_parts()
        if not stored.keys() >= parts.keys():
            raise UnsettledError("its parts were swept by someone who uploads to the same name")
        join(objects, [stored[part] for part in parts], name)

    objects.retry_transient(name, USER, attempt)
    return wanted


def _ranges(size: int, part_size: int) -> list[range]:
    return [range(start, min(start + part_size, size)) for start in range(0, size, part_size)]


def _content(source: Path, place: range) -> ObjectInfo:
    with source.open("rb") as file:
        file.seek(place.start)
        return ObjectInfo("", *copy_with_crc(file, limit=len(place)))


class _Section(io.RawIOBase):
    """A range of a file as a file of its own: an upload has to begin at 0 and may be rewound."""

    def __init__(self, file: io.FileIO, place: range) -> None:
        self._file, self._place, self._at = file, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._place)}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer)[: max(0, len(self._place) - self._at)]
        size = os.preadv(self._file.fileno(), [room], self._place.start + self._at)
        self._at += size
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


# --- down -------------------------------------------------------------------------------------------------------------


def download_in_ranges(objects: Objects, blob: Any, target: Path, part_size: int) -> None:
    """Make `target` what the object is. Inside an attempt of `retry_transient`, like any reading verb of `objects`.

    What was fetched, whatever stops it, stays next to `target`, hidden, for the next download from there to here.
    """
    expected = metadata(blob)
    with _unfinished(target, objects.address(blob.name)) as (partial, journal):
        os.truncate(partial, expected.size)
        journal.seek(0)
        lines = re.findall(rb"^(\d+) (\d+) (\d+) ([0-9a-f]{8})$", journal.read(), re.MULTILINE)
        told = {
            range(int(start), int(end)): crc.decode() for of, start, end, crc in lines if int(of) == blob.generation
        }
        # After a crash of the machine a line may be there before the bytes that it speaks of; so those are read.
        done = {
            place: crc for place, crc in told.items() if _content(partial, place) == ObjectInfo("", len(place), crc)
        }

        def fetch(place: range) -> None:
            with partial.open("r+b") as file:
                slot = _Slot(file, place)
                objects.fetch_range(blob, place.start, place.stop, slot)
                done[place] = slot.crc32c()
            # One write to a file that is opened for appending: whole lines, also if another process writes one.
            journal.write(f"{blob.generation} {place.start} {place.stop} {done[place]}\n".encode())

        places = _ranges(expected.size, part_size)
        objects.each(fetch, [place for place in places if place not in done])
        whole = _whole(expected.path, (ObjectInfo("", len(place), done[place]) for place in places))
        if whole != expected:
            partial.unlink()  # which range it is, nobody knows
            journal.truncate(0)
        require_same(expected, whole)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        rename(partial, target)


class _Slot:
    """The place of a range in a file: takes its bytes, and never one that belongs to its neighbour."""

    def __init__(self, file: BinaryIO, place: range) -> None:
        file.seek(place.start)
        self._file, self._missing, self._crc32c = file, len(place), 0

    def write(self, block: bytes) -> int:
        if len(block) > self._missing:
            raise UnsettledError("more bytes arrived than were asked for")
        self._missing -= len(block)
        self._crc32c = google_crc32c.extend(self._crc32c, block)
        return self._file.write(block)

    def crc32c(self) -> str:
        if self._missing:
            raise UnsettledError(f"{self._missing} bytes of a range did not arrive")
        return f"{self._crc32c:08x}"


@contextmanager
def _unfinished(target: Path, origin: str) -> Iterator[tuple[Path, io.FileIO]]:
    """An unfinished file next to `target` and a journal, both of an earlier download from `origin` if there was one.

    The journal is gone, and with it the claim, when the block ends well. Where somebody else is at it, or where the
    file system knows no locks, they are fresh ones that nobody will find again.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    key = sha256(f"{origin} {target.name}".encode()).hexdigest()[:16]
    path = target.with_name(f".{key}.journal.partial")
    journal = path.open("a+b", buffering=0)
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found_again = os.fstat(journal.fileno()).st_nlink > 0  # else it was finished before the lock was had
    except OSError:
        found_again = False
    if not found_again:
        journal.close()
        key = secrets.token_hex(8)
        path = target.with_name(f".{key}.journal.partial")
        journal = path.open("a+b", buffering=0)
    partial = target.with_name(f".{key}.partial")
    with journal:
        partial.touch()
        try:
            yield partial, journal
            path.unlink()
        finally:
            if not found_again:
                path.unlink(missing_ok=True)
                partial.unlink(missing_ok=True)
