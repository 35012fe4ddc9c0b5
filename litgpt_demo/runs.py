"""The layout of a run's folder, which launcher and nodes share.

runs/<name>-<id>/    config.json  sbom.cdx.json  metrics.jsonl  attempts/<n>/config.json
                     checkpoints/step-00000100/  profile/  final/{litgpt/,huggingface/,MODEL_CARD.md,lineage.json}
                     evaluations/<hash>.json  evaluations/<hash>.log  report.html  manifest.json
                     replays/<first>-<last>.json  replays/<first>-<last>.html
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, Field, FiniteFloat, JsonValue

from litgpt_demo.config import Settings, TrainingSpec
from litgpt_demo.documents import Unreadable, parse_json, with_checksum
from litgpt_demo.errors import JOB_FAILURE_CLASSES, DataError, FailureClass, TooLarge
from litgpt_demo.metrics import MOST_FILE, rows_of
from litgpt_demo.storage import MANIFEST, Storage, open_storage
from litgpt_demo.storage.local import translate_os_errors
from litgpt_demo.storage.private import make_private

CONFIG = "config.json"
METRICS = "metrics.jsonl"
ATTEMPTS = "attempts"
FINAL = "final"
FINAL_AVERAGE = "final-average"
"""The models of the moving average of the weights, with the same files as FINAL."""
LITGPT = f"{FINAL}/litgpt"
HUGGINGFACE = f"{FINAL}/huggingface"
REPORT = "report.html"
EVALUATIONS = "evaluations"
REPLAYS = "replays"

_NODE_REPORT = re.compile(r"node-[0-9]{1,6}\.json")
_REPORT_OF_ANY_LIFE = re.compile(rf"(restart-[0-9]+/)?{_NODE_REPORT.pattern}")
_MOST_NODE_REPORT = 8 << 20  # bytes: a thousand ranks with the ends of their tracebacks


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
    """Write config.json in the run's folder, with a checksum. A new local folder is readable by its owner only."""
    folder = run.local_path()
    if folder is not None:
        with translate_os_errors(run.root):
            make_private(folder)
    run.write(CONFIG, with_checksum(document.model_dump_json(indent=1).encode(), "config"))


def read_document(run: Storage) -> RunDocument:
    """Return the config of the run. One of an older version has no checksum, and is read all the same."""
    try:
        content = run.read(CONFIG)
    except FileNotFoundError as error:
        raise DataError(f"{run.address(CONFIG)} does not exist; start the run with `train-litgpt run`") from error
    copies = "copy a sound one, for the run's folder has the same as that of its newest attempt that trains"
    fix = f"{copies}; or, once no job of it runs, `train-litgpt run` with the run's config writes it again"
    return parse_json(content, RunDocument, where=run.address(CONFIG), fix=fix)


def dataset_address(run: Storage, recorded: str) -> str:
    """Return the address of a run's dataset: in the run's own root, which may be a copy, or else the recorded one."""
    own = f"{run.address().rpartition('/runs/')[0]}/datasets/{recorded.rpartition('/')[2]}"
    return own if open_storage(own).exists(MANIFEST) else recorded


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


def _of_a_job(fault: FailureClass) -> FailureClass:
    if fault not in JOB_FAILURE_CLASSES:
        raise ValueError(f"no node ends with {fault!r}")
    return fault


JobFault: TypeAlias = Annotated[FailureClass, AfterValidator(_of_a_job)]
"""The class of a failure that a job ends with; the others are the launching side's."""

# Stored values may be damaged or forged: a number is one that a platform can have given.
NodeNumber: TypeAlias = Annotated[int, Field(ge=0, lt=1_000_000)]
"""The number of a node or rank."""
ExitCode: TypeAlias = Annotated[int, Field(ge=-1000, lt=1_000_000)]
"""A byte, one of GCP Batch's reserved codes, or the negative number of a signal."""

# A node may write anything: a text that is too long is cut, a file that is too large is not a report.
_Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Text = Annotated[str, AfterValidator(lambda text: text[:10_000])]


class RankReport(BaseModel):
    """A node's report of a rank that failed; fields that are not needed here are ignored."""

    rank: NodeNumber | None = None
    exit_code: ExitCode | None = None
    message: _Text = ""
    traceback: Annotated[tuple[_Text, ...], AfterValidator(lambda lines: lines[-100:])] = ()
    time: FiniteFloat | None = None
    step: Annotated[int, Field(ge=0, le=2**53)] | None = None
    waits: bool = False
    held: bool = False


class Trace(BaseModel):
    """A line that a node picked from its kernel's log or its ranks' output (litgpt_demo.node.evidence)."""

    source: Literal["kernel", "memory", "output", "recorder"]
    text: Annotated[str, AfterValidator(lambda text: text[:500])]
    rank: NodeNumber | None = None


class NodeReport(BaseModel):
    """A node's report of its end (litgpt_demo.node.main)."""

    node: NodeNumber
    exit_code: ExitCode
    fault: JobFault | None
    message: _Text
    ended: FiniteFloat
    signalled_at: FiniteFloat | None = None
    started: FiniteFloat | None = None
    network_test_seconds: _Seconds = 0.0
    stage_seconds: _Seconds = 0.0
    host: Annotated[str, AfterValidator(lambda text: text[:253])] = ""
    """The machine, by its platform's name, which is at most as long as a DNS name."""
    stopped: Annotated[tuple[NodeNumber, ...], Field(max_length=1024)] = ()
    """The ranks that were stopped because of others, and had failed at nothing."""
    traces: Annotated[tuple[Trace, ...], AfterValidator(lambda traces: traces[:64])] = ()
    ranks: Annotated[tuple[RankReport, ...], Field(max_length=1024)] = ()
    """Those that failed, the one first that explains the others."""


def node_reports(attempt: Storage, bad: Unreadable | None = None, *, all_lives: bool = False) -> list[NodeReport]:
    """Return the reports `node-<k>.json` that the nodes of an attempt wrote at their end.

    A damaged report counts as none, and so does one in another node's file. `bad` counts both.

    Args:
        all_lives: also return the reports of earlier lives of an attempt that its platform restarted. Each life's
            reports were moved to `restart-<n>/`.
    """
    pattern = _REPORT_OF_ANY_LIFE if all_lives else _NODE_REPORT
    reports = []
    # torchrun leaves JSON files too, below a node's own folder.
    for path in attempt.list():
        if not pattern.fullmatch(path):
            continue
        try:
            content = attempt.read(path, most=_MOST_NODE_REPORT)
            report = parse_json(content, NodeReport, where=attempt.address(path), fix="read the node's log")
            if path.rpartition("/")[2] != f"node-{report.node}.json":
                raise DataError(f"{attempt.address(path)} is signed by node {report.node}", fix="read the node's log")
            reports.append(report)
        except DataError as error:
            if bad is not None:
                bad.add(str(error))
    return reports
