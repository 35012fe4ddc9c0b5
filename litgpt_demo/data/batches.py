"""The tokens of each step: a pure function of (dataset key, seed, step), where a mixture's key holds its weights too.

Resuming therefore needs one integer, and changing the number of nodes changes nothing the model sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from litgpt_demo.config import TrainingSpec
from litgpt_demo.data.conversations import UNLEARNED
from litgpt_demo.data.dataset import DatasetManifest, Split, Stage, require_sample
from litgpt_demo.data.mixture import Shares, drawn
from litgpt_demo.errors import UserError
from litgpt_demo.manifests import local_file
from litgpt_demo.models.layouts import RankLayout

Numbers = npt.NDArray[np.uint64]
SplitName: TypeAlias = Literal["train", "validation"]

NOT_LEARNED = -100
"""The target that is none: torch's cross_entropy and LitGPT's leave it out too."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """A split cut into samples of `length` tokens; sample i is tokens i*length to (i+1)*length, both included."""

    files: Sequence[npt.NDArray[np.uint16] | npt.NDArray[np.uint32]]
    """The split's tokens, to be read as one; a sample may begin in one file and end in the next."""
    length: int
    masked: bool = False
    """True if some ids are not learned, and say so by their highest bit."""

    def __len__(self) -> int:
        return max(0, (sum(map(len, self.files)) - 1) // self.length)

    def read(self, numbers: Numbers) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Inputs and targets, each of shape (len(numbers), length). A target that is not learned is NOT_LEARNED."""
        at = numbers.astype(np.int64)[:, None] * self.length + np.arange(self.length + 1)
        sample = self._tokens(at)
        if not self.masked:
            return sample[:, :-1], sample[:, 1:]
        ids = sample & ~UNLEARNED
        return ids[:, :-1], np.where(sample == ids, ids, NOT_LEARNED)[:, 1:]

    def learned_share(self, numbers: Numbers) -> float:
        """Return the share of the targets of these samples that is learned."""
        return float((self.read(numbers)[1] >= 0).mean()) if self.masked else 1.0

    def _tokens(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if len(self.files) == 1:
            return self.files[0][at].astype(np.int64)
        tokens, ends = np.empty_like(at), np.cumsum([len(file) for file in self.files])
        which = np.searchsorted(ends, at, side="right")
        for number in np.unique(which):
            here = which == number
            tokens[here] = self.files[number][at[here] - (ends[number] - len(self.files[number]))]
        return tokens


def open_windows(paths: Sequence[Path], *, dtype: str, length: int, masked: bool = False) -> Windows:
    """The split in the files `paths`, memory-mapped.

    Raises:
        UserError: the split is shorter than one window.
    """
    size = sum(path.stat().st_size for path in paths) // np.dtype(dtype).itemsize
    require_sample(size, length=length, where=str(paths[0]))
    return Windows(files=[np.memmap(path, dtype=dtype, mode="r") for path in paths], length=length, masked=masked)


@dataclass(frozen=True, kw_only=True)
class MixedWindows:
    """The samples of several sources, numbered as if they lay behind one another in `order`."""

    sources: Mapping[str, Windows]
    """The windows of each part of the mixture, by its name and in their order."""
    keys: Sequence[str]
    """Their datasets' keys."""
    stages: Sequence[Stage]
    order: Numbers | None = None
    """The places of the samples behind one another; None where their numbers say that."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def length(self) -> int:
        return next(iter(self.sources.values())).length

    @property
    def masked(self) -> bool:
        return any(source.masked for source in self.sources.values())

    @property
    def _ends(self) -> npt.NDArray[np.uint64]:
        return np.cumsum([len(source) for source in self.sources.values()], dtype=np.uint64)

    def read(self, numbers: Numbers) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Inputs and targets, each of shape (len(numbers), length)."""
        places, which = self._places(numbers), self.which(numbers)
        inputs, targets = (np.empty((len(numbers), self.length), dtype=np.int64) for _ in range(2))
        begin = np.uint64(0)
        for number, (source, end) in enumerate(zip(self.sources.values(), self._ends, strict=True)):
            if (here := which == number).any():
                inputs[here], targets[here] = source.read(places[here] - begin)
            begin = end
        return inputs, targets

    def learned_share(self, numbers: Numbers) -> float:
        """Return the share of the targets of these samples that is learned."""
        return float((self.read(numbers)[1] >= 0).mean()) if self.masked else 1.0

    def which(self, numbers: Numbers) -> npt.NDArray[np.int64]:
        """Return the sources of these samples, as numbers."""
        return np.searchsorted(self._ends, self._places(numbers), side="right")

    def _places(self, numbers: Numbers) -> Numbers:
        return numbers if self.order is None else self.order[numbers]

    def batch_numbers(self, *, step: int, steps: int, global_batch: int, mixture_key: str, seed: int) -> Numbers:
        """The samples of optimizer step `step` (from 0): each source's next ones in a permutation of its own."""
        stage, begin = self._stage_at(step, steps)
        shares, at = Shares(stage.millionths), (step - begin) * global_batch
        which = shares.sources_at(at, global_batch)
        begun = drawn(self.stages, step=begin, steps=steps, global_batch=global_batch) + shares.counts(at)
        numbers, first = np.empty(global_batch, dtype=np.uint64), 0
        for number, (source, key) in enumerate(zip(self.sources.values(), self.keys, strict=True)):
            here = which == number
            positions = np.arange(begun[number], begun[number] + np.count_nonzero(here), dtype=np.uint64)
            seed_of = f"{mixture_key}/{key}/{seed}"
            numbers[here] = epochs(positions, len(source), seed_of) + np.uint64(first)
            first += len(source)
        return numbers

    def _stage_at(self, step: int, steps: int) -> tuple[Stage, int]:
        begin = 0
        for stage in self.stages:
            if step < (end := stage.end(steps)):
                return stage, begin
            begin = end
        raise AssertionError(f"step {step} is none of {steps}")


AnyWindows: TypeAlias = Windows | MixedWindows


def open_split(folder: Path, manifest: DatasetManifest, name: SplitName, *, length: int) -> AnyWindows:
    """A split of the dataset in `folder`, memory-mapped.

    A mixture's validation samples come from each source in turn: any number of first ones is about as many of each.

    Raises:
        UserError: it is shorter than one window.
    """
    if manifest.parts:
        sources = {
            part.name: _open_source(folder.parent / part.folder, part.dataset, name, length=length)
            for part in manifest.parts
        }
        keys = [part.dataset.key for part in manifest.parts]
        order = in_turn([len(source) for source in sources.values()]) if name == "validation" else None
        return MixedWindows(sources=sources, keys=keys, stages=manifest.stages, order=order)
    return _open_source(folder, manifest, name, length=length)


def _open_source(folder: Path, manifest: DatasetManifest, name: SplitName, *, length: int) -> Windows:
    split: Split = getattr(manifest, name)
    paths = [local_file(folder, record.path, manifest.places) for record in split.files]
    if elsewhere := [record.path for record, path in zip(split.files, paths, strict=True) if not path.is_file()]:
        raise UserError(
            f"{folder / elsewhere[0]} is not there: its tokens lie in {manifest.places.get(elsewhere[0], folder)}. A "
            "folder that a bucket is mounted at has none of another place: take platform.stage=copy"
        )
    return open_windows(paths, dtype=manifest.dtype, length=length, masked=manifest.masked)


def in_turn(lengths: Sequence[int]) -> Numbers:
    """Return the places of the samples of several sources that lie behind one another: the first of each, the second
    of each, and so on, until those of the longest are left."""
    rounds = np.concatenate([np.arange(length) for length in lengths])
    return np.argsort(rounds, kind="stable").astype(np.uint64)


def by_source(windows: AnyWindows, count: int) -> dict[str, Numbers]:
    """Return the numbers of the first `count` samples by the sources that they are of; "" is the only one."""
    numbers = np.arange(count, dtype=np.uint64)
    if isinstance(windows, Windows):
        return {"": numbers}
    which = windows.which(numbers)
    return {name: numbers[which == number] for number, name in enumerate(windows.sources)}


def numbers_of(spec: TrainingSpec, windows: AnyWindows, step: int) -> Numbers:
    """The samples of a whole step of a run, of all ranks, by their place in the training split."""
    if isinstance(windows, MixedWindows):
        return windows.batch_numbers(
            step=step,
            steps=spec.steps,
            global_batch=spec.train.global_batch,
            mixture_key=spec.dataset_key,
            seed=spec.train.seed,
        )
    return batch_numbers(
        step=step,
        global_batch=spec.train.global_batch,
        windows=len(windows),
        dataset_key=spec.dataset_key,
        seed=spec.train.seed,
    )


def batch_numbers(*, step: int, global_batch: int, windows: int, dataset_key: str, seed: int) -> Numbers:
    """The samples of optimizer step `step` (from 0): the next slice of a permutation of all, a new one each epoch."""
    positions = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.uint64)
    return epochs(positions, windows, f"{dataset_key}/{seed}")


