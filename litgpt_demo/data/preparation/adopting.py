"""Tokens that exist already: read once, counted, checked and described.

Flat files of ids become a dataset where they lie; folders of litdata and MosaicML's streaming are written as such.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import MappingProxyType

import numpy as np

from litgpt_demo.data.corpus import Source, corpus_identity
from litgpt_demo.data.dataset import FORMAT, DatasetManifest, PlannedDataset, Split
from litgpt_demo.data.ids import Ids
from litgpt_demo.data.preparation.importing import arrays, folder_index
from litgpt_demo.data.preparation.ledger import Work
from litgpt_demo.data.preparation.tokenizing import settle_tokenizer
from litgpt_demo.data.settings import TokensCorpus
from litgpt_demo.data.tokens import TokenizerFiles
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.manifests import FileRecord
from litgpt_demo.storage import Position, Storage, open_storage, sha256_of
from litgpt_demo.storage.local import explaining

_BLOCK = 32 << 20  # bytes read at a time, by each of _READERS
_READERS = 4
_SPLITS = ("train", "validation")
_FILES = MappingProxyType({"train": "train", "validation": "val"})
_BEGINNING = 1 << 20  # bytes of a file that are looked at before anything is prepared


@dataclass(frozen=True, kw_only=True)
class _Adopted:
    """A file of tokens that was read."""

    source: Source
    crc32c: str
    ids: Ids


def dtype_of(corpus: TokensCorpus, tokenizer: TokenizerFiles) -> str:
    """Return numpy's name of the type of the ids, little-endian."""
    return {"auto": tokenizer.dtype, "uint16": "<u2", "uint32": "<u4"}[corpus.dtype]


def check_beginnings(planned: PlannedDataset) -> None:
    """Look at the first ids of every file.

    Raises:
        UserError: they cannot be ids of this tokenizer, in this type.
        DataError: a file ends inside of an id.
    """
    corpus, tokenizer = planned.data.corpus, planned.tokenizer
    assert isinstance(corpus, TokensCorpus)
    assert tokenizer is not None
    dtype = np.dtype(dtype_of(corpus, tokenizer))
    for source in (source for split in _SPLITS for source in _flat(planned.sources, split)):
        if source.size % dtype.itemsize:
            raise DataError(
                f"{source.address} has {source.size:,} bytes, which is no whole number of {dtype.name} ids; it is cut "
                "short, or set data.corpus.dtype to the other type"
            )
        storage, name = _opened(source)
        _, block = storage.read_on(name, Position(), most=_BEGINNING)
        ids = np.frombuffer(block, dtype=dtype)
        _require_known(int(ids.max(initial=0)), source, tokenizer.vocab_size, dtype)
        if dtype.itemsize == 2 and len(ids) >= 64 and not ids[1::2].any():
            raise UserError(
                f"{source.address} has a 0 in every second place when it is read as uint16, as ids of 4 bytes have; "
                "set data.corpus.dtype=uint32"
            )


def adopt(planned: PlannedDataset, work: Work, report: Callable[[int, int, int], None]) -> DatasetManifest:
    """Describe tokens where they lie; only those of this machine that a bucket's users cannot read are copied there.

    Args:
        report: is called with the number of documents and of bytes that are read, and that of all bytes.

    Raises:
        UserError: they are not the tokenizer's.
        DataError: a file changed meanwhile.
    """
    assert isinstance(planned.data.corpus, TokensCorpus)
    assert planned.tokenizer is not None
    check_beginnings(planned)
    tokenizer = settle_tokenizer(planned, work, lambda documents, size: None)
    dtype = dtype_of(planned.data.corpus, planned.tokenizer)
    progress = _Progress(report, sum(source.size for source in planned.sources))
    places: dict[str, str] = {}
    made = [_made(planned, work, split, dtype, progress, places) for split in _SPLITS]
    (train, _), (validation, _) = made
    return DatasetManifest(
        format=FORMAT,
        name=planned.name,
        key=planned.key,
        corpus=corpus_identity(planned.data.corpus, planned.sources),
        filters=planned.data.filters,
        dropped={},
        bad_documents=0,
        bad_places=(),
        document_lengths=(),
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        dtype=dtype,
        validation_fraction=validation.tokens / max(1, train.tokens + validation.tokens),
        split_seed=planned.data.split_seed,
        text_bytes=0,
        train=train,
        validation=validation,
        tokenizer=tokenizer.files,
        places=places,
        closes_documents=all(closed for _, closed in made),
    )


def _made(
    planned: PlannedDataset, work: Work, split: str, dtype: str, progress: _Progress, places: dict[str, str]
) -> tuple[Split, bool]:
    """Return one split, and whether every file of it ends with end-of-text; `places` is as `_split` fills it."""
    tokenizer, flat = planned.tokenizer, _flat(planned.sources, split)
    assert tokenizer is not None
    if not flat:
        ids = Ids(dtype=dtype, end_of_text=tokenizer.end_of_text)
        imported = _imported(work, split, _of(planned.sources, split), tokenizer, ids, progress)
        return imported, ids.last == ids.end_of_text
    with ThreadPoolExecutor(_READERS) as pool:
        files = list(pool.map(lambda source: _read(source, tokenizer, dtype, progress), flat))
    return _split(work, split, files, places), all(file.ids.last == tokenizer.end_of_text for file in files)


