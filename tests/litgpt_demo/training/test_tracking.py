"""MLflow's record of a training, read back with its own client from a real store of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from litgpt_demo.config import MlflowConfig, TrainConfig
from litgpt_demo.errors import UserError
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training.tracking import RUN_TAG, Mlflow, require_mlflow

pytest.importorskip("mlflow")
NewRun: TypeAlias = Callable[..., Path]


def told(run: Path, uri: str, rows: list[dict[str, Any]]) -> None:
    """One attempt of a run."""
    storage = open_storage(str(run))
    logger = Mlflow(MlflowConfig(uri=uri), read_spec(storage), storage, run / "metrics.csv")
    for row in rows:
        logger.write(row)
    logger.close()


@pytest.mark.long
def test_all_attempts_are_one_run_that_has_each_step_once(finished_copy: Path, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    rows = rows_of((finished_copy / "metrics.jsonl").read_text())
    killed = [row for row in rows if row["step"] <= 7]  # its last checkpoint was of step 4
    told(finished_copy, uri, killed)
    document = json.loads((finished_copy / "config.json").read_text())
    document["training"]["train"]["max_time"] = "PT8H"  # a setting that a run may change, and MLflow's may not
    (finished_copy / "config.json").write_text(json.dumps(document))
    told(finished_copy, uri, [row for row in rows if row["step"] > 4])

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("train-litgpt")
    (run,) = client.search_runs([experiment.experiment_id])
    for name in ("step/loss", "evaluation/validation_loss"):
        kind, _, column = name.partition("/")
        history = client.get_metric_history(run.info.run_id, name)
        assert {point.step: point.value for point in history} == curve(rows, kind, column)
        assert len(history) == len(curve(rows, kind, column))
    assert run.info.status == "FINISHED"
    assert (run.data.params["train.learning_rate"], run.data.params["train.max_time"]) == ("0.02", "None")
    assert run.data.tags[RUN_TAG] == read_spec(open_storage(str(finished_copy))).run
    (dataset,) = run.inputs.dataset_inputs
    assert dataset.dataset.digest == read_spec(open_storage(str(finished_copy))).dataset_key
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"config.json", "metrics.csv"}


def test_a_server_that_is_away_keeps_no_step_waiting(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    storage = open_storage(str(new_run("unheard")))
    began = time.monotonic()
    logger = Mlflow(MlflowConfig(uri="http://127.0.0.1:9"), read_spec(storage), storage, Path("metrics.csv"))
    logger.write({"kind": "step", "step": 1, "loss": 2.0})
    assert time.monotonic() - began < 1
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        logger.close()


def test_a_token_is_named_and_never_written() -> None:
    asked = TrainConfig.model_validate({"mlflow": {"uri": "https://mlflow.example.com", "secret": "MY_TOKEN"}})
    assert asked.mlflow is not None
    with pytest.raises(UserError, match="MY_TOKEN names a variable that is not in this node's environment"):
        require_mlflow(asked.mlflow, {})
    require_mlflow(asked.mlflow, {"MY_TOKEN": "0123456789"})
    assert asked.outcome() == TrainConfig().outcome()
    with pytest.raises(ValueError, match="mlflow") as refused:
        TrainConfig.model_validate({"mlflow": {"uri": "https://me:hunter2@mlflow.example.com"}})
    assert "hunter2" not in str(refused.value)
