"""The steps of a preparation's workers, which survey and encode shards, and the store of their progress."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b, sha256
from multiprocessing import parent_process
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, get_ident
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from litgpt_demo.config import DataConfig, Filters, Settings, TrainedTokenizer, content_hash
from litgpt_demo.data.dataset import PlannedDataset
from litgpt_demo.data.fetching import forget
from litgpt_demo.data.readers import BadDocument, first_few, text_edges
from litgpt_demo.data.shards import Shard, count_documents, documents, has_local_footers, read_shard
from litgpt_demo.data.tokens import Encoder, TokenizerFiles, train_tokenizer
from litgpt_demo.documents import FileRecord, parse_json
from litgpt_demo.errors import DataError
from litgpt_demo.storage import Storage, is_remote, open_storage
from litgpt_demo.storage.local import translate_os_errors
from litgpt_demo.storage.private import make_temporary, own_temporary

Mask: TypeAlias = npt.NDArray[np.bool_]
Ids: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

SHARDS = "shards"
"""The folder, below the dataset's, of what workers make."""

PLACES = 1000
"""Places of bad documents in a manifest. A shard's record has as many, so that they do not depend on the shards."""
_LENGTHS = 40  # powers of two that a document's number of tokens may reach
_MIN_FREE = 0.5  # share of the file system that is free where copies stay for the second reading
# Pieces that may wait on this machine's disk to be hashed, of at most some 100 MB each. The others are fetched back
# from the bucket when their turn comes: neighbouring shards may end far apart, and the temporary folder may be memory.
_WAITING = 32


@dataclass(frozen=True, kw_only=True)
class PrepContext:
    """The settings of a preparation, which travel to workers in other processes and on other machines."""

    data: DataConfig
    root: str
    path: str
    """The dataset's path below the root."""
    found: frozenset[str] = frozenset()
    """The files that were in the progress store at the beginning: no other record is looked for, by a request each."""
    local_pieces_dir: Path | None = None
    """The folder where workers leave the pieces that they upload to a bucket, to be hashed. A worker on another machine
    has no such folder. None for a local root, where the pieces themselves are read."""

    @property
    def storage(self) -> Storage:
        return open_storage(self.root).within(self.path)

    @property
    def progress_store(self) -> Storage:
        """The folder of the pieces and their records, whose checksums are compared before they are trusted."""
        return replace(self.storage.within(SHARDS), durable=False)

    @property
    def scratch(self) -> Path:
        """The folder for unfinished work, which the next run finds; on a local root's file system: moves are free."""
        name = self.path.rpartition("/")[2]
        local = open_storage(self.root).local_path(f".scratch/{name}")
        if local is not None:
            return local
        return own_temporary() / f"{name}-{content_hash(self.root)}"  # several buckets may have this dataset

    def make_scratch(self) -> Path:
        """Make the folder for unfinished work, if need be; no other user of this machine can change it."""
        if is_remote(self.root):
            return make_temporary(self.scratch.name)
        with translate_os_errors(str(self.scratch)):
            self.scratch.mkdir(parents=True, exist_ok=True)
        return self.scratch


class ShardRecord(Settings):
    """The record of a finished step, written when all of its files are stored."""

    number: int
    shard: str
    """The digest of the shard, limit included: a record of another shard is ignored."""
    documents: int
    text_bytes: int


class ShardStats(ShardRecord):
    """The survey of a shard: `documents` are those that pass the filters."""

    read: bool = True
    """False if documents were only counted: they include empty ones, and text_bytes is approximate."""
    kept: FileRecord | None = None
    """A bit for each document that was read, set if it stays; None where all do."""
    digests: FileRecord | None = None
    """DIGEST_BYTES of each that stays; None where duplicates stay too."""
    read_documents: int
    read_bytes: int
    """The same before filtering, with empty and bad ones."""
    dropped: dict[str, int]
    bad: int = 0
    bad_places: tuple[str, ...] = ()


class TokenPiece(Settings):
    documents: int
    tokens: int
    file: FileRecord | None


class EncodeResult(ShardRecord):
    task: str
    train: TokenPiece
    validation: TokenPiece
    lengths: tuple[int, ...]


Record = TypeVar("Record", ShardStats, EncodeResult)


def file_name(number: int, suffix: str) -> str:
    return f"{number:05d}.{suffix}"


def _digest_of(shard: Shard) -> str:
    parts = [content_hash(part.source.name, part.source.version, part.start, part.end) for part in shard.parts]
    return content_hash(shard.number, shard.limit, *parts)


