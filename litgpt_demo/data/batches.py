"""The tokens of each step: a pure function of (dataset key, seed, step).

For a mixture, a table of MIXTURE_CYCLE sources, repeated, assigns a source to each sample of the run. So any
MIXTURE_CYCLE samples in a row have the same number of each source. Its own samples come in an order of their own.
Resuming therefore needs one integer, and changing the number of nodes changes nothing the model sees.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from litgpt_demo.config import MIXTURE_CYCLE, TrainingSpec
from litgpt_demo.data.dataset import DatasetManifest, TokenDataset, open_dataset, open_split, stage
from litgpt_demo.errors import UserError
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage

SampleIds = npt.NDArray[np.uint64]


class MixtureSchedule:
    """Which source of a mixture each sample of a run comes from."""

    def __init__(self, schedule: Sequence[tuple[float, Sequence[int]]], *, samples: int) -> None:
        """Of a run of `samples` samples; the schedule is a manifest's."""
        self._starts = [round(after * samples) for after, _ in schedule]
        self._tables = [interleave_sources(shares) for _, shares in schedule]
        self._count = len(schedule[0][1])
        spans = [end - after for after, end in pairwise([*(after for after, _ in schedule), 1.0])]
        each = zip(*(shares for _, shares in schedule), strict=True)
        self.shares = [sum(map(mul, spans, shares)) / MIXTURE_CYCLE for shares in each]
        """Each source's share of a run, all stages together."""

    def samples_seen(self, samples: int) -> npt.NDArray[np.int64]:
        """Return how many of the first samples come from each source."""
        total = np.zeros(self._count, dtype=np.int64)
        for start, end, table in zip(self._starts, [*self._starts[1:], samples], self._tables, strict=True):
            periods, rest = divmod(max(0, min(end, samples) - start), MIXTURE_CYCLE)
            for part, times in ((table, periods), (table[:rest], 1)):
                total += times * np.bincount(part, minlength=self._count)
        return total

    def source_at(self, positions: SampleIds) -> tuple[npt.NDArray[np.int64], SampleIds]:
        """Return the source of each of these samples, and how many of that source's samples come before it."""
        numbers = positions.astype(np.int64)
        sources, before = np.empty_like(numbers), np.empty_like(numbers)
        stages = np.searchsorted(self._starts, numbers, side="right") - 1
        for number in np.unique(stages):
            start, table, here = self._starts[number], self._tables[number], stages == number
            each = np.stack([np.cumsum(table == source) for source in range(self._count)])
            periods, rest = np.divmod(numbers[here] - start, MIXTURE_CYCLE)
            sources[here] = which = table[rest]
            before[here] = self.samples_seen(start)[which] + periods * each[which, -1] + each[which, rest] - 1
        return sources, before.astype(np.uint64)


