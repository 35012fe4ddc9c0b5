"""The tokens of each step: a pure function of (dataset key, seed, step).

Resuming therefore needs one integer, and changing the number of nodes changes nothing the model sees. The samples of a
step whose loss was no number are shown as text:

    python -m litgpt_demo windows --run runs/owt-1a2b3c4d5e --step 1200
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from litgpt_demo.config import TrainingSpec
from litgpt_demo.data.dataset import Windows, open_dataset, open_split, stage
from litgpt_demo.errors import UserError
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage

Numbers = npt.NDArray[np.uint64]


def numbers_of(spec: TrainingSpec, windows: Windows, step: int) -> Numbers:
    """The samples of a whole step of a run, of all ranks, by their place in the training split."""
    train, key = spec.train, spec.dataset_key
    return batch_numbers(
        step=step, global_batch=train.global_batch, windows=len(windows), dataset_key=key, seed=train.seed
    )


def batch_numbers(*, step: int, global_batch: int, windows: int, dataset_key: str, seed: int) -> Numbers:
    """The samples of optimizer step `step` (from 0): the next slice of a permutation of all, a new one each epoch."""
    positions = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.uint64)
    epochs = positions // np.uint64(windows)
    numbers = np.empty_like(positions)
    for epoch in np.unique(epochs):
        these = epochs == epoch
        numbers[these] = permuted(positions[these] % np.uint64(windows), windows, f"{dataset_key}/{seed}/{epoch}")
    return numbers


def share_of(numbers: Numbers, *, rank: int, world_size: int) -> Numbers:
    """The consecutive part of a global batch that belongs to `rank`."""
    each = len(numbers) // world_size
    return numbers[rank * each : (rank + 1) * each]


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
        windows = open_split(folder, manifest, manifest.train, length=spec.model.sequence_length)
        numbers = numbers_of(spec, windows, args.step - 1)
        for number, tokens in zip(numbers, windows.read(numbers)[0], strict=True):
            text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
            print(f"--- window {number}, {len(text)} characters\n{text[: args.characters]}")
    return 0
