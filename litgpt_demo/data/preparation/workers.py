"""The steps that workers carry out on a shard: survey it, then encode it. Each finds itself done by its record."""

from __future__ import annotations

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from litgpt_demo.config import Filters, key_of
from litgpt_demo.data.corpus import Batch, Shard, documents_by_footer, forget, read_shard
from litgpt_demo.data.preparation.filters import (
    Mask,
    bits_of_mask,
    byte_lengths,
    chosen,
    digests_of,
    mask_of_bits,
    passing,
)
from litgpt_demo.data.preparation.ledger import (
    Encoded,
    Survey,
    TokenPiece,
    Work,
    digest_of,
    file_name,
    recorded,
    write_record,
)
from litgpt_demo.data.preparation.tokenizing import encoder_at
from litgpt_demo.errors import DataError
from litgpt_demo.manifests import FileRecord
from litgpt_demo.storage.local import explaining

Ids: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

_PLACES = 100  # of bad documents, that are written down for a shard
_LENGTHS = 40  # powers of two that a document's number of tokens may reach
_ROOM = 0.5  # of the file system is free where copies stay for the second reading
# Pieces that may wait on this machine's disk to be hashed, of at most some 100 MB each. The others are fetched back
# from the bucket when their turn comes: neighbouring shards may end far apart, and the temporary folder may be memory.
_WAITING = 32


def survey(work: Work, shard: Shard) -> Survey:
    """See how many documents of a shard stay; a step for workers."""
    if (done := recorded(work, file_name(shard.number, "survey.json"), Survey, shard)) is not None:
        return done
    if (record := _survey_by_footers(work, shard)) is None:
        return survey_by_reading(work, shard)
    _free_copies(work, shard)
    return record


def _free_copies(work: Work, shard: Shard) -> None:
    """Remove what was fetched for a shard's survey, unless there is much room: encoding has to fetch it again then.

    Together the copies are the whole corpus, and the temporary folder may be memory."""
    room = shutil.disk_usage(work.scratch)
    if room.free < room.total * _ROOM:
        forget((part.source for part in shard.parts), work.scratch)


def _survey_by_footers(work: Work, shard: Shard) -> Survey | None:
    """Count without reading where only empty documents can be left out: hardly any corpus has those, so assume none."""
    if work.data.filters != Filters() or work.data.on_bad_document == "skip" or work.max_bytes is not None:
        return None
    found = documents_by_footer(work.data.corpus, shard, scratch=work.make_scratch())
    if found is None:
        return None
    documents, text_bytes = found
    return Survey(
        number=shard.number,
        shard=digest_of(shard),
        documents=documents,
        text_bytes=text_bytes,
        read=False,
        kept=None,
        digests=None,
        read_documents=documents,
        read_bytes=text_bytes,
        dropped={},
        bad=0,
        bad_places=(),
    )


def survey_by_reading(work: Work, shard: Shard) -> Survey:
    """See which documents of a shard stay, and write that down; a step for workers."""
    name = file_name(shard.number, "survey.json")
    if (done := recorded(work, name, Survey, shard)) is not None:
        return done
    count = _Count()
    for batch in _batches(work, shard):
        count.add(batch, work.data.filters)
    kept = digests = None
    if not count.mask.all():
        kept = FileRecord.of(work.ledger.write(file_name(shard.number, "kept"), bits_of_mask(count.mask)))
    if work.data.filters.drop_duplicates:
        digests = FileRecord.of(work.ledger.write(file_name(shard.number, "digests"), b"".join(count.digests)))
    record = Survey(
        number=shard.number,
        shard=digest_of(shard),
        read=True,
        documents=int(count.mask.sum()),
        text_bytes=count.kept_bytes,
        kept=kept,
        digests=digests,
        read_documents=len(count.mask),
        read_bytes=count.read_bytes,
        dropped=dict(count.dropped),
        bad=count.bad,
        bad_places=tuple(count.bad_places),
    )
    write_record(work, name, record)
    _free_copies(work, shard)
    return record


class _Count:
    """The result of a shard's survey."""

    def __init__(self) -> None:
        self.masks: list[Mask] = []
        self.digests: list[bytes] = []
        self.dropped = Counter[str]()
        self.bad = 0
        self.bad_places: list[str] = []
        self.read_bytes = 0
        self.kept_bytes = 0

    def add(self, batch: Batch, filters: Filters) -> None:
        kept, reasons = passing(batch.texts, filters)
        lengths = byte_lengths(batch.texts)
        self.masks.append(kept)
        self.read_bytes += int(lengths.sum())
        self.kept_bytes += int(lengths[kept].sum())
        self.bad += len(batch.bad)
        self.bad_places += [f"{bad.place}: {bad.reason}" for bad in batch.bad[: _PLACES - len(self.bad_places)]]
        self.dropped += reasons - Counter(empty=len(batch.bad))  # bad documents stand as empty ones
        if filters.drop_duplicates:
            self.digests.append(digests_of(chosen(batch.texts, kept)))

    @property
    def mask(self) -> Mask:
        return np.concatenate(self.masks) if self.masks else np.empty(0, dtype=bool)


