"""The diagnosis of a dead attempt from its traces: the class of failure, culprit, evidence, and what to do.

Most nodes of a failed job are victims. One loses the connection to a peer that died, one waits for a peer until its
patience is over, one is asked to leave because another has ended. What such a node says is evidence of the cause only
where nothing else is, and it points to those that complain of nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from signal import Signals

from launcher.job import MACHINE, JobStatus, LogLine
from litgpt_demo.errors import FailureClass, fault_of_exception, fault_of_exit_code, is_gpu_error
from litgpt_demo.runs import NodeReport, RankReport
from litgpt_demo.secrets import Cleaner

_MOST_LINES, _LONGEST = 60, 1000  # lines of evidence, and characters of each


class Action(StrEnum):
    STOP = "stop"
    RESTART = "new attempt, as far as the budget of its class goes"


RESTARTED = {FailureClass.NODE, FailureClass.NETWORK, FailureClass.HANG, FailureClass.PREEMPTED}
"""The classes that a new attempt may follow, as their default rules have it (litgpt_demo.config.RestartSettings).

A disk does not empty itself, and the next attempt's machines mount the same one or are of the same size. An exit code
that is not ours is a crash in native code or a bug: restarting would hide it at a GPU's price."""

_OF_MACHINES = {FailureClass.NODE, FailureClass.HANG}
"""The classes that are held against the culprit's machine. A lost peer is somebody else's fault, and a machine that was
taken away is not broken."""

ADVICE: Mapping[FailureClass, str] = {
    FailureClass.USER: "fix what the message names, and run again",
    FailureClass.DATA: "fix or remove what the message names, and run again; finished steps are kept",
    FailureClass.OUT_OF_MEMORY: "halve train.micro_batch (the batch stays), or turn on train.activation_checkpointing",
    FailureClass.DISK_FULL: "make room where the message says, and run again; it resumes from the last checkpoint",
    FailureClass.NODE: "the machine or a process on it died; a new attempt resumes from the last checkpoint",
    FailureClass.NETWORK: "a peer was lost; a new attempt resumes from the last checkpoint",
    FailureClass.HANG: "the stacks say what each rank waited for; a new attempt resumes from the last checkpoint",
    FailureClass.PREEMPTED: "the machine was taken away; a new attempt resumes from the last checkpoint",
    FailureClass.UNKNOWN: "read the traceback above and the logs of the attempt",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The reason why an attempt ended."""

    fault: FailureClass
    node: int | None = None
    rank: int | None = None
    """The rank within the whole job."""
    evidence: str
    logs: str = ""
    host: str = ""
    """The node's machine by its platform's name, where it is known."""
    step: int | None = None
    """The steps that were done when a GPU stopped in the middle of the program's work; None for any other end."""
    clear: bool = False
    """True where no other node may as well have been the cause, and this one's end was no victim's."""

    @property
    def machine(self) -> str:
        """Return the machine that is to blame; empty where that is nobody's, or not clear."""
        blames = self.clear and self.fault in _OF_MACHINES and re.fullmatch(MACHINE, self.host)
        return self.host if blames else ""

    @property
    def action(self) -> Action:
        return Action.RESTART if self.fault in RESTARTED else Action.STOP

    @property
    def lines(self) -> tuple[str, ...]:
        """The evidence to be stored and shown: its first lines, each cut."""
        return tuple(line[:_LONGEST] for line in self.evidence.splitlines()[:_MOST_LINES])

    @property
    def code(self) -> str:
        """A stable name, which scripts may rely on."""
        return f"attempt.{self.fault.replace(' ', '-')}"

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


# Of two causes the one that says more comes first.
_SEVERITY = (
    FailureClass.USER,
    FailureClass.DATA,
    FailureClass.OUT_OF_MEMORY,
    FailureClass.DISK_FULL,
    FailureClass.PREEMPTED,
    FailureClass.HANG,
    FailureClass.NODE,
    FailureClass.UNKNOWN,
    FailureClass.NETWORK,
)

# Seconds that a platform lets the nodes end by themselves after one has failed, before it asks them to leave (5 in
# launcher.platforms.local.supervisor, PEER_GRACE). A node that is asked later than this is not preempted.
_ALONE = 4.0

# The driver's errors that mean the GPU, its memory or its links, by https://docs.nvidia.com/deploy/xid-errors/: 48, 63,
# 64, 94 and 95 memory, 54 power, 62, 119 and 120 its own processors, 74 NVLink, 79 off the bus, 110, 140 and 143
# others. 13, 31, 43 and 45 are what a program's mistake or its end causes.
_HARDWARE = re.compile(
    r"NVRM: Xid \(PCI:[0-9A-Fa-f:.]+\): (?:48|54|62|63|64|74|79|94|95|110|119|120|140|143),"
    r"|NVRM: GPU .*(?:fallen off|lost)|EDAC .*\b(?:[1-9][0-9]*) UE\b|Machine check events logged.*uncorrected"
    r"|\[Hardware Error\]:.*(?:Uncorrected|fatal)|AER: .*Fatal",
    re.IGNORECASE,
)
_KILLED_FOR_MEMORY = re.compile(r"Killed process|oom-kill:|for want of memory")

# torch 2.13, ProcessGroupNCCL.cpp: said by a rank's watchdog when it gives up, and when another's has.
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d{1,18})", re.IGNORECASE)
# torch 2.13, ProcessGroupGloo.cpp, monitoredBarrier.
_BARRED = re.compile(r"Ranks? (\d{1,6}) failed to pass monitoredBarrier")


