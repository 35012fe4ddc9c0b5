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
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypeVar

from litgpt_demo.config import DataConfig
from litgpt_demo.data.corpus import Shard, plan_shards
from litgpt_demo.data.dataset import DatasetManifest, PlannedDataset, finished_dataset, plan_dataset
from litgpt_demo.data.preparation.filters import bits_of_mask, first_of_each
from litgpt_demo.data.preparation.ledger import (
    SHARDS,
    Encoded,
    Record,
    Survey,
    Work,
    file_name,
    skipped_ones,
)
from litgpt_demo.data.preparation.publishing import RunningSha256, publish
from litgpt_demo.data.preparation.tokenizing import settle_tokenizer
from litgpt_demo.data.preparation.workers import Assignment, encode, survey, survey_by_reading
from litgpt_demo.errors import DataError, TrainLitgptError, UserError
from litgpt_demo.manifests import write_manifest
from litgpt_demo.storage import MANIFEST, Storage, is_remote, open_storage
from litgpt_demo.storage.private import own_temporary

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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

    Args:
        each: carries out the steps; without it, as many threads as `threads_for` says.

    Raises:
        DataError: the corpus is empty, too small, or not what it says it is.
        UserError: a setting does not fit the corpus.
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
    _sweep(work, done)
    return done


def _sweep(work: Work, manifest: DatasetManifest) -> None:
    """Remove what the making of a finished dataset has left."""
    for name in {name.partition("/")[0] if name.startswith(f"{SHARDS}/") else name for name in work.storage.list()}:
        if name != MANIFEST and name not in {record.path for record in manifest.files}:
            work.storage.remove(name)
    work.storage.remove_unfinished()
    shutil.rmtree(work.scratch, ignore_errors=True)
    _remove_if_empty(work.scratch)


def _remove_if_empty(scratch: Path) -> None:
    """Remove the folder and its parent if they are empty, but never the user's part of the temporary folder."""
    for folder in (scratch, scratch.parent):
        if folder != own_temporary():
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def _handing_over(work: Work) -> Iterator[Work]:
    """Return the work with a folder for the pieces that are still to be hashed, where the root is a bucket."""
    if work.storage.local_path() is not None:
        yield work
        return
    with TemporaryDirectory(dir=work.make_scratch(), prefix="pieces-", ignore_cleanup_errors=True) as folder:
        yield replace(work, handover=Path(folder))


def _prepared(planned: PlannedDataset, work: Work, each: MapFn, report: Report) -> DatasetManifest:
    def sampled(documents: int, text_bytes: int) -> None:
        report(Preparation(phase="tokenizer", documents=documents, text_bytes=text_bytes))

    tokenizer = settle_tokenizer(planned, work, sampled)
    for step in (survey, survey_by_reading):
        surveyed = _survey_all(planned, work, step, each, report)
        with _handing_over(work) as shared, RunningSha256(shared) as hashes:
            encoded = _encode_all(shared, surveyed, each, report, hashes)
            if encoded is not None:
                report(Preparation(phase="publish"))
                return publish(planned, work, tokenizer, [record for _, record in surveyed], encoded, hashes)
        # There are empty documents, so that all of them have to be read to be counted.
    raise AssertionError("every document was read and counted, and there are others")


def _encode_all(
    work: Work, surveyed: Surveyed, each: MapFn, report: Report, hashes: RunningSha256
) -> list[Encoded] | None:
    """The records of all shards in their order; None as soon as one shows that the survey miscounted."""
    all_bytes, progress = sum(record.text_bytes for _, record in surveyed), _Progress("encode", report)
    encoded: list[Encoded] = []
    with closing(each(partial(encode, work), _assignments(work, surveyed))) as records:
        for record in records:
            if record is None:
                return None
            encoded.append(progress.add(record, all_bytes))
            hashes.add(record)
    return sorted(encoded, key=lambda record: record.number)


