"""The tokens of each step: a pure function of (content hash, seed, first sample, step).

A run's samples have positions from 0. If it continues another run, each order begins where that run stood. For a
mixture, a cycle of MIXTURE_CYCLE sources, repeated, assigns a source to each position, so any MIXTURE_CYCLE in a row
have the same number of each. Each source has an order of its own. Resuming therefore needs one integer, and changing
the number of nodes changes nothing the model sees.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from litgpt_demo.config import MIXTURE_CYCLE, SeenSamples, TrainingSpec
from litgpt_demo.data.dataset import DatasetManifest, TokenDataset, open_dataset, open_split, stage
from litgpt_demo.errors import UserError
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage

SampleIds: TypeAlias = npt.NDArray[np.uint64]
"""Indices of samples in a dataset."""
Positions: TypeAlias = npt.NDArray[np.uint64]
"""Indices of samples among all that a run sees."""


class MixtureSchedule:
    """The sources of a mixture's samples, by their positions in a run."""

    def __init__(self, schedule: Sequence[tuple[float, Sequence[int]]], *, samples: int) -> None:
        """`samples` is the number of samples in the run; `schedule` comes from the dataset's manifest."""
        fractions, counts = [fraction for fraction, _ in schedule], np.array([shares for _, shares in schedule])
        spans = np.diff([*fractions, 1.0])
        self.shares: list[float] = ((spans[:, None] * counts).sum(axis=0) / MIXTURE_CYCLE).tolist()
        """Each source's share of a run, all stages together."""
        self._starts = np.array([round(fraction * samples) for fraction in fractions])
        self._counts = counts  # samples of each source in a cycle: [stage, source]
        self._cycles = np.stack([interleave_sources(shares) for shares in counts])
        # The samples of each source in the first n of a cycle, n from 0 to MIXTURE_CYCLE: [stage, n, source].
        self._in_cycle = np.zeros((len(counts), MIXTURE_CYCLE + 1, counts.shape[1]), dtype=np.int64)
        self._in_cycle[:, 1:] = np.cumsum(self._cycles[..., None] == np.arange(counts.shape[1]), axis=1)
        # The samples of each source before a stage: [stage, source].
        cycles, rest = np.divmod(np.diff(self._starts), MIXTURE_CYCLE)
        in_stages = cycles[:, None] * counts[:-1] + self._in_cycle[np.arange(len(rest)), rest]
        self._before = np.concatenate([np.zeros_like(counts[:1]), np.cumsum(in_stages, axis=0)])

    def samples_seen(self, samples: int) -> npt.NDArray[np.int64]:
        """Return how many of the first samples come from each source."""
        stage = int(np.searchsorted(self._starts, samples, side="right")) - 1
        cycles, rest = divmod(samples - int(self._starts[stage]), MIXTURE_CYCLE)
        seen: npt.NDArray[np.int64] = self._before[stage] + cycles * self._counts[stage] + self._in_cycle[stage, rest]
        return seen

    def source_at(self, positions: Positions) -> tuple[npt.NDArray[np.int64], Positions]:
        """Return the source of each of these samples, and how many of that source's samples come before it."""
        offsets = positions.astype(np.int64)
        stages = np.searchsorted(self._starts, offsets, side="right") - 1
        cycles, rest = np.divmod(offsets - self._starts[stages], MIXTURE_CYCLE)
        sources = self._cycles[stages, rest]
        in_stage = cycles * self._counts[stages, sources] + self._in_cycle[stages, rest, sources]
        return sources, (self._before[stages, sources] + in_stage).astype(np.uint64)