class Part(IntEnum):
    """The part that a node has in the end of a job; the lowest explains the others."""

    CAUSE = 0
    BLAMED = 1
    """Others lost it or gave up waiting, and it complained of nothing."""
    WAITED = 2
    LOST_PEER = 3
    ASKED = 4
    """It was asked to leave after another had failed."""


@dataclass(frozen=True, kw_only=True)
class _Suspect(Verdict):
    node: int
    part: Part = Part.CAUSE
    ended: float = -math.inf
    """Seconds since the epoch; minus infinity where it left no report, for then it may have been the first."""
    began: float = math.inf
    """Seconds since the epoch, where the first is the cause of the others: when its rank fell silent, or when it was
    asked to leave."""
    hardware: bool = False
    """True if its kernel reported a broken GPU, link or memory."""
    terminated: bool = False
    """A SIGTERM ended it, and it could say nothing: as the pods of a job whose first one has failed."""

    @property
    def order(self) -> tuple[int, float, float, int]:
        # A broken machine explains what hangs and is taken away, and no mistake in a program.
        severity = _SEVERITY.index(FailureClass.PREEMPTED) - 0.5 if self.hardware else _SEVERITY.index(self.fault)
        return self.part, severity, self.began, self.node


def diagnose(
    status: JobStatus, reports: Iterable[NodeReport], tail: Iterable[LogLine], *, logs: str, nodes: int | None = None
) -> Verdict:
    """The verdict on an attempt that failed.

    Args:
        reports: `node_reports` of the attempt; nodes that were killed left none.
        tail: the last log lines, shown where nothing better is known.
        nodes: the nodes of the job, where they are known; one that left nothing at all is suspected too.
    """
    # A node that was evicted could say of its end that it was asked to leave at the most.
    told = [report for report in reports if report.node not in status.evictions]
    bad = [report for report in told if report.exit_code != 0]
    known = {report.node for report in told}
    suspects = [_reported(report) for report in bad]
    suspects += [
        _killed(node, code, status.evictions.get(node, ""))
        for node, code in status.exit_codes.items()
        if code != 0 and node not in known
    ]
    if not suspects:  # none is known to have ended badly: the platform's words, and the last lines of the logs
        fault, lines = fault_of_exception(status.native), [str(line) for line in tail][-15:]
        no_output = f"{status.native}; its nodes left neither a report of a failure nor a line of log"
        evidence = "\n".join([f"{status.native}; last lines:", *lines]) if lines else no_output
        # A job that ended without any word is taken for one whose machine died.
        return Verdict(
            fault=FailureClass.NODE if fault is FailureClass.UNKNOWN else fault, evidence=Cleaner()(evidence), logs=logs
        )
    nothing = "the node left neither a report nor an exit code"  # its machine is gone, or it never began
    missing = set(range(nodes or 0)) - known - status.exit_codes.keys()
    suspects += [_Suspect(fault=FailureClass.NODE, node=node, evidence=nothing, part=Part.BLAMED) for node in missing]
    first = min(one.ended for one in suspects)
    failed = any(one.part is Part.CAUSE and not one.terminated for one in suspects)
    for place, one in enumerate(suspects):
        # It left only after another had ended, and so was asked to.
        if (one.fault is FailureClass.PREEMPTED and one.ended > first + _ALONE) or (one.terminated and failed):
            suspects[place] = replace(one, part=Part.ASKED)
    suspects += _blamed(bad, suspects)
    done = [report for report in told if report.exit_code == 0]
    if all(one.part is Part.LOST_PEER for one in suspects) and len(done) == 1:
        words = "its program came to its end with exit code 0 while the others still needed it"
        evidence = f"{words}: {suspects[0].evidence.splitlines()[0]}"
        suspects.append(_Suspect(fault=FailureClass.USER, node=done[0].node, evidence=evidence, host=done[0].host))
    cause = min(suspects, key=lambda one: one.order)
    rivals = {one.node for one in suspects if one.part <= Part.BLAMED} - {cause.node}
    clear = cause.part <= Part.BLAMED and not rivals and not cause.terminated
    # The platform knows the machine better, and knows it of a node that left no report.
    host = status.hosts.get(cause.node) or cause.host
    return replace(cause, clear=clear, host=host, evidence=Cleaner()(cause.evidence), logs=logs)


