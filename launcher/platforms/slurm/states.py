"""Slurm's states and reasons, in our words. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from signal import Signals
from types import MappingProxyType

from launcher.job import JobState
from litgpt_demo.errors import EXIT_CODES, Fault
from litgpt_demo.findings import Finding

# https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES; the last lines are newer releases'.
STATES: Mapping[str, JobState] = MappingProxyType(
    {
        "PENDING": JobState.PENDING,
        "CONFIGURING": JobState.PENDING,  # its nodes are there, and boot
        "REQUEUED": JobState.PENDING,
        "REQUEUE_FED": JobState.PENDING,
        "REQUEUE_HOLD": JobState.PENDING,
        "RESV_DEL_HOLD": JobState.PENDING,
        "SPECIAL_EXIT": JobState.PENDING,
        "RUNNING": JobState.RUNNING,
        "COMPLETING": JobState.RUNNING,  # processes or an epilog still run
        "RESIZING": JobState.RUNNING,
        "SIGNALING": JobState.RUNNING,
        "STAGE_OUT": JobState.RUNNING,
        "STOPPED": JobState.RUNNING,
        "SUSPENDED": JobState.RUNNING,
        "COMPLETED": JobState.SUCCEEDED,
        "CANCELLED": JobState.CANCELLED,
        # Of a federation, a cluster's copy of a job that runs on another one, which `squeue --all` shows. How the job
        # does is told there: https://slurm.schedmd.com/squeue.html#OPT_all, https://slurm.schedmd.com/federation.html
        "REVOKED": JobState.UNKNOWN,
        "BOOT_FAIL": JobState.FAILED,
        "DEADLINE": JobState.FAILED,
        "FAILED": JobState.FAILED,
        "NODE_FAIL": JobState.FAILED,
        "OUT_OF_MEMORY": JobState.FAILED,
        "PREEMPTED": JobState.FAILED,
        "TIMEOUT": JobState.FAILED,
        "EXPEDITING": JobState.PENDING,
        "LAUNCH_FAILED": JobState.FAILED,
        "POWER_UP_NODE": JobState.PENDING,
        "RECONFIG_FAIL": JobState.FAILED,
        "UPDATE_DB": JobState.RUNNING,
    }
)

# The class of an end that Slurm has a word for, and what it means; nodes that could still tell say it themselves.
ENDINGS: Mapping[str, tuple[Fault, str]] = MappingProxyType(
    {
        "TIMEOUT": (Fault.PREEMPTED, "the job reached its time limit"),
        "PREEMPTED": (Fault.PREEMPTED, "Slurm gave the job's nodes to another one"),
        "NODE_FAIL": (Fault.NODE, "Slurm lost the node"),
        "BOOT_FAIL": (Fault.NODE, "the node did not boot"),
        "LAUNCH_FAILED": (Fault.NODE, "the job could not be started on its nodes"),
        "RECONFIG_FAIL": (Fault.NODE, "the node could not be set up for the job"),
        "OUT_OF_MEMORY": (Fault.OUT_OF_MEMORY, "it was killed for the job's memory on the node, not its GPUs'"),
        "DEADLINE": (Fault.USER, "the job's deadline came, after which it may not run; leave --deadline out"),
    }
)

_KILLED: Mapping[Fault, set[int]] = MappingProxyType(
    {
        Fault.OUT_OF_MEMORY: {EXIT_CODES[Fault.NODE], -Signals.SIGKILL},  # by the kernel, the ranks or the node
        Fault.PREEMPTED: {-Signals.SIGKILL},  # by Slurm; a script that outlives its step for a moment writes it down
    }
)
"""Exit codes of nodes that were killed without being told why, which Slurm's word says."""


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job as `squeue` shows it."""

    number: str
    """Its own, or for a task of an array the array's and its index: 4711_3."""
    name: str
    state: str
    reason: str
    start: float | None
    """Seconds since the epoch: the actual start, or the expected one."""
    end: float | None
    nodes: tuple[str, ...]
    comment: str

    @property
    def live(self) -> bool:
        return job_state(self.state).live

    @property
    def task(self) -> str:
        """Return the index in its array; empty for a job that is none of an array."""
        return self.number.partition("_")[2]

    @property
    def order(self) -> list[int]:
        """Return what sorts jobs by their age."""
        return [int(part) for part in self.number.split("_")]

    @property
    def native(self) -> str:
        """Return Slurm's own words."""
        return self.state if self.reason in {"", "None"} else f"{self.state} ({self.reason})"


