"""A dataset: `train.bin`, `val.bin`, the tokenizer and a manifest, under a name that its inputs decide.

The bins are flat little-endian token ids, uint16 up to a vocabulary of 65,536 and uint32 above, every document followed
by the end-of-text id: LitGPT's and nanoGPT's own memmap loaders read them. Their bytes depend only on the inputs. A
split above `data.max_file_bytes` is several files of as many tokens, `train-00000.bin` and so on, to be read as one.
"""

from __future__ import annotations

import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import google_crc32c
from pydantic import Field, JsonValue

from litgpt_demo.config import DataConfig, Filters, Settings, content_hash, slug
from litgpt_demo.data.corpus import kind_of
from litgpt_demo.data.readers import Source, first_few
from litgpt_demo.data.shards import unseen_separator
from litgpt_demo.data.tokens import IdType, TokenizerFiles, tokenizer_identity
from litgpt_demo.documents import FileRecord, fetch_verified, read_manifest, write_manifest
from litgpt_demo.errors import DataError, Finding, NetworkError, Unreachable, UserError
from litgpt_demo.storage import MANIFEST, Storage, is_remote, open_storage
from litgpt_demo.storage.local import translate_os_errors

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

UNKNOWN = "unknown"
"""Replaces a hash while the Hub or a bucket does not answer. No hash is equal to it: hashes are hexadecimal."""

FORMAT = 2
"""Part of every dataset's content hash: raise it when the same inputs mean other bytes."""

_HASHED_APART = {"corpus", "tokenizer", "mixture", "stages"}  # fields of DataConfig that are hashed in their own ways
_BLOCK = 16 << 20  # bytes read at a time to verify, by each of _READERS
_READERS = 4
_HEAD = 4096  # first bytes of a file that show what it is


class Split(Settings):
    documents: int
    tokens: int
    files: tuple[FileRecord, ...]


class Ingredient(Settings):
    name: str
    dataset: str
    """The folder of its dataset, next to the mixture's own."""
    train: int
    """Tokens of its training split."""
    validation: int
    """Tokens of its validation split."""
    text_bytes: int = 0
    """Bytes of the text of both; 0 where they are not known."""
    documents: int | None = None
    """End-of-text ids of its training split; None in a mixture that was prepared before they were counted."""


class Mixture(Settings):
    """The sources that the samples of a training come from, and how many of a MIXTURE_CYCLE each gives."""

    sources: tuple[Ingredient, ...]
    schedule: tuple[tuple[float, tuple[int, ...]], ...]
    """Shares of MIXTURE_CYCLE, from each share of the run on."""


