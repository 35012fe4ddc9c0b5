"""Dataset preparation: documents in, `train.bin`, `val.bin`, tokenizer and a manifest out.

The bins are flat little-endian token ids, uint16 up to a vocabulary of 65,536 and uint32 above, every document followed
by the end-of-text id: LitGPT's and nanoGPT's own memmap loaders read them. Their bytes depend on the inputs alone.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from pydantic import JsonValue

from litgpt_demo.config import DataConfig, OpenWebTextCorpus, Settings, TrainedTokenizer, key_of
from litgpt_demo.corpus import Source, corpus_identity, documents, sources
from litgpt_demo.faults import DataError, UserError
from litgpt_demo.manifests import FileRecord, bring, differences, read_manifest, write_manifest
from litgpt_demo.storage import MANIFEST, Storage, open_storage, sha256_of
from litgpt_demo.tokens import Encoder, TokenizerFiles, tokenizer_identity, train_tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FORMAT = 1
"""Part of every dataset's key: raise it when the same inputs come to mean other bytes."""

# nanoGPT's data/openwebtext/readme.md and the corpus' own card, with the GPT-2 tokenizer, seed 2357, fraction 0.0005.
OPENWEBTEXT_TOTALS = {"documents": 8_013_769, "train": 9_035_582_198, "validation": 4_434_897}
_GPT2 = {"vocab_size": 50257, "end_of_text": 50256}

_BATCH_BYTES = 16_000_000  # text encoded at once: keeps every core busy, and memory below 0.3 GB


class Split(Settings):
    """One of the two splits."""

    documents: int
    tokens: int
    files: tuple[FileRecord, ...]


class DatasetManifest(Settings):
    """What a finished dataset is. Written last; without it the folder is not a dataset."""

    format: int
    name: str
    key: str
    corpus: JsonValue
    """Settings, and every source file with its size and version."""
    tokenizer_hash: str
    vocab_size: int
    end_of_text: int
    dtype: str
    """numpy's name of the ids' type, little-endian: `<u2` or `<u4`."""
    validation_fraction: float
    split_seed: int
    text_bytes: int
    """UTF-8 bytes of all documents."""
    train: Split
    validation: Split
    tokenizer: tuple[FileRecord, ...]

    @property
    def files(self) -> tuple[FileRecord, ...]:
        return self.train.files + self.validation.files + self.tokenizer


