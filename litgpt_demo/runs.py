"""The layout of a run's folder, which launcher and nodes share.

runs/<name>-<key>/   config.json  sbom.cdx.json  metrics.jsonl  attempts/<n>/config.json
                     checkpoints/step-00000100/  profile/  final/{litgpt/,huggingface/,MODEL_CARD.md,lineage.json}
                     evaluations/<key>.json  evaluations/<key>.log  report.html  manifest.json
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, JsonValue

from litgpt_demo.config import Settings, TrainingSpec
from litgpt_demo.documents import Unreadable, parse_json, sealed
from litgpt_demo.errors import DataError, TooLarge
from litgpt_demo.metrics import MOST_FILE, rows_of
from litgpt_demo.storage import Storage
from litgpt_demo.storage.local import explaining
from litgpt_demo.storage.private import make_private

CONFIG = "config.json"
METRICS = "metrics.jsonl"
ATTEMPTS = "attempts"
FINAL = "final"
LITGPT = f"{FINAL}/litgpt"
HUGGINGFACE = f"{FINAL}/huggingface"
REPORT = "report.html"
EVALUATIONS = "evaluations"

NODE_REPORT = r"node-[0-9]{1,6}\.json"
"""The name of the report that a node leaves at its end in an attempt's folder, as a regular expression."""
MOST_NODE_REPORT = 8 << 20
"""Bytes of one: a thousand ranks with the ends of their tracebacks."""


class RecordedPrice(Settings):
    """The price of a machine: of Google's list, on demand, or as its user has it."""

    machine: str
    usd: float
    """Dollars for an hour of one machine."""
    region: str
    """Empty where it is the user's own."""
    date: str
    """The ISO date on which it was read."""

    @property
    def source(self) -> str:
        own = "as platform.usd_per_hour has it"
        return f"list price on demand in {self.region} of {self.date}" if self.region else own


class RunDocument(Settings):
    """The content of config.json: what a run is made from, written before its first attempt."""

    run: dict[str, JsonValue] = Field({})
    """The config as the user wrote it."""
    training: TrainingSpec
    """The settings that every rank reads."""
    software: dict[str, JsonValue] = Field({})
    """The identity of the code: image, commit, dirty, packages."""
    price: RecordedPrice | None = None
    """None where the nodes' machines have no list price."""


def write_document(run: Storage, document: RunDocument) -> None:
    """Leave config.json in the run's folder, with a checksum of its own. A new local folder is its owner's alone."""
    if (folder := run.local_path()) is not None:
        with explaining(run.root):
            make_private(folder)
    run.write(CONFIG, sealed(document.model_dump_json(indent=1).encode(), "config"))


def read_document(run: Storage) -> RunDocument:
    """Return the config of the run. One of an older version has no checksum, and is read all the same."""
    try:
        content = run.read(CONFIG)
    except FileNotFoundError as error:
        raise DataError(f"{run.address(CONFIG)} is not there; start the run with `train-litgpt run`") from error
    copies = "copy a sound one, for the run's folder has the same as that of its newest attempt that trains"
    fix = f"{copies}; or, once no job of it runs, `train-litgpt run` with the run's config writes it anew"
    return parse_json(content, RunDocument, where=run.address(CONFIG), fix=fix)


def read_metrics(run: Storage, bad: Unreadable | None = None) -> list[dict[str, Any]]:
    """Return the rows of the run's metrics, none where there are none yet; `bad` counts what cannot be read."""
    try:
        return rows_of(run.read(METRICS, most=MOST_FILE), bad)
    except FileNotFoundError:
        return []
    except TooLarge as error:
        if bad is not None:
            bad.add(str(error))
        return []


def read_spec(run: Storage) -> TrainingSpec:
    return read_document(run).training