def _reported(report: NodeReport) -> _Suspect:
    fault = report.fault or fault_of_exit_code(report.exit_code)
    cause = report.ranks[0] if report.ranks else RankReport()
    # What the node's kernel said may tell more of the class.
    kernel = [trace.text for trace in report.traces if trace.source in {"kernel", "memory"}]
    broken = [line for line in kernel if _HARDWARE.search(line)]
    short = [line for line in kernel if _KILLED_FOR_MEMORY.search(line)]
    killed = cause.exit_code == -Signals.SIGKILL or "is killed by signal: Killed" in cause.message
    telling: list[str] = []
    if broken and fault in {
        FailureClass.USER,
        FailureClass.UNKNOWN,
        FailureClass.NODE,
        FailureClass.NETWORK,
        FailureClass.HANG,
    }:
        fault, telling = FailureClass.NODE, broken
    elif short and (
        fault is FailureClass.OUT_OF_MEMORY or (killed and fault in {FailureClass.NODE, FailureClass.UNKNOWN})
    ):
        fault, telling = FailureClass.OUT_OF_MEMORY, short
    words, lines = cause.message or report.message or f"ended with {_ending(report.exit_code)}", cause.traceback
    # Where a rank left because it was asked to is no news; nor is where an error of ours was raised, which says it all.
    if fault is FailureClass.PREEMPTED or f"litgpt_demo.errors.{words.partition(chr(10))[0]}" in lines:
        lines = ()
    began = {FailureClass.HANG: cause.time, FailureClass.PREEMPTED: report.asked}.get(fault)
    if cause.held:  # asked for its stacks it went on, and so did those that waited for it
        began = -math.inf
    part = Part.LOST_PEER if fault is FailureClass.NETWORK else Part.CAUSE
    if fault is FailureClass.HANG and cause.waits:
        part = Part.WAITED
    evidence = "\n    ".join([words, *telling, *lines])
    return _Suspect(
        fault=fault,
        node=report.node,
        rank=cause.rank,
        step=cause.step if fault is FailureClass.NODE and not telling and is_gpu_error(evidence) else None,
        evidence=evidence,
        part=part,
        ended=report.ended,
        began=math.inf if began is None else began,
        hardware=telling is broken,
        host=report.host,
    )