def interleave_sources(shares: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return MIXTURE_CYCLE sources with so many of each, evenly interleaved: next is the source furthest behind."""
    given, wanted, table = (
        np.zeros(len(shares), dtype=np.int64),
        np.array(shares),
        np.empty(MIXTURE_CYCLE, dtype=np.int64),
    )
    for place in range(MIXTURE_CYCLE):
        table[place] = source = int(np.argmax(wanted * (place + 1) - MIXTURE_CYCLE * given))
        given[source] += 1
    return table


@dataclass(frozen=True, kw_only=True)
class MixtureDataset(TokenDataset):
    """One split of every source of a mixture; samples are numbered on from the last one of the source before."""

    files: Sequence[npt.NDArray[np.uint16] | npt.NDArray[np.uint32]] = ()
    names: Sequence[str]
    parts: Sequence[TokenDataset]
    schedule: MixtureSchedule

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def read(self, numbers: SampleIds) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Inputs and targets, each of shape (len(numbers), length)."""
        found = np.empty((2, len(numbers), self.length), dtype=np.int64)
        which = self.source_of(numbers)
        for source in np.unique(which):
            here = which == source
            found[:, here] = self.parts[source].read(numbers[here] - self.starts[source])
        return found[0], found[1]

    def source_of(self, numbers: SampleIds) -> npt.NDArray[np.int64]:
        return np.searchsorted(self.starts, numbers, side="right") - 1

    @property
    def starts(self) -> SampleIds:
        return np.cumsum([0, *map(len, self.parts[:-1])], dtype=np.uint64)


Split: TypeAlias = Literal["train", "validation"]


def open_samples(spec: TrainingSpec, folder: Path, manifest: DatasetManifest, split: Split) -> TokenDataset:
    """The samples of a split of the dataset in `folder`; of a mixture, those of its sources, which lie beside it."""
    length, mixture = spec.model.sequence_length, manifest.mixture
    if mixture is None:
        return open_split(folder, manifest, getattr(manifest, split), length=length)
    there = [(Path(address), open_dataset(address)) for address in manifest.ingredients(str(folder))]
    return MixtureDataset(
        names=[source.name for source in mixture.sources],
        parts=[open_split(place, one, getattr(one, split), length=length) for place, one in there],
        schedule=MixtureSchedule(mixture.schedule, samples=spec.steps * spec.train.global_batch),
        length=length,
    )


class ValidationSource(NamedTuple):
    """The samples of a source that an evaluation takes."""

    name: str
    """Empty where there is one source."""
    share: float
    """The source's share of the run's training samples: its weight in the mean."""
    numbers: SampleIds


def validation_sources(windows: TokenDataset, most: int) -> list[ValidationSource]:
    """Return `most` validation samples of each source, or all where it has fewer, drawn from its whole split.

    The first ones of a corpus that is sorted by date or topic would stand for a part of it.
    """
    if isinstance(windows, MixtureDataset):
        sources = list(zip(windows.names, windows.schedule.shares, windows.parts, windows.starts, strict=True))
    else:
        sources = [("", 1.0, windows, np.uint64(0))]

    def drawn(size: int) -> SampleIds:
        return feistel_permutation(np.arange(min(most, size), dtype=np.uint64), size, "validation")

    return [ValidationSource(name, share, drawn(len(part)) + start) for name, share, part, start in sources]


def global_positions(step: int, batch: int) -> SampleIds:
    """The places of a step (from 0) among all samples of a run."""
    return np.arange(step * batch, (step + 1) * batch, dtype=np.uint64)


def sample_ids_for_step(spec: TrainingSpec, windows: TokenDataset, step: int) -> SampleIds:
    """The samples of a whole step of a run (from 0), of all ranks, by their place in the training split."""
    return sample_ids_at(windows, global_positions(step, spec.train.global_batch), seed=spec.train.seed)


def sample_ids_at(windows: TokenDataset, places: SampleIds, *, seed: int) -> SampleIds:
    """The samples at these places among all of a run: one permutation of all after the other; each source of a mixture
    by itself."""
    numbers = np.empty_like(places)
    if isinstance(windows, MixtureDataset):
        sources, before = windows.schedule.source_at(places)
        for source in np.unique(sources):
            here = sources == source
            numbers[here] = sample_ids_at(windows.parts[source], before[here], seed=seed) + windows.starts[source]
        return numbers
    epochs, within = np.divmod(places, np.uint64(len(windows)))
    for epoch in np.unique(epochs):
        these = epochs == epoch
        numbers[these] = feistel_permutation(within[these], len(windows), f"{windows.key}/{seed}/{epoch}")
    return numbers


def rank_slice(numbers: SampleIds, *, rank: int, world_size: int) -> SampleIds:
    """The consecutive part of a global batch that belongs to `rank`."""
    each = len(numbers) // world_size
    return numbers[rank * each : (rank + 1) * each]


_ROUNDS = 4  # Luby and Rackoff: four Feistel rounds of random functions cannot be told from a random permutation


def feistel_permutation(positions: SampleIds, size: int, seed: str) -> SampleIds:
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


def _mixed(value: SampleIds) -> SampleIds:
    """Every bit of the result depends on every bit of the value (the finaliser of splitmix64, Steele et al. 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def main(argv: Sequence[str]) -> int:
    """`python -m litgpt_demo windows`: prints number and text of every sample of a step."""
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(prog="python -m litgpt_demo windows", description="Show the samples of one step.")
    parser.add_argument("--run", required=True, help="address of the run's folder")
    parser.add_argument("--step", required=True, type=int, help="the step, as the metrics count, from 1")
    parser.add_argument("--characters", type=int, default=400, help="of each sample (default: 400)")
    args = parser.parse_args(argv)
    spec = read_spec(open_storage(args.run))
    if not 1 <= args.step <= spec.steps:
        raise UserError(f"--step={args.step} is no step of {args.run}; it has the steps 1 to {spec.steps}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = open_storage(spec.dataset).local_path() or stage(spec.dataset, Path(scratch))
        manifest, tokenizer = open_dataset(str(folder)), Tokenizer.from_file(f"{folder}/tokenizer/tokenizer.json")
        windows = open_samples(spec, folder, manifest, "train")
        numbers = sample_ids_for_step(spec, windows, args.step - 1)
        for number, tokens in zip(numbers, windows.read(numbers)[0], strict=True):
            text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
            print(f"--- window {number}, {len(text)} characters\n{text[: args.characters]}")
    return 0
