"""The steps of a preparation: the tokenizer is settled, and workers survey each shard and encode it. Each step finds
itself done by its record."""

from __future__ import annotations

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from litgpt_demo.config import Filters, TrainedTokenizer, key_of
from litgpt_demo.data.corpus import BadDocument, Batch, Shard, documents, documents_by_footer, forget, read_shard
from litgpt_demo.data.dataset import PlannedDataset
from litgpt_demo.data.preparation.filters import Mask, byte_lengths, chosen, digests_of, passing
from litgpt_demo.data.preparation.ledger import (
    SHARDS,
    Encoded,
    Survey,
    TokenizerRecord,
    TokenPiece,
    Work,
    digest_of,
    file_name,
    recorded,
    write_record,
)
from litgpt_demo.data.tokens import Encoder, TokenizerFiles, train_tokenizer
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError
from litgpt_demo.manifests import FileRecord
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.storage.local import explaining

Ids: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

_PLACES = 100  # of bad documents, that are written down for a shard
_LENGTHS = 40  # powers of two that a document's number of tokens may reach
_ROOM = 0.5  # of the file system is free where copies stay for the second reading
# Pieces that may wait on this machine's disk to be hashed, of at most some 100 MB each. The others are fetched back
# from the bucket when their turn comes: neighbouring shards may end far apart, and the temporary folder may be memory.
_WAITING = 32
_TOKENIZER = "tokenizer.json"


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def settle_tokenizer(planned: PlannedDataset, work: Work, report: Callable[[int, int], None]) -> TokenizerRecord:
    """Put the tokenizer in its place; one that is to be trained on the corpus is trained by the first run only.

    Args:
        report: as `train_tokenizer` takes it.
    """
    storage, data, tokenizer = work.storage, planned.data, planned.tokenizer
    if tokenizer is None:
        with suppress(FileNotFoundError, DataError):  # DataError: of another version of this code
            there = _tokenizer_record(storage)
            if all(sha256(storage.read(file.path)).hexdigest() == file.sha256 for file in there.files):
                return there
        assert isinstance(data.tokenizer, TrainedTokenizer)
        bad, skip_bad, scratch = list[BadDocument](), data.on_bad_document == "skip", work.make_scratch()
        texts = documents(
            data.corpus, planned.sources, scratch=scratch, skip_bad=skip_bad, most=data.max_document_bytes, skipped=bad
        )
        if (first := next(texts, None)) is None and bad:
            told = skipped_ones(len(bad), [f"{one.place}: {one.reason}" for one in bad])
            raise DataError(f"data.corpus ({data.corpus.kind}) holds no text{told}")
        tokenizer = train_tokenizer(data.tokenizer, chain([] if first is None else [first], texts), report)
    record = TokenizerRecord(
        files=tuple(
            FileRecord.of(storage.write(f"tokenizer/{name}", content), sha256=sha256(content).hexdigest())
            for name, content in sorted(tokenizer.files.items())
        ),
        end_of_text=tokenizer.end_of_text,
        vocab_size=tokenizer.vocab_size,
        hash=tokenizer.hash,
        dtype=tokenizer.dtype,
    )
    write_record(work, _TOKENIZER, record)
    return record


def skipped_ones(count: int, places: Sequence[str]) -> str:
    """What to say behind an error about bad documents that were left out; nothing without any."""
    told = "; ".join(places[:3]) + "; …" * (count > 3)
    return f"; data.on_bad_document=skip left out {count:,} bad ones: {told}" if count else ""


def _tokenizer_record(storage: Storage) -> TokenizerRecord:
    """Return the record of the tokenizer that this preparation encodes with."""
    path = f"{SHARDS}/{_TOKENIZER}"
    fix = f"remove {storage.address(SHARDS)} and prepare again"
    return parse_json(storage.read(path), TokenizerRecord, where=storage.address(path), fix=fix)


_encoders: dict[str, Encoder] = {}  # of this process, by the dataset's address
_one_at_a_time = Lock()  # with functools.cache two threads would make the same one


