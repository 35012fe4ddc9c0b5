"""What workers do for a preparation: they survey each shard and encode it. And the progress store of what is done."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b, sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from litgpt_demo.config import DataConfig, Filters, Settings, TrainedTokenizer, content_hash
from litgpt_demo.data.dataset import PlannedDataset
from litgpt_demo.data.fetching import forget
from litgpt_demo.data.reading import BadDocument, first_few
from litgpt_demo.data.shards import Shard, documents, documents_by_footer, read_shard
from litgpt_demo.data.tokens import Encoder, TokenizerFiles, assemble, train_tokenizer
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
_ROOM = 0.5  # of the file system is free where copies stay for the second reading
# Pieces that may wait on this machine's disk to be hashed, of at most some 100 MB each. The others are fetched back
# from the bucket when their turn comes: neighbouring shards may end far apart, and the temporary folder may be memory.
_WAITING = 32


@dataclass(frozen=True, kw_only=True)
class PrepContext:
    """The knowledge of every worker of a preparation. It travels to other processes and machines."""

    data: DataConfig
    root: str
    path: str
    """Of the dataset, below the root."""
    local_pieces_dir: Path | None = None
    """The folder where workers leave the pieces that they put in a bucket, to be hashed; on a worker of another machine
    there is no such folder. None for a local root, where the pieces themselves can be read."""

    @property
    def storage(self) -> Storage:
        """The folder of the dataset."""
        return open_storage(self.root).within(self.path)

    @property
    def progress_store(self) -> Storage:
        """The folder of the pieces and their records, whose checksums are compared before they are believed."""
        return replace(self.storage.within(SHARDS), durable=False)

    @property
    def scratch(self) -> Path:
        """The folder for unfinished work, which the next run finds; on a local root's file system: moves are free."""
        name = self.path.rpartition("/")[2]
        if (local := open_storage(self.root).local_path(f".scratch/{name}")) is not None:
            return local
        # Several buckets may have this dataset.
        return own_temporary() / f"{name}-{content_hash(self.root)}"

    def make_scratch(self) -> Path:
        """See that the folder for unfinished work is there, and that no other user of this machine could change it."""
        if is_remote(self.root):
            return make_temporary(self.scratch.name)
        with translate_os_errors(str(self.scratch)):
            self.scratch.mkdir(parents=True, exist_ok=True)
        return self.scratch


class ShardRecord(Settings):
    """An entry of the progress store: what was made of a shard. Written when all of it is there."""

    number: int
    shard: str
    """The shard that it belongs to, limit included: a record of another one counts for nothing."""
    documents: int
    text_bytes: int
    """UTF-8 bytes of those documents."""


class ShardStats(ShardRecord):
    """The content of a shard: `documents` are those that pass the filters."""

    read: bool = True
    """False: not a document was read, the files' footers say how many there are. An empty one would belie them, and
    then `text_bytes` is only about right."""
    kept: FileRecord | None = None
    """The documents that stay, a bit for each that was read; None where all do."""
    digests: FileRecord | None = None
    """DIGEST_BYTES of each that stays; None where duplicates stay too."""
    read_documents: int
    read_bytes: int
    """The same before filtering, with empty and bad ones."""
    dropped: dict[str, int]
    bad: int = 0
    bad_places: tuple[str, ...] = ()


class TokenPiece(Settings):
    """A shard's documents of one split."""

    documents: int
    tokens: int
    file: FileRecord | None
    """None where there are none."""


class EncodeResult(ShardRecord):
    """A shard's tokens."""

    assignment: str
    """The documents that were to be encoded, and the split of each."""
    train: TokenPiece
    validation: TokenPiece
    lengths: tuple[int, ...]
    """The lengths, as in DatasetManifest.document_lengths."""


Record = TypeVar("Record", ShardStats, EncodeResult)


def file_name(number: int, suffix: str) -> str:
    """The name of what was made of the shard with this number, below SHARDS."""
    return f"{number:05d}.{suffix}"