NUMBER = r"[0-9]{1,11}(?:_[0-9]{1,9})?"
"""The number of a job, as `QueuedJob.number` has it."""
SEPARATOR = "\x1f"
SQUEUE_FORMAT = SEPARATOR.join(("%i", "%T", "%r", "%S", "%e", "%N", "%j", "%k"))
"""The format of squeue that `queued` reads; names and comments of other jobs may hold anything else."""


def queued(text: str) -> list[QueuedJob]:
    """Return the jobs that squeue printed; a line that is not whole is none."""
    rows = (line.split(SEPARATOR) for line in text.splitlines())
    return [
        QueuedJob(
            number=row[0], state=row[1], reason=row[2], start=_seconds(row[3]), end=_seconds(row[4]),
            nodes=tuple(hosts(row[5])), name=row[6], comment=row[7],
        )
        for row in rows if len(row) == 8 and re.fullmatch(NUMBER, row[0])
    ]  # fmt: skip


def _seconds(text: str) -> float | None:
    """A time as SLURM_TIME_FORMAT=%s has it; None for N/A, NONE and Unknown."""
    return float(text) if text.isdecimal() else None


def hosts(listed: str) -> Iterator[str]:
    """Yield the nodes of a list such as n[0-2,7],login."""
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", listed):
        before, bracket, rest = part.partition("[")
        if not bracket:
            yield part
            continue
        inside, _, after = rest.partition("]")
        for numbers in inside.split(","):
            first, _, last = numbers.partition("-")
            if first.isdecimal() and (last or first).isdecimal():
                every = range(int(first), int(last or first) + 1)
                yield from (name for one in every for name in hosts(f"{before}{one:0{len(first)}}{after}"))


def job_state(native: str) -> JobState:
    """Return the state for Slurm's word; `CANCELLED by 1000` is sacct's, and an unlisted word stops nothing."""
    return STATES.get(native.split(" ")[0].rstrip("+"), JobState.UNKNOWN)


# --- how it ended -----------------------------------------------------------------------------------------------------


def endings(
    state: str, codes: Mapping[int, int], nodes: int, *,
    script: int | None, on: Mapping[int, str], down: Collection[str],
) -> tuple[dict[int, int], dict[int, str]]:  # fmt: skip
    """Return the exit code of each node, and the words for those that could not tell themselves how they ended.

    Args:
        state: Slurm's word for the end of the job.
        codes: the exit codes that nodes left.
        script: the exit code that the script left.
        on: node number to the machine's name.
        down: machines that are out of service now.
    """
    known, silent = dict(codes), [node for node in range(nodes) if node not in codes]
    if state not in ENDINGS:
        if script and not codes:
            if (signal := node_code(script)) < 0:  # srun tells what killed its tasks
                return dict.fromkeys(range(nodes), signal), {}
            return {0: script}, {0: "the job's script ended before its nodes began; the log of node 0 says why"}
        return known, {}
    fault, words = ENDINGS[state]
    silent += [node for node, code in codes.items() if code in _KILLED.get(fault, ())]
    lost = [node for node in range(nodes) if on.get(node) in down]  # its tasks may live on, and leave an exit code
    if fault is Fault.NODE and lost:
        # Slurm ended the others for it.
        known |= dict.fromkeys(silent, -int(Signals.SIGTERM))
        silent = lost
    told = {node: f"{words} ({state}{' on ' + on[node] if node in on else ''})" for node in silent}
    return known | dict.fromkeys(silent, EXIT_CODES[fault]), told


def is_loss(state: str) -> bool:
    """Return whether a job ended because of one of its nodes."""
    return state in ENDINGS and ENDINGS[state][0] is Fault.NODE


def node_code(shell: int) -> int:
    """Return an exit code as Popen has it, of one that a shell told: 137 is signal 9."""
    return 128 - shell if 128 < shell < 160 else shell


# --- why it waits -----------------------------------------------------------------------------------------------------

_LIMITS = {
    "GRES": "GPUs or other resources", "Cpu": "CPUs", "CPU": "CPUs", "Mem": "memory", "Node": "nodes",
    "Jobs": "running jobs", "Submit": "submitted jobs", "Wall": "running time", "RunMinutes": "minutes left to run",
    "Minutes": "minutes of use", "Billing": "billing units", "License": "licenses", "BB": "burst buffer",
}  # fmt: skip

_TOO_MUCH = "ask for less (platform.nodes, gpus, time), or take another account or QOS"
_OURS_WAITS = "nothing has to be done"
_ADMIN = "ask the cluster's administrators, or `scontrol show job`"