def _encoder_at(address: str) -> Encoder:
    with _one_at_a_time:
        if address not in _encoders:
            storage = open_storage(address)
            record = _tokenizer_record(storage)
            files = {file.path.partition("/")[2]: storage.read(file.path) for file in record.files}
            made = TokenizerFiles(files=files, end_of_text=record.end_of_text, vocab_size=record.vocab_size)
            _encoders[address] = Encoder(made)
        return _encoders[address]


# --- the survey -------------------------------------------------------------------------------------------------------


def survey(work: Work, shard: Shard) -> Survey:
    """See how many documents of a shard stay; a step for workers.

    Nothing is read where only empty documents can be left out: hardly any corpus has those, so assume none.
    """
    if (done := recorded(work, file_name(shard.number, "survey.json"), Survey, shard)) is not None:
        return done
    by_footer = None
    if work.data.filters == Filters() and work.data.on_bad_document == "fail" and work.max_bytes is None:
        by_footer = documents_by_footer(work.data.corpus, shard, scratch=work.make_scratch())
    if by_footer is None:
        return survey_by_reading(work, shard)
    _free_copies(work, shard)
    count, text_bytes = by_footer
    return Survey(
        number=shard.number,
        shard=digest_of(shard),
        documents=count,
        text_bytes=text_bytes,
        read=False,
        read_documents=count,
        read_bytes=text_bytes,
        dropped={},
    )


def survey_by_reading(work: Work, shard: Shard) -> Survey:
    """See which documents of a shard stay, and write that down; a step for workers."""
    name = file_name(shard.number, "survey.json")
    if (done := recorded(work, name, Survey, shard)) is not None:
        return done
    masks, digests, dropped = [np.empty(0, dtype=bool)], list[bytes](), Counter[str]()
    bad, places, read_bytes, kept_bytes = 0, list[str](), 0, 0
    for batch in _batches(work, shard):
        kept, reasons = passing(batch.texts, work.data.filters)
        lengths = byte_lengths(batch.texts)
        masks.append(kept)
        read_bytes += int(lengths.sum())
        kept_bytes += int(lengths[kept].sum())
        bad += len(batch.bad)
        places += [f"{one.place}: {one.reason}" for one in batch.bad[: _PLACES - len(places)]]
        dropped += reasons - Counter(empty=len(batch.bad))  # bad documents stand as empty ones
        if work.data.filters.drop_duplicates:
            digests.append(digests_of(chosen(batch.texts, kept)))
    mask = np.concatenate(masks)

    def stored(suffix: str, content: bytes) -> FileRecord:
        return FileRecord.of(work.ledger.write(file_name(shard.number, suffix), content))

    record = Survey(
        number=shard.number,
        shard=digest_of(shard),
        documents=int(mask.sum()),
        text_bytes=kept_bytes,
        kept=None if mask.all() else stored("kept", np.packbits(mask).tobytes()),
        digests=stored("digests", b"".join(digests)) if work.data.filters.drop_duplicates else None,
        read_documents=len(mask),
        read_bytes=read_bytes,
        dropped=dict(dropped),
        bad=bad,
        bad_places=tuple(places),
    )
    write_record(work, name, record)
    _free_copies(work, shard)
    return record


def _free_copies(work: Work, shard: Shard) -> None:
    """Remove what was fetched for a shard's survey, unless there is much room: encoding has to fetch it again then.

    Together the copies are the whole corpus, and the temporary folder may be memory."""
    room = shutil.disk_usage(work.scratch)
    if room.free < room.total * _ROOM:
        forget((part.source for part in shard.parts), work.scratch)


def _batches(work: Work, shard: Shard) -> Iterator[Batch]:
    skip_bad = work.data.on_bad_document == "skip"
    most = work.data.max_document_bytes
    return read_shard(work.data.corpus, shard, scratch=work.make_scratch(), skip_bad=skip_bad, most=most)