def interleave_sources(shares: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return MIXTURE_CYCLE sources with these counts, evenly interleaved: next is the one furthest behind its share."""
    counts, cycle = np.zeros(len(shares), dtype=np.int64), np.empty(MIXTURE_CYCLE, dtype=np.int64)
    for place in range(MIXTURE_CYCLE):
        cycle[place] = source = int(np.argmax(np.array(shares) * (place + 1) - MIXTURE_CYCLE * counts))
        counts[source] += 1
    return cycle


@dataclass(frozen=True, kw_only=True)
class MixtureDataset(TokenDataset):
    """One split of every source of a mixture. The samples of a source follow those of the source before."""

    files: Sequence[npt.NDArray[np.uint16] | npt.NDArray[np.uint32]] = ()
    names: Sequence[str]
    parts: Sequence[TokenDataset]
    schedule: MixtureSchedule

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def read(self, sample_ids: SampleIds) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return inputs and targets, each of shape (len(sample_ids), length)."""
        samples = np.empty((2, len(sample_ids), self.length), dtype=np.int64)
        sources = self.source_of(sample_ids)
        for source in np.unique(sources):
            selected = sources == source
            samples[:, selected] = self.parts[source].read(sample_ids[selected] - self.starts[source])
        return samples[0], samples[1]

    def source_of(self, sample_ids: SampleIds) -> npt.NDArray[np.int64]:
        return np.searchsorted(self.starts, sample_ids, side="right") - 1

    @property
    def starts(self) -> SampleIds:
        return np.cumsum([0, *map(len, self.parts[:-1])], dtype=np.uint64)


Split: TypeAlias = Literal["train", "validation"]


def open_samples(spec: TrainingSpec, folder: Path, manifest: DatasetManifest, split: Split) -> TokenDataset:
    """Return the samples of a split of the dataset in `folder`. A mixture's sources are in the folders next to it."""
    length, mixture = spec.model.sequence_length, manifest.mixture

    def open_part(folder: Path, manifest: DatasetManifest) -> TokenDataset:
        part = open_split(folder, manifest, getattr(manifest, split), length=length)
        return replace(part, first=spec.first_sample(part.content_hash))

    if mixture is None:
        return open_part(folder, manifest)
    parts = [open_part(Path(address), open_dataset(address)) for address in manifest.ingredients(str(folder))]
    return MixtureDataset(
        names=[source.name for source in mixture.sources],
        parts=parts,
        schedule=MixtureSchedule(mixture.schedule, samples=spec.samples_after(spec.steps)),
        length=length,
    )


class ValidationSource(NamedTuple):
    name: str
    """Empty where there is one source."""
    share: float
    """The source's share of the run's training samples: its weight in the mean."""
    sample_ids: SampleIds


def validation_sources(dataset: TokenDataset, count: int) -> list[ValidationSource]:
    """Return `count` validation samples of each source, or all where it has fewer, drawn from its whole split."""

    def draw(size: int) -> SampleIds:
        return feistel_permutation(np.arange(min(count, size), dtype=np.uint64), size, "validation")

    if not isinstance(dataset, MixtureDataset):
        return [ValidationSource("", 1.0, draw(len(dataset)))]
    parts = zip(dataset.names, dataset.schedule.shares, dataset.parts, dataset.starts, strict=True)
    return [ValidationSource(name, share, draw(len(part)) + start) for name, share, part, start in parts]


def weighted_mean(sources: Iterable[ValidationSource], losses: Iterable[float]) -> float:
    """Return the validation loss of a mixture: the mean of its sources' losses, weighted by their shares."""
    return sum(source.share * loss for source, loss in zip(sources, losses, strict=True))


def global_positions(spec: TrainingSpec, step: int) -> Positions:
    """Return the positions of a step (from 0) in the run."""
    return np.arange(spec.samples_after(step), spec.samples_after(step + 1), dtype=np.uint64)


def sample_ids_for_step(spec: TrainingSpec, dataset: TokenDataset, step: int) -> SampleIds:
    """Return the samples of a step of a run (from 0), those of all ranks."""
    return sample_ids_at(dataset, global_positions(spec, step), seed=spec.train.seed)


def sample_ids_at(dataset: TokenDataset, positions: Positions, *, seed: int) -> SampleIds:
    """Return the samples at these positions of a run: epoch after epoch, each source with its own permutations."""
    sample_ids = np.empty_like(positions)
    if isinstance(dataset, MixtureDataset):
        sources, seen = dataset.schedule.source_at(positions)
        for source in np.unique(sources):
            selected, part = sources == source, dataset.parts[source]
            sample_ids[selected] = sample_ids_at(part, seen[selected], seed=seed) + dataset.starts[source]
        return sample_ids
    epochs, offsets = np.divmod(positions + np.uint64(dataset.first), np.uint64(len(dataset)))
    for epoch in np.unique(epochs):
        selected = epochs == epoch
        order = f"{dataset.content_hash}/{seed}/{epoch}"
        sample_ids[selected] = feistel_permutation(offsets[selected], len(dataset), order)
    return sample_ids


def samples_seen(spec: TrainingSpec, dataset: TokenDataset, done: int) -> tuple[SeenSamples, ...]:
    """Return the samples that the weights after `done` steps have seen, in the run and in those that it continues."""
    parts, counts = [dataset], [spec.samples_after(done)]
    if isinstance(dataset, MixtureDataset):
        parts, counts = [*dataset.parts], dataset.schedule.samples_seen(counts[0]).tolist()
    earlier = spec.origin.trained_on if spec.origin else ()
    orders = {(seen.dataset, seen.seed, seen.length): seen for seen in earlier}
    for part, count in zip(parts, counts, strict=True):
        order = part.content_hash, spec.train.seed, part.length
        seen = SeenSamples(part.content_hash, spec.train.seed, part.first + count, part.length)
        # Without the optimizer's state, a run begins at the first sample, though its weights may have seen more.
        orders[order] = max(seen, orders.get(order, seen))
    return tuple(orders.values())


def rank_slice(batch: SampleIds, *, rank: int, world_size: int) -> SampleIds:
    size = len(batch) // world_size
    return batch[rank * size : (rank + 1) * size]


_ROUNDS = 4  # Luby and Rackoff: four Feistel rounds of random functions are indistinguishable from a random permutation


def feistel_permutation(values: SampleIds, size: int, seed: str) -> SampleIds:
    """Return where a fixed pseudo-random permutation of range(size) sends `values`, in memory independent of `size`.

    A Feistel network permutes the next power of four; values that fall outside `size` are sent through it again until
    they are inside, which keeps it a permutation.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.frombuffer(blake2b(seed.encode(), digest_size=8 * _ROUNDS).digest(), dtype="<u8")
    result = values.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        high, low = result[outside] >> half, result[outside] & mask
        for key in keys:
            high, low = low, high ^ (_mix_bits(low ^ key) & mask)
        result[outside] = (high << half) | low
        outside = result >= np.uint64(size)
    return result


def _mix_bits(value: SampleIds) -> SampleIds:
    """Make every bit depend on every bit of the value (the finaliser of splitmix64, Steele et al. 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def main(argv: Sequence[str]) -> int:
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(prog="python -m litgpt_demo windows", description="Show the samples of one step.")
    parser.add_argument("--run", required=True, help="address of the run's folder")
    parser.add_argument("--step", required=True, type=int, help="number of the step, as in the metrics, from 1")
    parser.add_argument("--characters", type=int, default=400, help="characters of each sample to print (default: 400)")
    args = parser.parse_args(argv)
    spec = read_spec(open_storage(args.run))
    if not 1 <= args.step <= spec.steps:
        raise UserError(f"--step={args.step} is not a step of {args.run}; choose one from 1 to {spec.steps}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = open_storage(spec.dataset).local_path() or stage(spec.dataset, Path(scratch))
        manifest, tokenizer = open_dataset(str(folder)), Tokenizer.from_file(f"{folder}/tokenizer/tokenizer.json")
        samples = open_samples(spec, folder, manifest, "train")
        sample_ids = sample_ids_for_step(spec, samples, args.step - 1)
        for sample_id, tokens in zip(sample_ids, samples.read(sample_ids)[0], strict=True):
            text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
            print(f"--- sample {sample_id}, {len(text)} characters\n{text[: args.characters]}")
    return 0
