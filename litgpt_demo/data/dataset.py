"""A dataset: `train.bin`, `val.bin`, the tokenizer and a manifest, under a name that its inputs decide.

The bins are flat little-endian token ids, uint16 up to a vocabulary of 65,536 and uint32 above, every document followed
by the end-of-text id: LitGPT's and nanoGPT's own memmap loaders read them. Their bytes depend on the inputs alone. A
split above `data.max_file_bytes` is several files, `train-00000.bin` and so on, to be read as one.

Tokens that existed already may lie elsewhere: the manifest then names their addresses. A mixture has a tokenizer and a
manifest alone, which names the datasets next to it that are mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue

from litgpt_demo.data.conversations import template_identity
from litgpt_demo.data.corpus import Source, corpus_identity, sources
from litgpt_demo.data.curation import Removed, curation_identity
from litgpt_demo.data.settings import MAX_DOCUMENT_BYTES, Curation, DataConfig, Filters, InstructionCorpus, TokensCorpus
from litgpt_demo.data.tokens import TokenizerFiles, tokenizer_identity
from litgpt_demo.errors import DataError, NetworkError, Unreachable, UserError
from litgpt_demo.manifests import FileRecord, bring, read_manifest
from litgpt_demo.settings import Settings, key_of
from litgpt_demo.storage import MANIFEST, Storage, is_remote, open_storage

UNKNOWN = "unknown"
"""Stands where a key would, while the Hub or a bucket cannot be asked. No key reads so: keys are hexadecimal."""

MILLION = 1_000_000

FORMAT = 2
"""Part of every dataset's key: raise it when the same inputs mean other bytes."""


class Split(Settings):
    """One of the two splits."""

    documents: int
    tokens: int
    files: tuple[FileRecord, ...]
    """The files in their order; read as one."""


def _is_empty(value: Sized) -> bool:
    """Say what a manifest leaves out: datasets keep the bytes that they had before there were such fields."""
    return not value


def _is_none(value: object) -> bool:
    return value is None


class DatasetManifest(Settings):
    """The manifest of a finished dataset. Written last; without it the folder is not a dataset."""

    format: int
    name: str
    key: str
    corpus: JsonValue
    """Settings, and every source file with its size and version."""
    filters: Filters
    dropped: dict[str, int]
    """The number of documents that were left out, by reason."""
    curation: Curation | None = Field(None, exclude_if=_is_none)
    curated: tuple[Removed, ...] = Field((), exclude_if=_is_empty)
    """The documents and bytes that each step of the curation removed."""
    bad_documents: int
    """The number of documents that were skipped because they were not text."""
    bad_places: tuple[str, ...]
    """The places and problems of skipped documents; of very many, the first ones."""
    document_lengths: tuple[int, ...]
    """The numbers of documents with 2^i to 2^(i+1) - 1 tokens, end-of-text included, by their index i."""
    tokenizer_hash: str
    vocab_size: int
    end_of_text: int
    dtype: str
    """numpy's name of the ids' type, little-endian: `<u2` or `<u4`."""
    masked: bool = False
    """True for conversations: an id whose highest bit is set is shown to the model and not learned."""
    validation_fraction: float
    split_seed: int
    text_bytes: int
    """UTF-8 bytes of all documents."""
    train: Split
    validation: Split
    tokenizer: tuple[FileRecord, ...]
    places: dict[str, str] = Field({}, exclude_if=_is_empty)
    """The addresses of files that lie elsewhere, by their paths."""
    closes_documents: bool = Field(True, exclude_if=bool)
    """Every document ends with end-of-text. Tokens that existed already are taken as they are."""
    parts: tuple[MixturePart, ...] = Field((), exclude_if=_is_empty)
    """The datasets of a mixture, whose splits are then sums, and have no files."""
    stages: tuple[Stage, ...] = Field((), exclude_if=_is_empty)
    """The stages of a mixture."""

    @property
    def files(self) -> tuple[FileRecord, ...]:
        return self.train.files + self.validation.files + self.tokenizer

    @property
    def documents(self) -> int:
        return self.train.documents + self.validation.documents

    @property
    def tokens(self) -> int:
        return self.train.tokens + self.validation.tokens


class MixturePart(Settings):
    """One dataset of a mixture."""

    name: str
    folder: str
    """The name of its folder, next to the mixture's."""
    dataset: DatasetManifest


