"""The diagnosis of a dead attempt from its traces: the class of failure, culprit, evidence, and what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, FiniteFloat

from launcher.job import JobFault, JobStatus, LogLine
from litgpt_demo.documents import Unreadable, parse_json
from litgpt_demo.errors import DataError, Fault, fault_of_exception, fault_of_exit_code
from litgpt_demo.runs import MOST_NODE_REPORT, NODE_REPORT
from litgpt_demo.storage import Storage


class Action(StrEnum):
    """The consequence of a failure."""

    STOP = "stop"
    RESTART = "new attempt"
    RESTART_FREE = "new attempt, counted unless a new checkpoint was committed"


ACTIONS: Mapping[Fault, Action] = {
    Fault.USER: Action.STOP,
    Fault.DATA: Action.STOP,
    Fault.OUT_OF_MEMORY: Action.STOP,
    # A disk does not empty itself, and the next attempt's machines mount the same one or are of the same size.
    Fault.DISK_FULL: Action.STOP,
    Fault.NODE: Action.RESTART,
    Fault.NETWORK: Action.RESTART,
    Fault.HANG: Action.RESTART,
    Fault.PREEMPTED: Action.RESTART_FREE,
    # An exit code that is not ours: a crash in native code or a bug. Restarting would hide it at a GPU's price.
    Fault.UNKNOWN: Action.STOP,
}

ADVICE: Mapping[Fault, str] = {
    Fault.USER: "fix what the message names, and run again",
    Fault.DATA: "fix or remove what the message names, and run again; finished steps are kept",
    Fault.OUT_OF_MEMORY: "halve train.micro_batch (the batch stays), or turn on train.activation_checkpointing",
    Fault.DISK_FULL: "make room where the message says, and run again; training goes on from the last checkpoint",
    Fault.NODE: "the machine or a process on it died; a new attempt resumes from the last checkpoint",
    Fault.NETWORK: "a peer was lost; a new attempt resumes from the last checkpoint",
    Fault.HANG: "the stacks say what each rank waited for; a new attempt resumes from the last checkpoint",
    Fault.PREEMPTED: "the machine was taken away; a new attempt resumes from the last checkpoint",
    Fault.UNKNOWN: "read the traceback above and the logs of the attempt",
}

# A lost peer is what the others see of somebody's death: it is evidence of the cause only where nothing else is.
_SEVERITY = (
    Fault.USER, Fault.DATA, Fault.OUT_OF_MEMORY, Fault.DISK_FULL, Fault.PREEMPTED, Fault.HANG, Fault.NODE,
    Fault.UNKNOWN, Fault.NETWORK,
)  # fmt: skip

# Seconds that a platform lets the nodes end by themselves after one has failed, before it asks them to leave (5 in
# launcher.platforms.local.supervisor, PEER_GRACE). A node that is asked later than this is not preempted.
_ALONE = 4.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The reason why an attempt ended."""

    fault: Fault
    node: int | None
    rank: int | None
    """The rank within the whole job."""
    evidence: str
    logs: str
    """The folder of the attempt's logs."""

    @property
    def action(self) -> Action:
        return ACTIONS[self.fault]

    def __str__(self) -> str:
        who = (
            "" if self.node is None else f" on node {self.node}" + ("" if self.rank is None else f", rank {self.rank}")
        )
        return f"{self.fault}{who}: {self.evidence}\n  what to do: {ADVICE[self.fault]}\n  logs: {self.logs}"


# A node may write anything: what is too long is cut, what is too large is no report. A million nodes or ranks are none.
_Number = Annotated[int, Field(ge=0, lt=1_000_000)]
_Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Text = Annotated[str, AfterValidator(lambda text: text[:10_000])]


class _RankReport(BaseModel):
    """A node's report of a rank that failed; fields that are not needed here are ignored."""

    rank: _Number | None
    message: _Text = ""
    traceback: Annotated[tuple[_Text, ...], AfterValidator(lambda lines: lines[-100:])] = ()
    time: FiniteFloat | None = None


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


