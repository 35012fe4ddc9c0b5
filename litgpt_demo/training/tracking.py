"""MLflow: one run there for all attempts of ours, with parameters, lineage, metrics and artifacts.

MLflow forgets no point that it was told, so that a step that is trained again after a resume would stand there twice.
The steps that it has are asked for when an attempt begins, and are not told again. All of it happens in a thread: a
server that is slow or away keeps no step waiting.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from time import time
from typing import Any

from litgpt_demo.config import MlflowConfig, TrainingSpec
from litgpt_demo.errors import NetworkError, UserError
from litgpt_demo.metrics import Row
from litgpt_demo.runs import CONFIG, read_document
from litgpt_demo.storage import Storage

RUN_TAG = "train_litgpt.run"
"""The tag by which an attempt finds the run of those before it."""
_LAST = 120.0  # seconds that the last metrics may take
# What one request may hold (docs of MLflow's REST API, "Log Batch").
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 6000
# A metric that each kind of row has.
_CURVES = ("step/loss", "evaluation/validation_loss", "checkpoint/seconds", "scores/validation/perplexity")
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Their defaults are 7 and 120 s: minutes for a server that is not there.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


class Mlflow:
    """A run of MLflow."""

    def __init__(self, settings: MlflowConfig, spec: TrainingSpec, run: Storage, table: Path) -> None:
        """
        Args:
            table: the run's metrics.csv, an artifact when the attempt ends.
        """
        self._settings, self._spec, self._run, self._table = settings, spec, run, table
        self._rows: SimpleQueue[tuple[float, int, dict[str, float]] | None] = SimpleQueue()
        self._error: Exception | None = None
        self._ended = False
        self._thread = Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        from litgpt_demo.training.loggers import scalars

        if self._error is not None:
            raise self._error
        self._ended = self._ended or row.get("kind") == "end"
        if values := scalars(row):
            self._rows.put((time(), int(row["step"]), values))

    def close(self) -> None:
        self._rows.put(None)
        self._thread.join(_LAST)
        if self._thread.is_alive():
            raise NetworkError(f"{self._settings.uri} did not take them within {_LAST:.0f} s")
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            self._open()
            while batch := self._batch():
                self._log(batch)
            self._client.log_text(self._id, self._run.read(CONFIG).decode(), CONFIG)
            if self._table.exists():
                self._client.log_artifact(self._id, str(self._table))
            self._client.set_terminated(self._id, "FINISHED" if self._ended else "KILLED")
        except Exception as error:  # raised again where the training says what it costs
            self._error = error

    def _open(self) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        if self._settings.secret is not None:
            os.environ["MLFLOW_TRACKING_TOKEN"] = os.environ[self._settings.secret]
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._settings.uri)
        experiment = self._experiment()
        there = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{self._spec.run}'", max_results=1)
        if there:
            self._id, known = there[0].info.run_id, there[0].data.params
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id, known = (
                self._client.create_run(experiment, tags=self._tags(), run_name=self._spec.run).info.run_id,
                {},
            )
            self._log_dataset()
        self._log_parameters(known)
        self._told = {
            name.partition("/")[0]: max(
                (point.step for point in self._client.get_metric_history(self._id, name)), default=0
            )
            for name in (_CURVES if there else ())
        }

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name, uri = self._settings.experiment, self._settings.uri
        if (there := self._client.get_experiment_by_name(name)) is not None:
            return str(there.experiment_id)
        # Without a server artifacts would go below the current folder.
        place = f"{Path(uri.removeprefix('sqlite:///')).resolve()}.artifacts" if uri.startswith("sqlite:///") else None
        try:
            return str(self._client.create_experiment(name, artifact_location=place))
        except MlflowException:
            if (there := self._client.get_experiment_by_name(name)) is None:
                raise
            return str(there.experiment_id)  # another training was faster

    def _tags(self) -> dict[str, str]:
        software = read_document(self._run).software
        told = {"mlflow.source.git.commit": software.get("commit"), "image": software.get("image")}
        return {
            RUN_TAG: self._spec.run,
            "folder": self._run.address(),
            "dataset": self._spec.dataset,
            "dataset_key": self._spec.dataset_key,
            **{name: str(value) for name, value in told.items() if value},
        }

    def _log_dataset(self) -> None:
        from mlflow.entities import Dataset, DatasetInput

        name = self._spec.dataset.rstrip("/").rpartition("/")[2]
        dataset = Dataset(
            name=name, digest=self._spec.dataset_key, source_type="train-litgpt", source=self._spec.dataset
        )
        self._client.log_inputs(self._id, [DatasetInput(dataset)])

    def _log_parameters(self, known: Mapping[str, str]) -> None:
        """Log those that MLflow has not: it refuses another value, and a setting that is no part of the run's key may
        change between attempts."""
        from mlflow.entities import Param

        settings = {
            "model": self._spec.model.model_dump(mode="json"),
            "train": self._spec.train.model_dump(mode="json"),
        }
        new = [Param(name, value[:_LONGEST_PARAM]) for name, value in _dotted(settings) if name not in known]
        for first in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._id, params=new[first : first + _MOST_PARAMS])

    def _batch(self) -> list[tuple[float, int, dict[str, float]]]:
        """Wait for a row, and return it with those behind it; nothing when the attempt has ended."""
        found, row = [], self._rows.get()
        try:
            while row is not None:
                found.append(row)
                if sum(len(values) for *_, values in found) > _MOST_METRICS // 2:
                    return found
                row = self._rows.get_nowait()
        except Empty:
            return found
        if found:
            self._rows.put(None)
        return found

    def _log(self, rows: list[tuple[float, int, dict[str, float]]]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(1000 * told), step)
            for told, step, values in rows
            for name, value in values.items()
            if step > self._told.get(name.partition("/")[0], 0)
        ]
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)


def require_mlflow(settings: MlflowConfig, environ: Mapping[str, str]) -> None:
    """Raise UserError if this node cannot track, whatever the server says."""
    if find_spec("mlflow") is None:
        raise UserError(
            "train.mlflow needs mlflow-skinny, which is not installed here; pip install 'train-litgpt[mlflow]' where "
            "the training runs, or in its image, or leave train.mlflow out"
        )
    if settings.secret is not None and not environ.get(settings.secret):
        raise UserError(
            f"train.mlflow.secret={settings.secret} names a variable that is not in this node's environment; set it "
            "where the run is submitted, or leave the secret out for a server that asks for none"
        )


def _dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