class DatasetManifest(Settings):
    """The manifest of a finished dataset. Written last; without it the folder is not a dataset."""

    format: int
    name: str
    content_hash: str
    corpus: JsonValue
    """Settings, and every source file with its size and version."""
    filters: Filters
    dropped: dict[str, int] = Field({})
    bad_documents: int = 0
    bad_places: tuple[str, ...] = ()
    """The places and problems of skipped documents; of very many, the first ones."""
    external_root: str | None = Field(None, exclude_if=lambda root: root is None)
    """The folder of the splits' files if it is not the dataset's own: token files that exist are read in place."""
    mixture: Mixture | None = Field(None, exclude_if=lambda mixture: mixture is None)
    """The datasets that this one mixes: then it has no splits of its own, and the counts are those of all."""
    document_lengths: tuple[int, ...] = ()
    """The numbers of documents with 2^i to 2^(i+1) - 1 tokens, end-of-text included, by their index i."""
    tokenizer_hash: str
    vocab_size: int
    end_of_text: int
    dtype: IdType
    validation_fraction: float
    split_seed: int
    text_bytes: int = 0
    """UTF-8 bytes of all documents; 0 where they are not known, as for tokens that another program made."""
    train: Split
    validation: Split
    tokenizer: tuple[FileRecord, ...]

    @property
    def files(self) -> tuple[FileRecord, ...]:
        return self.train.files + self.validation.files + self.tokenizer

    def ingredients(self, address: str) -> list[str]:
        """Return the addresses of the datasets that it mixes; a DataError if its content hash is not of those."""
        if self.mixture is None:
            return []
        names, fix = [source.dataset for source in self.mixture.sources], "remove that folder and prepare it again"
        for name in names:
            if slug(name, len(name)) != name:
                raise DataError(f"{address} mixes {name!r}, which is not the name of a dataset next to it", fix=fix)
        if self.content_hash != mixture_hash([name.rpartition("-")[2] for name in names], self.mixture.schedule):
            raise DataError(f"{address} mixes {', '.join(names)}, but its content hash is of other sources", fix=fix)
        return [f"{address.rpartition('/')[0]}/{name}" for name in names]

    @property
    def sample_hashes(self) -> set[str]:
        """Return the hashes that decide the order of samples: the dataset's own, or those of the datasets it mixes."""
        mixed = self.mixture.sources if self.mixture else ()
        return {source.dataset.rpartition("-")[2] for source in mixed} or {self.content_hash}

    @property
    def external_files(self) -> tuple[FileRecord, ...]:
        return () if self.external_root is None else self.train.files + self.validation.files

    @property
    def is_tokenized(self) -> bool:
        """Return whether the corpus was token ids. Those need not close every document."""
        return isinstance(self.corpus, dict) and "tokens" in self.corpus

    @property
    def documents(self) -> int:
        return self.train.documents + self.validation.documents

    @property
    def tokens(self) -> int:
        return self.train.tokens + self.validation.tokens


def mixture_hash(hashes: Sequence[str], schedule: Sequence[tuple[float, tuple[int, ...]]]) -> str:
    return content_hash(FORMAT, [*hashes], [[after, *shares] for after, shares in schedule])


@dataclass(frozen=True, kw_only=True)
class PlannedDataset:
    """A dataset as its inputs decide it; it need not exist yet."""

    data: DataConfig
    sources: tuple[Source, ...]
    tokenizer: TokenizerFiles | None
    """None where it is to be trained on the corpus."""
    name: str
    content_hash: str
    unknown: str = ""
    """The reason why the hash is UNKNOWN. Such a dataset can be shown, and never be made."""
    skipped_paths: tuple[str, ...] = ()
    """Paths that the corpus selects and that cannot be read, or would be read twice: a sentence each."""

    parts: tuple[PlannedDataset, ...] = ()

    @property
    def path(self) -> str:
        """Below the root."""
        return f"datasets/{self.name}-{self.content_hash}"

    @property
    def sample_hashes(self) -> set[str]:
        return {part.content_hash for part in self.parts or (self,)}


def plan_dataset(data: DataConfig) -> PlannedDataset:
    """Return the dataset that the settings make; reads files only for their checksums."""
    if data.mixture:
        parts = tuple(map(plan_dataset, data.parts))
        if len({part.content_hash for part in parts}) < len(parts):
            raise UserError("data.mixture has two sources that are the same dataset; keep one, and add the weights")
        return PlannedDataset(
            data=data,
            sources=tuple(source for part in parts for source in part.sources),
            tokenizer=parts[0].tokenizer,
            name=data.label,
            content_hash=mixture_hash([part.content_hash for part in parts], data.schedule),
            skipped_paths=tuple(path for part in parts for path in part.skipped_paths),
            parts=parts,
        )
    kind, skipped_paths = kind_of(data.corpus), list[str]()
    files = kind.list_files(skipped_paths)
    identity, tokenizer = tokenizer_identity(data.tokenizer)
    decisive = set[str]()
    if not data.corpus.is_tokenized:
        decisive = set(DataConfig.model_fields) - _HASHED_APART
    if data.on_bad_document == "fail":
        decisive.discard("max_document_bytes")  # it decides whether there is a dataset, and no byte of it
    # The version of Unicode says what a letter is, where that decides which documents pass.
    unicode = unicodedata.unidata_version if data.filters.min_letter_ratio else None
    settings = data.model_dump(mode="json", include=decisive)
    return PlannedDataset(
        data=data,
        sources=tuple(files),
        tokenizer=tokenizer,
        name=data.corpus.label,
        content_hash=content_hash(FORMAT, kind.identity(files), identity, settings, unicode),
        skipped_paths=tuple(skipped_paths),
    )


