"""The data that the model reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from litgpt_demo.config import TrainingSpec
from litgpt_demo.data.batches import Windows, open_split
from litgpt_demo.data.dataset import DatasetManifest, open_dataset
from litgpt_demo.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Data:
    """The two splits of a dataset, as samples."""

    manifest: DatasetManifest
    train: Windows
    validation: Windows


def open_data(spec: TrainingSpec, folder: Path) -> Data:
    """The two splits, memory-mapped.

    Raises:
        DataError: it is not the dataset of the spec.
        UserError: a split is shorter than one sample.
    """
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
