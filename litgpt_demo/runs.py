"""The layout of a run's folder, which launcher and nodes share.

runs/<name>-<key>/   config.json  metrics.jsonl  skipped.json  attempts/<n>/  checkpoints/step-00000100/
                     final/{litgpt/,huggingface/,MODEL_CARD.md,lineage.json}  report.html  manifest.json
"""

from __future__ import annotations

import json

from pydantic import ValidationError

from litgpt_demo.config import TrainingSpec
from litgpt_demo.faults import DataError
from litgpt_demo.storage import Storage

CONFIG = "config.json"
METRICS = "metrics.jsonl"
SKIPPED = "skipped.json"
ATTEMPTS = "attempts"
FINAL = "final"
LITGPT = f"{FINAL}/litgpt"
HUGGINGFACE = f"{FINAL}/huggingface"
REPORT = "report.html"


def read_spec(run: Storage) -> TrainingSpec:
    """What the nodes are told about this run.

    Raises:
        DataError: the run has no config.json, or not one of this version.
    """
    try:
        document = json.loads(run.read(CONFIG))
        return TrainingSpec.model_validate(document["training"])
    except FileNotFoundError as error:
        raise DataError(f"{run.address(CONFIG)} is not there; start the run with `train-litgpt run`") from error
    except (json.JSONDecodeError, KeyError, ValidationError) as error:
        raise DataError(f"{run.address(CONFIG)} is not a config of this version: {error}") from error