def epochs(positions: Numbers, windows: int, seed: str) -> Numbers:
    """Return the samples at `positions` of an endless row of permutations of all, a new one each epoch."""
    numbers, number = np.empty_like(positions), positions // np.uint64(windows)
    for epoch in np.unique(number):
        these = number == epoch
        numbers[these] = permuted(positions[these] % np.uint64(windows), windows, f"{seed}/{epoch}")
    return numbers


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The number of a group of ranks that read the same samples, among all such groups: without tensor or context
    parallelism each rank is one."""

    number: int
    count: int

    @classmethod
    def of(cls, rank: int, layout: RankLayout) -> Reader:
        """The one that `rank` belongs to."""
        return cls(number=rank // layout.together, count=layout.readers)


def share_of(numbers: Numbers, reader: Reader) -> Numbers:
    """The consecutive part of a global batch that belongs to a reader."""
    each = len(numbers) // reader.count
    return numbers[reader.number * each : (reader.number + 1) * each]


_ROUNDS = 4  # Luby and Rackoff: four Feistel rounds of random functions cannot be told from a random permutation


def permuted(positions: Numbers, size: int, seed: str) -> Numbers:
    """Return where a fixed pseudo-random permutation of range(size) sends `positions`, in memory independent of `size`.

    A Feistel network permutes the next power of four; values that fall outside `size` are sent through it again until
    they are inside, which keeps it a permutation.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.frombuffer(blake2b(seed.encode(), digest_size=8 * _ROUNDS).digest(), dtype="<u8")
    result = positions.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        result[outside] = (left << half) | right
        outside = result >= np.uint64(size)
    return result


def _mixed(value: Numbers) -> Numbers:
    """Every bit of the result depends on every bit of the value (the finaliser of splitmix64, Steele et al. 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
