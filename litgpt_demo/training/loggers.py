"""Targets of the metrics rows besides metrics.jsonl: a table always, TensorBoard and Weights & Biases if asked for.

A logger has a folder and two verbs. One that fails costs its own record, never the training.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from litgpt_demo.config import TrainingSpec, WandbConfig
from litgpt_demo.errors import UserError
from litgpt_demo.metrics import Row

# Of metrics.csv, in this order; other columns are in metrics.jsonl.
COLUMNS = (
    "kind", "step", "tokens", "loss", "learning_rate", "grad_norm", "validation_loss", "perplexity",
    "tokens_per_second", "mfu", "step_seconds", "data_seconds", "memory", "seconds", "save_seconds", "bytes",
)  # fmt: skip
_PLOTTED = ("step", "evaluation", "checkpoint")


class Logger(Protocol):
    """Something that takes metrics rows."""

    def write(self, row: Row) -> None:
        """Take a row, without waiting for disk or network."""

    def close(self) -> None:
        """Wait until all rows are where they should be."""


class Table:
    """metrics.csv: the rows of steps, evaluations and checkpoints, one column per metric, empty where it has none."""

    def __init__(self, path: Path, kept: Iterable[Row]) -> None:
        """Begins with the rows of older attempts that still count."""
        aside = path.with_name(f".{path.name}.partial")
        with aside.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *map(_cells, filter(_is_plotted, kept))])
        aside.replace(path)
        self._file = path.open("a", buffering=1, newline="")
        self._writer = csv.writer(self._file)

    def write(self, row: Row) -> None:
        if _is_plotted(row):
            self._writer.writerow(_cells(row))

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files; `tensorboard --logdir` on the folder shows them."""

    def __init__(self, folder: Path, *, resumed_from: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps of older attempts that will be repeated are not to be drawn twice.
        self._writer = SummaryWriter(str(folder), purge_step=resumed_from + 1, flush_secs=10)

    def write(self, row: Row) -> None:
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, int(row["step"]))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases with the run's name, taken up again by later attempts; it makes `wandb/`."""

    def __init__(self, settings: WandbConfig, spec: TrainingSpec, folder: Path, environ: Mapping[str, str]) -> None:
        import wandb

        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            id=spec.run,
            name=spec.run,
            resume="allow",
            dir=str(folder),
            config=spec.model_dump(mode="json"),
            mode="offline" if settings.secret is None else "online",
            # What the job prints is its own log already, and code and git are in the run's folder.
            settings=wandb.Settings(
                api_key=None if settings.secret is None else environ[settings.secret],
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
            ),
        )
        # Their own step cannot go back, ours does when an attempt repeats steps.
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        if values := scalars(row):
            self._run.log({"step": int(row["step"]), **values})

    def close(self) -> None:
        self._run.finish()


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a row that are worth a curve, as `kind/name`."""
    if not _is_plotted(row):
        return {}
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
    return {f"{row['kind']}/{name}": float(value) for name, value in numbers.items()}


def asked_for(spec: TrainingSpec, folder: Path, *, resumed_from: int) -> dict[str, Callable[[], Logger]]:
    """The loggers that the settings ask for besides the table, still to be opened; their files go below `folder`.

    Raises:
        UserError: a secret is not there.
    """
    found: dict[str, Callable[[], Logger]] = {}
    if spec.train.tensorboard:
        found["TensorBoard"] = partial(TensorBoard, folder / "tensorboard", resumed_from=resumed_from)
    if (asked := spec.train.wandb) is not None:
        if asked.secret is not None and not os.environ.get(asked.secret):
            raise UserError(
                f"train.wandb.secret={asked.secret} names a variable that is not in this node's environment; set it "
                "where the run is submitted, or leave the secret empty to keep the records in the run's folder"
            )
        found["Weights & Biases"] = partial(Wandb, asked, spec, folder, os.environ)
    return found


def _is_plotted(row: Row) -> bool:
    return row.get("kind") in _PLOTTED


def _cells(row: Row) -> list[Any]:
    return [row.get(name, "") for name in COLUMNS]
