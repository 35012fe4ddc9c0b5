"""Targets of the metrics rows besides metrics.jsonl: a table always, TensorBoard and Weights & Biases if asked for.

A logger has a folder and two verbs. One that fails costs its own record, never the training.
"""

from __future__ import annotations

import csv
import os
import shutil
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from litgpt_demo.config import TrainingSpec, WandbConfig
from litgpt_demo.errors import UserError
from litgpt_demo.metrics import Row
from litgpt_demo.secrets import HIDDEN, without

# Of metrics.csv, in this order; other columns are in metrics.jsonl.
COLUMNS = (
    "kind", "step", "tokens", "loss", "learning_rate", "grad_norm", "validation_loss", "perplexity",
    "tokens_per_second", "mfu", "step_seconds", "data_seconds", "memory", "seconds", "save_seconds", "bytes",
)  # fmt: skip
_PLOTTED = ("step", "evaluation", "checkpoint")
_LONGEST_LINE = 1 << 20
"""Characters of a line; a longer one is left out of a file that a key is taken from."""


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
    """A run of Weights & Biases with the run's name, taken up again by later attempts; it makes `wandb/`.

    Their program keeps what its service answers to a refused request in a log, and some answers repeat the key that
    they were sent. So the key is taken out of their files when their program has ended, and what an attempt that was
    killed left is dealt with when the next one begins.
    """

    def __init__(self, settings: WandbConfig, spec: TrainingSpec, folder: Path, environ: Mapping[str, str]) -> None:
        self._files = folder / "wandb"
        self._key = None if settings.secret is None else environ[settings.secret]
        forget(self._files, self._key)
        try:
            import wandb

            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                id=spec.run,
                name=spec.run,
                resume="allow",
                dir=str(folder),
                config=spec.model_dump(mode="json"),
                mode="offline" if self._key is None else "online",
                # What the job prints is its own log already, and code and git are in the run's folder.
                settings=wandb.Settings(
                    api_key=self._key, console="off", silent=True, disable_git=True, disable_code=True
                ),
            )
            # Their own step cannot go back, ours does when an attempt repeats steps.
            self._run.define_metric("*", step_metric="step")
        except BaseException:
            self._end()
            raise

    def write(self, row: Row) -> None:
        if values := scalars(row):
            self._run.log({"step": int(row["step"]), **values})

    def close(self) -> None:
        try:
            self._run.finish()
        finally:
            self._end()

    def _end(self) -> None:
        """Wait until their program has written its last line, and read the key nowhere in it."""
        import wandb

        try:
            wandb.teardown()
        finally:
            forget(self._files, self._key)


Logger: TypeAlias = Table | TensorBoard | Wandb
"""It takes rows without waiting for disk or network; `close` waits until all are where they should be."""


def forget(folder: Path, key: str | None) -> None:
    """Take a key out of the text files below a folder, which nobody may be writing to. A binary file is left as it is.

    Each is written beside and put in its place, a line after the other: a log may have any size.
    """
    if key is None:
        return
    sent = b64encode(f"api:{key}".encode()).decode()  # `Authorization: Basic`, as their program logs in
    options: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
    for path in [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]:
        if path.suffix == ".wandb":  # their records, with checksums: metrics and config, no answers
            continue
        aside, changed = path.with_name(f".{path.name}.partial"), False
        try:
            with path.open(**options) as before, aside.open("w", **options) as after:
                while line := before.readline(_LONGEST_LINE):
                    kept = without(line, key, sent)
                    if len(line) == _LONGEST_LINE and not line.endswith("\n"):  # a key may lie across its end
                        kept = f"{HIDDEN}\n"
                        while (rest := before.readline(_LONGEST_LINE)) and not rest.endswith("\n"):
                            pass
                    after.write(kept)
                    changed |= kept != line
            if changed:
                shutil.copymode(path, aside)
                aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a row that are worth a curve, as `kind/name`."""
    if not _is_plotted(row):
        return {}
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
    return {f"{row['kind']}/{name}": float(value) for name, value in numbers.items()}


def asked_for(spec: TrainingSpec, folder: Path, *, resumed_from: int) -> dict[str, Callable[[], Logger]]:
    """The loggers that the settings ask for besides the table, still to be opened; their files go below `folder`."""
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