def preview_dataset(data: DataConfig) -> PlannedDataset:
    """Plan the dataset; its content hash is UNKNOWN where the Hub or a bucket does not answer."""
    try:
        return plan_dataset(data)
    except (Unreachable, NetworkError) as error:
        return PlannedDataset(
            data=data, sources=(), tokenizer=None, name=data.label, content_hash=UNKNOWN, unknown=str(error)
        )


def warnings_of(planned: PlannedDataset) -> Iterator[Finding]:
    if planned.skipped_paths:
        what = f"data.corpus.paths select {len(planned.skipped_paths):,} paths that are not read: "
        what += first_few(planned.skipped_paths)
        yield Finding("warning", "data.left-out", what, "to read them, add the files' own paths to data.corpus.paths")
    for part in planned.parts or (planned,):
        yield from unseen_separator(part.data.corpus, part.sources)


def finished_dataset(root: Storage, planned: PlannedDataset) -> DatasetManifest | None:
    """The manifest if this dataset is done, judged by its files being there; `stage` checks every byte."""
    return _finished(root.within(planned.path))


def _finished(storage: Storage) -> DatasetManifest | None:
    manifest = read_manifest(storage, DatasetManifest)
    if manifest is None:
        return None
    for address in manifest.ingredients(storage.address()):
        if _finished(open_storage(address)) is None:
            raise DataError(f"{storage.address()} mixes {address}, which is gone; remove that mixture and run again")
    present, where = set(storage.list()), ""
    if manifest.external_root is not None:
        external, where = open_storage(manifest.external_root), f" in {manifest.external_root}"
        present |= {record.path for record in manifest.external_files if external.exists(record.path)}
    missing = sorted({record.path for record in manifest.files} - present)
    if missing:
        raise DataError(
            f"{storage.address()} has a manifest, but its {', '.join(missing)} is missing{where}; "
            "remove the dataset's folder and run again"
        )
    return manifest


def require_sample(tokens: int, *, length: int, where: str) -> None:
    """Raise UserError if a split has less than one training sample: `length` tokens and the one that follows."""
    if tokens <= length:
        raise UserError(
            f"{where} has {tokens} tokens, but one sample of model.sequence_length={length} needs {length + 1}; "
            "take more text, a larger data.validation_fraction if this is the validation split, or shorter sequences"
        )


def require_document_ends(manifest: DatasetManifest) -> None:
    """Raise UserError if a training split, or that of a source, has no end-of-text id, where attention would end."""
    counts: dict[str, int | None] = {"the training split": manifest.train.documents}
    if manifest.mixture is not None:
        counts = {f"{source.name}, of data.mixture,": source.documents for source in manifest.mixture.sources}
    for where, documents in counts.items():
        if documents == 0:
            what = f"{where} never has the id {manifest.end_of_text}, the tokenizer's end-of-text"
            fix = "write that id after each document, name the token that ends them as the tokenizer's end-of-text"
            fix += ", or set train.attention=causal"
            raise UserError(f"train.attention=documents finds no document: {what}", fix=fix)


def stage(address: str, scratch: Path, *, train: bool = True) -> Path:
    """Return the dataset in a local folder, every byte verified; without `train`, the training split is not fetched."""
    storage, manifest, target = open_storage(address), open_dataset(address), scratch / address.rsplit("/", 1)[-1]
    for part in manifest.ingredients(address):
        stage(part, scratch, train=train)
    own, external = list[FileRecord](), list[FileRecord]()
    for record in manifest.files:
        if train or record not in manifest.train.files:
            (external if record in manifest.external_files else own).append(record)
    folder = fetch_verified(storage, own, lambda: target)
    if manifest.external_root is not None:
        fetch_verified(open_storage(manifest.external_root), external, lambda: target)
    if storage.local_path() is None:  # all files are in one folder now
        write_manifest(open_storage(str(folder)), manifest.model_copy(update={"external_root": None}))
    return folder