# Reason (https://slurm.schedmd.com/job_reason_codes.html), what it means, what to do. The first that fits.
_REASONS: tuple[tuple[str, str, str], ...] = (
    (r"Priority", "jobs of a higher priority come first", _OURS_WAITS),
    (r"Resources", "it is next, and waits until enough nodes are free", _OURS_WAITS),
    (r"None|WaitingForScheduling|Prolog|Cleaning", "the scheduler has not looked at it yet", _OURS_WAITS),
    (r"JobArrayTaskLimit", "as many trials of its sweep run as sweep.max_parallel allows", _OURS_WAITS),
    (r"BeginTime", "it may not start before a certain time, as for a minute after it was queued again", _OURS_WAITS),
    (r"Dependency", "it waits for another job", "`scontrol show job` says for which"),
    (r"DependencyNeverSatisfied", "it waits for a job that has ended badly", "cancel it"),
    (r"Licenses", "it waits for a license", _OURS_WAITS),
    (r"Reservation", "its reservation has not begun", "take platform.reservation out, or wait"),
    (r"ReservationDeleted", "its reservation is gone", "take platform.reservation out, and run again"),
    (r"JobHeldUser", "somebody with your account holds it", "`scontrol release` lets it go"),
    (r"JobHeldAdmin|JobHoldMaxRequeue", "an administrator holds it, or it was queued again too often", _ADMIN),
    (r"JobLaunchFailure|launch failed.*", "its start failed on a node, and it is held", _ADMIN),
    (r"ReqNodeNotAvail.*|NodeDown|Nodes_required.*", "nodes that it needs are down, drained or reserved",
     "`sinfo -R` says why; take another partition or constraint, or wait"),
    (r"PartitionDown|PartitionInactive", "its partition starts no jobs now",
     "take another platform.partition, or wait"),
    (r"PartitionNodeLimit", "its partition has not so many nodes, or some are out of service",
     "lower platform.nodes, or take another platform.partition"),
    (r"PartitionTimeLimit", "its time limit is above the partition's", "lower platform.time"),
    (r"BadConstraints", "no node has what it asks for",
     "see platform.constraint, gpu and memory against `sinfo -o '%N %f %G %m'`"),
    (r"(InvalidAccount|AccountNotAllowed|AccountingPolicy).*", "its account may not be used here",
     "see platform.account against `sacctmgr show assoc user=$USER`"),
    (r"(InvalidQOS|QOSNotAllowed|QOSUsageThreshold).*", "its QOS may not be used here",
     "see platform.qos against `sacctmgr show assoc user=$USER`"),
    (r"(Assoc|QOS)(Grp|Max)(?P<limit>\w+?)(PerUser|PerAccount|PerAcct|PerJob|PerNode)?(Limit)?", "", _TOO_MUCH),
    (r"(Association|QOS)(Job|Resource|Time)Limit", "it is at a limit of its account or QOS", _TOO_MUCH),
    (r"InactiveLimit|SystemFailure|FrontEndDown", "Slurm itself has a problem", _ADMIN),
)  # fmt: skip

# What no waiting changes: the partition's or the QOS's own bound is below what each such job asks for.
_NEVER = re.compile(
    r"PartitionTimeLimit|InvalidAccount|InvalidQOS|BadConstraints|DependencyNeverSatisfied"
    r"|(Assoc|QOS)MaxWallDurationPerJobLimit|(Assoc|QOS)Max\w+PerJob(Limit)?|(Assoc|QOS)Max\w+PerNode(Limit)?"
)


def is_refused(reason: str) -> bool:
    """Return whether a pending job will never start as it is."""
    return _NEVER.fullmatch(reason) is not None


def pending(job: QueuedJob) -> Finding:
    """Return why a job waits, in words, with the start that Slurm expects."""
    reason = job.reason.strip("()") or "None"
    what, fix = f"Slurm says {reason}", "https://slurm.schedmd.com/job_reason_codes.html says what that is"
    for pattern, words, todo in _REASONS:
        if (found := re.fullmatch(pattern, reason.partition(",")[0])) is not None:
            what, fix = f"{words or _limit(reason, found['limit'])} ({reason})", todo
            break
    expected = "" if job.start is None else f"; Slurm expects it to start about {_about(job.start)}"
    return Finding("info", "slurm.pending", f"{what}{expected}", fix)


def _limit(reason: str, of: str) -> str:
    """The words for a limit, whose name says whose it is and on what."""
    whose = "the account" if reason.startswith("Assoc") else "the QOS"
    if "PerUser" in reason:
        whose = f"you under {whose}"
    kind = next((words for name, words in _LIMITS.items() if name in of), of)
    at = "all jobs together are" if "Grp" in reason else "it is"
    return f"{at} at the limit on {kind} for {whose}"


def _about(start: float) -> str:
    """A time to the next ten minutes: the scheduler changes its mind by seconds, which is no news."""
    return datetime.fromtimestamp(600 * -(-start // 600)).astimezone().strftime("%Y-%m-%d %H:%M %Z")