def _batches(work: Work, shard: Shard) -> Iterator[Batch]:
    skip_bad = work.data.on_bad_document == "skip"
    most = work.data.max_document_bytes
    return read_shard(work.data.corpus, shard, scratch=work.make_scratch(), skip_bad=skip_bad, most=most)


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
    with _PieceFile(work, assignment, "train") as train, _PieceFile(work, assignment, "val") as validation:
        written = _write_tokens(work, assignment, train, validation)
        if written is None:
            return None
        lengths, text_bytes = written
        record = Encoded(
            number=shard.number,
            shard=digest_of(shard),
            assignment=assignment.digest,
            documents=train.documents + validation.documents,
            text_bytes=text_bytes,
            train=train.stored(),
            validation=validation.stored(),
            lengths=lengths,
        )
    write_record(work, name, record)
    forget((part.source for part in shard.parts), work.scratch)
    return record


def _staying(work: Work, assignment: Assignment) -> Mask:
    """Yield for every document, as it is read, whether it is encoded."""
    survey = assignment.survey
    if survey.kept is None:
        staying = np.ones(survey.read_documents, dtype=bool)
    else:
        staying = mask_of_bits(work.ledger.read(survey.kept.path), survey.read_documents)
    if assignment.unique is not None:
        staying[staying] = mask_of_bits(work.ledger.read(file_name(survey.number, "unique")), survey.documents)
    return staying


def _write_tokens(
    work: Work, assignment: Assignment, train: _PieceFile, validation: _PieceFile
) -> tuple[tuple[int, ...], int] | None:
    """Encode a shard's documents into its pieces: the histogram of their lengths, and their UTF-8 bytes.

    None where an empty document shows up that nobody counted.
    """
    encoder, staying = encoder_at(work.storage.address()), _staying(work, assignment)
    held_out = np.zeros(int(staying.sum()), dtype=bool)
    held_out[list(assignment.held_out)] = True
    histogram, read, done, text_bytes = np.zeros(_LENGTHS, dtype=np.int64), 0, 0, 0
    for batch in _batches(work, assignment.shard):
        read += len(batch.texts)
        if read > len(staying):
            break
        texts = chosen(batch.texts, staying[read - len(batch.texts) : read])
        sizes = byte_lengths(texts)
        if not sizes.all() and not assignment.survey.read:
            return None
        ids, lengths = encoder.encode(texts)
        if not done:
            encoder.compare(texts)
        _split(ids, lengths, held_out[done : done + len(texts)], train, validation)
        histogram += np.bincount(np.frexp(lengths)[1] - 1, minlength=_LENGTHS)
        text_bytes += int(sizes.sum())
        done += len(texts)
    if read != len(staying):
        names = ", ".join(part.source.address for part in assignment.shard.parts[:3])
        raise DataError(f"{names}: not the {len(staying)} documents of before; something changes them, run again")
    return tuple(histogram.tolist()), text_bytes


def _split(ids: Ids, lengths: npt.NDArray[np.int64], held_out: Mask, train: _PieceFile, validation: _PieceFile) -> None:
    """Write each document to its split, neighbours of one split at once."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    edges = [0, *(np.flatnonzero(np.diff(held_out)) + 1).tolist(), len(held_out)]
    for first, past in pairwise(edges):
        split = validation if held_out[first : first + 1].any() else train
        split.write(ids[ends[first] : ends[past]], past - first)


class _PieceFile:
    """The tokens of a shard's documents of one split, on their way into the storage."""

    def __init__(self, work: Work, assignment: Assignment, split: str) -> None:
        self._work = work
        # With the assignment in its name, a preparation that counted otherwise writes another file.
        self._name = file_name(assignment.shard.number, f"{assignment.digest}.{split}.bin")
        self._path = work.make_scratch() / f"{secrets.token_hex(8)}.{split}"
        self.documents = 0
        self.tokens = 0

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
        self.tokens += len(ids)
        self.documents += documents

    def stored(self) -> TokenPiece:
        with explaining(str(self._path)):
            self._file.close()
        if not self.tokens:
            return TokenPiece(documents=0, tokens=0, file=None)
        handover = self._handover()
        stored = self._work.ledger.upload(self._path, self._name, move=handover is None)
        if handover is not None:
            self._path.replace(handover / self._name)
        return TokenPiece(documents=self.documents, tokens=self.tokens, file=FileRecord.of(stored))

    def _handover(self) -> Path | None:
        """The folder that keeps the piece for the process that hashes, if it is on this machine and not too full."""
        folder = self._work.handover
        if folder is None or not os.access(folder, os.W_OK):
            return None
        return folder if len(list(folder.iterdir())) < _WAITING else None
