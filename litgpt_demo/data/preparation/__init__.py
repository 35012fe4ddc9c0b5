"""Preparing a dataset: documents in, token files out, by many workers, and again after whatever killed them.

    tokenizer  trained on the start of the corpus, where none is given
    survey     each shard of the corpus: which documents stay, and how many
    encode     each shard: its training and its validation documents as two pieces of tokens
    publish    the pieces joined, checked and described by the manifest

What a worker makes lies in the dataset's own storage, each with a record that is written last: the ledger. A second run
believes the records and does the rest. Workers may be threads, processes or other machines.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from litgpt_demo.config import DataConfig
from litgpt_demo.data.corpus import Shard, plan_shards
from litgpt_demo.data.dataset import DatasetManifest, PlannedDataset, finished_dataset, plan_dataset, warnings_of
from litgpt_demo.data.preparation.filters import first_of_each
from litgpt_demo.data.preparation.ledger import SHARDS, Encoded, Survey, Work, file_name
from litgpt_demo.data.preparation.publishing import RunningSha256, publish
from litgpt_demo.data.preparation.workers import (
    Assignment,
    encode,
    settle_tokenizer,
    skipped_ones,
    survey,
    survey_by_reading,
)
from litgpt_demo.errors import DataError, TrainLitgptError, UserError
from litgpt_demo.manifests import write_manifest
from litgpt_demo.storage import MANIFEST, Storage, is_remote, open_storage
from litgpt_demo.storage.private import own_temporary

T = TypeVar("T")
R = TypeVar("R")
Surveyed: TypeAlias = list[tuple[Shard, Survey]]

_WIDEST_WAVE = 64  # shards surveyed at a time where max_bytes may make the next ones unnecessary


class MapFn(Protocol):
    """A way to carry out steps: `step` on every item, in any place and order; results as they come.

    Closing the generator calls off what has not begun.
    """

    def __call__(self, step: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]: ...


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The progress of a preparation."""

    phase: Literal["tokenizer", "survey", "encode", "publish"]
    documents: int = 0
    """Done in this phase."""
    text_bytes: int = 0
    """UTF-8 bytes of those."""
    all_bytes: int | None = None
    """The total that `text_bytes` will reach; None while the corpus is surveyed."""
    tokens: int = 0
    seconds: float = 0.0
    """Since the phase began."""

    @property
    def rate(self) -> float:
        """UTF-8 bytes per second."""
        return self.text_bytes / max(self.seconds, 1e-3)

    @property
    def seconds_left(self) -> float | None:
        if self.all_bytes is None or not self.text_bytes:
            return None
        return (self.all_bytes - self.text_bytes) / self.rate


Report = Callable[[Preparation], None]


def threads_for(root: str) -> int:
    """Return how many threads keep this machine's cores busy: two for each where half of them wait for a bucket."""
    return len(os.sched_getaffinity(0)) * (2 if is_remote(root) else 1)


def in_threads(workers: int) -> MapFn:
    """Steps in threads of this process."""

    def each(step: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(step, item) for item in items]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                for future in futures:
                    future.cancel()

    return each


def prepare(
    planned: PlannedDataset, root: Storage, *, each: MapFn | None = None, report: Report = lambda progress: None
) -> DatasetManifest:
    """Make the dataset, or find it done. Killed at any moment, it leaves nothing that looks finished, and goes on.

    A corpus that is empty, too small or not what it says it is is a DataError; settings that do not fit, a UserError.

    Args:
        each: carries out the steps; without it, as many threads as `threads_for` says.
    """
    if planned.unknown:
        raise UserError(f"the dataset cannot be made while its sources are not known: {planned.unknown}")
    work = Work(data=planned.data, root=root.root, path=planned.path)
    if (done := finished_dataset(root, planned)) is None:
        try:
            done = _prepared(planned, work, each or in_threads(threads_for(root.root)), report)
            write_manifest(work.storage, done)
        except (TrainLitgptError, OSError):
            # Another preparation of it may have ended meanwhile, and swept what this one had begun.
            if (done := finished_dataset(root, planned)) is None:
                raise
        finally:
            _remove_if_empty(work.scratch)
    # What the making of it has left:
    for name in {name.partition("/")[0] if name.startswith(f"{SHARDS}/") else name for name in work.storage.list()}:
        if name != MANIFEST and name not in {record.path for record in done.files}:
            work.storage.remove(name)
    work.storage.remove_unfinished()
    shutil.rmtree(work.scratch, ignore_errors=True)
    _remove_if_empty(work.scratch)
    return done


