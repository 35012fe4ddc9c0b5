"""The places where a run is looked at: its folder, its logs, its platform's pages, its trackers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from litgpt_demo.config import MlflowConfig, TrainConfig, WandbConfig
from litgpt_demo.storage import Storage
from litgpt_demo.storage.base import file_page, folder_page

_FILES = (".json", ".jsonl", ".md")


class RunPlace(NamedTuple):
    """A place, and its page in a browser."""

    name: str
    text: str
    """The address of the place, or the command that shows it."""
    url: str | None = None
    """None where no browser shows it, as a folder of this machine."""


def web_page(address: str) -> str | None:
    """Return where a browser lists the folder, or shows the file, at an address; None on this machine."""
    return file_page(address) if address.endswith(_FILES) else folder_page(address)


def run_places(
    run: Storage, *, name: str, logs: str, train: TrainConfig | None, pages: Mapping[str, str]
) -> tuple[RunPlace, ...]:
    """Return the places of an attempt while it runs.

    Args:
        name: the run's name.
        logs: the address of the attempt's logs.
        train: the settings of its training; None for a script of the user's own.
        pages: the job's pages on its platform, by what they are.
    """
    return (
        RunPlace("Run's folder", run.address(), folder_page(run.address())),
        RunPlace("Logs", logs, folder_page(logs)),
        RunPlace("Logs in a terminal", f"train-litgpt logs {name} --root {run.address().rpartition('/runs/')[0]}"),
        *(RunPlace(what, what, url) for what, url in pages.items()),
        *(_trackers(run, name, train) if train is not None else ()),
    )


def _trackers(run: Storage, name: str, train: TrainConfig) -> tuple[RunPlace, ...]:
    asked = (
        _tensorboard(run) if train.tensorboard else None,
        _wandb(run, name, train.wandb) if train.wandb is not None else None,
        _mlflow(train.mlflow) if train.mlflow is not None else None,
    )
    return tuple(place for place in asked if place is not None)


def _tensorboard(run: Storage) -> RunPlace:
    return RunPlace("TensorBoard", f"tensorboard --logdir {run.address('tensorboard')}")


def _wandb(run: Storage, name: str, settings: WandbConfig) -> RunPlace:
    """Return the run's page at https://wandb.ai, where the account is known; the records' folder where none is used."""
    if settings.secret is None:
        return RunPlace("Weights & Biases", run.address("wandb"), folder_page(run.address("wandb")))
    if settings.entity is None:
        return RunPlace("Weights & Biases", f"run {name} of the project {settings.project}", "https://wandb.ai/home")
    project = f"{settings.entity}/{settings.project}"
    return RunPlace("Weights & Biases", f"{project}/{name}", f"https://wandb.ai/{project}/runs/{name}")


def _mlflow(settings: MlflowConfig) -> RunPlace:
    shown = settings.uri if settings.uri.startswith("http") else None
    return RunPlace("MLflow", f"{settings.uri}, experiment {settings.experiment}", shown)