def _killed(node: int, code: int, eviction: str) -> _Suspect:
    """A node that could not tell how it ended. One that was evicted comes before those that ended with it."""
    fault = fault_of_exit_code(code)
    evidence = eviction or f"the node's process ended with {_ending(code)}"
    if fault is FailureClass.OUT_OF_MEMORY and not eviction:  # torch's own would have been reported
        evidence += (
            ": killed for its machine's or pod's memory, not its GPUs'; raise platform.memory if that is the limit"
        )
    part = Part.LOST_PEER if fault is FailureClass.NETWORK else Part.CAUSE
    began = -math.inf if eviction else math.inf
    terminated = code == -Signals.SIGTERM and not eviction
    return _Suspect(fault=fault, node=node, evidence=evidence, part=part, began=began, terminated=terminated)


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _blamed(reports: Sequence[NodeReport], suspects: Sequence[_Suspect]) -> Iterator[_Suspect]:
    """Yield the rank that others gave up waiting for, where what they say tells which one it was.

    NCCL's watchdogs number what each rank has begun: the one that came least far is the one. A barrier names it. Else
    it is the one rank, or one node, that complained of nothing while it was there.
    """
    waited = [suspect for suspect in suspects if suspect.part is Part.WAITED]
    if not waited:
        return
    where: dict[int, int] = {}  # the node of each rank that a report speaks of
    quiet: list[int] = []  # the ranks that were ended because of others, and had said nothing
    begun: dict[int, int] = {}  # by rank, how many collectives
    barred: dict[int, str] = {}  # the ranks that a monitored barrier names, and its words
    for report in reports:
        silent = (one.rank for one in report.ranks if one.exit_code == -Signals.SIGTERM and not one.message)
        spoken = [*(one.rank for one in report.ranks), *(one.rank for one in report.traces)]
        quiet += [*report.stopped, *(rank for rank in silent if rank is not None)]
        where |= {rank: report.node for rank in (*report.stopped, *spoken) if rank is not None}
        for trace in report.traces:
            if trace.rank is not None and (found := _ENQUEUED.search(trace.text)):
                begun[trace.rank] = int(found[1])
        for words in (*(one.message for one in report.ranks), *(trace.text for trace in report.traces)):
            if found := _BARRED.search(words):
                barred[int(found[1])] = found[0]
    least = sorted(begun, key=begun.__getitem__)[:2]
    killed = [suspect for suspect in suspects if suspect.part is Part.CAUSE and suspect.ended == -math.inf]
    there = {where[rank] for rank in quiet}
    node: int | None = None
    rank: int | None = None
    if len(least) == 2 and begun[least[0]] != begun[least[1]]:
        rank = least[0]
        why = f"it had begun {begun[rank]} collectives, and each other rank at least {begun[least[1]]}"
    elif len(barred) == 1:
        [(rank, why)] = barred.items()
    elif any(suspect.part is Part.BLAMED for suspect in suspects):
        return  # a node that left nothing at all is the likelier cause
    elif killed:
        if len(killed) > 1 or killed[0].fault is not FailureClass.NODE:
            return
        # A process that dies closes its connections; this one let the others wait, until it was killed for it.
        node, why = killed[0].node, killed[0].evidence
    elif len(quiet) == 1:
        rank, why = quiet[0], "it was stopped without a word"
    elif len(there) == 1:
        node, why = there.pop(), "its ranks were stopped without a word"
    node = node if rank is None else where.get(rank)
    if node is not None:
        evidence = f"{why}; the others waited for it until they gave up: {waited[0].evidence.splitlines()[0]}"
        host = next((report.host for report in reports if report.node == node), "")
        yield _Suspect(fault=FailureClass.HANG, node=node, rank=rank, evidence=evidence, part=Part.BLAMED, host=host)
