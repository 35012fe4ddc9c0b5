"""The diagnosis of a dead attempt from its traces: the class of failure, culprit, evidence, and what to do.

Most nodes of a failed job are victims. One loses the connection to a peer that died, one waits for a peer until its
timeout, one is terminated because another has ended. The report of such a node is evidence of the cause only if there
is no better evidence, and it points to the nodes that report no problem.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
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
"""The classes that are held against the culprit's machine. A lost peer is the fault of another node, and a machine that
was taken away is not broken."""

ADVICE: Mapping[FailureClass, str] = {
    FailureClass.USER: "fix what the message names, and run again",
    FailureClass.DATA: "fix or remove what the message names, and run again; finished steps are kept",
    FailureClass.OUT_OF_MEMORY: "halve train.micro_batch (the batch stays), or set train.activation_checkpointing=full",
    FailureClass.DISK_FULL: "make room where the message says, and run again: the run resumes from the last checkpoint",
    FailureClass.NODE: "the machine or a process on it died; a new attempt resumes from the last checkpoint",
    FailureClass.NETWORK: "a peer was lost; a new attempt resumes from the last checkpoint",
    FailureClass.HANG: "the stacks say what each rank waited for; a new attempt resumes from the last checkpoint",
    FailureClass.PREEMPTED: "the machine was taken away; a new attempt resumes from the last checkpoint",
    FailureClass.UNKNOWN: "read the traceback above and the logs of the attempt",
    FailureClass.UNREACHABLE: "wait, and run the same command again: the job may still be running",
    FailureClass.UNKNOWN_RUN: "take a name that `train-litgpt runs` lists",
    FailureClass.LIVE: "follow the running job, replace it with `--replace`, or start another with `--allow-duplicate`",
    FailureClass.CANCELLED: "run the same command to resume from the last checkpoint",
    FailureClass.SERVER: "start Prefect's server with `train-litgpt serve`, or unset `PREFECT_API_URL`",
    FailureClass.REFUSED: "do what the message says",
}
"""The advice of each class. Only commands end with the last six, and only docs/reference/exit-codes.md shows theirs."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
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
    """True if no other node is as likely to be the cause, and this node did not end as a victim."""

    @property
    def machine(self) -> str:
        """Return the machine that is to blame; empty if it is none, or not clear."""
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
        """Return the node and rank as the end of a phrase; empty if they are unknown."""
        if self.node is None:
            return ""
        if self.rank is None:
            return f" on node {self.node}"
        return f" on node {self.node}, rank {self.rank}"

    def __str__(self) -> str:
        machine = ""
        if self.machine:
            machine = f"  machine: {self.machine}\n"
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

# A platform lets the nodes end by themselves after one has failed, and then terminates them (after 5 s in
# launcher.platforms.local.supervisor, PEER_GRACE). A node that ended later than this was not preempted.
_PEER_GRACE_SECONDS = 4.0

# The driver's errors that mean the GPU, its memory or its links, by https://docs.nvidia.com/deploy/xid-errors/: 48, 63,
# 64, 94 and 95 memory, 54 power, 62, 119 and 120 its own processors, 74 NVLink, 79 off the bus, 110, 140 and 143
# others. 13, 31, 43 and 45 are what a program's mistake or its end causes.
_HARDWARE = re.compile(
    r"NVRM: Xid \(PCI:[0-9A-Fa-f:.]+\): (?:48|54|62|63|64|74|79|94|95|110|119|120|140|143),"
    r"|NVRM: GPU .*(?:fallen off|lost)|EDAC .*\b(?:[1-9][0-9]*) UE\b|Machine check events logged.*uncorrected"
    r"|\[Hardware Error\]:.*(?:Uncorrected|fatal)|AER: .*Fatal",
    re.IGNORECASE,
)
_KILLED_FOR_MEMORY = re.compile(r"Killed process|oom-kill:")

