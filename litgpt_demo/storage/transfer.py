"""Large objects up and down in parts, several at a time, gone on with by the next process where one was killed."""

from __future__ import annotations

import fcntl
import io
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c

from litgpt_demo.storage.base import ObjectInfo
from litgpt_demo.storage.checksums import EMPTY, combined_crc32c, copy_with_crc
from litgpt_demo.storage.compose import hidden, join, sweep, whole
from litgpt_demo.storage.local import rename
from litgpt_demo.storage.objects import USER, Objects, UnsettledError, metadata, require_same


@dataclass(frozen=True)
class _Range:
    """The bytes of a file from `start` up to and without `end`."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def _ranges(size: int, part_size: int) -> list[_Range]:
    return [_Range(start, min(start + part_size, size)) for start in range(0, size, part_size)]


# --- up ---------------------------------------------------------------------------------------------------------------


def upload_in_parts(objects: Objects, source: Path, name: str, part_size: int) -> ObjectInfo:
    """Put the content of `source` at `name`: hidden objects of `part_size` bytes, then joined by the bucket.

    They are named after the whole's size and checksum, so that the next upload of the same finds what is there.

    Raises:
        DataError: `source` changes while it is read, or its bytes stay wrong on their way.
    """
    places = _ranges(source.stat().st_size, part_size)
    contents = [_content(source, place) for place in places]
    wanted = whole(name, contents)
    key = f"{wanted.size}-{wanted.crc32c}"
    parts = {
        ObjectInfo(hidden(name, f"{key}-{number:05d}"), content.size, content.crc32c): place
        for number, (content, place) in enumerate(zip(contents, places, strict=True))
    }

    def stored_parts() -> dict[ObjectInfo, Any]:
        return {metadata(blob): blob for blob in objects.listed(hidden(name, key).removesuffix(".partial"))}

    def attempt() -> None:
        there = objects.look(name)
        if there is not None and metadata(there) == wanted:
            sweep(objects, name)
            return
        stored = stored_parts()
        missing = [part for part in parts if part not in stored]
        objects.each(lambda part: objects.put(part, lambda: _section(source, parts[part])), missing)
        stored = stored_parts()
        if not stored.keys() >= parts.keys():
            raise UnsettledError("its parts were swept by someone who uploads to the same name")
        join(objects, [stored[part] for part in parts], name)

    objects.retry_transient(name, USER, attempt)
    return wanted


def _content(source: Path, place: _Range) -> ObjectInfo:
    with source.open("rb") as file:
        file.seek(place.start)
        return ObjectInfo("", *copy_with_crc(file, limit=place.size))


def _section(source: Path, place: _Range) -> BinaryIO:
    return io.BufferedReader(_Section(source.open("rb", buffering=0), place))


class _Section(io.RawIOBase):
    """A range of a file as a file of its own: an upload has to begin at 0 and may be rewound."""

    def __init__(self, file: io.FileIO, place: _Range) -> None:
        self._file, self._place, self._at = file, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._place.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer)[: max(0, self._place.size - self._at)]
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
        done = _done(partial, journal, blob.generation)

        def fetch(place: _Range) -> None:
            with partial.open("r+b") as file:
                slot = _Slot(file, place)
                objects.fetch_range(blob, place.start, place.end, slot)
                done[place] = slot.crc32c()
            # One write to a file that is opened for appending: whole lines, also if another process writes one.
            journal.write(f"{blob.generation} {place.start} {place.end} {done[place]}\n".encode())

        places = _ranges(expected.size, part_size)
        objects.each(fetch, [place for place in places if place not in done])
        crc32c = EMPTY
        for place in places:
            crc32c = combined_crc32c(crc32c, done[place], place.size)
        if crc32c != expected.crc32c:
            partial.unlink()  # which range it is, nobody knows
            journal.truncate(0)
        require_same(expected, ObjectInfo(expected.path, expected.size, crc32c))
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        rename(partial, target)


class _Slot:
    """The place of a range in a file: takes its bytes, and never one that belongs to its neighbour."""

    def __init__(self, file: BinaryIO, place: _Range) -> None:
        file.seek(place.start)
        self._file, self._missing, self._crc32c = file, place.size, 0

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


def _done(partial: Path, journal: io.FileIO, generation: int) -> dict[_Range, str]:
    """Return the ranges of this generation in the partial file, and their checksums: the journal, as far as it is true.

    After a crash of the machine its lines may be there before the bytes they speak of; so those are read.
    """
    journal.seek(0)
    lines = re.findall(rb"^(\d+) (\d+) (\d+) ([0-9a-f]{8})$", journal.read(), re.MULTILINE)
    listed = {
        _Range(int(start), int(end)): crc32c.decode() for of, start, end, crc32c in lines if int(of) == generation
    }
    return {
        place: crc32c
        for place, crc32c in listed.items()
        if _content(partial, place) == ObjectInfo("", place.size, crc32c)
    }


@contextmanager
def _unfinished(target: Path, origin: str) -> Iterator[tuple[Path, io.FileIO]]:
    """An unfinished file next to `target` and a journal, both of an earlier download from `origin` if there was one.

    The journal is gone, and with it the claim, when the block ends well. Where somebody else is at it, or where the
    file system knows no locks, they are fresh ones that nobody will find again.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    journal = _journal(target, sha256(f"{origin} {target.name}".encode()).hexdigest()[:16])
    found_again = _claimed(journal)
    if not found_again:
        journal.close()
        journal = _journal(target, secrets.token_hex(8))
    path = Path(journal.name)
    partial = path.with_name(path.name.replace(".journal.", "."))
    with journal:
        partial.touch()
        try:
            yield partial, journal
            path.unlink()
        finally:
            if not found_again:
                path.unlink(missing_ok=True)
                partial.unlink(missing_ok=True)


def _journal(target: Path, key: str) -> io.FileIO:
    return target.with_name(f".{key}.journal.partial").open("a+b", buffering=0)


def _claimed(journal: io.FileIO) -> bool:
    """Return True if the journal is ours alone until it is closed, and still has its name."""
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return os.fstat(journal.fileno()).st_nlink > 0