def _digest_of(shard: Shard) -> str:
    parts = [content_hash(part.source.name, part.source.version, part.start, part.end) for part in shard.parts]
    return content_hash(shard.number, shard.limit, *parts)


def _recorded(work: PrepContext, name: str, kind: type[Record], shard: Shard) -> Record | None:
    progress_store = work.progress_store
    try:
        record = parse_json(progress_store.read(name), kind, where=progress_store.address(name), fix="it is made anew")
        if isinstance(record, ShardStats):
            files = (record.kept, record.digests)
        else:
            files = (record.train.file, record.validation.file)
        intact = all(file is None or FileRecord.of(progress_store.stat(file.path)) == file for file in files)
    except (FileNotFoundError, DataError):  # DataError: cut short, or of another version of this code
        return None
    return record if intact and record.shard == _digest_of(shard) else None


def _note(work: PrepContext, name: str, record: Settings) -> None:
    """Note something as done: whatever it names must be there already."""
    content = record.model_dump_json().encode()
    if not work.progress_store.create(
        name, content
    ):  # the usual case, and in a bucket one request where `write` makes two
        work.progress_store.write(name, content)


_TOKENIZER = "tokenizer.json"


class TokenizerRecord(Settings):
    """The progress store's entry for the tokenizer."""

    files: tuple[FileRecord, ...]


StoredTokenizer: TypeAlias = tuple[TokenizerFiles, tuple[FileRecord, ...]]


def load_or_train_tokenizer(
    planned: PlannedDataset, work: PrepContext, report: Callable[[int, int], None]
) -> StoredTokenizer:
    """Put the tokenizer in its place; one that is to be trained on the corpus is trained by the first run only."""
    data, tokenizer = planned.data, planned.tokenizer
    if tokenizer is None:
        with suppress(FileNotFoundError, DataError):  # DataError: damaged, or of another version of this code
            return _stored_tokenizer(work)
        assert isinstance(data.tokenizer, TrainedTokenizer)
        bad = list[BadDocument]()
        texts = documents(data, planned.sources, work.make_scratch(), bad)
        try:
            tokenizer = train_tokenizer(data.tokenizer, texts, report)
        except DataError as error:
            told = skipped_ones(len(bad), [f"{one.place}: {one.reason}" for one in bad])
            raise DataError(f"{error}{told}") from error
    files = tuple(
        FileRecord.of(work.storage.write(f"tokenizer/{name}", content), sha256=sha256(content).hexdigest())
        for name, content in sorted(tokenizer.files.items())
    )
    _note(work, _TOKENIZER, TokenizerRecord(files=files))
    return tokenizer, files


def _stored_tokenizer(work: PrepContext) -> StoredTokenizer:
    storage, where = work.storage, work.progress_store.address(_TOKENIZER)
    fix = f"remove {work.progress_store.address()} and prepare again"
    record, files = (
        parse_json(work.progress_store.read(_TOKENIZER), TokenizerRecord, where=where, fix=fix),
        dict[str, bytes](),
    )
    for file in record.files:
        content = files[file.path.partition("/")[2]] = storage.read(file.path)
        if sha256(content).hexdigest() != file.sha256:
            raise DataError(f"{storage.address(file.path)} is not what it was", fix=fix)
    return assemble(files, origin=storage.address("tokenizer")), record.files


def skipped_ones(count: int, places: Sequence[str]) -> str:
    """Return the end of an error's sentence that names the skipped documents; empty if there are none."""
    if not count:
        return ""
    return f"; data.on_bad_document=skip left out {count:,} bad ones: {first_few(places)}"


_encoders: dict[str, Encoder] = {}  # of this process, by the dataset's address
_one_at_a_time = Lock()  # with functools.cache two threads would make the same one


def _encoder_of(work: PrepContext) -> Encoder:
    address = work.storage.address()
    with _one_at_a_time:
        if address not in _encoders:
            _encoders[address] = Encoder(_stored_tokenizer(work)[0])
        return _encoders[address]


