"""Preparing a dataset: documents in, token files out, by many workers, which may be killed at any time.

    tokenizer  trained on the start of the corpus, unless one is given
    survey     each shard of the corpus: which documents stay, and how many
    encode     each shard: its training and its validation documents as two pieces of tokens
    publish    the pieces joined, checked and described by the manifest

The results of workers are stored in the dataset's own folder, each with a record that is written last. A second run
trusts the records and does the rest. Workers may be threads, processes or other machines.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from litgpt_demo.config import DataConfig, TokensCorpus
from litgpt_demo.data import dataset, workers
from litgpt_demo.data.corpus import kind_of, selects, token_folder
from litgpt_demo.data.dataset import DatasetManifest, Ingredient, Mixture, PlannedDataset, Split
from litgpt_demo.data.fetching import local_copy
from litgpt_demo.data.readers import Source, detect_wrong_ids, refuse_lfs_pointer
from litgpt_demo.data.shards import Shard, plan_shards
from litgpt_demo.data.workers import SHARDS, EncodeResult, EncodeTask, PrepContext, ShardStats, StoredTokenizer
from litgpt_demo.documents import FileRecord, write_manifest
from litgpt_demo.errors import DataError, TrainLitgptError, UserError
from litgpt_demo.storage import MANIFEST, ObjectInfo, Storage, combine_crc32c, is_remote, open_storage
from litgpt_demo.storage.base import content_of
from litgpt_demo.storage.local import translate_os_errors

T = TypeVar("T")
R = TypeVar("R")
Surveyed: TypeAlias = list[tuple[Shard, ShardStats]]

_WIDEST_WAVE = 64  # shards surveyed at a time where max_bytes may make the next ones unnecessary
_AT_ONCE = 4_000_000  # digests compared at a time, in about 300 MB
_BLOCK = 1 << 20


class MapSteps(Protocol):
    """Carries out `step` on every item, anywhere; results keep the order of the items, and closing cancels the rest."""

    def __call__(self, step: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]: ...


@dataclass(frozen=True, kw_only=True)
class Preparation:
    phase: Literal["tokenizer", "survey", "encode", "count", "publish"]
    documents: int = 0
    """Done in this phase."""
    text_bytes: int = 0
    all_bytes: int | None = None
    """The total that `text_bytes` will reach; None while the corpus is surveyed."""
    tokens: int = 0
    began: float = field(default_factory=monotonic)

    def plus(self, *, documents: int, text_bytes: int, tokens: int = 0) -> Preparation:
        return replace(
            self,
            documents=self.documents + documents,
            text_bytes=self.text_bytes + text_bytes,
            tokens=self.tokens + tokens,
        )

    @property
    def rate(self) -> float:
        """UTF-8 bytes per second."""
        return self.text_bytes / max(monotonic() - self.began, 1e-3)

    @property
    def seconds_left(self) -> float | None:
        if self.all_bytes is None or not self.text_bytes:
            return None
        return (self.all_bytes - self.text_bytes) / self.rate


Report = Callable[[Preparation], None]


def threads_for(root: str) -> int:
    """Return how many threads keep this machine's cores busy: two for each where half of them wait for a bucket."""
    return len(os.sched_getaffinity(0)) * (2 if is_remote(root) else 1)