# torch 2.13, ProcessGroupNCCL.cpp: a rank's watchdog prints it when it gives up, or when another's has given up.
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d{1,18})", re.IGNORECASE)
# torch 2.13, ProcessGroupGloo.cpp, monitoredBarrier.
_BARRED = re.compile(r"Ranks? (\d{1,6}) failed to pass monitoredBarrier")


class Role(IntEnum):
    """The role of a node in the end of a job; the lowest explains the others."""

    CAUSE = 0
    BLAMED = 1
    """Others lost it or gave up waiting, and it complained of nothing."""
    WAITED = 2
    LOST_PEER = 3
    ASKED_TO_LEAVE = 4
    """It left after another node had failed."""


@dataclass(frozen=True, kw_only=True)
class RootCauseCandidate(Diagnosis):
    node: int
    role: Role = Role.CAUSE
    ended: float = -math.inf
    """Seconds since the epoch; minus infinity if it left no report, for then it may have been the first."""
    began: float = math.inf
    """Seconds since the epoch, if the first is the cause of the others: when its rank fell silent, or when it was
    terminated."""
    hardware: bool = False
    """True if its kernel reported a broken GPU, link or memory."""
    terminated: bool = False
    """True if SIGTERM ended it without a report, as it ends the pods of a job whose first pod has failed."""

    @property
    def order(self) -> tuple[int, float, float, int]:
        severity: float = _SEVERITY.index(self.fault)
        if self.hardware:  # a broken machine explains hangs and preemptions, but no mistake in a program
            severity = _SEVERITY.index(FailureClass.PREEMPTED) - 0.5
        return self.role, severity, self.began, self.node


def diagnose(
    status: JobStatus, reports: Iterable[NodeReport], tail: Iterable[LogLine], *, logs: str, nodes: int | None = None
) -> Diagnosis:
    """Return the diagnosis of an attempt that failed. `tail` is the evidence if there is no other. One of the `nodes`
    without any trace is a candidate too."""
    # The report of an evicted node says at most that the node was terminated.
    usable = [report for report in reports if report.node not in status.evictions]
    failed = [report for report in usable if report.exit_code != 0]
    known = {report.node for report in usable}
    candidates = [_reported(report) for report in failed]
    candidates += [
        _killed(node, code, status.evictions.get(node, ""))
        for node, code in status.exit_codes.items()
        if code != 0 and node not in known
    ]
    if not candidates:
        return _without_traces(status, tail, logs)
    nothing = "the node left neither a report nor an exit code"  # its machine is gone, or it never began
    for node in set(range(nodes or 0)) - known - status.exit_codes.keys():
        candidates.append(RootCauseCandidate(fault=FailureClass.NODE, node=node, evidence=nothing, role=Role.BLAMED))
    first = min(candidate.ended for candidate in candidates)
    has_cause = any(candidate.role is Role.CAUSE and not candidate.terminated for candidate in candidates)
    for place, candidate in enumerate(candidates):
        # A node that left only after another had ended was terminated.
        left_later = candidate.fault is FailureClass.PREEMPTED and candidate.ended > first + _PEER_GRACE_SECONDS
        if left_later or (candidate.terminated and has_cause):
            candidates[place] = replace(candidate, role=Role.ASKED_TO_LEAVE)
    waited = [candidate for candidate in candidates if candidate.role is Role.WAITED]
    if waited:
        straggler = _find_straggler(failed, candidates)
        if straggler is not None:
            complaint = f"the others waited for it until they gave up: {waited[0].evidence.splitlines()[0]}"
            candidates.append(replace(straggler, evidence=f"{straggler.evidence}; {complaint}"))
    finished = [report for report in usable if report.exit_code == 0]
    if all(candidate.role is Role.LOST_PEER for candidate in candidates) and len(finished) == 1:
        early = "its program ended with exit code 0 while the other nodes still needed it"
        evidence = f"{early}: {candidates[0].evidence.splitlines()[0]}"
        [report] = finished
        candidates.append(
            RootCauseCandidate(fault=FailureClass.USER, node=report.node, evidence=evidence, host=report.host)
        )
    cause = min(candidates, key=lambda candidate: candidate.order)
    rivals = {candidate.node for candidate in candidates if candidate.role <= Role.BLAMED} - {cause.node}
    is_clear = cause.role <= Role.BLAMED and not rivals and not cause.terminated
    # The platform knows the machine better, and also that of a node that left no report.
    host = status.hosts.get(cause.node) or cause.host
    return replace(cause, clear=is_clear, host=host, evidence=Cleaner()(cause.evidence), logs=logs)