class _Progress:
    """Adds up what several threads have read."""

    def __init__(self, report: Callable[[int, int, int], None], total: int) -> None:
        self._report, self._total, self._lock = report, total, Lock()
        self._documents = self._size = 0

    def add(self, documents: int, size: int) -> None:
        with self._lock:
            self._documents, self._size = self._documents + documents, self._size + size
            self._report(self._documents, self._size, self._total)


def _of(sources: Sequence[Source], split: str) -> list[Source]:
    return [source for source in sources if source.name.startswith(f"{split}/")]


def _flat(sources: Sequence[Source], split: str) -> list[Source]:
    """Return a split's files where they are flat files of ids."""
    own = _of(sources, split)
    return [] if folder_index(own) else own


def _imported(
    work: Work, split: str, sources: Sequence[Source], tokenizer: TokenizerFiles, ids: Ids, progress: _Progress
) -> Split:
    """Write the ids of a folder with an index as a flat file of the dataset, and count them.

    Raises:
        UserError: the tokenizer does not have one of them.
        DataError: a file is not what was listed, or not what its index says.
    """
    # Another preparation of the same dataset may be at work beside this one.
    target = work.make_scratch() / f"{secrets.token_hex(8)}.{split}.bin"
    with explaining(str(target), needed=sum(source.size for source in sources)), target.open("wb") as file:
        for source, shard in arrays(sources, _content):
            lowest, largest = int(shard.min(initial=0)), int(shard.max(initial=0))
            _require_known(lowest if lowest < 0 else largest, source, tokenizer.vocab_size, shard.dtype)
            ends, block = ids.ends, shard.astype(ids.dtype).tobytes()
            ids.add(block)
            file.write(block)
            progress.add(ids.ends - ends, source.size)
    name = f"{_FILES[split]}.bin"
    hashed = sha256_of(target)
    stored = work.storage.upload(target, name, move=True)
    return Split(documents=ids.ends, tokens=ids.tokens, files=(FileRecord.of(stored, sha256=hashed),))


def _content(source: Source) -> bytes:
    storage, name = _opened(source)
    content = storage.read(name)
    if f"crc32c:{Position().after(content).crc32c}" != source.version:
        raise DataError(f"{source.address} is not what was listed: it changed meanwhile; run again to list it anew")
    return content


def _opened(source: Source) -> tuple[Storage, str]:
    """Return the folder of a file, and the file's name there."""
    parent, _, name = source.address.rpartition("/")
    return open_storage(parent or "/"), name


def _read(source: Source, tokenizer: TokenizerFiles, dtype: str, progress: _Progress) -> _Adopted:
    """Read a file from its first byte to its last.

    Raises:
        UserError: it has an id that the tokenizer has not.
        DataError: it is not what was listed.
    """
    (storage, name), position = _opened(source), Position()
    ids = Ids(dtype=dtype, end_of_text=tokenizer.end_of_text)
    while position.size < source.size:
        begin, block = storage.read_on(name, position, most=_BLOCK)
        if begin != position or not block:
            break
        ends, position = ids.ends, position.after(block)
        ids.add(block)
        progress.add(ids.ends - ends, len(block))
    if (position.size, f"crc32c:{position.crc32c}") != (source.size, source.version):
        raise DataError(
            f"{source.address} is not what was listed: it changed while it was read; run again to list it anew"
        )
    _require_known(ids.largest, source, tokenizer.vocab_size, np.dtype(dtype))
    return _Adopted(source=source, crc32c=position.crc32c, ids=ids)


def _require_known(largest: int, source: Source, vocab_size: int, dtype: np.dtype[np.generic]) -> None:
    if not 0 <= largest < vocab_size:
        raise UserError(
            f"{source.address} holds the id {largest:,}, and data.tokenizer has the ids 0 to {vocab_size - 1:,}; give "
            f"the tokenizer that made these tokens, or data.corpus.dtype if they are not {dtype.name}"
        )


def _split(work: Work, split: str, files: Sequence[_Adopted], places: dict[str, str]) -> Split:
    """Return a split's files under a dataset's own names; `places` gets the addresses of those that stay elsewhere."""
    short, count = _FILES[split], len(files)
    names = [f"{short}.bin"] if count == 1 else [f"{short}-{number:05d}.bin" for number in range(count)]
    for name, file in zip(names, files, strict=True):
        if file.source.is_remote or work.storage.local_path() is not None:
            places[name] = file.source.address
        else:
            work.storage.upload(Path(file.source.address), name)
    return Split(
        documents=sum(file.ids.ends for file in files),
        tokens=sum(file.ids.tokens for file in files),
        files=tuple(
            FileRecord(path=name, size=file.source.size, crc32c=file.crc32c)
            for name, file in zip(names, files, strict=True)
        ),
    )
