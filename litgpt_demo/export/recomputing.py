"""Computes the digests of a run's weights and batches again, from its files and its dataset. Imports torch.

docs/reference/digests.md defines them. Nothing of the run changes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from litgpt_demo.data.batches import open_samples, sample_ids_for_step
from litgpt_demo.data.dataset import open_dataset, stage
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.export.digests import RecomputedDigests
from litgpt_demo.export.models import verified_checkpoint
from litgpt_demo.export.weights import Weights
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.chain import hexadecimal
from litgpt_demo.training.checkpoint_reader import explain_unpickling_errors
from litgpt_demo.training.checkpoints import folder_of
from litgpt_demo.training.digests import Leaves, batch_sum, row_leaves, weights_digest

_MODEL = "litgpt/lit_model.pth"


def weights_of_model(final: Storage, scratch: Path) -> str:
    """Return the digest of the weights that LitGPT opens."""
    path = final.local_path(_MODEL)
    if path is None:
        path = scratch / "lit_model.pth"
        final.download(_MODEL, path)
    with explain_unpickling_errors(final.address(_MODEL)):
        weights = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    leaves = (Leaves(name, 0, row_leaves(tensor)) for name, tensor in weights.items())
    return weights_digest(leaves, {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()})


def weights_of_checkpoint(run: Storage, step: int, scratch: Path) -> str:
    """Return the digest of a kept checkpoint's weights."""
    _, shards = verified_checkpoint(run, read_spec(run), scratch, step=step, newest=False)
    return Weights(shards, run.address(folder_of(step))).digest()


def batches_of(run: Storage, dataset: str, steps: int, scratch: Path) -> Iterator[str]:
    """Yield the digest of each step's batch, as the dataset, the seed and the step determine it."""
    spec, folder = read_spec(run), open_storage(dataset).local_path() or stage(dataset, scratch)
    samples = open_samples(spec, folder, open_dataset(str(folder)), "train")
    for step in range(steps):
        inputs, targets = map(torch.from_numpy, samples.read(sample_ids_for_step(spec, samples, step)))
        yield hexadecimal(batch_sum(inputs, targets))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="litgpt_demo digests", description=__doc__)
    parser.add_argument("--final", help="address of the folder with the collected model")
    parser.add_argument("--run", help="address of the run's folder, for its checkpoints and batches")
    parser.add_argument("--checkpoints", type=int, nargs="*", default=[], help="steps of the checkpoints to read")
    parser.add_argument("--dataset", help="address of the dataset, for the batches")
    parser.add_argument("--batches", type=int, default=0, help="number of steps whose batches to read")
    parser.add_argument("--out", required=True, type=Path, help="file for the digests, in JSON")
    args = parser.parse_args(argv)
    problems, found = list[str](), RecomputedDigests()

    @contextmanager
    def noted() -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="litgpt-digests-") as scratch:
            try:
                yield Path(scratch)
            except (TrainLitgptError, OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
                problems.append(str(error))

    if args.final is not None:
        with noted() as scratch:
            found = found.model_copy(update={"model": weights_of_model(open_storage(args.final), scratch)})
    for step in args.checkpoints:
        with noted() as scratch:
            found.checkpoints[step] = weights_of_checkpoint(open_storage(args.run), step, scratch)
    if args.batches:
        with noted() as scratch:
            batches = tuple(batches_of(open_storage(args.run), args.dataset, args.batches, scratch))
            found = found.model_copy(update={"batches": batches})
    args.out.write_text(found.model_copy(update={"problems": tuple(problems)}).model_dump_json())
    return 0