# --- encoding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A shard to encode."""

    shard: Shard
    survey: Survey
    unique: int | None
    """The number of surveyed documents that are not duplicates; None where duplicates stay."""
    held_out: tuple[int, ...]
    """The documents that stay and are for validation, counted from the shard's first."""

    @property
    def digest(self) -> str:
        survey = self.survey
        return key_of(survey.shard, survey.documents, survey.read_documents, self.unique, list(self.held_out))


def encode(work: Work, assignment: Assignment) -> Encoded | None:
    """Write a shard's two pieces of tokens, then their record; a step for workers.

    None if the shard was not read before and has empty documents: they were counted.
    """
    shard, name = assignment.shard, file_name(assignment.shard.number, "json")
    done = recorded(work, name, Encoded, shard)
    if done is not None and done.assignment == assignment.digest:
        return done
    encoder, staying = _encoder_at(work.storage.address()), _staying(work, assignment)
    held_out = np.zeros(int(staying.sum()), dtype=bool)
    held_out[list(assignment.held_out)] = True
    histogram, read, encoded, text_bytes = np.zeros(_LENGTHS, dtype=np.int64), 0, 0, 0
    with _PieceFile(work, assignment, "train") as train, _PieceFile(work, assignment, "val") as validation:
        for batch in _batches(work, shard):
            read += len(batch.texts)
            if read > len(staying):
                break
            texts = chosen(batch.texts, staying[read - len(batch.texts) : read])
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
        if read != len(staying):
            names = ", ".join(part.source.address for part in shard.parts[:3])
            raise DataError(f"{names}: not the {len(staying)} documents of before; something changes them, run again")
        record = Encoded(
            number=shard.number,
            shard=digest_of(shard),
            assignment=assignment.digest,
            documents=encoded,
            text_bytes=text_bytes,
            train=train.stored(),
            validation=validation.stored(),
            lengths=tuple(histogram.tolist()),
        )
    write_record(work, name, record)
    forget((part.source for part in shard.parts), work.scratch)
    return record


def _staying(work: Work, assignment: Assignment) -> Mask:
    """Say of every document, as it is read, whether it is encoded."""

    def mask(file: str, count: int) -> Mask:
        return np.unpackbits(np.frombuffer(work.ledger.read(file), dtype=np.uint8), count=count).astype(bool)

    survey = assignment.survey
    staying = np.ones(survey.read_documents, dtype=bool)
    if survey.kept is not None:
        staying = mask(survey.kept.path, survey.read_documents)
    if assignment.unique is not None:
        staying[staying] = mask(file_name(survey.number, "unique"), survey.documents)
    return staying


class _PieceFile:
    """The tokens of a shard's documents of one split, on their way into the storage."""

    def __init__(self, work: Work, assignment: Assignment, split: str) -> None:
        self._work = work
        # With the assignment in its name, a preparation that counted otherwise writes another file.
        self._name = file_name(assignment.shard.number, f"{assignment.digest}.{split}.bin")
        self._path = work.make_scratch() / f"{secrets.token_hex(8)}.{split}"
        self._documents = self._tokens = 0

    def __enter__(self) -> _PieceFile:
        self._file = self._path.open("wb")
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # of what is not stored by now, nothing is wanted
            self._file.close()
        self._path.unlink(missing_ok=True)

    def write(self, ids: Ids, documents: int) -> None:
        with explaining(str(self._path), needed=ids.nbytes):
            self._file.write(ids.data)
        self._tokens += len(ids)
        self._documents += documents

    def stored(self) -> TokenPiece:
        """Put it into the storage; a copy stays for the process that hashes, if it is on this machine and has room."""
        with explaining(str(self._path)):
            self._file.close()
        if not self._tokens:
            return TokenPiece(documents=0, tokens=0, file=None)
        handover = self._work.handover
        if handover is not None and not os.access(handover, os.W_OK):
            handover = None
        if handover is not None and len(list(handover.iterdir())) >= _WAITING:
            handover = None
        stored = self._work.ledger.upload(self._path, self._name, move=handover is None)
        if handover is not None:
            self._path.replace(handover / self._name)
        return TokenPiece(documents=self._documents, tokens=self._tokens, file=FileRecord.of(stored))
