"""The last step of a preparation: the pieces joined and described."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path

from litgpt_demo.config import DataConfig, OpenWebTextCorpus
from litgpt_demo.corpus import corpus_identity
from litgpt_demo.dataset import FORMAT, DatasetManifest, PlannedDataset, Split
from litgpt_demo.faults import DataError
from litgpt_demo.manifests import FileRecord
from litgpt_demo.preparation.ledger import SHARDS, Encoded, Piece, Survey, Work
from litgpt_demo.preparation.tokenizing import TokenizerRecord
from litgpt_demo.storage import combined_crc32c, sha256_of

# nanoGPT's data/openwebtext/readme.md and the corpus' own card, with the GPT-2 tokenizer, seed 2357, fraction 0.0005.
OPENWEBTEXT_TOTALS = {"documents": 8_013_769, "train": 9_035_582_198, "validation": 4_434_897}
_GPT2 = {"vocab_size": 50257, "end_of_text": 50256}

_PLACES = 1000  # of bad documents, that are written down in the manifest


def publish(
    planned: PlannedDataset,
    work: Work,
    tokenizer: TokenizerRecord,
    surveys: Sequence[Survey],
    encoded: Sequence[Encoded],
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
        document_lengths=_trimmed(map(sum, zip(*(entry.lengths for entry in encoded), strict=True))),
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        dtype=tokenizer.dtype,
        validation_fraction=data.validation_fraction,
        split_seed=data.split_seed,
        text_bytes=sum(entry.text_bytes for entry in encoded),
        train=_split(work, "train", [entry.train for entry in encoded]),
        validation=_split(work, "val", [entry.validation for entry in encoded]),
        tokenizer=tokenizer.files,
    )
    check_totals(planned, manifest)
    return manifest


def _trimmed(counts: Iterable[int]) -> tuple[int, ...]:
    every = list(counts)
    while every and not every[-1]:
        every.pop()
    return tuple(every)


def _split(work: Work, name: str, pieces: Sequence[Piece]) -> Split:
    """One split's files: one, or numbered ones past the size cap."""
    groups = _groups([piece.file for piece in pieces if piece.file is not None], work.data.max_file_bytes)
    if len(groups) == 1:
        named = {f"{name}.bin": groups[0]}
    else:
        named = {f"{name}-{number:05d}.bin": group for number, group in enumerate(groups)}
    return Split(
        documents=sum(piece.documents for piece in pieces),
        tokens=sum(piece.tokens for piece in pieces),
        files=tuple(_joined(work, path, group) for path, group in named.items()),
    )


def _groups(files: Iterable[FileRecord], cap: int) -> list[list[FileRecord]]:
    """Neighbours together, as many as stay below `cap` bytes."""
    groups: list[list[FileRecord]] = [[]]
    for file in files:
        if groups[-1] and sum(one.size for one in groups[-1]) + file.size > cap:
            groups.append([])
        groups[-1].append(file)
    return groups


def _joined(work: Work, path: str, pieces: Sequence[FileRecord]) -> FileRecord:
    stored = work.storage.join([f"{SHARDS}/{piece.path}" for piece in pieces], path)
    expected = reduce(lambda crc, piece: combined_crc32c(crc, piece.crc32c, piece.size), pieces, "00000000")
    if (stored.crc32c, stored.size) != (expected, sum(piece.size for piece in pieces)):
        raise DataError(
            f"{work.storage.address(path)} has crc32c {stored.crc32c}, its {len(pieces)} pieces come to {expected}; "
            "the disk or the bucket damaged it: run again, and if that repeats, on another disk"
        )
    # A bucket joined it without a byte passing here: there crc32c alone proves it.
    local = None if work.root.startswith("gs://") else sha256_of(Path(work.storage.address(path)))
    return FileRecord.of(stored, sha256=local)


def check_totals(planned: PlannedDataset, manifest: DatasetManifest) -> None:
    """OpenWebText with GPT-2's tokenizer must come to the known totals: another sum is another dataset."""
    gpt2 = {"vocab_size": manifest.vocab_size, "end_of_text": manifest.end_of_text} == _GPT2
    customary, data = DataConfig(), planned.data
    as_usual = all(
        getattr(data, name) == getattr(customary, name) for name in ("validation_fraction", "split_seed", "filters")
    )
    if not (isinstance(data.corpus, OpenWebTextCorpus) and gpt2 and as_usual):
        return
    found = {
        "documents": manifest.documents,
        "train": manifest.train.tokens,
        "validation": manifest.validation.tokens,
    }
    if found != OPENWEBTEXT_TOTALS:
        raise DataError(
            f"data.corpus=openwebtext came to {found}, and it must come to {OPENWEBTEXT_TOTALS}; "
            "a source file is missing or changed: compare the revision of Skylion007/openwebtext"
        )