def survey(work: PrepContext, shard: Shard, *, by_footer: bool = True) -> ShardStats:
    """See which documents of a shard stay, and write that down; a step for workers.

    With `by_footer` nothing is read where only empty documents can be left out: hardly any corpus has those, so assume
    none.
    """
    name, data, scratch = file_name(shard.number, "survey.json"), work.data, work.make_scratch()
    if (done := _recorded(work, name, ShardStats, shard)) is not None:
        return done
    if by_footer and data.filters == Filters() and data.on_bad_document == "fail" and data.corpus.max_bytes is None:
        counted = documents_by_footer(data.corpus, shard, scratch=scratch)
        if counted is not None:
            _free_copies(work, shard)
            count, size = counted
            return ShardStats(
                number=shard.number, shard=_digest_of(shard), documents=count, text_bytes=size, read=False,
                read_documents=count, read_bytes=size, dropped={},
            )  # fmt: skip
    masks, digests, dropped = [np.empty(0, dtype=bool)], list[bytes](), Counter[str]()
    bad, places, read_bytes, kept_bytes = 0, list[str](), 0, 0
    for batch in read_shard(data, shard, scratch):
        kept, reasons = passing(batch.texts, data.filters)
        lengths = byte_lengths(batch.texts)
        masks.append(kept)
        read_bytes += int(lengths.sum())
        kept_bytes += int(lengths[kept].sum())
        bad += len(batch.bad)
        places += [f"{one.place}: {one.reason}" for one in batch.bad[: PLACES - len(places)]]
        dropped += reasons - Counter(empty=len(batch.bad))  # bad documents stand as empty ones
        if data.filters.drop_duplicates:
            texts = batch.texts.filter(kept).cast("large_binary").to_pylist()
            digests += [blake2b(text, digest_size=DIGEST_BYTES).digest() for text in texts]
    mask = np.concatenate(masks)

    def stored(suffix: str, content: bytes) -> FileRecord:
        return FileRecord.of(work.progress_store.write(file_name(shard.number, suffix), content))

    record = ShardStats(
        number=shard.number,
        shard=_digest_of(shard),
        documents=int(mask.sum()),
        text_bytes=kept_bytes,
        kept=None if mask.all() else stored("kept", np.packbits(mask).tobytes()),
        digests=stored("digests", b"".join(digests)) if data.filters.drop_duplicates else None,
        read_documents=len(mask),
        read_bytes=read_bytes,
        dropped=dict(dropped),
        bad=bad,
        bad_places=tuple(places),
    )
    _note(work, name, record)
    _free_copies(work, shard)
    return record


def _free_copies(work: PrepContext, shard: Shard) -> None:
    """Remove what was fetched for a shard's survey, unless there is much room: encoding has to fetch it again then.

    Together the copies are the whole corpus, and the temporary folder may be memory."""
    room = shutil.disk_usage(work.scratch)
    if room.free < room.total * _ROOM:
        forget((part.source for part in shard.parts), work.scratch)


DIGEST_BYTES = 16
"""Bits of a hash that must agree for documents to count as the same: among 10^12, two different ones do so with
a probability below 10^-14."""


def passing(texts: Any, filters: Filters) -> tuple[Mask, Counter[str]]:
    """Return which documents pass, and how many were dropped for which reason (the first one that applies).

    `texts` is a LargeStringArray of pyarrow, without nulls; so are those of the other functions here.
    """
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
    """UTF-8 bytes of each document."""
    import pyarrow.compute as pc

    return _numbers(pc.binary_length(texts))


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
    """A shard to encode."""

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
        """Say of every document, as it is read, whether it is encoded."""

        def mask(file: str, count: int) -> Mask:
            return np.unpackbits(np.frombuffer(progress_store.read(file), dtype=np.uint8), count=count).astype(bool)

        survey = self.survey
        keep_mask = np.ones(survey.read_documents, dtype=bool)
        if survey.kept is not None:
            keep_mask = mask(survey.kept.path, survey.read_documents)
        if self.unique is not None:
            keep_mask[keep_mask] = mask(file_name(survey.number, "unique"), survey.documents)
        return keep_mask