class Stage(Settings):
    """A part of a training, in which the shares of a mixture's datasets stay as they are."""

    until_step: int | None = None
    """The last step of the stage; None where `until_share` says when it ends, or the end of the run."""
    until_share: float | None = None
    """The share of the run's steps that are done when it ends."""
    millionths: tuple[int, ...]
    """The shares of the datasets, in their order; the sum is 1,000,000."""

    def end(self, steps: int) -> int:
        """Return the number of steps that are done when the stage ends, in a run of `steps`."""
        if self.until_step is not None:
            return self.until_step
        return steps if self.until_share is None else round(self.until_share * steps)


DatasetManifest.model_rebuild()


def sources_of(dataset: DatasetManifest) -> dict[str, DatasetManifest]:
    """Return the datasets that a run on this one reads, by name: the parts of a mixture, else the dataset alone."""
    return {part.name: part.dataset for part in dataset.parts} or {dataset.name: dataset}


@dataclass(frozen=True, kw_only=True)
class PlannedDataset:
    """A dataset as its inputs decide it, before any of its bytes exist."""

    data: DataConfig
    sources: tuple[Source, ...]
    tokenizer: TokenizerFiles | None
    """None where it is to be trained on the corpus."""
    name: str
    key: str
    curator: JsonValue = None
    """The identity of what curates the documents, as `curation_identity` says; None where nothing does."""
    unknown: str = ""
    """The reason why the key is UNKNOWN. Such a dataset can be shown, and never be made."""
    parts: Mapping[str, PlannedDataset] = field(default_factory=dict)
    """The datasets of a mixture, by their names."""

    @property
    def kind(self) -> str:
        """Return what it is made of, in a word or a few."""
        return f"a mixture of {', '.join(self.parts)}" if self.parts else self.data.corpus.kind

    @property
    def path(self) -> str:
        """Below the root."""
        return f"datasets/{self.name}-{self.key}"


def plan_dataset(data: DataConfig) -> PlannedDataset:
    """Look at the sources and say which dataset they make; reads no text but what the checksums need.

    Raises:
        UserError: the corpus or the tokenizer is not there.
    """
    if data.mixture:
        return _plan_mixture(data, {name: plan_dataset(source) for name, source in data.sources.items()})
    found = sources(data.corpus)
    identity, tokenizer = tokenizer_identity(data.tokenizer)
    if isinstance(data.corpus, InstructionCorpus):
        identity["chat_template"] = template_identity(tokenizer)
    rest = data.model_dump(mode="json", exclude={"corpus", "tokenizer", "curation"} | _without_effect(data))
    curator = None if data.curation is None else curation_identity(data.curation)
    curated = [] if curator is None else [curator]  # datasets keep the keys that they had before there was curation
    key = key_of(FORMAT, corpus_identity(data.corpus, found), identity, rest, _unicode(data.filters), *curated)
    return PlannedDataset(
        data=data, sources=tuple(found), tokenizer=tokenizer, name=data.corpus.label, key=key, curator=curator
    )


def _plan_mixture(data: DataConfig, parts: Mapping[str, PlannedDataset]) -> PlannedDataset:
    """The mixture of datasets that are planned already.

    Raises:
        UserError: two of them are the same.
    """
    keys = {name: part.key for name, part in parts.items()}
    if same := [name for name, key in keys.items() if list(keys.values()).count(key) > 1 and key != UNKNOWN]:
        raise UserError(f"data.mixture: {' and '.join(same)} are the same dataset; keep one, and add up their weights")
    unknown = "; ".join(filter(None, dict.fromkeys(part.unknown for part in parts.values())))
    stages: list[JsonValue] = [stage.model_dump(mode="json") for stage in stages_of(data)]
    first = next(iter(parts.values()))
    return PlannedDataset(
        data=data,
        sources=tuple(source for part in parts.values() for source in part.sources),
        tokenizer=first.tokenizer,
        name="mixture",
        key=UNKNOWN if unknown else key_of(FORMAT, [[name, key] for name, key in keys.items()], stages),
        unknown=unknown,
        parts=parts,
    )


def stages_of(data: DataConfig) -> tuple[Stage, ...]:
    """Return the stages of a mixture, one where it has none."""
    ends: list[dict[str, Any]] = [stage.model_dump(exclude={"weights"}) for stage in data.stages] or [{}]
    return tuple(Stage(**end, millionths=millionths(weights)) for end, weights in zip(ends, data.weights, strict=True))