def in_threads(workers: int) -> MapSteps:
    def map_steps(step: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(step, items)  # closing it cancels the rest

    return map_steps


def prepare(
    planned: PlannedDataset, root: Storage, *, map_steps: MapSteps | None = None, report: Report = lambda progress: None
) -> DatasetManifest:
    """Make the dataset, or return the manifest of the finished one. Killed at any moment, it can be called again."""
    if planned.unknown:
        raise UserError(f"the dataset cannot be made while its sources are not known: {planned.unknown}")
    found = frozenset(root.within(f"{planned.path}/{SHARDS}").list())
    context = PrepContext(data=planned.data, root=root.root, path=planned.path, found=found)
    try:
        manifest = dataset.finished_dataset(root, planned)
        if manifest is None:
            manifest = _make(planned, root, context, map_steps or in_threads(threads_for(root.root)), report)
        files = {MANIFEST, *(record.path for record in manifest.files)}
        unfinished = [path for path in context.storage.list() if path not in files]
        for name in {SHARDS if path.startswith(f"{SHARDS}/") else path for path in unfinished}:
            context.storage.remove(name)
        context.storage.remove_unfinished()
        shutil.rmtree(context.scratch, ignore_errors=True)
        return manifest
    finally:
        folders = [context.scratch]
        if not is_remote(root.root):  # else it is the user's part of the temporary folder, which others use too
            folders.append(context.scratch.parent)
        for folder in folders:
            with suppress(OSError):
                folder.rmdir()


def _make(
    planned: PlannedDataset, root: Storage, context: PrepContext, map_steps: MapSteps, report: Report
) -> DatasetManifest:
    make = _tokenize
    if planned.parts:
        make = _mix
    elif planned.data.corpus.is_tokenized:
        make = _count_tokens
    try:
        manifest = make(planned, context, map_steps, report)
        write_manifest(context.storage, manifest)
    except (TrainLitgptError, OSError):
        # Another preparation of it may have ended meanwhile, and removed what this one had begun.
        finished = dataset.finished_dataset(root, planned)
        if finished is None:
            raise
        return finished
    return manifest


def _tokenize(planned: PlannedDataset, context: PrepContext, map_steps: MapSteps, report: Report) -> DatasetManifest:
    def report_sample(documents: int, text_bytes: int) -> None:
        report(Preparation(phase="tokenizer", documents=documents, text_bytes=text_bytes))

    tokenizer = workers.load_or_train_tokenizer(planned, context, report_sample)
    surveyed = _survey_all(planned, context, map_steps, report, by_count=True)
    encoded = _encode_all(context, tokenizer, surveyed, map_steps, report)
    if encoded is None:  # empty documents were counted too: read all, to count the others
        surveyed = _survey_all(planned, context, map_steps, report, by_count=False)
        encoded = _encode_all(context, tokenizer, surveyed, map_steps, report)
    assert encoded is not None, "every document was read and counted"
    results, train, validation = encoded
    data, surveys = planned.data, [stats for _, stats in surveyed]
    dropped = sum((Counter(stats.dropped) for stats in surveys), Counter[str]())
    if data.filters.drop_duplicates:
        dropped["duplicate"] = sum(stats.documents for stats in surveys) - sum(result.documents for result in results)
    manifest = _manifest(
        planned,
        tokenizer,
        corpus=kind_of(data.corpus).identity(planned.sources),
        dropped=dict(sorted((+dropped).items())),
        bad_documents=sum(stats.bad for stats in surveys),
        bad_places=tuple(place for stats in surveys for place in stats.bad_places)[: workers.PLACES],
        document_lengths=tuple(np.trim_zeros(np.sum([result.lengths for result in results], axis=0), "b").tolist()),
        text_bytes=sum(result.text_bytes for result in results),
        train=_join(context, "train", [result.train for result in results], train),
        validation=_join(context, "val", [result.validation for result in results], validation),
    )
    check_totals(planned, manifest)
    return manifest


def _manifest(planned: PlannedDataset, tokenizer: StoredTokenizer, **own: Any) -> DatasetManifest:
    files, records = tokenizer
    nothing = Split(documents=0, tokens=0, files=())
    fields: dict[str, Any] = {
        "format": dataset.FORMAT,
        "name": planned.name,
        "content_hash": planned.content_hash,
        "filters": planned.data.filters,
        "validation_fraction": planned.data.validation_fraction,
        "split_seed": planned.data.split_seed,
        "vocab_size": files.vocab_size,
        "end_of_text": files.end_of_text,
        "dtype": files.dtype,
        "tokenizer_hash": files.hash,
        "tokenizer": records,
        "train": nothing,
        "validation": nothing,
    }
    return DatasetManifest(**fields | own)


def _total(splits: Sequence[Split]) -> Split:
    return Split(
        documents=sum(split.documents for split in splits), tokens=sum(split.tokens for split in splits), files=()
    )


def _mix(planned: PlannedDataset, context: PrepContext, map_steps: MapSteps, report: Report) -> DatasetManifest:
    manifests, sources = list[DatasetManifest](), list[Ingredient]()
    for part, source in zip(planned.parts, planned.data.mixture, strict=True):
        manifest = prepare(part, open_storage(context.root), map_steps=map_steps, report=report)
        manifests.append(manifest)
        sources.append(
            Ingredient(
                name=source.label,
                dataset=f"{manifest.name}-{manifest.content_hash}",
                train=manifest.train.tokens,
                validation=manifest.validation.tokens,
                text_bytes=manifest.text_bytes,
                documents=manifest.train.documents,
            )
        )
    tokenizer = planned.tokenizer
    assert tokenizer is not None, "DataConfig requires one that exists"
    if tokenizer.prefix:
        prefixed = tokenizer.with_prefix()
        if {manifest.tokenizer_hash for manifest in manifests} == {prefixed.hash}:
            tokenizer = prefixed
    sizes = [manifest.text_bytes for manifest in manifests]
    return _manifest(
        planned,
        workers.store_tokenizer(context, tokenizer),
        corpus={source.name: manifest.corpus for source, manifest in zip(sources, manifests, strict=True)},
        mixture=Mixture(sources=tuple(sources), schedule=planned.data.schedule),
        # 0, which is unknown, if one is: the sum of the others would make the text look shorter than it is.
        text_bytes=sum(sizes) if all(sizes) else 0,
        train=_total([manifest.train for manifest in manifests]),
        validation=_total([manifest.validation for manifest in manifests]),
    )


def _count_tokens(
    planned: PlannedDataset, context: PrepContext, map_steps: MapSteps, report: Report
) -> DatasetManifest:
    # Nodes read the files in place. They are copied if either they or the root are in a bucket and the other is not:
    # no other machine can read a folder of this one.
    corpus, tokenizer = planned.data.corpus, planned.tokenizer
    assert isinstance(corpus, TokensCorpus)
    assert tokenizer is not None, "DataConfig requires one that exists"
    folder = token_folder(corpus)
    is_copied = is_remote(folder) != is_remote(context.root)
    fields: dict[str, Any] = {"corpus": kind_of(corpus).identity(planned.sources)}
    if not is_copied:
        fields["external_root"] = folder
    if corpus.dtype is not None:
        fields["dtype"] = {"uint16": "<u2", "uint32": "<u4"}[corpus.dtype]
    step = partial(_count_file, context, _manifest(planned, (tokenizer, ()), **fields), tokenizer.prefix)
    progress = Preparation(phase="count", all_bytes=sum(source.size for source in planned.sources))
    train, validation = list[Split](), list[Split]()
    for source, (split, is_prefixed) in zip(planned.sources, map_steps(step, planned.sources), strict=True):
        if selects(source.name, corpus.validation):
            if is_prefixed and not validation:
                tokenizer = tokenizer.with_prefix()
            validation.append(split)
        else:
            train.append(split)
        progress = progress.plus(documents=split.documents, text_bytes=source.size, tokens=split.tokens)
        report(progress)
    if is_copied:  # after all of them were checked
        list(map_steps(partial(_copy_file, context), planned.sources))
    for name, splits in (("train", train), ("validation", validation)):
        files = tuple(file for split in splits for file in split.files)
        fields[name] = _total(splits).model_copy(update={"files": files})
    return _manifest(planned, workers.store_tokenizer(context, tokenizer), **fields)


def _copy_file(context: PrepContext, source: Source) -> None:
    with local_copy(source, context.make_scratch()) as path:
        context.storage.upload(path, source.name)


def _count_file(
    context: PrepContext, manifest: DatasetManifest, prefix: Sequence[int], source: Source
) -> tuple[Split, bool]:
    """Return the file as a split, and whether it begins with the tokenizer's prefix, as its texts do."""
    width, address = np.dtype(manifest.dtype).itemsize, source.address
    record = FileRecord(path=source.name, size=source.size, crc32c=source.version.removeprefix("crc32c:"), sha256="")
    if manifest.external_root is not None:
        scan = dataset.scan_file(manifest, open_storage(manifest.external_root), record)
    else:
        with local_copy(source, context.make_scratch()) as path:
            copy = record.model_copy(update={"path": path.name})
            scan = dataset.scan_file(manifest, open_storage(str(path.parent)), copy)
    if scan is None or (scan.record.size, scan.record.crc32c) != (record.size, record.crc32c):
        raise DataError(f"{address} has changed since it was listed; run again")
    refuse_lfs_pointer(scan.head, address)
    wrong_format = detect_wrong_ids(scan.head, record.size)
    if wrong_format is not None:
        raise UserError(f"{address} is {wrong_format}", fix="give flat little-endian ids, as nanoGPT's train.bin")
    if not record.size or record.size % width:
        what = f"{address} has {record.size} bytes, which do not split into ids of {width} bytes"
        raise UserError(what, fix="set data.corpus.dtype, or give a file that is complete")
    _require_width(scan, width, address)
    if scan.largest_id >= manifest.vocab_size:
        what = f"{address} holds the id {scan.largest_id}, but the tokenizer's last id is {manifest.vocab_size - 1}"
        raise UserError(f"data.tokenizer: {what}", fix="give the one that made the ids, or set data.corpus.dtype")
    record = scan.record.model_copy(update={"path": source.name})
    is_prefixed = bool(prefix) and scan.head.startswith(np.array(prefix, manifest.dtype).tobytes())
    return Split(documents=scan.ends, tokens=record.size // width, files=(record,)), is_prefixed


def _require_width(scan: dataset.FileScan, width: int, address: str) -> None:
    """Raise UserError if most of every other id are 0 anywhere in the file: then an id has more bytes."""
    even, odd = scan.nonzero[0] + scan.nonzero[2], scan.nonzero[1] + scan.nonzero[3]
    if 2 * min(even, odd) >= max(even, odd):
        return
    found = 2 * width
    if 2 * sum(scan.nonzero) < 3 * max(scan.nonzero):
        found = 4 * width
    fix = "write them as uint32: numpy's ids.astype('<u4').tofile(…)"
    if found == 4:
        fix = "set data.corpus.dtype=uint32"
    raise UserError(f"{address} looks like ids of {found} bytes: as {width} bytes, most of every other are 0", fix=fix)


def _survey_all(
    planned: PlannedDataset, context: PrepContext, map_steps: MapSteps, report: Report, *, by_count: bool
) -> Surveyed:
    """Return the shards that the dataset takes, with their surveys; the last is cut where `max_bytes` is reached."""
    step, progress = partial(workers.survey, context, by_count=by_count), Preparation(phase="survey")
    shards, max_bytes = plan_shards(context.data.corpus, planned.sources), context.data.corpus.max_bytes

    def survey(wave: Sequence[Shard]) -> Surveyed:
        nonlocal progress
        surveyed = Surveyed()
        for shard, stats in zip(wave, map_steps(step, wave), strict=True):
            assert stats.number == shard.number, "results come in the order of the items"
            progress = progress.plus(documents=stats.documents, text_bytes=stats.text_bytes)
            report(progress)
            surveyed.append((shard, stats))
        return surveyed

    if max_bytes is None:
        return survey(shards)
    # One shard, two, four, …: a small `max_bytes` of a large corpus reads little, and a large one has enough at a time.
    surveyed, remaining, width = Surveyed(), max_bytes, 1
    while len(surveyed) < len(shards):
        for shard, stats in survey(shards[len(surveyed) : len(surveyed) + width]):
            if stats.read_bytes >= remaining:
                return surveyed + survey([replace(shard, limit=remaining)])
            surveyed.append((shard, stats))
            remaining -= stats.read_bytes
        width = min(2 * width, _WIDEST_WAVE)
    return surveyed


def _encode_tasks(context: PrepContext, surveyed: Surveyed) -> list[EncodeTask]:
    data, surveys = context.data, [stats for _, stats in surveyed]
    counts, unique = [stats.documents for stats in surveys], list[int | None]([None] * len(surveys))
    if data.filters.drop_duplicates:
        masks = _first_occurrences(context.progress_store, surveys)
        for stats, mask in zip(surveys, masks, strict=True):
            context.progress_store.write(workers.file_name(stats.number, "unique"), np.packbits(mask).tobytes())
        counts = [int(mask.sum()) for mask in masks]
        unique = [*counts]
    count = sum(counts)
    _require_documents(data, surveyed, count)
    # For validation: the first ceil(fraction * count) of a permutation. Generator.permutation(count) would shuffle
    # 8-byte numbers with the same draws.
    order = np.arange(count, dtype=np.uint32 if count <= 2**32 else np.int64)
    np.random.default_rng(data.split_seed).shuffle(order)
    held_out = np.sort(order[: math.ceil(data.validation_fraction * count)].astype(np.int64))
    if len(held_out) == count:
        raise UserError(
            f"data.validation_fraction={data.validation_fraction} of {count} documents leaves none to train on; "
            "lower it, or give more documents"
        )
    tasks, start = list[EncodeTask](), 0
    for (shard, stats), documents, unique_documents in zip(surveyed, counts, unique, strict=True):
        first, last = np.searchsorted(held_out, [start, start + documents])
        own = tuple((held_out[first:last] - start).tolist())
        tasks.append(EncodeTask(shard=shard, survey=stats, unique=unique_documents, held_out=own))
        start += documents
    return tasks


def _require_documents(data: DataConfig, surveyed: Surveyed, count: int) -> None:
    if count >= 2:
        return
    files, read = sum(len(shard.parts) for shard, _ in surveyed), sum(stats.read_documents for _, stats in surveyed)
    ending = ""
    if read > count:
        ending = f"; {read - count} more are empty, bad, or dropped by data.filters"
    places = [place for _, stats in surveyed for place in stats.bad_places]
    ending += workers.skipped_ones(sum(stats.bad for _, stats in surveyed), places)
    raise DataError(
        f"data.corpus ({data.corpus.kind}) has {count} documents in {files} files, but training and validation need "
        f"at least one each; give more text, or for text files the data.corpus.separator of its documents{ending}"
    )


def _first_occurrences(progress_store: Storage, surveys: Sequence[ShardStats]) -> list[workers.Mask]:
    # The digests of a shard's documents are read once for every `_AT_ONCE` documents there are in all. So memory is
    # bounded by that and by a byte per document.
    starts = np.cumsum([0, *(stats.documents for stats in surveys)])
    is_first = np.zeros(starts[-1], dtype=bool)
    groups = -(-len(is_first) // _AT_ONCE) or 1
    for group in range(groups):
        # The digests that fall into the group, as pairs of numbers, and the numbers of their documents.
        numbers, digests = list[Any](), list[Any]()
        for start, stats in zip(starts, surveys, strict=False):
            assert stats.digests is not None
            pairs = np.frombuffer(progress_store.read(stats.digests.path), dtype="<u8").reshape(-1, 2)
            in_group = np.flatnonzero(pairs[:, 0] % np.uint64(groups) == group)
            numbers.append(in_group + start)
            digests.append(pairs[in_group])
        pairs = np.concatenate(digests)
        order = np.lexsort((pairs[:, 1], pairs[:, 0]))  # stable: of equal digests the lowest number comes first
        pairs = pairs[order]
        differs = np.ones(len(pairs), dtype=bool)
        differs[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
        is_first[np.concatenate(numbers)[order[differs]]] = True
    return np.split(is_first, starts[1:-1])


class _SplitFile:
    def __init__(self) -> None:
        self.pieces, self.size, self.sha256 = list[FileRecord](), 0, sha256()


def _encode_all(
    context: PrepContext, tokenizer: StoredTokenizer, surveyed: Surveyed, map_steps: MapSteps, report: Report
) -> tuple[list[EncodeResult], list[_SplitFile], list[_SplitFile]] | None:
    # A thread hashes the pieces while later ones are encoded. The sha256 of a file is the one checksum that cannot
    # be combined from those of its pieces, and it is slow: 0.5 GB/s a core.
    results, hashing = list[EncodeResult](), list[Future[None]]()
    train, validation = list[_SplitFile](), list[_SplitFile]()
    width = np.dtype(tokenizer[0].dtype).itemsize
    max_bytes = max(1, context.data.max_file_bytes // width) * width
    progress = Preparation(phase="encode", all_bytes=sum(stats.text_bytes for _, stats in surveyed))
    with ExitStack() as stack:
        if context.storage.local_path() is None:  # a folder for the pieces that are still to be hashed
            folder = TemporaryDirectory(dir=context.make_scratch(), prefix="pieces-", ignore_cleanup_errors=True)
            context = replace(context, local_pieces_dir=Path(stack.enter_context(folder)))
        hasher = ThreadPoolExecutor(1)
        stack.callback(hasher.shutdown, cancel_futures=True)
        steps = map_steps(partial(workers.encode, context), _encode_tasks(context, surveyed))
        for result in stack.enter_context(closing(steps)):
            if result is None:
                return None
            assert result.number == len(results), "results come in the order of the items"
            tokens = result.train.tokens + result.validation.tokens
            progress = progress.plus(documents=result.documents, text_bytes=result.text_bytes, tokens=tokens)
            report(progress)
            results.append(result)
            for piece, files in ((result.train.file, train), (result.validation.file, validation)):
                if piece is not None:
                    hashing.append(hasher.submit(_append, context, files, piece, max_bytes))
        report(Preparation(phase="publish"))
        for future in hashing:
            future.result()
    return results, train, validation


def _append(context: PrepContext, files: list[_SplitFile], piece: FileRecord, max_bytes: int) -> None:
    # A piece that would make the file larger than `max_bytes` is cut. Pieces differ between a corpus on this machine
    # and the same one in a bucket, and the files must not.
    start, parts = 0, list[FileRecord]()
    with _local_piece(context, piece) as path, path.open("rb") as content:
        while start < piece.size:
            if not files or files[-1].size == max_bytes:
                files.append(_SplitFile())
            file = files[-1]
            end = min(piece.size, start + max_bytes - file.size)
            part = piece if end - start == piece.size else _cut(context, path, start, end)
            parts.append(part)
            file.pieces.append(part)
            file.size += part.size
            for position in range(start, end, _BLOCK):
                file.sha256.update(content.read(min(_BLOCK, end - position)))
            start = end
    _require_whole(context.progress_store, ObjectInfo(piece.path, piece.size, piece.crc32c), parts)


@contextmanager
def _local_piece(context: PrepContext, piece: FileRecord) -> Iterator[Path]:
    """Yield the piece's path on this machine. From a bucket it is fetched, unless a worker of this machine left it."""
    if context.local_pieces_dir is None:
        yield Path(context.progress_store.address(piece.path))
        return
    path = context.local_pieces_dir / piece.path
    if not path.is_file() or content_of(path) != (piece.size, piece.crc32c):
        context.progress_store.download(piece.path, path)
    yield path
    path.unlink()


def _cut(context: PrepContext, path: Path, start: int, end: int) -> FileRecord:
    with TemporaryDirectory(dir=context.make_scratch(), prefix="cut-", ignore_cleanup_errors=True) as folder:
        part = Path(folder, f"{path.name}.{start}")
        with translate_os_errors(str(part), needed=end - start), path.open("rb") as content, part.open("wb") as file:
            content.seek(start)
            for position in range(start, end, _BLOCK):
                file.write(content.read(min(_BLOCK, end - position)))
        return FileRecord.of(context.progress_store.upload(part, part.name, move=True, is_new=True))


def _join(context: PrepContext, name: str, pieces: Sequence[workers.TokenPiece], files: Sequence[_SplitFile]) -> Split:
    files, records = files or [_SplitFile()], list[FileRecord]()
    for number, file in enumerate(files):
        path = f"{name}.bin" if len(files) == 1 else f"{name}-{number:05d}.bin"
        stored = context.storage.join([f"{SHARDS}/{piece.path}" for piece in file.pieces], path)
        _require_whole(context.storage, stored, file.pieces)
        records.append(FileRecord.of(stored, sha256=file.sha256.hexdigest()))
    documents, tokens = sum(piece.documents for piece in pieces), sum(piece.tokens for piece in pieces)
    return Split(documents=documents, tokens=tokens, files=tuple(records))


def _require_whole(storage: Storage, stored: ObjectInfo, parts: Sequence[FileRecord]) -> None:
    expected = combine_crc32c(stored.path, (ObjectInfo(piece.path, piece.size, piece.crc32c) for piece in parts))
    if stored != expected:
        raise DataError(
            f"{storage.address(stored.path)} has crc32c {stored.crc32c}, but its {len(parts)} pieces combine to "
            f"{expected.crc32c}; the disk or the bucket damaged it: run again, and if that repeats, on another disk"
        )


def check_totals(planned: PlannedDataset, manifest: DatasetManifest) -> None:
    """Raise DataError if a corpus with known totals has others, split as usual with GPT-2's tokenizer."""
    corpus, expected = planned.data.corpus, kind_of(planned.data.corpus).known_totals
    usual = {"validation_fraction", "split_seed", "filters"}
    is_usual = planned.data.model_dump(include=usual) == DataConfig().model_dump(include=usual)
    is_gpt2 = (manifest.vocab_size, manifest.end_of_text) == (50257, 50256)
    if expected is None or not is_usual or not is_gpt2:
        return
    documents, train, validation = manifest.documents, manifest.train.tokens, manifest.validation.tokens
    totals = {"documents": documents, "train": train, "validation": validation}
    if totals != expected:
        raise DataError(
            f"data.corpus={corpus.kind} has {totals} in total, but must have {expected}",
            fix="a file is missing or changed: compare the revision of Skylion007/openwebtext",
        )


def main(argv: Sequence[str]) -> int:
    """Run `python -m litgpt_demo prepare`: only the preparation, for a machine that has nothing but this package."""
    parser = argparse.ArgumentParser(prog="litgpt_demo prepare", description=__doc__)
    parser.add_argument("--root", required=True, help="folder or gs:// address to prepare the dataset under")
    parser.add_argument("--data", required=True, help="the data settings as JSON")
    args = parser.parse_args(argv)
    planned = dataset.plan_dataset(DataConfig.model_validate_json(args.data))
    for finding in dataset.warnings_of(planned):
        print(finding, file=sys.stderr)
    manifest = prepare(planned, open_storage(args.root))
    print(f"{planned.path}: {manifest.train.tokens} training tokens, {manifest.validation.tokens} validation tokens")
    return 0