@dataclass(frozen=True, kw_only=True)
class PlannedDataset:
    """A dataset as its inputs decide it, before any of its bytes exist."""

    data: DataConfig
    sources: tuple[Source, ...]
    tokenizer: TokenizerFiles | None
    """None where it is to be trained on the corpus."""
    name: str
    key: str

    @property
    def path(self) -> str:
        """Below the root."""
        return f"datasets/{self.name}-{self.key}"


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How far a preparation has come."""

    documents: int
    text_bytes: int
    tokens: int
    seconds: float


Report = Callable[[Preparation], None]


def plan_dataset(data: DataConfig) -> PlannedDataset:
    """Look at the sources and say which dataset they make; reads no text but what the checksums need.

    Raises:
        UserError: the corpus or the tokenizer is not there.
    """
    found = sources(data.corpus)
    identity, tokenizer = tokenizer_identity(data.tokenizer)
    key = key_of(
        FORMAT, corpus_identity(data.corpus, found), identity, data.validation_fraction, data.split_seed
    )  # fmt: skip
    return PlannedDataset(data=data, sources=tuple(found), tokenizer=tokenizer, name=data.corpus.label, key=key)


def finished_dataset(root: Storage, planned: PlannedDataset) -> DatasetManifest | None:
    """The manifest if this dataset is done, judged by its files being there; `stage` checks every byte.

    Raises:
        DataError: it has a manifest, but a file of it is gone.
    """
    storage = root.within(planned.path)
    manifest = read_manifest(storage, DatasetManifest)
    if manifest is None:
        return None
    there = set(storage.list())
    if missing := sorted({record.path for record in manifest.files} - there):
        raise DataError(
            f"{storage.address()} has a manifest but lacks {', '.join(missing)}; "
            "something removed them: delete the folder and run again"
        )
    return manifest


def prepare(planned: PlannedDataset, root: Storage, *, report: Report = lambda progress: None) -> DatasetManifest:
    """Make the dataset, or find it done. Killed at any moment, it leaves nothing that looks finished.

    Raises:
        DataError: the corpus is empty, too small, or not what it says it is.
    """
    if (done := finished_dataset(root, planned)) is not None:
        return done
    storage = root.within(planned.path)
    with scratch_beside(root) as scratch:
        tokenizer = planned.tokenizer or _trained(planned, scratch)
        encoded = _encode(planned, tokenizer, scratch, report)
        manifest = _publish(planned, tokenizer, encoded, scratch, storage)
    _check_totals(planned, manifest)
    # What a preparation that was killed may have left. Not removed at the start: another one may be at work right now,
    # and writes the very same files.
    for stray in set(storage.list()) - {MANIFEST} - {record.path for record in manifest.files}:
        storage.remove(stray)
    write_manifest(storage, manifest)
    return manifest


@contextmanager
def scratch_beside(root: Storage) -> Iterator[Path]:
    """A folder for unfinished work, on the root's own file system where it has one: finished files move for free."""
    parent = None if root.root.startswith("gs://") else Path(root.root) / ".scratch"
    if parent is not None:
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"root={root.root} cannot be written ({error.strerror}); choose another root") from error
    with tempfile.TemporaryDirectory(prefix="dataset-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _trained(planned: PlannedDataset, scratch: Path) -> TokenizerFiles:
    assert isinstance(planned.data.tokenizer, TrainedTokenizer)
    return train_tokenizer(planned.data.tokenizer, documents(planned.data.corpus, planned.sources, scratch=scratch))


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """All documents' ids behind one another in one file, and each document's number of ids."""

    path: Path
    lengths: npt.NDArray[np.int64]
    text_bytes: int
    dtype: str


def _encode(planned: PlannedDataset, tokenizer: TokenizerFiles, scratch: Path, report: Report) -> _Encoded:
    import numpy as np

    encoder = Encoder(tokenizer)
    dtype = "<u2" if tokenizer.vocab_size <= 65_536 else "<u4"
    path, lengths, text_bytes, tokens, start = scratch / "all.bin", [], 0, 0, monotonic()
    with path.open("wb") as out:
        for batch, size in _batches(documents(planned.data.corpus, planned.sources, scratch=scratch)):
            ids, each = encoder.encode(batch)
            ids.astype(dtype).tofile(out)
            lengths.append(each)
            text_bytes, tokens = text_bytes + size, tokens + len(ids)
            report(
                Preparation(
                    documents=sum(map(len, lengths)), text_bytes=text_bytes, tokens=tokens, seconds=monotonic() - start
                )
            )
    every = np.concatenate(lengths) if lengths else np.empty(0, dtype=np.int64)
    if len(every) < 2:
        raise DataError(
            f"data.corpus ({planned.data.corpus.kind}) has {len(every)} documents in {len(planned.sources)} files; "
            "one for training and one for validation are the least: give more text, "
            "or for text files a data.corpus.separator that cuts it into documents"
        )
    return _Encoded(path=path, lengths=every, text_bytes=text_bytes, dtype=dtype)


def _batches(texts: Iterable[str]) -> Iterator[tuple[list[str], int]]:
    """Documents in batches of about _BATCH_BYTES, with their size in bytes."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text.encode())
        if size >= _BATCH_BYTES:
            yield batch, size
            batch, size = [], 0
    if batch:
        yield batch, size


def validation_documents(count: int, *, fraction: float, seed: int) -> npt.NDArray[np.int64]:
    """The numbers of the documents kept for validation: the first ceil(fraction * count) of a seeded permutation."""
    import numpy as np

    return np.random.default_rng(seed).permutation(count)[: math.ceil(fraction * count)].astype(np.int64)


def _publish(
    planned: PlannedDataset, tokenizer: TokenizerFiles, encoded: _Encoded, scratch: Path, storage: Storage
) -> DatasetManifest:
    """Split the ids, put every file in its place, and describe them; the manifest itself is not written yet."""
    import numpy as np

    data, count = planned.data, len(encoded.lengths)
    held_out = np.zeros(count, dtype=bool)
    held_out[validation_documents(count, fraction=data.validation_fraction, seed=data.split_seed)] = True
    if held_out.all():
        raise UserError(
            f"data.validation_fraction={data.validation_fraction} of {count} documents leaves none to train on; "
            "lower it, or give more documents"
        )
    records = [
        FileRecord.of(storage.write(f"tokenizer/{name}", content), sha256=sha256(content).hexdigest())
        for name, content in sorted(tokenizer.files.items())
    ]
    return DatasetManifest(
        format=FORMAT,
        name=planned.name,
        key=planned.key,
        corpus=corpus_identity(data.corpus, planned.sources),
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        dtype=encoded.dtype,
        validation_fraction=data.validation_fraction,
        split_seed=data.split_seed,
        text_bytes=encoded.text_bytes,
        train=_split(encoded, ~held_out, scratch / "train.bin", storage),
        validation=_split(encoded, held_out, scratch / "val.bin", storage),
        tokenizer=tuple(records),
    )


def _split(encoded: _Encoded, chosen: npt.NDArray[np.bool_], path: Path, storage: Storage) -> Split:
    """Copy the chosen documents, in their order, runs of neighbours at once, into `path`, and that to its place."""
    import numpy as np

    ids = np.memmap(encoded.path, dtype=encoded.dtype, mode="r")
    ends = np.concatenate([[0], np.cumsum(encoded.lengths)])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8)))
    with path.open("wb") as out:
        for first, past in edges.reshape(-1, 2):
            ids[ends[first] : ends[past]].tofile(out)
    digest = sha256_of(path)
    stored = storage.upload(path, path.name, move=True)
    return Split(
        documents=int(chosen.sum()),
        tokens=int(encoded.lengths[chosen].sum()),
        files=(FileRecord.of(stored, sha256=digest),),
    )


def _check_totals(planned: PlannedDataset, manifest: DatasetManifest) -> None:
    """OpenWebText with GPT-2's tokenizer must come to the known totals: another sum is another dataset."""
    gpt2 = {"vocab_size": manifest.vocab_size, "end_of_text": manifest.end_of_text} == _GPT2
    customary = DataConfig()
    default_split = (planned.data.validation_fraction, planned.data.split_seed) == (
        customary.validation_fraction,
        customary.split_seed,
    )
    if not (isinstance(planned.data.corpus, OpenWebTextCorpus) and gpt2 and default_split):
        return
    found = {
        "documents": manifest.train.documents + manifest.validation.documents,
        "train": manifest.train.tokens,
        "validation": manifest.validation.tokens,
    }
    if found != OPENWEBTEXT_TOTALS:
        raise DataError(
            f"data.corpus=openwebtext came to {found}, and it must come to {OPENWEBTEXT_TOTALS}; "
            "a source file is missing or changed: compare the revision of Skylion007/openwebtext"
        )


def require_sample(tokens: int, *, length: int, where: str) -> None:
    """A split has to hold one training sample: `length` tokens and the one that follows.

    Raises:
        UserError: it does not.
    """
    if tokens <= length:
        raise UserError(
            f"{where} has {tokens} tokens, one sample of model.sequence_length={length} needs {length + 1}; "
            "take more text, a larger data.validation_fraction if this is the validation split, or shorter sequences"
        )


def stage(address: str, scratch: Path) -> Path:
    """The dataset at `address` in a local folder with every byte verified against its manifest.

    Raises:
        DataError: no manifest, or a file is not what it says.
    """
    storage = open_storage(address)
    manifest = open_dataset(address)
    return bring(storage, manifest.files, lambda: scratch / address.rsplit("/", 1)[-1])


def open_dataset(address: str) -> DatasetManifest:
    """The manifest of the finished dataset at `address`.

    Raises:
        DataError: there is none.
    """
    manifest = read_manifest(open_storage(address), DatasetManifest)
    if manifest is None:
        raise DataError(f"{address} has no manifest, so it is not a finished dataset; run `train-litgpt prepare` first")
    return manifest


def problems(address: str) -> list[str]:
    """Everything wrong with the local dataset at `address`: checksums, counts, ids, document ends."""
    import numpy as np

    manifest, folder = open_dataset(address), Path(address)
    if wrong := differences(folder, manifest.files):
        return wrong
    for split in (manifest.train, manifest.validation):
        for record in split.files:
            ids = np.memmap(folder / record.path, dtype=manifest.dtype, mode="r")
            if int(ids.max()) >= manifest.vocab_size:
                wrong.append(
                    f"{record.path} holds the id {int(ids.max())}, the vocabulary ends at {manifest.vocab_size - 1}"
                )
            if int((ids == manifest.end_of_text).sum()) != split.documents or ids[-1] != manifest.end_of_text:
                wrong.append(f"{record.path} does not close {split.documents} documents with id {manifest.end_of_text}")
    return wrong


def main(argv: Sequence[str]) -> int:
    """`python -m litgpt_demo prepare`: the preparation alone, for a machine that has nothing but this package."""
    parser = argparse.ArgumentParser(prog="litgpt_demo prepare", description=__doc__)
    parser.add_argument("--root", required=True, help="folder or gs:// address to prepare the dataset under")
    parser.add_argument("--data", required=True, help="the data settings as JSON")
    args = parser.parse_args(argv)
    planned = plan_dataset(DataConfig.model_validate_json(args.data))
    manifest = prepare(planned, open_storage(args.root))
    print(f"{planned.path}: {manifest.train.tokens} training tokens, {manifest.validation.tokens} validation tokens")
    return 0