def _read_record(context: PrepContext, name: str, kind: type[Record], shard: Shard) -> Record | None:
    store = context.progress_store
    if name not in context.found:
        return None
    try:
        record = parse_json(store.read(name), kind, where=store.address(name), fix="it is made again")
        if isinstance(record, ShardStats):
            files = (record.kept, record.digests)
        else:
            files = (record.train.file, record.validation.file)
        is_intact = all(file is None or FileRecord.of(store.stat(file.path)) == file for file in files)
    except (FileNotFoundError, DataError):  # DataError: cut short, or of another version of this code
        return None
    return record if is_intact and record.shard == _digest_of(shard) else None


def _write_record(context: PrepContext, name: str, record: Settings) -> None:
    content = record.model_dump_json().encode()
    # `create` is usually enough, and in a bucket it is one request where `write` makes two.
    if not context.progress_store.create(name, content):
        context.progress_store.write(name, content)


_TOKENIZER = "tokenizer.json"


class TokenizerRecord(Settings):
    files: tuple[FileRecord, ...]
    end_of_text: int
    vocab_size: int
    prefix: tuple[int, ...]


StoredTokenizer: TypeAlias = tuple[TokenizerFiles, tuple[FileRecord, ...]]


def load_or_train_tokenizer(
    planned: PlannedDataset, context: PrepContext, report: Callable[[int, int], None]
) -> StoredTokenizer:
    """Store the dataset's tokenizer. One that is to be trained on the corpus is trained by the first run only."""
    data, tokenizer = planned.data, planned.tokenizer
    if tokenizer is not None:
        return store_tokenizer(context, tokenizer)
    with suppress(FileNotFoundError, DataError):  # DataError: damaged, or of another version of this code
        return _stored_tokenizer(context)
    assert isinstance(data.tokenizer, TrainedTokenizer)
    bad = list[BadDocument]()
    texts = documents(data, planned.sources, context.make_scratch(), bad)
    try:
        trained = train_tokenizer(data.tokenizer, texts, report)
    except DataError as error:
        skipped = skipped_ones(len(bad), [f"{document.place}: {document.reason}" for document in bad])
        raise DataError(f"{error}{skipped}") from error
    return store_tokenizer(context, trained)


def store_tokenizer(context: PrepContext, tokenizer: TokenizerFiles) -> StoredTokenizer:
    records = []
    for name, content in sorted(tokenizer.files.items()):
        stored = context.storage.write(f"tokenizer/{name}", content)
        records.append(FileRecord.of(stored, sha256=sha256(content).hexdigest()))
    record = TokenizerRecord(
        files=tuple(records),
        end_of_text=tokenizer.end_of_text,
        vocab_size=tokenizer.vocab_size,
        prefix=tokenizer.prefix,
    )
    _write_record(context, _TOKENIZER, record)
    return tokenizer, record.files


def _stored_tokenizer(context: PrepContext) -> StoredTokenizer:
    storage, store = context.storage, context.progress_store
    fix = f"remove {store.address()} and prepare again"
    record = parse_json(store.read(_TOKENIZER), TokenizerRecord, where=store.address(_TOKENIZER), fix=fix)
    files = dict[str, bytes]()
    for file in record.files:
        content = storage.read(file.path)
        if sha256(content).hexdigest() != file.sha256:
            raise DataError(f"{storage.address(file.path)} has changed since it was written", fix=fix)
        files[file.path.partition("/")[2]] = content
    tokenizer = TokenizerFiles(files=files, **record.model_dump(exclude={"files"}))
    return tokenizer, record.files


def skipped_ones(count: int, places: Sequence[str]) -> str:
    """Return the end of an error's sentence that names the skipped documents; empty if there are none."""
    if not count:
        return ""
    return f"; data.on_bad_document=skip left out {count:,} bad ones: {first_few(places)}"


# Of this process, by the dataset's address. In a worker process gigatoken encodes one text at a time: one per thread.
_encoders: dict[tuple[str, int | None], Encoder] = {}
_one_at_a_time = Lock()  # with functools.cache two threads would make the same one


def _encoder_of(context: PrepContext) -> Encoder:
    key = context.storage.address(), None if parent_process() is None else get_ident()
    with _one_at_a_time:
        if key not in _encoders:
            _encoders[key] = Encoder(_stored_tokenizer(context)[0])
        return _encoders[key]


