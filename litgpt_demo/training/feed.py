"""The data that the model reads: a dataset's splits, and their batches on the device, read one step ahead."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TypeAlias

import torch
from torch import Tensor

from litgpt_demo.config import TrainingSpec
from litgpt_demo.data.batches import Numbers, Windows, numbers_of, open_split, share_of
from litgpt_demo.data.dataset import DatasetManifest, open_dataset
from litgpt_demo.errors import DataError

Samples: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets, each of shape (samples, length)."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The two splits of a dataset, as samples."""

    manifest: DatasetManifest
    train: Windows
    validation: Windows


def open_data(spec: TrainingSpec, folder: Path) -> Data:
    """Open the two splits, memory-mapped."""
    manifest = open_dataset(str(folder))
    if manifest.key != spec.dataset_key:
        raise DataError(
            f"{folder} is the dataset {manifest.key}, this run was made for {spec.dataset_key}; stage that one"
        )
    train, validation = (
        open_split(folder, manifest, split, length=spec.model.sequence_length)
        for split in (manifest.train, manifest.validation)
    )
    return Data(manifest=manifest, train=train, validation=validation)


class Feed:
    """This rank's share of each step's batch. While a step is computed, a thread reads the next one's from the disk."""

    def __init__(self, spec: TrainingSpec, windows: Windows, device: torch.device, *, rank: int) -> None:
        self._spec, self._windows, self._device, self._rank = spec, windows, device, rank
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self._ahead: tuple[int, Future[Samples]] | None = None

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def take(self, step: int) -> tuple[list[Samples], float]:
        """The micro-batches of a step, and the seconds that were spent waiting for them."""
        began = monotonic()
        ahead, self._ahead = self._ahead, None
        read = ahead[1] if ahead is not None and ahead[0] == step else self._reader.submit(self._read, step)
        inputs, targets = read.result()
        if step + 1 < self._spec.steps:
            self._ahead = step + 1, self._reader.submit(self._read, step + 1)
        waited = monotonic() - began
        size = self._spec.train.micro_batch
        pairs = zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
        return [to_device(pair, self._device) for pair in pairs], waited

    def _read(self, step: int) -> Samples:
        numbers = numbers_of(self._spec, self._windows, step)
        mine = share_of(numbers, rank=self._rank, world_size=self._spec.world_size)
        return read_samples(self._windows, mine, self._device)


def read_samples(windows: Windows, numbers: Numbers, device: torch.device) -> Samples:
    """Samples in memory from which `device` copies without waiting: pinned, if it is a GPU."""
    inputs, targets = (torch.from_numpy(part.copy()) for part in windows.read(numbers))
    return (inputs.pin_memory(), targets.pin_memory()) if device.type == "cuda" else (inputs, targets)


def to_device(samples: Samples, device: torch.device) -> Samples:
    inputs, targets = samples
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
