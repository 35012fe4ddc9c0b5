"""Everything that a finished dataset promises, read again from its first byte to its last."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from litgpt_demo.data.dataset import FORMAT, DatasetManifest, open_dataset
from litgpt_demo.errors import DataError
from litgpt_demo.manifests import FileRecord
from litgpt_demo.storage import MANIFEST, Storage, open_storage
from litgpt_demo.storage.local import explaining

_BLOCK = 16 << 20  # bytes read at a time, by each of _READERS
_READERS = 4


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of reading a dataset again."""

    manifest: DatasetManifest
    problems: tuple[str, ...]
    """One sentence each; none if everything is as the manifest says."""
    strays: tuple[str, ...] = ()
    """The files that the manifest does not list; each is one of the problems."""

    @property
    def remedy(self) -> str:
        """The advice to a person who has these problems."""
        if len(self.strays) == len(self.problems):
            return "remove the files that it does not list"
        return "remove that folder and prepare it again"


class _Content(NamedTuple):
    """What a file of a dataset holds; of the ids in it the largest, the number of end-of-text, and the last."""

    record: FileRecord
    largest: int
    ends: int
    last: int


def verify_dataset(address: str) -> Verification:
    """Compare the dataset at `address` with its manifest: files, sizes, checksums, counts, ids, ends of documents.

    Reads each byte once, in 64 MiB of memory. A bucket's files are fetched one by one into the temporary folder.
    Counts and ids are looked at because the manifest itself may be wrong, which checksums cannot show.
    """
    manifest, storage = open_dataset(address), open_storage(address)
    with ThreadPoolExecutor(_READERS) as pool:
        contents = list(pool.map(lambda record: _content(storage, record, manifest), manifest.files))
    found = {content.record.path: content for content in contents if content is not None}
    problems = list[str]()
    if manifest.format != FORMAT:
        problems.append(f"the manifest has format {manifest.format}, and this version knows format {FORMAT}")
    for record in manifest.files:
        if (here := found.get(record.path)) is None:
            place = storage.address(record.path)
            problems.append(f"{place} is not a file" if os.path.lexists(place) else f"{place} is missing")
            continue
        for name in ("size", "crc32c", "sha256"):
            found_here, said = getattr(here.record, name), getattr(record, name)
            if found_here != said:
                problems.append(f"{record.path} has {name} {found_here}, its manifest says {said}")
    for name, split in (("train", manifest.train), ("validation", manifest.validation)):
        of_split = [found[record.path] for record in split.files if record.path in found]
        tokens = sum(content.record.size for content in of_split) // np.dtype(manifest.dtype).itemsize
        if tokens != split.tokens:
            problems.append(f"{name} holds {tokens} tokens, its manifest says {split.tokens}")
        if (ends := sum(content.ends for content in of_split)) != split.documents:
            closes = f"{name} closes {ends} documents with id {manifest.end_of_text}"
            problems.append(f"{closes}, its manifest says {split.documents}")
        for record, largest, _, last in of_split:
            if largest >= manifest.vocab_size:
                most = manifest.vocab_size - 1
                problems.append(f"{record.path} holds the id {largest}, the vocabulary ends at {most}")
            if record.size and last != manifest.end_of_text:
                problems.append(f"{record.path} ends in the middle of a document: its last id is {last}")
    strays = sorted(set(storage.list()) - {record.path for record in manifest.files} - {MANIFEST})
    problems += [f"{storage.address(path)} is not in the manifest" for path in strays]
    return Verification(manifest=manifest, problems=tuple(problems), strays=tuple(strays))


def _content(storage: Storage, record: FileRecord, manifest: DatasetManifest) -> _Content | None:
    """Return the content of the file; None if there is no such file."""
    tokens = record not in manifest.tokenizer
    try:
        if (path := storage.local_path(record.path)) is not None:
            if not path.is_file():  # not there, a folder, or a link that leads nowhere or to itself
                return None
            with explaining(str(path)):
                return _read(path, record, manifest if tokens else None)
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "file")
            storage.download(record.path, target)
            return _read(target, record, manifest if tokens else None)
    except FileNotFoundError:
        return None


def _read(path: Path, record: FileRecord, manifest: DatasetManifest | None) -> _Content:
    """Everything about the file in one reading; of its ids too, where `manifest` says how they are written."""
    size, crc32c, hashed = 0, 0, sha256()
    largest, ends, last = -1, 0, -1
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size += len(block)
            crc32c = google_crc32c.extend(crc32c, block)
            if record.sha256 is not None:
                hashed.update(block)
            if manifest is not None and len(block) % np.dtype(manifest.dtype).itemsize == 0:
                ids = np.frombuffer(block, dtype=manifest.dtype)
                largest, last = max(largest, int(ids.max())), int(ids[-1])
                ends += int(np.count_nonzero(ids == manifest.end_of_text))
    digest = None if record.sha256 is None else hashed.hexdigest()
    return _Content(FileRecord(path=record.path, size=size, crc32c=f"{crc32c:08x}", sha256=digest), largest, ends, last)


def require_sound(address: str) -> DatasetManifest:
    """The manifest of the dataset at `address`, every byte compared; a DataError names all that is wrong."""
    verification = verify_dataset(address)
    if verification.problems:
        raise DataError(
            f"{address} is not what its manifest says: {'; '.join(verification.problems)}: {verification.remedy}"
        )
    return verification.manifest


def main(argv: Sequence[str]) -> int:
    """`python -m litgpt_demo verify`: for a machine that has nothing but this package."""
    parser = argparse.ArgumentParser(prog="litgpt_demo verify", description=__doc__)
    parser.add_argument("dataset", help="folder or gs:// address of a prepared dataset")
    args = parser.parse_args(argv)
    manifest = require_sound(args.dataset)
    print(f"{args.dataset}: {manifest.documents} documents, {manifest.tokens} tokens, all as the manifest says")
    return 0