def survey(context: PrepContext, shard: Shard, *, by_count: bool = True) -> ShardStats:
    # `by_count` looks into no document if no setting can drop any. It counts empty ones too, which are rare.
    name, data, scratch = file_name(shard.number, "survey.json"), context.data, context.make_scratch()
    recorded = _read_record(context, name, ShardStats, shard)
    if recorded is not None and (recorded.read or by_count):
        return recorded
    if by_count and data.filters == Filters() and data.on_bad_document == "fail" and data.corpus.max_bytes is None:
        counts = count_documents(data, shard, scratch)
        # A single one is read: it may be a bad file, of which no count of documents should complain first.
        if counts is not None and counts[0] > 1:
            _free_copies(context, shard)
            count, size = counts
            stats = ShardStats(
                number=shard.number, shard=_digest_of(shard), documents=count, text_bytes=size, read=False,
                read_documents=count, read_bytes=size, dropped={},
            )  # fmt: skip
            if not has_local_footers(data, shard):  # which takes no longer than a record
                _write_record(context, name, stats)
            return stats
    masks, digests, dropped = [np.empty(0, dtype=bool)], list[bytes](), Counter[str]()
    bad, bad_places, read_bytes, kept_bytes = 0, list[str](), 0, 0
    for batch in read_shard(data, shard, scratch):
        kept, reasons = passing(batch.texts, data.filters)
        lengths = byte_lengths(batch.texts)
        masks.append(kept)
        read_bytes += int(lengths.sum())
        kept_bytes += int(lengths[kept].sum())
        bad += len(batch.bad)
        bad_places += [f"{document.place}: {document.reason}" for document in batch.bad[: PLACES - len(bad_places)]]
        dropped += reasons - Counter(empty=len(batch.bad))  # bad documents are in the batch as empty ones
        if data.filters.drop_duplicates:
            texts = batch.texts.filter(kept).cast("large_binary").to_pylist()
            digests += [blake2b(text, digest_size=DIGEST_BYTES).digest() for text in texts]
    mask, kept_file, digests_file = np.concatenate(masks), None, None
    store = context.progress_store
    if not mask.all():
        kept_file = FileRecord.of(store.write(file_name(shard.number, "kept"), np.packbits(mask).tobytes()))
    if data.filters.drop_duplicates:
        digests_file = FileRecord.of(store.write(file_name(shard.number, "digests"), b"".join(digests)))
    stats = ShardStats(
        number=shard.number,
        shard=_digest_of(shard),
        documents=int(mask.sum()),
        text_bytes=kept_bytes,
        kept=kept_file,
        digests=digests_file,
        read_documents=len(mask),
        read_bytes=read_bytes,
        dropped=dict(dropped),
        bad=bad,
        bad_places=tuple(bad_places),
    )
    _write_record(context, name, stats)
    _free_copies(context, shard)
    return stats


def _free_copies(context: PrepContext, shard: Shard) -> None:
    # Together the copies are the whole corpus, and the temporary folder may be memory.
    room = shutil.disk_usage(context.scratch)
    if room.free < room.total * _MIN_FREE:
        forget((part.source for part in shard.parts), context.scratch)


DIGEST_BYTES = 16
"""Bits of a hash that must agree for documents to count as the same: among 10^12, two different ones do so with
a probability below 10^-14."""


def passing(texts: Any, filters: Filters) -> tuple[Mask, Counter[str]]:
    """Return which texts of a LargeStringArray pass, and how many were dropped for the first reason that applies."""
    import pyarrow.compute as pc

    kept, dropped = np.ones(len(texts), dtype=bool), Counter[str]()

    def drop(reason: str, which: Mask) -> None:
        dropped[reason] += int((kept & which).sum())
        kept[which] = False

    drop("empty", byte_lengths(texts) == 0)
    if filters.min_characters or filters.max_characters:
        characters = _numbers(pc.utf8_length(texts))
        drop("too short", characters < (filters.min_characters or 0))
        if filters.max_characters:
            drop("too long", characters > filters.max_characters)
    if filters.min_letter_ratio:
        drop("too few letters", _letter_ratios(texts) < filters.min_letter_ratio)
    return kept, +dropped


def byte_lengths(texts: Any) -> npt.NDArray[np.int64]:
    return np.diff(text_edges(texts))


def _numbers(array: Any) -> npt.NDArray[np.int64]:
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.int64)


def _letter_ratios(texts: Any) -> npt.NDArray[np.float64]:
    """The share of letters and their marks, in any script, among what is not white space; 0 where all of it is."""
    import pyarrow.compute as pc

    edges = np.append(0, np.cumsum(_numbers(pc.utf8_length(texts))))
    points = np.frombuffer("".join(texts.to_pylist()).encode("utf-32-le"), dtype="<u4")
    letters, spaces = (np.diff(np.append(0, np.cumsum(table[points]))[edges]) for table in _letters_and_spaces())
    visible = np.diff(edges) - spaces
    return np.asarray(np.divide(letters, visible, out=np.zeros(len(texts)), where=visible > 0))


@cache
def _letters_and_spaces() -> tuple[Mask, Mask]:
    import sys
    import unicodedata

    every = [chr(point) for point in range(sys.maxunicode + 1)]
    letters = np.fromiter((unicodedata.category(character)[0] in "LM" for character in every), dtype=bool)
    return letters, np.fromiter((character.isspace() for character in every), dtype=bool)


