"""Everything that a finished dataset promises, read again from its first byte to its last."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import google_crc32c

from litgpt_demo.data.dataset import FORMAT, DatasetManifest, Split, open_dataset
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


@dataclass(frozen=True, kw_only=True)
class _Content:
    """The content of a dataset's file."""

    record: FileRecord
    largest: int = -1
    ends: int = 0
    """The number of end-of-text ids."""
    last: int = -1


def verify_dataset(address: str) -> Verification:
    """Compare the dataset at `address` with its manifest: files, sizes, checksums, counts, ids, ends of documents.

    Reads each byte once, in 64 MiB of memory. A bucket's files are fetched one by one into the temporary folder.

    Raises:
        DataError: there is no finished dataset.
        NetworkError: the bucket went away.
    """
    manifest, storage = open_dataset(address), open_storage(address)
    with ThreadPoolExecutor(_READERS) as pool:
        contents = list(pool.map(lambda record: _content(storage, record, manifest), manifest.files))
    found = {content.record.path: content for content in contents if content is not None}
    strays = sorted(set(storage.list()) - {record.path for record in manifest.files} - {MANIFEST})
    problems = [
        *_format_problems(manifest),
        *_missing(manifest, found, storage),
        *(problem for record in manifest.files if record.path in found for problem in _differences(record, found)),
        *_split_problems(manifest, manifest.train, found),
        *_split_problems(manifest, manifest.validation, found),
    ]
    problems += [f"{storage.address(path)} is not in the manifest" for path in strays]
    return Verification(manifest=manifest, problems=tuple(problems), strays=tuple(strays))


def _format_problems(manifest: DatasetManifest) -> Iterator[str]:
    if manifest.format != FORMAT:
        yield f"the manifest has format {manifest.format}, and this version knows format {FORMAT}"


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
    import numpy as np

    size, crc32c, hashed = 0, 0, sha256()
    largest, ends, last = -1, 0, -1
    for block in _blocks(path):
        size += len(block)
        crc32c = google_crc32c.extend(crc32c, block)
        if record.sha256 is not None:
            hashed.update(block)
        if manifest is not None and len(block) % np.dtype(manifest.dtype).itemsize == 0:
            ids = np.frombuffer(block, dtype=manifest.dtype)
            largest, last = max(largest, int(ids.max())), int(ids[-1])
            ends += int(np.count_nonzero(ids == manifest.end_of_text))
    found = FileRecord(
        path=record.path,
        size=size,
        crc32c=f"{crc32c:08x}",
        sha256=None if record.sha256 is None else hashed.hexdigest(),
    )
    return _Content(record=found, largest=largest, ends=ends, last=last)


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _missing(manifest: DatasetManifest, found: dict[str, _Content], storage: Storage) -> Iterator[str]:
    for record in manifest.files:
        if record.path not in found:
            address = storage.address(record.path)
            yield f"{address} is not a file" if os.path.lexists(address) else f"{address} is missing"


def _differences(record: FileRecord, found: dict[str, _Content]) -> Iterator[str]:
    content = found[record.path].record
    for name in ("size", "crc32c", "sha256"):
        found_here, said = getattr(content, name), getattr(record, name)
        if found_here != said:
            yield f"{record.path} has {name} {found_here}, its manifest says {said}"


def _split_problems(manifest: DatasetManifest, split: Split, found: dict[str, _Content]) -> Iterator[str]:
    """Yield mistakes that the checksums cannot show, because the manifest itself may be wrong."""
    import numpy as np

    name = "train" if split is manifest.train else "validation"
    contents = [found[record.path] for record in split.files if record.path in found]
    tokens = sum(content.record.size for content in contents) // np.dtype(manifest.dtype).itemsize
    if tokens != split.tokens:
        yield f"{name} holds {tokens} tokens, its manifest says {split.tokens}"
    if (ends := sum(content.ends for content in contents)) != split.documents:
        yield f"{name} closes {ends} documents with id {manifest.end_of_text}, its manifest says {split.documents}"
    for content in contents:
        if content.largest >= manifest.vocab_size:
            yield (
                f"{content.record.path} holds the id {content.largest}, "
                f"the vocabulary ends at {manifest.vocab_size - 1}"
            )
        if content.record.size and content.last != manifest.end_of_text:
            yield f"{content.record.path} ends in the middle of a document: its last id is {content.last}"


def require_sound(address: str) -> DatasetManifest:
    """The manifest of the dataset at `address`, every byte of which was compared.

    Raises:
        DataError: names everything that is wrong.
    """
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
