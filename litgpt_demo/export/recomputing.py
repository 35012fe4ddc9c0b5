"""Computes the digests of a run's weights and batches again, from its files and its dataset. Imports torch.

docs/reference/digests.md defines them. Nothing of the run changes. Damaged files are a DataError.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from litgpt_demo.data.batches import open_samples, sample_ids_for_step
from litgpt_demo.data.dataset import open_dataset, stage
from litgpt_demo.errors import DataError
from litgpt_demo.export.models import verified_checkpoint
from litgpt_demo.export.weights import Weights
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.chain import hexadecimal
from litgpt_demo.training.checkpoint_reader import explain_unpickling_errors
from litgpt_demo.training.checkpoints import folder_of
from litgpt_demo.training.digests import Leaves, batch_sum, row_leaves, weights_digest


@contextmanager
def _scratch(address: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="litgpt-digests-") as scratch:
        try:
            yield Path(scratch)
        except (OSError, ValueError, RuntimeError, KeyError, AttributeError, EOFError) as error:
            raise DataError(f"{address} cannot be read: {error}") from error


def weights_of_model(final: Storage) -> str:
    """Return the digest of the weights that LitGPT opens."""
    name = "litgpt/lit_model.pth"
    with _scratch(final.address(name)) as scratch, explain_unpickling_errors(final.address(name)):
        path = final.local_path(name) or scratch / "weights"
        if final.local_path() is None:
            final.download(name, path)
        weights = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        leaves = (Leaves(name, 0, row_leaves(tensor)) for name, tensor in weights.items())
        return weights_digest(leaves, {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()})


def weights_of_checkpoint(run: Storage, step: int) -> str:
    """Return the digest of a kept checkpoint's weights."""
    address = run.address(folder_of(step))
    with _scratch(address) as scratch:
        _, shards = verified_checkpoint(run, read_spec(run), scratch, step=step, newest=False)
        return Weights(shards, address).digest()


def digests_of_batches(run: Storage, dataset: str, steps: int) -> list[str]:
    """Return the digest of each step's batch, from step 1 on: it depends on the dataset, the seed and the step."""
    spec, digests = read_spec(run), list[str]()
    with _scratch(dataset) as scratch:
        folder = open_storage(dataset).local_path() or stage(dataset, scratch)
        samples = open_samples(spec, folder, open_dataset(str(folder)), "train")
        for step in range(steps):
            inputs, targets = map(torch.from_numpy, samples.read(sample_ids_for_step(spec, samples, step)))
            digests.append(hexadecimal(batch_sum(inputs, targets)))
    return digests