def encode(work: PrepContext, assignment: EncodeTask) -> EncodeResult | None:
    """Write a shard's two pieces of tokens, then their record; a step for workers.

    None if the shard was not read before and has empty documents: they were counted.
    """
    shard, name = assignment.shard, file_name(assignment.shard.number, "json")
    done = _recorded(work, name, EncodeResult, shard)
    if done is not None and done.assignment == assignment.digest:
        return done
    encoder, keep_mask = _encoder_of(work), assignment.keep_mask(work.progress_store)
    held_out = np.zeros(int(keep_mask.sum()), dtype=bool)
    held_out[list(assignment.held_out)] = True
    histogram, read, encoded, text_bytes = np.zeros(_LENGTHS, dtype=np.int64), 0, 0, 0
    with TemporaryDirectory(dir=work.make_scratch(), prefix="tokens-", ignore_cleanup_errors=True) as folder:
        # With the assignment in its name, a preparation that counted otherwise writes another file.
        train, validation = (
            _Piece(Path(folder, file_name(shard.number, f"{assignment.digest}.{split}.bin")))
            for split in ("train", "val")
        )
        for batch in read_shard(work.data, shard, work.scratch):
            read += len(batch.texts)
            if read > len(keep_mask):
                break
            mask = keep_mask[read - len(batch.texts) : read]
            texts = batch.texts if mask.all() else batch.texts.filter(mask)
            sizes = byte_lengths(texts)
            if not sizes.all() and not assignment.survey.read:
                return None
            ids, lengths = encoder.encode(texts)
            if not encoded:
                encoder.compare(texts)
            here = held_out[encoded : encoded + len(texts)]
            if here.any():
                which = np.repeat(here, lengths)
                validation.write(ids[which], int(here.sum()))
                ids = ids[~which]
            train.write(ids, int((~here).sum()))
            histogram += np.bincount(np.frexp(lengths)[1] - 1, minlength=_LENGTHS)
            text_bytes += int(sizes.sum())
            encoded += len(texts)
        if read != len(keep_mask):
            names = ", ".join(part.source.address for part in shard.parts[:3])
            raise DataError(f"{names}: not the {len(keep_mask)} documents of before; something changes them, run again")
        record = EncodeResult(
            number=shard.number,
            shard=_digest_of(shard),
            assignment=assignment.digest,
            documents=encoded,
            text_bytes=text_bytes,
            train=_stored(work, train),
            validation=_stored(work, validation),
            lengths=tuple(histogram.tolist()),
        )
    _note(work, name, record)
    forget((part.source for part in shard.parts), work.scratch)
    return record


@dataclass
class _Piece:
    path: Path
    documents: int = 0
    tokens: int = 0

    def write(self, ids: Ids, documents: int) -> None:
        with translate_os_errors(str(self.path), needed=ids.nbytes), self.path.open("ab") as file:
            file.write(ids.data)
        self.tokens += len(ids)
        self.documents += documents


def _stored(work: PrepContext, piece: _Piece) -> TokenPiece:
    """Put it into the storage; a copy stays for the process that hashes, if it is on this machine and has room."""
    if not piece.tokens:
        return TokenPiece(documents=0, tokens=0, file=None)
    folder = work.local_pieces_dir
    if folder is not None and (not os.access(folder, os.W_OK) or len(list(folder.iterdir())) >= _WAITING):
        folder = None
    stored = work.progress_store.upload(piece.path, piece.path.name, move=folder is None)
    if folder is not None:
        piece.path.replace(folder / piece.path.name)
    return TokenPiece(documents=piece.documents, tokens=piece.tokens, file=FileRecord.of(stored))