def _remove_if_empty(scratch: Path) -> None:
    """Remove the folder and its parent if they are empty, but never the user's part of the temporary folder."""
    for folder in (scratch, scratch.parent):
        if folder != own_temporary():
            with suppress(OSError):
                folder.rmdir()


def _prepared(planned: PlannedDataset, work: Work, each: MapFn, report: Report) -> DatasetManifest:
    def sampled(documents: int, text_bytes: int) -> None:
        report(Preparation(phase="tokenizer", documents=documents, text_bytes=text_bytes))

    tokenizer = settle_tokenizer(planned, work, sampled)
    for step in (survey, survey_by_reading):
        surveyed = _survey_all(planned, work, step, each, report)
        with ExitStack() as stack:
            shared = work
            if work.storage.local_path() is None:  # a folder for the pieces that are still to be hashed
                folder = TemporaryDirectory(dir=work.make_scratch(), prefix="pieces-", ignore_cleanup_errors=True)
                shared = replace(work, handover=Path(stack.enter_context(folder)))
            hashes = stack.enter_context(RunningSha256(shared))
            done = _progress("encode", report, all_bytes=sum(record.text_bytes for _, record in surveyed))
            encoded: list[Encoded] = []
            with closing(each(partial(encode, shared), _assignments(work, surveyed))) as records:
                for record in records:
                    if record is None:
                        break  # there are empty documents, so that all of them have to be read to be counted
                    done(record)
                    encoded.append(record)
                    hashes.add(record)
                else:
                    report(Preparation(phase="publish"))
                    encoded.sort(key=lambda record: record.number)
                    return publish(planned, work, tokenizer, [record for _, record in surveyed], encoded, hashes)
    raise AssertionError("every document was read and counted, and there are others")


def _progress(
    phase: Literal["survey", "encode"], report: Report, all_bytes: int | None = None
) -> Callable[[Survey | Encoded], None]:
    """A function that takes the records of a phase as they come, and reports their sums."""
    start, documents, text_bytes, tokens = monotonic(), 0, 0, 0

    def add(record: Survey | Encoded) -> None:
        nonlocal documents, text_bytes, tokens
        documents += record.documents
        text_bytes += record.text_bytes
        if isinstance(record, Encoded):
            tokens += record.train.tokens + record.validation.tokens
        report(
            Preparation(
                phase=phase,
                documents=documents,
                text_bytes=text_bytes,
                all_bytes=all_bytes,
                tokens=tokens,
                seconds=monotonic() - start,
            )
        )

    return add


def _survey_all(
    planned: PlannedDataset, work: Work, step: Callable[[Work, Shard], Survey], each: MapFn, report: Report
) -> Surveyed:
    """Every shard that the dataset takes, with its survey; the last one cut where `max_bytes` is reached."""
    shards, done = plan_shards(planned.data.corpus, planned.sources), _progress("survey", report)
    left, width, taken = work.max_bytes, 1, list[tuple[Shard, Survey]]()

    def surveys(chosen: Sequence[Shard]) -> Surveyed:
        records = dict[int, Survey]()
        for record in each(partial(step, work), chosen):
            done(record)
            records[record.number] = record
        return [(shard, records[shard.number]) for shard in chosen]

    if left is None:
        return surveys(shards)
    # One shard, two, four, …: a small `max_bytes` of a large corpus reads little, a large one is not held up.
    while wave := shards[len(taken) : len(taken) + width]:
        for shard, record in surveys(wave):
            if record.read_bytes >= left:
                return taken + surveys([replace(shard, limit=left)])
            taken.append((shard, record))
            left -= record.read_bytes
        width = min(2 * width, _WIDEST_WAVE)
    return taken