@dataclass
class _Progress:
    """Adds up the records of a phase and reports them."""

    phase: Literal["survey", "encode"]
    report: Report
    start: float = field(default_factory=monotonic)
    so_far: Preparation = Preparation(phase="survey")

    def add(self, record: Record, all_bytes: int | None = None) -> Record:
        tokens = record.train.tokens + record.validation.tokens if isinstance(record, Encoded) else 0
        self.so_far = Preparation(
            phase=self.phase,
            documents=self.so_far.documents + record.documents,
            text_bytes=self.so_far.text_bytes + record.text_bytes,
            all_bytes=all_bytes,
            tokens=self.so_far.tokens + tokens,
            seconds=monotonic() - self.start,
        )
        self.report(self.so_far)
        return record


def _survey_all(
    planned: PlannedDataset, work: Work, step: Callable[[Work, Shard], Survey], each: MapFn, report: Report
) -> Surveyed:
    """Every shard that the dataset takes, with its survey; the last one cut where `max_bytes` is reached."""
    shards, progress = plan_shards(planned.data.corpus, planned.sources), _Progress("survey", report)
    left = work.max_bytes

    def surveys(chosen: Sequence[Shard]) -> Surveyed:
        records = {record.number: progress.add(record) for record in each(partial(step, work), chosen)}
        return [(shard, records[shard.number]) for shard in chosen]

    if left is None:
        return surveys(shards)
    taken: Surveyed = []
    for wave in _waves(shards):
        for shard, record in surveys(wave):
            if record.read_bytes >= left:
                return taken + surveys([replace(shard, limit=left)])
            taken.append((shard, record))
            left -= record.read_bytes
    return taken


def _waves(shards: Sequence[Shard]) -> Iterator[Sequence[Shard]]:
    """One shard, two, four, …: a small `max_bytes` of a large corpus reads little, a large one is not held up."""
    start, width = 0, 1
    while start < len(shards):
        yield shards[start : start + width]
        start, width = start + width, min(2 * width, _WIDEST_WAVE)


def _assignments(work: Work, surveyed: Surveyed) -> list[Assignment]:
    import numpy as np

    unique = _without_duplicates(work, [record for _, record in surveyed])
    counts = unique or [record.documents for _, record in surveyed]
    held_out = _held_out(sum(counts), work.data, surveyed)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    cuts = np.searchsorted(held_out, starts)
    return [
        Assignment(
            shard=shard,
            survey=record,
            unique=unique[i] if unique else None,
            held_out=tuple((held_out[cuts[i] : cuts[i + 1]] - starts[i]).tolist()),
        )
        for i, (shard, record) in enumerate(surveyed)
    ]


def _without_duplicates(work: Work, surveys: Sequence[Survey]) -> list[int] | None:
    """Return how many documents of each shard are the first with their text, and write which ones next to it."""
    if not work.data.filters.drop_duplicates:
        return None

    def digests(position: int) -> bytes:
        file = surveys[position].digests
        return work.ledger.read(file.path) if file is not None else b""

    masks = first_of_each([record.documents for record in surveys], digests)
    for record, mask in zip(surveys, masks, strict=True):
        work.ledger.write(file_name(record.number, "unique"), bits_of_mask(mask))
    return [int(mask.sum()) for mask in masks]


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
    chosen = validation_documents(count, fraction=data.validation_fraction, seed=data.split_seed)
    if len(chosen) == count:
        raise UserError(
            f"data.validation_fraction={data.validation_fraction} of {count} documents leaves none to train on; "
            "lower it, or give more documents"
        )
    chosen.sort()
    return chosen


def validation_documents(count: int, *, fraction: float, seed: int) -> npt.NDArray[np.int64]:
    """The numbers of the documents kept for validation: the first ceil(fraction * count) of a seeded permutation.

    Takes 4 bytes of memory per document of the corpus.
    """
    import numpy as np

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
    manifest = prepare(planned, open_storage(args.root))
    print(f"{planned.path}: {manifest.train.tokens} training tokens, {manifest.validation.tokens} validation tokens")
    return 0
