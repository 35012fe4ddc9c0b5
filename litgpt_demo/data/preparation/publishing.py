"""The last step of a preparation: the pieces joined and described."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np

from litgpt_demo.config import DataConfig, OpenWebTextCorpus
from litgpt_demo.data.corpus import corpus_identity
from litgpt_demo.data.dataset import FORMAT, DatasetManifest, PlannedDataset, Split
from litgpt_demo.data.preparation.ledger import SHARDS, Encoded, Survey, TokenizerRecord, TokenPiece, Work
from litgpt_demo.errors import DataError
from litgpt_demo.manifests import FileRecord
from litgpt_demo.storage import ObjectInfo, combined_crc32c

# nanoGPT's data/openwebtext/readme.md and the corpus' own card, with the GPT-2 tokenizer, seed 2357, fraction 0.0005.
OPENWEBTEXT_TOTALS = {"documents": 8_013_769, "train": 9_035_582_198, "validation": 4_434_897}
_GPT2 = {"vocab_size": 50257, "end_of_text": 50256}

_BLOCK = 1 << 20  # bytes read at a time
_PLACES = 1000  # of bad documents, that are written down in the manifest


def publish(
    planned: PlannedDataset,
    work: Work,
    tokenizer: TokenizerRecord,
    surveys: Sequence[Survey],
    encoded: Sequence[Encoded],
    hashes: RunningSha256,
) -> DatasetManifest:
    """Join the pieces and describe everything; the manifest itself is not written yet."""
    data, dropped = planned.data, sum((Counter(survey.dropped) for survey in surveys), Counter[str]())
    if data.filters.drop_duplicates:
        dropped["duplicate"] = sum(survey.documents for survey in surveys) - sum(entry.documents for entry in encoded)
    manifest = DatasetManifest(
        format=FORMAT,
        name=planned.name,
        key=planned.key,
        corpus=corpus_identity(data.corpus, planned.sources),
        filters=data.filters,
        dropped=dict(sorted((+dropped).items())),
        bad_documents=sum(survey.bad for survey in surveys),
        bad_places=tuple(place for survey in surveys for place in survey.bad_places)[:_PLACES],
        document_lengths=tuple(np.trim_zeros(np.sum([entry.lengths for entry in encoded], axis=0), "b").tolist()),
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        dtype=tokenizer.dtype,
        validation_fraction=data.validation_fraction,
        split_seed=data.split_seed,
        text_bytes=sum(entry.text_bytes for entry in encoded),
        train=_split(work, "train", [entry.train for entry in encoded], hashes),
        validation=_split(work, "val", [entry.validation for entry in encoded], hashes),
        tokenizer=tokenizer.files,
    )
    check_totals(planned, manifest)
    return manifest


@dataclass
class HashedFile:
    """A file of a split: the pieces that are to be joined in it, and their sha256."""

    pieces: list[FileRecord] = field(default_factory=list)
    hash: Any = field(default_factory=sha256)


class RunningSha256:
    """The sha256 of a split's files, taken from the pieces while later ones are still being encoded.

    It is the one thing about them that cannot be put together from the pieces' own, and is slow: 0.5 GB/s a core.
    Pieces in a bucket are read where workers of this machine left them, else fetched: each byte once.

    Leaving its block calls off what is still to be hashed.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._thread = ThreadPoolExecutor(1)
        self._waiting: dict[int, Encoded] = {}
        self._next = 0
        self._hashing: list[Future[None]] = []
        self._files: dict[str, list[HashedFile]] = {"train": [], "val": []}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def add(self, record: Encoded) -> None:
        """Take in a shard that is done; they may come in any order."""
        self._waiting[record.number] = record
        while (following := self._waiting.pop(self._next, None)) is not None:
            self._hashing.append(self._thread.submit(self._hash, following))
            self._next += 1

    def files(self, split: str) -> list[HashedFile]:
        """Return the split's files: one, or several past the size cap; waits for what is still to be hashed."""
        for done in self._hashing:
            done.result()
        return self._files[split] or [HashedFile()]

    def _hash(self, record: Encoded) -> None:
        for split, piece in (("train", record.train), ("val", record.validation)):
            if piece.file is None:
                continue
            files = self._files[split]
            taken = sum(before.size for before in files[-1].pieces) if files else 0
            if not files or taken + piece.file.size > self._work.data.max_file_bytes:
                files.append(HashedFile())
            files[-1].pieces.append(piece.file)
            ledger, folder = self._work.ledger, self._work.handover
            path = Path(ledger.address(piece.file.path)) if folder is None else folder / piece.file.path
            if folder is not None:
                ledger.download(piece.file.path, path)  # only compares checksums where a worker left the piece
            with path.open("rb") as content:
                while block := content.read(_BLOCK):
                    files[-1].hash.update(block)
            if folder is not None:
                path.unlink()


def _split(work: Work, name: str, pieces: Sequence[TokenPiece], hashes: RunningSha256) -> Split:
    files = hashes.files(name)
    names = [f"{name}.bin"] if len(files) == 1 else [f"{name}-{number:05d}.bin" for number in range(len(files))]
    return Split(
        documents=sum(piece.documents for piece in pieces),
        tokens=sum(piece.tokens for piece in pieces),
        files=tuple(
            FileRecord.of(_joined(work, path, file.pieces), sha256=file.hash.hexdigest())
            for path, file in zip(names, files, strict=True)
        ),
    )


def _joined(work: Work, path: str, pieces: Sequence[FileRecord]) -> ObjectInfo:
    """The pieces as one file, which has to have the checksum that theirs combine to."""
    stored = work.storage.join([f"{SHARDS}/{piece.path}" for piece in pieces], path)
    expected = reduce(lambda crc, piece: combined_crc32c(crc, piece.crc32c, piece.size), pieces, "00000000")
    if (stored.crc32c, stored.size) != (expected, sum(piece.size for piece in pieces)):
        raise DataError(
            f"{work.storage.address(path)} has crc32c {stored.crc32c}, its {len(pieces)} pieces combine to {expected}; "
            "the disk or the bucket damaged it: run again, and if that repeats, on another disk"
        )
    return stored


def check_totals(planned: PlannedDataset, manifest: DatasetManifest) -> None:
    """OpenWebText with GPT-2's tokenizer must have the known totals: another sum is another dataset."""
    gpt2 = {"vocab_size": manifest.vocab_size, "end_of_text": manifest.end_of_text} == _GPT2
    customary, data = DataConfig(), planned.data
    as_usual = all(
        getattr(data, name) == getattr(customary, name) for name in ("validation_fraction", "split_seed", "filters")
    )
    if not (isinstance(data.corpus, OpenWebTextCorpus) and gpt2 and as_usual):
        return
    tokens = {"train": manifest.train.tokens, "validation": manifest.validation.tokens}
    found = {"documents": manifest.documents} | tokens
    if found != OPENWEBTEXT_TOTALS:
        raise DataError(
            f"data.corpus=openwebtext has {found} in total, and it must have {OPENWEBTEXT_TOTALS}; "
            "a source file is missing or changed: compare the revision of Skylion007/openwebtext"
        )