def _assignments(work: Work, surveyed: Surveyed) -> list[Assignment]:
    surveys = [record for _, record in surveyed]
    counts = [record.documents for record in surveys]
    unique: Sequence[int | None] = [None] * len(surveys)
    if work.data.filters.drop_duplicates:

        def digests(position: int) -> bytes:
            file = surveys[position].digests
            return work.ledger.read(file.path) if file is not None else b""

        masks = first_of_each(counts, digests)
        for record, mask in zip(surveys, masks, strict=True):
            work.ledger.write(file_name(record.number, "unique"), np.packbits(mask).tobytes())
        unique = counts = [int(mask.sum()) for mask in masks]
    held_out = _held_out(sum(counts), work.data, surveyed)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    cuts = np.searchsorted(held_out, starts)
    return [
        Assignment(
            shard=shard,
            survey=record,
            unique=unique[i],
            held_out=tuple((held_out[cuts[i] : cuts[i + 1]] - starts[i]).tolist()),
        )
        for i, (shard, record) in enumerate(surveyed)
    ]


def _held_out(count: int, data: DataConfig, surveyed: Surveyed) -> npt.NDArray[np.int64]:
    if count < 2:
        files = sum(len(shard.parts) for shard, _ in surveyed)
        read = sum(record.read_documents for _, record in surveyed)
        others = f"; {read - count} more are empty, bad, or dropped by data.filters" if read > count else ""
        bad = [place for _, record in surveyed for place in record.bad_places]
        others += skipped_ones(sum(record.bad for _, record in surveyed), bad)
        raise DataError(
            f"data.corpus ({data.corpus.kind}) has {count} documents in {files} files; "
            "one for training and one for validation are the least: give more text, "
            f"or for text files a data.corpus.separator that cuts it into documents{others}"
        )
    chosen = np.sort(validation_documents(count, fraction=data.validation_fraction, seed=data.split_seed))
    if len(chosen) == count:
        raise UserError(
            f"data.validation_fraction={data.validation_fraction} of {count} documents leaves none to train on; "
            "lower it, or give more documents"
        )
    return chosen


def validation_documents(count: int, *, fraction: float, seed: int) -> npt.NDArray[np.int64]:
    """The numbers of the documents kept for validation: the first ceil(fraction * count) of a seeded permutation.

    Takes 4 bytes of memory per document of the corpus.
    """
    # Generator.permutation(count) shuffles 8-byte numbers with the same draws.
    every = np.arange(count, dtype=np.uint32 if count <= 2**32 else np.int64)
    np.random.default_rng(seed).shuffle(every)
    return every[: math.ceil(fraction * count)].astype(np.int64)


def main(argv: Sequence[str]) -> int:
    """`python -m litgpt_demo prepare`: the preparation alone, for a machine that has nothing but this package."""
    parser = argparse.ArgumentParser(prog="litgpt_demo prepare", description=__doc__)
    parser.add_argument("--root", required=True, help="folder or gs:// address to prepare the dataset under")
    parser.add_argument("--data", required=True, help="the data settings as JSON")
    args = parser.parse_args(argv)
    planned = plan_dataset(DataConfig.model_validate_json(args.data))
    for finding in warnings_of(planned):
        print(finding, file=sys.stderr)
    manifest = prepare(planned, open_storage(args.root))
    print(f"{planned.path}: {manifest.train.tokens} training tokens, {manifest.validation.tokens} validation tokens")
    return 0
