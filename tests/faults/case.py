"""The failures that the diagnosis is scored on, one a line of tests/faults/cases.jsonl, and their judgement."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from pydantic import BaseModel, JsonValue

from launcher.job import JobState, JobStatus, LogLine
from launcher.runs.diagnosis import Diagnosis, diagnose
from litgpt_demo.errors import FailureClass
from litgpt_demo.runs import node_reports
from litgpt_demo.storage import open_storage

CASES = Path(__file__).with_name("cases.jsonl")


class Status(BaseModel, extra="forbid"):
    """The end of the job as the platform told it."""

    native: str = ""
    exit_codes: dict[int, int] = {}
    evictions: dict[int, str] = {}


class Case(BaseModel, extra="forbid"):
    """One failure: what it left, and who caused it."""

    name: str
    about: str
    """A sentence that tells the fault which was caused."""
    how: Literal["made", "documented"]
    """Really caused on this product's own nodes, or put together from texts that platforms and libraries document."""
    source: str
    """What was done, `[DISTURBANCE[:NODE]] PROGRAM ARGUMENTS`, or the address of the text."""
    held_out: bool
    """True if it was made after the rules of the diagnosis were fixed, and changed none of them."""
    nodes: int
    processes: int
    fault: FailureClass
    culprits: tuple[tuple[int | None, int | None], ...]
    """Node and rank of whom it was; several where all failed alike, no rank where it was the node."""
    status: Status = Status()
    reports: dict[str, JsonValue] = {}
    """The nodes' reports, by the names of their files."""
    logs: tuple[tuple[int, str], ...] = ()
    """The lines that the platform showed, each with its node, in the order in which they came."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A class and a culprit, whoever named them."""

    fault: FailureClass
    node: int | None
    rank: int | None


def cases() -> Iterator[Case]:
    """Yield all cases, by name."""
    yield from map(Case.model_validate_json, CASES.read_text().splitlines())


def judged(case: Case) -> Diagnosis:
    """Return the product's diagnosis of a case, from the files that its nodes left."""
    with TemporaryDirectory() as folder:
        for name, content in case.reports.items():
            (Path(folder) / name).write_text(json.dumps(content))
        reports = node_reports(open_storage(folder))
    status = JobStatus(state=JobState.FAILED, **case.status.model_dump())
    tail = [LogLine(node=node, text=text) for node, text in case.logs[-200:]]
    return diagnose(status, reports, tail, logs="/runs/faults/attempts/1", nodes=case.nodes)