def millionths(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the weights as whole millionths whose sum is a million: by largest remainder, the first of equal ones.

    Raises:
        UserError: a weight is so small that nothing is left of it.
    """
    exact = [weight / sum(weights) * MILLION for weight in weights]
    parts = [int(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda source: parts[source] - exact[source])
    for source in order[: MILLION - sum(parts)]:
        parts[source] += 1
    for weight, part in zip(weights, parts, strict=True):
        if weight and not part:
            raise UserError(
                f"data.mixture: a weight of {weight:g} among {sum(weights):g} is less than one sample of a million; "
                "give 0 to leave the source out, or more"
            )
    return tuple(parts)


def _without_effect(data: DataConfig) -> set[str]:
    """Settings that decide no byte here: datasets keep the keys that they had before there were such settings."""
    if isinstance(data.corpus, TokensCorpus):  # whose bytes and splits are what they are
        return set(DataConfig.model_fields)
    skips = data.on_bad_document == "skip" and data.max_document_bytes != MAX_DOCUMENT_BYTES
    return {"mixture", "stages"} | (set() if skips else {"max_document_bytes"})


def preview_dataset(data: DataConfig) -> PlannedDataset:
    """Plan the dataset as far as that is possible from this machine: where its sources cannot be asked, under UNKNOWN.

    Raises:
        UserError: the corpus or the tokenizer is not there.
    """
    if data.mixture:
        return _plan_mixture(data, {name: preview_dataset(source) for name, source in data.sources.items()})
    try:
        return plan_dataset(data)
    except (Unreachable, NetworkError) as error:
        return PlannedDataset(
            data=data, sources=(), tokenizer=None, name=data.corpus.label, key=UNKNOWN, unknown=str(error)
        )


def _unicode(filters: Filters) -> str | None:
    """The version of Unicode that says what a letter is, where that decides which documents pass."""
    import unicodedata

    return unicodedata.unidata_version if filters.min_letter_ratio else None


def finished_dataset(root: Storage, planned: PlannedDataset) -> DatasetManifest | None:
    """The manifest if this dataset is done, judged by its files being there; `stage` checks every byte.

    Raises:
        DataError: it has a manifest, but a file of it is gone.
    """
    storage = root.within(planned.path)
    manifest = read_manifest(storage, DatasetManifest)
    if manifest is None:
        return None
    if any(finished_dataset(root, part) is None for part in planned.parts.values()):
        return None
    there = set(storage.list())
    if missing := sorted({record.path for record in manifest.files} - there - set(manifest.places)):
        raise DataError(
            f"{storage.address()} has a manifest but {', '.join(missing)} is missing; "
            "something removed them: delete the folder and run again"
        )
    return manifest


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
    """The dataset at `address` in a local folder with every byte verified against its manifest, which comes last.

    The datasets of a mixture lie next to it.

    Raises:
        DataError: no manifest, or a file is not what it says.
    """
    manifest = open_dataset(address)
    return staged(address, manifest, manifest.files, scratch, parts=lambda dataset: dataset.files)


def staged(
    address: str,
    manifest: DatasetManifest,
    records: Sequence[FileRecord],
    scratch: Path,
    *,
    parts: Callable[[DatasetManifest], Sequence[FileRecord]],
) -> Path:
    """Return a local folder with some files of a dataset, verified; next to it those of a mixture's parts.

    Args:
        parts: chooses the files of each part.

    Raises:
        DataError: a file is not what its manifest says.
    """
    parent, _, name = address.rpartition("/")
    for part in manifest.parts:
        chosen, home = parts(part.dataset), f"{parent}/{part.folder}"
        folder = staged(home, part.dataset, chosen, scratch, parts=parts)
        if folder.parent != scratch:  # it is used where it lies, and found in the scratch folder too
            scratch.mkdir(parents=True, exist_ok=True)
            link = scratch / part.folder
            link.unlink(missing_ok=True)
            link.symlink_to(folder)
    storage = open_storage(address)
    folder = bring(storage, records, lambda: scratch / name, manifest.places)
    if manifest.parts and folder.parent != scratch:
        folder = _copied(storage, records, scratch / name)
    if folder != storage.local_path():
        open_storage(str(folder)).write(MANIFEST, storage.read(MANIFEST))
    return folder


def local_folder(address: str) -> Path | None:
    """Return the dataset's folder if all that is in it lies on this machine; nothing is verified.

    Raises:
        DataError: there is none.
    """
    places = [place for one in sources_of(open_dataset(address)).values() for place in one.places.values()]
    return None if any(map(is_remote, places)) else open_storage(address).local_path()


def _copied(storage: Storage, records: Sequence[FileRecord], folder: Path) -> Path:
    """A mixture's own few files in the folder that has its parts next to it."""
    for record in records:
        storage.download(record.path, folder / record.path)
    return folder


def open_dataset(address: str) -> DatasetManifest:
    """The manifest of the finished dataset at `address`.

    Raises:
        DataError: there is none.
    """
    manifest = read_manifest(open_storage(address), DatasetManifest)
    if manifest is None:
        raise DataError(f"{address} has no manifest, so it is not a finished dataset; run `train-litgpt prepare` first")
    return manifest