def _without_traces(status: JobStatus, tail: Iterable[LogLine], logs: str) -> Diagnosis:
    fault = fault_of_exception(status.native)
    if fault is FailureClass.UNKNOWN:  # most probably its machine died
        fault = FailureClass.NODE
    lines = [str(line) for line in tail][-15:]
    evidence = f"{status.native}; its nodes left neither a report nor a log line"
    if lines:
        evidence = "\n".join([f"{status.native}; last lines:", *lines])
    return Diagnosis(fault=fault, evidence=Cleaner()(evidence), logs=logs)


# The classes that a kernel's report of broken hardware, or of a process killed for memory, explains better.
_EXPLAINED_BY_HARDWARE = {
    FailureClass.USER, FailureClass.UNKNOWN, FailureClass.NODE, FailureClass.NETWORK, FailureClass.HANG
}  # fmt: skip


def _reported(report: NodeReport) -> RootCauseCandidate:
    fault = report.fault or fault_of_exit_code(report.exit_code)
    cause = report.ranks[0] if report.ranks else RankReport()
    # "memory" is the container's own count of kills, and often the only proof: most containers hide the kernel's log.
    short = [trace.text for trace in report.traces if trace.source == "memory"]
    kernel = [trace.text for trace in report.traces if trace.source == "kernel"]
    broken = [line for line in kernel if _HARDWARE.search(line)]
    short += [line for line in kernel if _KILLED_FOR_MEMORY.search(line)]
    was_killed = cause.exit_code == -Signals.SIGKILL or "is killed by signal: Killed" in cause.message
    is_hardware = bool(broken) and fault in _EXPLAINED_BY_HARDWARE
    explained: list[str] = []
    if is_hardware:
        fault, explained = FailureClass.NODE, broken
    elif short and fault is FailureClass.OUT_OF_MEMORY:
        explained = short
    elif short and was_killed and fault in {FailureClass.NODE, FailureClass.UNKNOWN}:
        fault, explained = FailureClass.OUT_OF_MEMORY, short
    message = cause.message or report.message or f"ended with {_ending(report.exit_code)}"
    traceback = cause.traceback
    # The traceback of a terminated rank, or of our own error, says nothing more than its message.
    if fault is FailureClass.PREEMPTED or f"litgpt_demo.errors.{message.partition(chr(10))[0]}" in traceback:
        traceback = ()
    evidence = "\n    ".join([message, *explained, *traceback])
    role, began, step = Role.CAUSE, math.inf, None
    if fault is FailureClass.NETWORK:
        role = Role.LOST_PEER
    elif fault is FailureClass.HANG:
        began = cause.time or math.inf
        if cause.waits:
            role = Role.WAITED
    elif fault is FailureClass.PREEMPTED:
        began = report.signalled_at or math.inf
    elif fault is FailureClass.NODE and not explained and is_gpu_error(evidence):
        step = cause.step
    if cause.held:  # it continued when its stacks were requested, and so did the ranks that waited for it
        began = -math.inf
    return RootCauseCandidate(
        fault=fault,
        node=report.node,
        rank=cause.rank,
        step=step,
        evidence=evidence,
        role=role,
        ended=report.ended,
        began=began,
        hardware=is_hardware,
        host=report.host,
    )


