"""The evidence that an attempt's nodes left: their reports, validated, for a node may write anything."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, FiniteFloat

from launcher.job import JobFault
from litgpt_demo.documents import Unreadable, parse_json
from litgpt_demo.errors import DataError
from litgpt_demo.runs import MOST_NODE_REPORT, NODE_REPORT
from litgpt_demo.storage import Storage

# A node may write anything: what is too long is cut, what is too large is no report. A million nodes or ranks are none.
_Number = Annotated[int, Field(ge=0, lt=1_000_000)]
_Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Text = Annotated[str, AfterValidator(lambda text: text[:10_000])]


class _RankReport(BaseModel):
    """A node's report of a rank that failed; fields that are not needed here are ignored."""

    rank: _Number | None
    exit_code: Annotated[int, Field(ge=-1000, lt=1_000_000)] | None = None
    message: _Text = ""
    traceback: Annotated[tuple[_Text, ...], AfterValidator(lambda lines: lines[-100:])] = ()
    time: FiniteFloat | None = None
    waits: bool = False
    held: bool = False


class _Trace(BaseModel):
    """A line that a node picked from its kernel's log or its ranks' output (litgpt_demo.node.evidence)."""

    source: Literal["kernel", "memory", "output", "recorder"]
    text: Annotated[str, AfterValidator(lambda text: text[:500])]
    rank: _Number | None = None


class _NodeReport(BaseModel):
    """A node's report of its end."""

    node: _Number
    exit_code: Annotated[int, Field(ge=-1000, lt=1_000_000)]
    """A byte, one of GCP Batch's reserved codes, or the negative number of a signal."""
    fault: JobFault | None
    message: _Text
    ended: FiniteFloat
    asked: FiniteFloat | None = None
    started: FiniteFloat | None = None
    gate_seconds: _Seconds = 0.0
    stage_seconds: _Seconds = 0.0
    host: Annotated[str, AfterValidator(lambda text: text[:253])] = ""
    """The machine, by its platform's name; a name of DNS has 253 characters at the most."""
    stopped: Annotated[tuple[_Number, ...], Field(max_length=1024)] = ()
    """The ranks that were stopped because of others, and had failed at nothing."""
    traces: Annotated[tuple[_Trace, ...], AfterValidator(lambda traces: traces[:64])] = ()
    ranks: Annotated[tuple[_RankReport, ...], Field(max_length=1024)] = ()


def damaged_reports() -> Unreadable:
    """Return the count of damaged reports, before any is."""
    return Unreadable("nodes' reports")


def node_reports(attempt: Storage, bad: Unreadable | None = None) -> list[dict[str, Any]]:
    """Return the report that each node wrote of its end (litgpt_demo.node.main): `node-<k>.json`.

    A damaged one, or one in another node's file, counts as none: the node's exit code is left, as for a node that was
    killed. `bad` counts both.
    """
    found = []
    # Below a node's own folder torchrun leaves JSON files too.
    for name in (path for path in attempt.list() if re.fullmatch(NODE_REPORT, path)):
        try:
            content = attempt.read(name, most=MOST_NODE_REPORT)
            report = parse_json(content, _NodeReport, where=attempt.address(name), fix="read the node's log")
            if name != f"node-{report.node}.json":
                raise DataError(f"{attempt.address(name)} is signed by node {report.node}; read the node's log")
            found.append(report.model_dump(mode="json"))
        except DataError as error:
            if bad is not None:
                bad.add(str(error))
    return found
