"""Preparing a dataset: documents in, token files out, by many workers, and again after whatever killed them.

    tokenizer  trained on the start of the corpus, where none is given
    survey     each shard of the corpus: which documents stay, and how many
    encode     each shard: its training and its validation documents as two pieces of tokens
    publish    the pieces joined, checked and described by the manifest

What a worker makes is stored in the dataset's own folder, each with a record that is written last. A second run
believes the records and does the rest. Workers may be threads, processes or other machines.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
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
from litgpt_demo.data.reading import Source, detect_wrong_ids, refuse_lfs_pointer
from litgpt_demo.data.shards import Shard, plan_shards
from litgpt_demo.data.workers import (
    SHARDS,
    EncodeResult,
    EncodeTask,
    Mask,
    PrepContext,
    ShardStats,
    StoredTokenizer,
    TokenPiece,
)
from litgpt_demo.documents import FileRecord, write_manifest
from litgpt_demo.errors import DataError, TrainLitgptError, UserError
from litgpt_demo.storage import MANIFEST, ObjectInfo, Storage, combine_crc32c, is_remote, open_storage
from litgpt_demo.storage.local import translate_os_errors

T = TypeVar("T")
R = TypeVar("R")
Surveyed: TypeAlias = list[tuple[Shard, ShardStats]]

_WIDEST_WAVE = 64  # shards surveyed at a time where max_bytes may make the next ones unnecessary
_AT_ONCE = 4_000_000  # digests compared at a time, in about 300 MB
_BLOCK = 1 << 20


class MapSteps(Protocol):
    """A way to carry out steps: `step` on every item, in any place and order; results in the order of the items.

    Closing the generator calls off what has not begun.
    """

    def __call__(self, step: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]: ...


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The progress of a preparation."""

    phase: Literal["tokenizer", "survey", "encode", "count", "publish"]
    documents: int = 0
    """Done in this phase."""
    text_bytes: int = 0
    """UTF-8 bytes of those."""
    all_bytes: int | None = None
    """The total that `text_bytes` will reach; None while the corpus is surveyed."""
    tokens: int = 0
    began: float = field(default_factory=monotonic)

    def and_of(self, record: ShardStats | EncodeResult) -> Preparation:
        """The progress when this shard is done too."""
        tokens = record.train.tokens + record.validation.tokens if isinstance(record, EncodeResult) else 0
        return replace(
            self,
            documents=self.documents + record.documents,
            text_bytes=self.text_bytes + record.text_bytes,
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
    """Steps in threads of this process."""

    def map_steps(step: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(step, items)  # which calls off the rest when it is closed

    return map_steps


def prepare(
    planned: PlannedDataset, root: Storage, *, map_steps: MapSteps | None = None, report: Report = lambda progress: None
) -> DatasetManifest:
    """Make the dataset, or find it done. Killed at any moment, it leaves nothing that looks finished, and goes on.

    `map_steps` carries out the steps; by default as many threads as `threads_for` says. A corpus that is empty, too
    small or not what it says it is is a DataError; settings that do not fit, a UserError.
    """
    if planned.unknown:
        raise UserError(f"the dataset cannot be made while its sources are not known: {planned.unknown}")
    work = PrepContext(data=planned.data, root=root.root, path=planned.path)
    try:
        if (done := dataset.finished_dataset(root, planned)) is None:
            try:
                make = _prepared
                if planned.parts:
                    make = _mixed
                elif planned.data.corpus.is_tokenized:
                    make = _counted
                done = make(planned, work, map_steps or in_threads(threads_for(root.root)), report)
                write_manifest(work.storage, done)
            except (TrainLitgptError, OSError):
                # Another preparation of it may have ended meanwhile, and swept what this one had begun.
                if (done := dataset.finished_dataset(root, planned)) is None:
                    raise
        # What the making of it has left:
        for name in {name.partition("/")[0] if name.startswith(f"{SHARDS}/") else name for name in work.storage.list()}:
            if name != MANIFEST and name not in {record.path for record in done.files}:
                work.storage.remove(name)
        work.storage.remove_unfinished()
        shutil.rmtree(work.scratch, ignore_errors=True)
        return done
    finally:
        # Not the user's part of the temporary folder, which others are at.
        for folder in (work.scratch,) if is_remote(root.root) else (work.scratch, work.scratch.parent):
            with suppress(OSError):
                folder.rmdir()


def _prepared(planned: PlannedDataset, work: PrepContext, map_steps: MapSteps, report: Report) -> DatasetManifest:
    sampled = partial(Preparation, phase="tokenizer")
    tokenizer = workers.load_or_train_tokenizer(
        planned, work, lambda count, size: report(sampled(documents=count, text_bytes=size))
    )
    for by_footer in (True, False):
        surveyed = _survey_all(planned, work, partial(workers.survey, work, by_footer=by_footer), map_steps, report)
        encoded, hashing, files = list[EncodeResult](), list[Future[None]](), _Files(list)
        width = np.dtype(tokenizer[0].dtype).itemsize
        most = max(1, work.data.max_file_bytes // width) * width
        progress = Preparation(phase="encode", all_bytes=sum(record.text_bytes for _, record in surveyed))
        with ExitStack() as stack:
            shared = work
            if work.storage.local_path() is None:  # a folder for the pieces that are still to be hashed
                folder = TemporaryDirectory(dir=work.make_scratch(), prefix="pieces-", ignore_cleanup_errors=True)
                shared = replace(work, local_pieces_dir=Path(stack.enter_context(folder)))
            thread = ThreadPoolExecutor(1)
            stack.callback(thread.shutdown, cancel_futures=True)
            step = partial(workers.encode, shared)
            for record in stack.enter_context(closing(map_steps(step, _assignments(work, surveyed)))):
                if record is None:
                    break  # there are empty documents, so that all of them have to be read to be counted
                assert record.number == len(encoded), "results come in the order of the items"
                report(progress := progress.and_of(record))
                encoded.append(record)
                hashing.append(thread.submit(_hash, shared, record, files, most))
            else:
                report(Preparation(phase="publish"))
                for done in hashing:
                    done.result()
                break
    else:
        raise AssertionError("every document was read and counted, and there are others")
    data, surveys = planned.data, [record for _, record in surveyed]
    dropped = sum((Counter(record.dropped) for record in surveys), Counter[str]())
    if data.filters.drop_duplicates:
        dropped["duplicate"] = sum(record.documents for record in surveys) - sum(entry.documents for entry in encoded)
    manifest = _manifest(
        planned,
        tokenizer,
        corpus=kind_of(data.corpus).identity(planned.sources),
        dropped=dict(sorted((+dropped).items())),
        bad_documents=sum(record.bad for record in surveys),
        bad_places=tuple(place for record in surveys for place in record.bad_places)[: workers.PLACES],
        document_lengths=tuple(np.trim_zeros(np.sum([entry.lengths for entry in encoded], axis=0), "b").tolist()),
        text_bytes=sum(entry.text_bytes for entry in encoded),
        train=_joined(work, "train", [entry.train for entry in encoded], files),
        validation=_joined(work, "val", [entry.validation for entry in encoded], files),
    )
    check_totals(planned, manifest)
    return manifest


def _manifest(planned: PlannedDataset, tokenizer: StoredTokenizer, **own: Any) -> DatasetManifest:
    (of_tokenizer, files), nothing = tokenizer, Split(documents=0, tokens=0, files=())
    known: dict[str, Any] = {
        "format": dataset.FORMAT,
        "name": planned.name,
        "key": planned.key,
        **{name: getattr(planned.data, name) for name in ("filters", "validation_fraction", "split_seed")},
        **{name: getattr(of_tokenizer, name) for name in ("vocab_size", "end_of_text", "dtype")},
        "tokenizer_hash": of_tokenizer.hash,
        "tokenizer": files,
        "train": nothing,
        "validation": nothing,
    }
    return DatasetManifest(**known | own)


def _total(splits: Sequence[Split], *, files: bool = False) -> Split:
    found = tuple(file for split in splits for file in split.files if files)
    return Split(documents=sum(one.documents for one in splits), tokens=sum(one.tokens for one in splits), files=found)


def _mixed(planned: PlannedDataset, work: PrepContext, map_steps: MapSteps, report: Report) -> DatasetManifest:
    made = [prepare(part, open_storage(work.root), map_steps=map_steps, report=report) for part in planned.parts]
    sources = list[Ingredient]()
    for source, one in zip(planned.data.mixture, made, strict=True):
        sizes = {"train": one.train.tokens, "validation": one.validation.tokens, "text_bytes": one.text_bytes}
        sources.append(Ingredient(name=source.label, dataset=f"{one.name}-{one.key}", **sizes))
    if (tokenizer := planned.tokenizer) is not None and tokenizer.prefix:
        prefixed = tokenizer.with_prefix()
        if {dataset.tokenizer_hash for dataset in made} == {prefixed.hash}:
            planned = replace(planned, tokenizer=prefixed)
    return _manifest(
        planned,
        workers.load_or_train_tokenizer(planned, work, lambda *_: None),
        corpus={source.name: one.corpus for source, one in zip(sources, made, strict=True)},
        mixture=Mixture(sources=tuple(sources), schedule=planned.data.schedule),
        # Of all or of none: a sum of some would make the text look shorter than it is.
        text_bytes=sum(one.text_bytes for one in made) if all(one.text_bytes for one in made) else 0,
        train=_total([one.train for one in made]),
        validation=_total([one.validation for one in made]),
    )


def _counted(planned: PlannedDataset, work: PrepContext, map_steps: MapSteps, report: Report) -> DatasetManifest:
    """Read files of ids once, to count and to check them. Nodes read them where they lie; they are copied only into or
    out of a bucket, for what is in a folder of this machine no node elsewhere can read."""
    corpus = planned.data.corpus
    assert isinstance(corpus, TokensCorpus)
    home, listed = token_folder(corpus), kind_of(corpus).identity(planned.sources)
    elsewhere = {} if is_remote(home) != is_remote(work.root) else {"home": home}
    dtype = {} if corpus.dtype is None else {"dtype": {"uint16": "<u2", "uint32": "<u4"}[corpus.dtype]}
    known, tokenizer = {"corpus": listed, **elsewhere, **dtype}, planned.tokenizer
    assert tokenizer is not None, "DataConfig requires one that exists"
    step = partial(_count, work, _manifest(planned, (tokenizer, ()), **known), tokenizer.prefix)
    progress = Preparation(phase="count", all_bytes=sum(source.size for source in planned.sources))
    splits: dict[bool, list[Split]] = {True: [], False: []}
    for source, (split, is_prefixed) in zip(planned.sources, map_steps(step, planned.sources), strict=True):
        splits[held := selects(source.name, corpus.validation)].append(split)
        if is_prefixed and held and len(splits[True]) == 1:
            tokenizer = tokenizer.with_prefix()
        progress = replace(
            progress, documents=progress.documents + split.documents, tokens=progress.tokens + split.tokens,
            text_bytes=progress.text_bytes + source.size,
        )  # fmt: skip
        report(progress)
    if not elsewhere:  # nothing is copied before all of it is known to be well
        list(map_steps(partial(_copy, work), planned.sources))
    train, validation = (_total(splits[held], files=True) for held in (False, True))
    stored = workers.load_or_train_tokenizer(replace(planned, tokenizer=tokenizer), work, lambda *_: None)
    return _manifest(planned, stored, train=train, validation=validation, **known)


def _copy(work: PrepContext, source: Source) -> None:
    with local_copy(source, work.make_scratch()) as path:
        work.storage.upload(path, source.name)


def _count(work: PrepContext, manifest: DatasetManifest, prefix: Sequence[int], source: Source) -> tuple[Split, bool]:
    """Return what the file holds, and whether it begins as the tokenizer's texts do, with its prefix."""
    width, where = np.dtype(manifest.dtype).itemsize, source.address
    record = FileRecord(path=source.name, size=source.size, crc32c=source.version.removeprefix("crc32c:"), sha256="")
    if (home := manifest.home) is not None:
        found = dataset.content_of(manifest, open_storage(home), record)
    else:
        with local_copy(source, work.make_scratch()) as path:
            copy = record.model_copy(update={"path": path.name})
            found = dataset.content_of(manifest, open_storage(str(path.parent)), copy)
    if found is None or (found.record.size, found.record.crc32c) != (record.size, record.crc32c):
        raise DataError(f"{where} has changed since it was listed; run again to list it anew")
    refuse_lfs_pointer(found.head, where)
    if (kind := detect_wrong_ids(found.head, record.size)) is not None:
        raise UserError(f"{where} is {kind}", fix="give flat little-endian ids, as nanoGPT's train.bin")
    if not record.size or record.size % width:
        raise UserError(f"{where} has {record.size} bytes, which are no ids of {width}; set data.corpus.dtype")
    halves = found.used[0] + found.used[2], found.used[1] + found.used[3]
    if 2 * min(halves) < max(halves):  # anywhere in it, whatever it begins with
        wide = width * (4 if 2 * sum(found.used) < 3 * max(found.used) else 2)
        fix = "data.corpus.dtype=uint32" if wide == 4 else "write them as uint32: numpy's ids.astype('<u4').tofile(…)"
        raise UserError(f"{where} looks like ids of {wide} bytes: most of every other one of {width} are 0", fix=fix)
    if found.largest >= manifest.vocab_size:
        what = f"{where} holds the id {found.largest}, and the last of the tokenizer is {manifest.vocab_size - 1}"
        raise UserError(f"data.tokenizer: {what}", fix="name the one that made the ids, or data.corpus.dtype")
    record = found.record.model_copy(update={"path": source.name})
    is_prefixed = bool(prefix) and found.head.startswith(np.array(prefix, manifest.dtype).tobytes())
    return Split(documents=found.ends, tokens=record.size // width, files=(record,)), is_prefixed


def _survey_all(
    planned: PlannedDataset, work: PrepContext, step: Callable[[Shard], ShardStats], map_steps: MapSteps, report: Report
) -> Surveyed:
    """Every shard that the dataset takes, with its survey; the last one cut where `max_bytes` is reached."""
    shards, progress = plan_shards(work.data.corpus, planned.sources), Preparation(phase="survey")
    most, taken = work.data.corpus.max_bytes, Surveyed()
    left, width = (math.inf, len(shards)) if most is None else (most, 1)

    def surveys(chosen: Sequence[Shard]) -> Surveyed:
        nonlocal progress
        found = Surveyed()
        for shard, record in zip(chosen, map_steps(step, chosen), strict=True):
            assert record.number == shard.number, "results come in the order of the items"
            report(progress := progress.and_of(record))
            found.append((shard, record))
        return found

    # One shard, two, four, …: a small `max_bytes` of a large corpus reads little, a large one is not held up.
    while wave := shards[len(taken) : len(taken) + width]:
        for shard, record in surveys(wave):
            if record.read_bytes >= left:
                return taken + surveys([replace(shard, limit=int(left))])
            taken.append((shard, record))
            left -= record.read_bytes
        width = min(2 * width, _WIDEST_WAVE)
    return taken


def _assignments(work: PrepContext, surveyed: Surveyed) -> list[EncodeTask]:
    data, surveys = work.data, [record for _, record in surveyed]
    counts = [record.documents for record in surveys]
    unique: Sequence[int | None] = [None] * len(surveys)
    if data.filters.drop_duplicates:
        masks = _first_of_each(work.progress_store, surveys)
        for record, mask in zip(surveys, masks, strict=True):
            work.progress_store.write(workers.file_name(record.number, "unique"), np.packbits(mask).tobytes())
        unique = counts = [int(mask.sum()) for mask in masks]
    if (count := sum(counts)) < 2:
        files, read = sum(len(shard.parts) for shard, _ in surveyed), sum(record.read_documents for record in surveys)
        others = f"; {read - count} more are empty, bad, or dropped by data.filters" if read > count else ""
        bad = [place for record in surveys for place in record.bad_places]
        others += workers.skipped_ones(sum(record.bad for record in surveys), bad)
        raise DataError(
            f"data.corpus ({data.corpus.kind}) has {count} documents in {files} files; "
            "one for training and one for validation are the least: give more text, "
            f"or for text files a data.corpus.separator that cuts it into documents{others}"
        )
    # For validation: the first ceil(fraction * count) of a permutation. Generator.permutation(count) would shuffle
    # 8-byte numbers with the same draws.
    every = np.arange(count, dtype=np.uint32 if count <= 2**32 else np.int64)
    np.random.default_rng(data.split_seed).shuffle(every)
    held_out = np.sort(every[: math.ceil(data.validation_fraction * count)].astype(np.int64))
    if len(held_out) == count:
        raise UserError(
            f"data.validation_fraction={data.validation_fraction} of {count} documents leaves none to train on; "
            "lower it, or give more documents"
        )
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    bounds = np.searchsorted(held_out, starts)
    return [
        EncodeTask(
            shard=shard,
            survey=record,
            unique=unique[i],
            held_out=tuple((held_out[bounds[i] : bounds[i + 1]] - starts[i]).tolist()),
        )
        for i, (shard, record) in enumerate(surveyed)
    ]


def _first_of_each(progress_store: Storage, surveys: Sequence[ShardStats]) -> list[Mask]:
    """The digests of a shard's documents are read once for every `_AT_ONCE` documents there are in all, so that memory
    is bounded by that and by a byte per document."""
    starts = np.cumsum([0, *(record.documents for record in surveys)])
    first = np.zeros(starts[-1], dtype=bool)
    groups = -(-len(first) // _AT_ONCE) or 1
    for group in range(groups):
        # The digests that fall into the group, as pairs of numbers, and the numbers of their documents.
        every_number, every_key = list[Any](), list[Any]()
        for start, record in zip(starts, surveys, strict=False):
            assert record.digests is not None
            found = np.frombuffer(progress_store.read(record.digests.path), dtype="<u8").reshape(-1, 2)
            mine = np.flatnonzero(found[:, 0] % np.uint64(groups) == group)
            every_number.append(mine + start)
            every_key.append(found[mine])
        numbers, keys = np.concatenate(every_number), np.concatenate(every_key)
        order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: of equal digests the lowest number comes first
        ordered = keys[order]
        leads = np.ones(len(ordered), dtype=bool)
        leads[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        first[numbers[order[leads]]] = True
    return np.split(first, starts[1:-1])


# Of each split's files, one or several past the size cap, the pieces that are to be joined in it, and their sha256.
_Files: TypeAlias = defaultdict[str, list[tuple[list[FileRecord], Any]]]


def _hash(work: PrepContext, record: EncodeResult, into: _Files, most: int) -> None:
    """Take the sha256 of the splits' files on by a shard's pieces, while later ones are still being encoded.

    It is the one thing about them that cannot be put together from the pieces' own, and is slow: 0.5 GB/s a core.
    Pieces in a bucket are read where workers of this machine left them, else fetched: each byte once. A piece that
    would make a file larger than `most` bytes is cut: shards, and so pieces, differ between a corpus on this machine
    and the same one in a bucket, and the files must not.
    """
    progress_store, folder = work.progress_store, work.local_pieces_dir
    for split, piece in (("train", record.train.file), ("val", record.validation.file)):
        if piece is None:
            continue
        path = Path(progress_store.address(piece.path)) if folder is None else folder / piece.path
        if folder is not None:
            progress_store.download(piece.path, path)  # only compares checksums where a worker left the piece
        files, parts = into[split], list[FileRecord]()
        room = most - sum(before.size for before in files[-1][0]) if files else 0
        with path.open("rb") as content:
            for number, (start, end) in enumerate(pairwise([0, *range(room, piece.size, most), piece.size])):
                if number:
                    files.append(([], sha256()))
                if start < end:
                    pieces, hashed = files[-1]
                    parts.append(piece if end - start == piece.size else _cut(work, path, start, end))
                    pieces.append(parts[-1])
                    content.seek(start)
                    for at in range(start, end, _BLOCK):
                        hashed.update(content.read(min(_BLOCK, end - at)))
        _require_whole(progress_store, ObjectInfo(piece.path, piece.size, piece.crc32c), parts)
        if folder is not None:
            path.unlink()


def _cut(work: PrepContext, path: Path, start: int, end: int) -> FileRecord:
    """Put the bytes [start, end) of a piece into the progress store, as a piece of their own."""
    with TemporaryDirectory(dir=work.make_scratch(), prefix="cut-", ignore_cleanup_errors=True) as folder:
        part = Path(folder, f"{path.name}.{start}")
        with translate_os_errors(str(part), needed=end - start), path.open("rb") as content, part.open("wb") as file:
            content.seek(start)
            for at in range(start, end, _BLOCK):
                file.write(content.read(min(_BLOCK, end - at)))
        return FileRecord.of(work.progress_store.upload(part, part.name, move=True))


def _joined(work: PrepContext, name: str, pieces: Sequence[TokenPiece], of_splits: _Files) -> Split:
    """Each file of a split from its pieces; it has to have the checksum that theirs combine to."""
    files, records = of_splits[name] or [([], sha256())], list[FileRecord]()
    for number, (parts, hashed) in enumerate(files):
        path = f"{name}.bin" if len(files) == 1 else f"{name}-{number:05d}.bin"
        stored = work.storage.join([f"{SHARDS}/{piece.path}" for piece in parts], path)
        _require_whole(work.storage, stored, parts)
        records.append(FileRecord.of(stored, sha256=hashed.hexdigest()))
    documents, tokens = sum(piece.documents for piece in pieces), sum(piece.tokens for piece in pieces)
    return Split(documents=documents, tokens=tokens, files=tuple(records))


def _require_whole(storage: Storage, stored: ObjectInfo, parts: Sequence[FileRecord]) -> None:
    expected = combine_crc32c(stored.path, (ObjectInfo(piece.path, piece.size, piece.crc32c) for piece in parts))
    if stored != expected:
        raise DataError(
            f"{storage.address(stored.path)} has crc32c {stored.crc32c}, its {len(parts)} pieces combine to "
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
    """`python -m litgpt_demo prepare`: the preparation alone, for a machine that has nothing but this package."""
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
