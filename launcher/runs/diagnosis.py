"""The diagnosis of a dead attempt from its traces: the class of failure, culprit, evidence, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from launcher.job import MACHINE, JobFault, JobStatus, LogLine
from launcher.runs.culprits import Report, culprit
from litgpt_demo.config import Settings
from litgpt_demo.documents import parse_json, sealed
from litgpt_demo.errors import Fault, fault_of_exception
from litgpt_demo.findings import Finding
from litgpt_demo.storage import Storage

VERDICT = "verdict.json"
"""The name of the verdict in an attempt's folder."""

_MOST_LINES, _LONGEST = 60, 1000  # lines of evidence, and characters of each
_LONGEST_HOST = 253  # characters, as of a name of DNS
_MOST_BYTES = 1 << 20


class Action(StrEnum):
    """The consequence of a failure."""

    STOP = "stop"
    RESTART = "new attempt, as far as the budget of its class goes"


ACTIONS: Mapping[Fault, Action] = {
    Fault.USER: Action.STOP,
    Fault.DATA: Action.STOP,
    Fault.OUT_OF_MEMORY: Action.STOP,
    # A disk does not empty itself, and the next attempt's machines mount the same one or are of the same size.
    Fault.DISK_FULL: Action.STOP,
    Fault.NODE: Action.RESTART,
    Fault.NETWORK: Action.RESTART,
    Fault.HANG: Action.RESTART,
    Fault.PREEMPTED: Action.RESTART,
    # An exit code that is not ours: a crash in native code or a bug. Restarting would hide it at a GPU's price.
    Fault.UNKNOWN: Action.STOP,
}
"""The consequence of each class by itself, as its default rule has it (litgpt_demo.config.RestartSettings)."""

_OF_MACHINES = {Fault.NODE, Fault.HANG}
"""The classes that are held against the culprit's machine. A lost peer is somebody else's fault, and a machine that was
taken away is not broken."""

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
    host: str = ""
    """The node's machine by its platform's name, where it is known."""
    clear: bool = False
    """True where no other node may as well have been the cause."""

    @property
    def machine(self) -> str:
        """Return the machine that is to blame; empty where that is nobody's, or not clear."""
        blames = self.clear and self.fault in _OF_MACHINES and re.fullmatch(MACHINE, self.host)
        return self.host if blames else ""

    @property
    def action(self) -> Action:
        return ACTIONS[self.fault]

    @property
    def lines(self) -> tuple[str, ...]:
        """The evidence to be stored and shown: its first lines, each cut."""
        return tuple(line[:_LONGEST] for line in self.evidence.splitlines()[:_MOST_LINES])

    @property
    def finding(self) -> Finding:
        """The verdict as a finding."""
        code = f"attempt.{self.fault.replace(' ', '-')}"
        return Finding("error", code, f"{self.fault}{self.culprit}: {self.lines[0]}", ADVICE[self.fault], self.fault)

    @property
    def culprit(self) -> str:
        """The node and rank as the end of a phrase; empty where nobody is known."""
        if self.node is None:
            return ""
        return f" on node {self.node}" + ("" if self.rank is None else f", rank {self.rank}")

    def __str__(self) -> str:
        machine = f"  machine: {self.machine}\n" if self.machine else ""
        advice = f"  what to do: {ADVICE[self.fault]}\n  logs: {self.logs}"
        return f"{self.fault}{self.culprit}: {self.evidence}\n{machine}{advice}"


class VerdictDocument(Settings):
    """The content of verdict.json in an attempt's folder: why it ended, for people and for scripts."""

    format: Literal[1] = 1
    code: str = Field(max_length=100)
    """The finding's stable name, which scripts may rely on."""
    fault: JobFault
    node: int | None = Field(ge=0, lt=1_000_000)
    rank: int | None = Field(ge=0, lt=1_000_000)
    host: str = Field(max_length=_LONGEST_HOST)
    """The machine of the culprit by its platform's name; empty where it is not known."""
    clear: bool = False
    """True where no other node may as well have been the cause."""
    evidence: tuple[Annotated[str, Field(max_length=_LONGEST)], ...] = Field(max_length=_MOST_LINES)
    action: Action
    """The consequence by the class alone; the run's budget may be used up."""
    advice: str = Field(max_length=_LONGEST)


def write_verdict(attempt: Storage, verdict: Verdict) -> bool:
    """Leave verdict.json in the attempt's folder, unless another orchestrator has; return whether this one did."""
    document = VerdictDocument(
        code=verdict.finding.code,
        fault=verdict.fault,
        node=verdict.node,
        rank=verdict.rank,
        host=verdict.host[:_LONGEST_HOST],
        clear=verdict.clear,
        evidence=verdict.lines,
        action=verdict.action,
        advice=ADVICE[verdict.fault],
    )
    return attempt.create(VERDICT, sealed(document.model_dump_json(indent=1).encode(), "record"))


def read_verdict(attempt: Storage) -> VerdictDocument | None:
    """Return what was judged of an attempt, None where nothing was.

    Raises:
        DataError: its verdict.json is damaged.
    """
    if not attempt.exists(VERDICT):
        return None
    content = attempt.read(VERDICT, most=_MOST_BYTES)
    where, fix = attempt.address(VERDICT), "the attempt's logs and its nodes' reports tell the same"
    return parse_json(content, VerdictDocument, where=where, fix=fix)


def diagnose(
    status: JobStatus,
    reports: Iterable[Report],
    tail: Iterable[LogLine],
    *,
    logs: str,
    nodes: int | None = None,
) -> Verdict:
    """The verdict on an attempt that failed.

    Args:
        reports: `node_reports` of the attempt; nodes that were killed left none.
        tail: the last log lines, shown where nothing better is known.
        nodes: the nodes of the job, where they are known.
    """
    cause = culprit(status, reports, nodes=nodes)
    if cause is None:
        return Verdict(
            fault=_fault_of_words(status.native), node=None, rank=None, evidence=_last(status, tail), logs=logs
        )
    return Verdict(
        fault=cause.fault, node=cause.node, rank=cause.rank, evidence=cause.evidence, logs=logs, host=cause.host,
        clear=cause.clear,
    )  # fmt: skip


def _fault_of_words(native: str) -> Fault:
    """The class that a platform's words name; a job that ended without any is taken for one whose machine died."""
    fault = fault_of_exception(native)
    return Fault.NODE if fault is Fault.UNKNOWN else fault


def _last(status: JobStatus, tail: Iterable[LogLine]) -> str:
    """The platform's words, and the last lines of the logs where there are any."""
    if lines := list(tail)[-15:]:
        return "\n".join([f"{status.native}; last lines:", *map(str, lines)])
    return f"{status.native}; its nodes left neither a report nor a line of log"