@dataclass(frozen=True, kw_only=True)
class EncodeTask:
    shard: Shard
    survey: ShardStats
    unique: int | None
    """The number of surveyed documents that are not duplicates; None where duplicates stay."""
    held_out: tuple[int, ...]
    """The documents that stay and are for validation, counted from the shard's first."""

    @property
    def digest(self) -> str:
        survey = self.survey
        return content_hash(survey.shard, survey.documents, survey.read_documents, self.unique, list(self.held_out))

    def keep_mask(self, progress_store: Storage) -> Mask:
        survey = self.survey
        mask = np.ones(survey.read_documents, dtype=bool)
        if survey.kept is not None:
            mask = _read_mask(progress_store, survey.kept.path, survey.read_documents)
        if self.unique is not None:
            mask[mask] = _read_mask(progress_store, file_name(survey.number, "unique"), survey.documents)
        return mask


def _read_mask(progress_store: Storage, path: str, count: int) -> Mask:
    return np.unpackbits(np.frombuffer(progress_store.read(path), dtype=np.uint8), count=count).astype(bool)


def encode(context: PrepContext, task: EncodeTask) -> EncodeResult | None:
    """Write a shard's two pieces of tokens, then their record; None if empty documents were counted too."""
    shard, name = task.shard, file_name(task.shard.number, "json")
    recorded = _read_record(context, name, EncodeResult, shard)
    if recorded is not None and recorded.task == task.digest:
        return recorded
    encoder, keep_mask = _encoder_of(context), task.keep_mask(context.progress_store)
    held_out = np.zeros(int(keep_mask.sum()), dtype=bool)
    held_out[list(task.held_out)] = True
    histogram, read, encoded, text_bytes = np.zeros(_LENGTHS, dtype=np.int64), 0, 0, 0
    with TemporaryDirectory(dir=context.make_scratch(), prefix="tokens-", ignore_cleanup_errors=True) as folder:
        # With the task in its name, a preparation that counted otherwise writes another file.
        train = _Piece(Path(folder, file_name(shard.number, f"{task.digest}.train.bin")))
        validation = _Piece(Path(folder, file_name(shard.number, f"{task.digest}.val.bin")))
        for batch in read_shard(context.data, shard, context.scratch):
            mask = keep_mask[read : read + len(batch.texts)]
            read += len(batch.texts)
            if read > len(keep_mask):
                break
            texts = batch.texts if mask.all() else batch.texts.filter(mask)
            sizes = byte_lengths(texts)
            if not sizes.all() and not task.survey.read:
                return None
            ids, lengths = encoder.encode_some_checked(texts)
            of_validation, ends = held_out[encoded : encoded + len(texts)], np.cumsum(lengths)
            # Runs of documents for the same split: every other one is for validation.
            runs = np.split(ids, ends[:-1][np.diff(of_validation)])
            begins_with_validation = int(of_validation[:1].sum())
            train.write(runs[begins_with_validation::2], int((~of_validation).sum()))
            validation.write(runs[1 - begins_with_validation :: 2], int(of_validation.sum()))
            histogram += np.bincount(np.frexp(lengths)[1] - 1, minlength=_LENGTHS)
            text_bytes += int(sizes.sum())
            encoded += len(texts)
        if read != len(keep_mask):
            names = ", ".join(part.source.address for part in shard.parts[:3])
            raise DataError(f"{names}: {read} documents instead of {len(keep_mask)} before; run again without changes")
        result = EncodeResult(
            number=shard.number,
            shard=_digest_of(shard),
            task=task.digest,
            documents=encoded,
            text_bytes=text_bytes,
            train=_stored(context, train),
            validation=_stored(context, validation),
            lengths=tuple(histogram.tolist()),
        )
    _write_record(context, name, result)
    forget((part.source for part in shard.parts), context.scratch)
    return result


@dataclass
class _Piece:
    path: Path
    documents: int = 0
    tokens: int = 0

    def write(self, runs: Sequence[Ids], documents: int) -> None:
        needed = sum(run.nbytes for run in runs)
        with translate_os_errors(str(self.path), needed=needed), self.path.open("ab") as file:
            file.writelines(run.data for run in runs)
        self.tokens += sum(map(len, runs))
        self.documents += documents


def _stored(context: PrepContext, piece: _Piece) -> TokenPiece:
    if not piece.tokens:
        return TokenPiece(documents=0, tokens=0, file=None)
    folder = context.local_pieces_dir
    is_left = folder is not None and os.access(folder, os.W_OK) and len(list(folder.iterdir())) < _WAITING
    stored = context.progress_store.upload(piece.path, piece.path.name, move=not is_left, is_new=True)
    if folder is not None and is_left:
        piece.path.replace(folder / piece.path.name)
    return TokenPiece(documents=piece.documents, tokens=piece.tokens, file=FileRecord.of(stored))