def _killed(node: int, code: int, eviction: str) -> RootCauseCandidate:
    fault = fault_of_exit_code(code)
    role = Role.LOST_PEER if fault is FailureClass.NETWORK else Role.CAUSE
    if eviction:
        return RootCauseCandidate(fault=fault, node=node, evidence=eviction, role=role, began=-math.inf)
    evidence = f"the node's process ended with {_ending(code)}"
    if fault is FailureClass.OUT_OF_MEMORY:  # torch's own would have been reported
        evidence += (
            ": killed for its machine's or pod's memory, not its GPUs'; raise platform.memory if that is the limit"
        )
    is_terminated = code == -Signals.SIGTERM
    return RootCauseCandidate(fault=fault, node=node, evidence=evidence, role=role, terminated=is_terminated)


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _find_straggler(  # noqa: C901 - a list of rules, of which the first that fits counts
    reports: Sequence[NodeReport], candidates: Sequence[RootCauseCandidate]
) -> RootCauseCandidate | None:
    """NCCL's watchdogs number the collectives that each rank has begun, and a monitored barrier names the rank. Without
    either, it is the only rank, or the only node, that complained of nothing."""
    node_of: dict[int, int] = {}  # of each rank that a report mentions
    quiet: list[int] = []  # ranks that were ended because of others, without a message
    collectives: dict[int, int] = {}  # by rank, the number that it had begun
    barred: dict[int, str] = {}  # by rank, the message of the barrier that names it
    for report in reports:
        quiet += report.stopped
        node_of.update(dict.fromkeys(report.stopped, report.node))
        texts = []
        for failure in report.ranks:
            texts.append(failure.message)
            if failure.rank is not None:
                node_of[failure.rank] = report.node
                if failure.exit_code == -Signals.SIGTERM and not failure.message:
                    quiet.append(failure.rank)
        for trace in report.traces:
            texts.append(trace.text)
            enqueued = _ENQUEUED.search(trace.text)
            if trace.rank is not None:
                node_of[trace.rank] = report.node
                if enqueued:
                    collectives[trace.rank] = int(enqueued[1])
        for match in filter(None, map(_BARRED.search, texts)):
            barred[int(match[1])] = match[0]

    def blamed(node: int | None, rank: int | None, reason: str) -> RootCauseCandidate | None:
        if node is None:
            return None
        host = next((report.host for report in reports if report.node == node), "")
        return RootCauseCandidate(
            fault=FailureClass.HANG, node=node, rank=rank, evidence=reason, role=Role.BLAMED, host=host
        )

    slowest = sorted(collectives, key=collectives.__getitem__)[:2]
    if len(slowest) == 2 and collectives[slowest[0]] != collectives[slowest[1]]:
        rank, next_slowest = slowest
        reason = f"it had begun {collectives[rank]} collectives, and each other rank at least "
        return blamed(node_of.get(rank), rank, f"{reason}{collectives[next_slowest]}")
    if len(barred) == 1:
        [(rank, reason)] = barred.items()
        return blamed(node_of.get(rank), rank, reason)
    if any(candidate.role is Role.BLAMED for candidate in candidates):
        return None  # a node that left nothing at all is the likelier cause
    killed = [candidate for candidate in candidates if candidate.role is Role.CAUSE and candidate.ended == -math.inf]
    if len(killed) == 1 and killed[0].fault is FailureClass.NODE:
        # A process that dies closes its connections; this one let the others wait, until it was killed for it.
        return blamed(killed[0].node, None, killed[0].evidence)
    if killed:
        return None
    if len(quiet) == 1:
        return blamed(node_of[quiet[0]], quiet[0], "it was stopped without a message")
    quiet_nodes = {node_of[rank] for rank in quiet}
    if len(quiet_nodes) == 1:
        return blamed(quiet_nodes.pop(), None, "its ranks were stopped without a message")
    return None