def diagnose(status: JobStatus, reports: Iterable[Mapping[str, Any]], tail: Iterable[LogLine], *, logs: str) -> Verdict:
    """The verdict on an attempt that failed.

    Args:
        reports: `node_reports` of the attempt; nodes that were killed left none.
        tail: the last log lines, shown where nothing better is known.
    """
    # A node that was evicted could say of its end that it was asked to leave at the most.
    suspects = [
        _suspect(report)
        for report in reports
        if report.get("exit_code") != 0 and int(report["node"]) not in status.evictions
    ]
    told = {suspect.node for suspect in suspects}
    suspects += [
        _killed(node, code, status.evictions.get(node, ""))
        for node, code in status.exit_codes.items()
        if code != 0 and node not in told
    ]
    if not suspects:
        return Verdict(
            fault=_fault_of_words(status.native), node=None, rank=None, evidence=_last(status, tail), logs=logs
        )
    cause = _culprit(suspects)
    return Verdict(fault=cause.fault, node=cause.node, rank=cause.rank, evidence=cause.evidence, logs=logs)


def _fault_of_words(native: str) -> Fault:
    """The class that a platform's words name; a job that ended without any is taken for one whose machine died."""
    fault = fault_of_exception(native)
    return Fault.NODE if fault is Fault.UNKNOWN else fault


def _last(status: JobStatus, tail: Iterable[LogLine]) -> str:
    """The platform's words, and the last lines of the logs where there are any."""
    if lines := list(tail)[-15:]:
        return "\n".join([f"{status.native}; last lines:", *map(str, lines)])
    return f"{status.native}; its nodes left neither a report nor a line of log"


class _Suspect(NamedTuple):
    """The end of one node."""

    fault: Fault
    node: int
    rank: int | None
    evidence: str
    ended: float
    """Seconds since the epoch; minus infinity where it left no report, for then it may have been the first."""
    began: float = math.inf
    """Seconds since the epoch, where the first is the cause of the others: when its rank fell silent, or when it was
    asked to leave."""


def _culprit(suspects: Sequence[_Suspect]) -> _Suspect:
    """The node that explains the others."""
    first = min(suspect.ended for suspect in suspects)

    def order(suspect: _Suspect) -> tuple[bool, int, float, int]:
        was_told = suspect.fault is Fault.PREEMPTED and suspect.ended > first + _ALONE
        return was_told, _SEVERITY.index(suspect.fault), suspect.began, suspect.node

    return min(suspects, key=order)


def _suspect(report: Mapping[str, Any]) -> _Suspect:
    """A node that told how it ended; of its ranks, the first one explains the others (litgpt_demo.node.main)."""
    fault = Fault(report["fault"]) if report.get("fault") else fault_of_exit_code(int(report["exit_code"]))
    cause: Mapping[str, Any] = next(iter(report.get("ranks") or ()), {})
    evidence = cause.get("message") or report.get("message") or f"ended with {_ending(int(report['exit_code']))}"
    # Where a rank left because it was asked to is no news.
    lines = () if fault is Fault.PREEMPTED else cause.get("traceback") or ()
    traceback = "".join(f"\n    {line}" for line in lines)
    began = {Fault.HANG: cause.get("time"), Fault.PREEMPTED: report.get("asked")}.get(fault)
    return _Suspect(
        fault,
        int(report["node"]),
        cause.get("rank"),
        f"{evidence}{traceback}",
        float(report["ended"]),
        math.inf if began is None else float(began),
    )


def _killed(node: int, code: int, eviction: str) -> _Suspect:
    """A node that could not tell how it ended. One that was evicted comes before those that ended with it."""
    began = -math.inf if eviction else math.inf
    return _Suspect(fault_of_exit_code(code), node, None, eviction or _unreported(code), -math.inf, began)


def _unreported(code: int) -> str:
    """Return what is known of a node that has left no report: out of memory itself, it could not write one."""
    ended = f"the node's process ended with {_ending(code)}"
    if fault_of_exit_code(code) is not Fault.OUT_OF_MEMORY:
        return ended
    return (
        f"{ended}: killed for its machine's or pod's memory, not its GPUs'; raise platform.memory if that is the limit"
    )


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