def open_dataset(address: str) -> DatasetManifest:
    """Return the manifest of the finished dataset at `address`; a DataError where there is none."""
    manifest = read_manifest(open_storage(address), DatasetManifest)
    if manifest is None:
        raise DataError(f"{address} has no manifest, so it is not a finished dataset; run `train-litgpt prepare` first")
    return manifest


@dataclass(frozen=True, kw_only=True)
class TokenDataset:
    """A split cut into samples of `length` tokens; sample i is tokens i*length to (i+1)*length, both included."""

    files: Sequence[npt.NDArray[np.uint16] | npt.NDArray[np.uint32]]
    """The split's tokens, to be read as one; a sample may begin in one file and end in the next."""
    length: int
    content_hash: str = ""
    """The dataset's content hash, which with a run's seed decides the order of the samples."""
    first: int = 0
    """The place in that order at which a run begins."""

    def __len__(self) -> int:
        return max(0, (sum(map(len, self.files)) - 1) // self.length)

    def read(self, sample_ids: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return inputs and targets, each of shape (len(sample_ids), length)."""
        import numpy as np

        indices = sample_ids.astype(np.int64)[:, None] * self.length + np.arange(self.length + 1)
        if len(self.files) == 1:
            tokens = self.files[0][indices].astype(np.int64)
            return tokens[:, :-1], tokens[:, 1:]
        tokens, ends = np.empty_like(indices), np.cumsum([len(file) for file in self.files])
        files = np.searchsorted(ends, indices, side="right")
        for number in np.unique(files):
            selected, start = files == number, ends[number] - len(self.files[number])
            tokens[selected] = self.files[number][indices[selected] - start]
        return tokens[:, :-1], tokens[:, 1:]


def open_split(folder: Path, manifest: DatasetManifest, split: Split, *, length: int) -> TokenDataset:
    """Return a split of the dataset in `folder`, memory-mapped; a UserError where it is shorter than one sample."""
    import numpy as np

    root = manifest.external_root or ""
    if is_remote(root):
        what = f"{folder} is read in place, but its token files are in {root}, which cannot be memory-mapped"
        raise UserError(what, fix="set platform.dataset_access to copy")
    paths = [folder / root / record.path for record in split.files]
    require_sample(split.tokens, length=length, where=str(paths[0]))
    files = [np.memmap(path, dtype=manifest.dtype, mode="r") for path in paths]
    return TokenDataset(files=files, length=length, content_hash=manifest.content_hash)


class FileScan(NamedTuple):
    record: FileRecord
    largest_id: int = -1
    ends: int = 0
    """The number of end-of-text ids."""
    last_id: int = -1
    head: bytes = b""
    nonzero: tuple[int, ...] = (0, 0, 0, 0)
    """Of every four ids in a row, how many are not 0: the first ones, the second ones, and so on."""


def scan_file(manifest: DatasetManifest, storage: Storage, record: FileRecord) -> FileScan | None:
    """Return everything about the file from one reading; None if there is no such file."""
    import numpy as np

    scan, size, crc32c, hashed = FileScan(record), 0, 0, sha256()
    nonzero, has_ids = np.zeros(4, dtype=np.int64), record not in manifest.tokenizer
    with suppress(FileNotFoundError), tempfile.TemporaryDirectory() as folder:
        path = storage.local_path(record.path)
        if path is None:
            path = Path(folder, "file")
            storage.download(record.path, path)
        elif not path.is_file():  # absent, a folder, or a link that leads nowhere or to itself
            return None
        with translate_os_errors(str(path)), path.open("rb") as file:
            while block := file.read(_BLOCK):
                if not size:
                    scan = scan._replace(head=block[:_HEAD])
                size, crc32c = size + len(block), google_crc32c.extend(crc32c, block)
                if record.sha256 is not None:
                    hashed.update(block)
                if has_ids and len(block) % np.dtype(manifest.dtype).itemsize == 0:
                    ids = np.frombuffer(block, dtype=manifest.dtype)
                    nonzero += [np.count_nonzero(ids[: len(ids) // 4 * 4][place::4]) for place in range(4)]
                    scan = scan._replace(
                        largest_id=max(scan.largest_id, int(ids.max())),
                        last_id=int(ids[-1]),
                        ends=scan.ends + int(np.count_nonzero(ids == manifest.end_of_text)),
                    )
        digest = None if record.sha256 is None else hashed.hexdigest()
        found = FileRecord(path=record.path, size=size, crc32c=f"{crc32c:08x}", sha256=digest)
        return scan._replace(record=found, nonzero=tuple(nonzero.tolist()))
    return None


def verify_dataset(address: str) -> DatasetManifest:
    """Return the manifest of the dataset at `address` after comparing it with the files.

    Compares files, sizes, checksums, counts, ids, and ends of documents; a DataError has each problem on a line. Counts
    and ids are compared because the manifest itself may be wrong, which checksums cannot show. Reads each byte once, in
    64 MiB of memory. A bucket's files are fetched one by one into the temporary folder.
    """
    manifest, storage = open_dataset(address), open_storage(address)
    for part in manifest.ingredients(storage.address()):
        verify_dataset(part)
    external = open_storage(manifest.external_root or address)
    storages = [external if record in manifest.external_files else storage for record in manifest.files]
    with ThreadPoolExecutor(_READERS) as pool:
        scans = list(pool.map(partial(scan_file, manifest), storages, manifest.files))
    by_path = {scan.record.path: scan for scan in scans if scan}
    problems = list[str]()
    if manifest.format != FORMAT:
        problems.append(f"the manifest has format {manifest.format}, but this version reads format {FORMAT}")
    for record in manifest.files:
        scan = by_path.get(record.path)
        if scan is None:
            problems.append(f"{storage.address(record.path)} is missing or not a file")
            continue
        for name in ("size", "crc32c", "sha256"):
            found, expected = getattr(scan.record, name), getattr(record, name)
            if found != expected:
                problems.append(f"{record.path} has {name} {found}, but its manifest says {expected}")
    if manifest.mixture is None:
        for name, split in (("train", manifest.train), ("validation", manifest.validation)):
            of_split = [by_path[record.path] for record in split.files if record.path in by_path]
            problems += _problems_of_split(manifest, name, split, of_split)
    fix = "remove that folder and prepare it again" if problems else "remove the files that it does not list"
    strays = sorted(set(storage.list()) - {record.path for record in manifest.files} - {MANIFEST})
    problems += [f"{storage.address(path)} is not in the manifest" for path in strays]
    if problems:
        raise DataError("\n✗ ".join([f"{address} is not what its manifest says", *problems]), fix=fix)
    return manifest


def _problems_of_split(manifest: DatasetManifest, name: str, split: Split, scans: Sequence[FileScan]) -> Iterator[str]:
    tokens = sum(scan.record.size for scan in scans) // int(manifest.dtype[-1])  # bytes of an id
    if tokens != split.tokens:
        yield f"{name} holds {tokens} tokens, but its manifest says {split.tokens}"
    ends = sum(scan.ends for scan in scans)
    if ends != split.documents:
        yield f"{name} closes {ends} documents with id {manifest.end_of_text}, but its manifest says {split.documents}"
    for scan in scans:
        path = scan.record.path
        if scan.largest_id >= manifest.vocab_size:
            yield f"{path} holds the id {scan.largest_id}, but the vocabulary ends at {manifest.vocab_size - 1}"
        # Only the last of several files ends with a document.
        is_last = path == split.files[-1].path
        if is_last and scan.record.size and scan.last_id != manifest.end_of_text and not manifest.is_tokenized:
            yield f"{path} ends in the middle of a document: its last id is {scan.last_id}"
