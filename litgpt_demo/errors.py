"""The tree of errors, the class (`FailureClass`) of each, and the exit codes that carry the classes out of a process.

TrainLitgptError         unknown            1
  UserError              user error         40   what was asked for cannot work, however often it is tried
    Unreachable          user error         40   the Hub or a bucket cannot be asked from this machine
  DataError              data error         41   a corpus, dataset or checkpoint is not what it says it is
    TooLarge             data error         41   a file has more bytes than any of its kind, and is not read
  NodeError              node fault         43   this machine is not fit for the job
  NetworkError           network fault      44   the other nodes cannot be reached
  Preempted              preempted          45   the machine was asked to leave; the state was saved before
  Hung                   hang               46   a rank gives no sign of life
  DiskFull               disk full          47   a disk, quota or file system has no room; the message has the bytes
  LauncherError          user error         40   the branch of the launching side: launcher.errors draws it

Out of memory (42) has no exception of ours: torch, the kernel and the platforms raise it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from signal import Signals
from typing import Literal

from litgpt_demo.secrets import redacted


class FailureClass(StrEnum):
    """The class of a failure, and the exit code that carries it out of a process.

    A job ends with one of `JOB_FAILURE_CLASSES`. The launching side alone uses the others.

    64..78 belong to sysexits.h, 126.. to shells, 50001.. to GCP Batch; 40..55 collide with none of them
    and fit the single byte that Kubernetes' podFailurePolicy and Batch's lifecyclePolicies compare.
    """

    exit_code: int

    def __new__(cls, words: str, exit_code: int = 1) -> FailureClass:
        fault = str.__new__(cls, words)
        fault._value_, fault.exit_code = words, exit_code
        return fault

    USER = "user error", 40
    DATA = "data error", 41
    OUT_OF_MEMORY = "out of memory", 42
    NODE = "node fault", 43
    NETWORK = "network fault", 44
    PREEMPTED = "preempted", 45
    HANG = "hang", 46
    DISK_FULL = "disk full", 47
    UNKNOWN = "unknown"
    UNREACHABLE = "platform unreachable", 50
    UNKNOWN_RUN = "unknown run", 51
    LIVE = "run is live", 52
    CANCELLED = "cancelled", 53
    SERVER = "server unreachable", 54
    REFUSED = "platform refused", 55


EXIT_CODES = {fault: fault.exit_code for fault in FailureClass}
JOB_FAILURE_CLASSES = tuple(fault for fault in FailureClass if fault.exit_code < 50)
"""The classes that a node can end with; each has exactly one action (launcher.runs.diagnosis)."""

# A user's own script may end with 50 and more: only a node's own codes say anything about a node.
_FAULTS = {fault.exit_code: fault for fault in JOB_FAILURE_CLASSES}

# What GCP Batch says of tasks that it lost (https://cloud.google.com/batch/docs/troubleshooting#reserved-exit-codes).
BATCH_CODES: dict[int, tuple[FailureClass, str]] = {
    50001: (FailureClass.PREEMPTED, "its Spot VM was taken away"),
    50002: (FailureClass.NODE, "its VM stopped reporting"),
    50003: (FailureClass.NODE, "its VM was rebooted"),
    50004: (FailureClass.NODE, "its VM does not answer"),
    50005: (FailureClass.USER, "it ran longer than it may"),
    50006: (FailureClass.NODE, "its VM was made anew"),
}


class TrainLitgptError(Exception):
    """A known failure. `what` was given and why it cannot be, and the `fix`, what to do; `str()` has both."""

    fault: FailureClass = FailureClass.UNKNOWN

    def __init__(self, *args: object, fix: str = "", fault: FailureClass | None = None, no_retry: bool = False) -> None:
        """`fault` is its class where the kind of error does not say it; see `mark_no_retry`."""
        super().__init__(*args)
        self.fix = fix
        if fault is not None:
            self.fault = fault
        if no_retry:
            mark_no_retry(self)

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}" if self.fix else self.what

    @property
    def what(self) -> str:
        """The message without the fix."""
        return super().__str__()

    @property
    def exit_code(self) -> int:
        return self.fault.exit_code


def mark_no_retry(error: BaseException) -> None:
    """Mark an error of any kind: it was tried for as long as that can help, and nobody further up is to try again."""
    vars(error)["no_retry"] = True  # it goes with the error to other processes


def is_marked_no_retry(error: BaseException) -> bool:
    """Return whether an error is marked so: the waits would multiply."""
    return bool(vars(error).get("no_retry"))


class UserError(TrainLitgptError):
    fault = FailureClass.USER


class Unreachable(UserError):
    """There is no network, or there are no credentials."""


class DataError(TrainLitgptError):
    fault = FailureClass.DATA


class TooLarge(DataError):
    pass


class DiskFull(TrainLitgptError):
    fault = FailureClass.DISK_FULL


class NodeError(TrainLitgptError):
    fault = FailureClass.NODE


class NetworkError(TrainLitgptError):
    fault = FailureClass.NETWORK


class Preempted(TrainLitgptError):
    fault = FailureClass.PREEMPTED


class Hung(TrainLitgptError):
    fault = FailureClass.HANG


def fault_of_exit_code(code: int) -> FailureClass:
    """The class that an exit code stands for; a negative code is the signal that killed it (as `Popen.returncode`)."""
    if code < 0:
        return FailureClass.NODE
    if code in BATCH_CODES:
        return BATCH_CODES[code][0]
    # Python itself and argparse end with 2 where the command line is wrong.
    return FailureClass.USER if code == 2 else _FAULTS.get(code, FailureClass.UNKNOWN)


def one_line(error: BaseException | str) -> str:
    """Return what another's error says, to go on inside a sentence of ours: on one line, no full stop, no secret."""
    return " ".join(redacted(str(error)).split()).rstrip(".")


_KINDS = {
    FailureClass.OUT_OF_MEMORY: "MemoryError OutOfMemoryError",
    FailureClass.NETWORK: "DistNetworkError DistStoreError BrokenPipeError ConnectionError ConnectionRefusedError "
    "ConnectionResetError TimeoutError",
    # Mistakes in the program or its settings: they come back however often it is started.
    FailureClass.USER: "ArgumentError AssertionError AttributeError FileNotFoundError FloatingPointError ImportError "
    "IndentationError IndexError IsADirectoryError KeyError ModuleNotFoundError NameError NotADirectoryError "
    "NotImplementedError OverflowError PermissionError RecursionError SyntaxError TabError TypeError "
    "UnboundLocalError ValueError ZeroDivisionError",
    # What readers of files say of bytes that are none of their kind.
    FailureClass.DATA: "ArrowInvalid BadGzipFile BadZipFile JSONDecodeError LZMAError ReadError SafetensorError "
    "UnicodeDecodeError UnpicklingError",
}
_BY_NAME = {name: fault for fault, names in _KINDS.items() for name in names.split()} | {
    kind.__name__: kind.fault for kind in (UserError, DataError, DiskFull, NodeError, NetworkError, Preempted, Hung)
}

# A GPU that stops in the middle of a kernel or of a library's call. On many GPUs the machine is the likelier cause; a
# mistake of the program does the same, but at the same step on every machine (launcher.runs.restarts).
_GPU = (
    "an illegal memory access was encountered|an illegal instruction was encountered|unspecified launch failure"
    "|misaligned address|invalid program counter|cuda error: unknown error|cuda driver error"
    "|_status_execution_failed|_status_not_initialized|_status_internal_error|_status_mapping_error"
)

# Wording of torch 2.13, gloo, NCCL, CUDA's error strings and the C library, matched in lower case; each phrase is one
# that their sources print. The first that is found counts.
_PHRASES = {
    FailureClass.OUT_OF_MEMORY: "out of memory|outofmemoryerror|can't allocate memory|cannot allocate memory"
    "|_status_alloc_failed|out of shared memory|unable to allocate shared memory",
    # torch.save's zip writer says the last of a write that did not go through; its stream has forgotten the reason.
    FailureClass.DISK_FULL: "no space left on device|disk quota exceeded|. unexpected pos ",
    FailureClass.NODE: "uncorrectable ecc error|uncorrectable nvlink error|no cuda-capable device is detected"
    "|cuda-capable device(s) is/are busy or unavailable|system not yet initialized|hardware stack error"
    "|driver/library version mismatch|input/output error|stale file handle|transport endpoint is not connected"
    f"|is killed by signal|{_GPU}",
    FailureClass.DATA: "pytorchstreamreader failed|invalid magic number; corrupt file|magic bytes not found"
    "|ran out of input|unexpected eof",
    FailureClass.USER: "shapes cannot be multiplied|is invalid for input of size|must match the size of tensor"
    "|must match the existing size|expected all tensors to be on the same device|error(s) in loading state_dict"
    "|does not require grad and does not have a grad_fn|expected to have finished reduction in the prior iteration"
    "|device-side assert triggered|detected mismatch between collectives",
    FailureClass.HANG: "watchdog caught collective operation timeout|ms for recv operation to complete"
    "|ms for send operation to complete|failed to pass monitoredbarrier",
    FailureClass.NETWORK: "connection closed by peer|connection reset by peer|connection refused|socket timeout"
    "|broken pipe|remote process exited or there was a network error|ncclremoteerror|ncclsystemerror|distnetworkerror"
    "|distbackenderror|name or service not known|temporary failure in name resolution|no route to host",
}
_BY_PHRASE = {phrase: fault for fault, phrases in _PHRASES.items() for phrase in phrases.split("|")}


def fault_of_exception(error: BaseException | str) -> FailureClass:
    """The class of an exception raised in a worker, or of its text (`Name: message`) as torch's error file keeps it.

    The name of the class says most; else a phrase of the message, which for a lost peer is all there is.
    """
    if isinstance(error, TrainLitgptError):
        return error.fault
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    name = re.match(r"(?:\w+\.)*(\w+)(?::|\s*$)", text)
    if name and name[1] in _BY_NAME:
        return _BY_NAME[name[1]]
    lower = text.lower()
    return next((fault for phrase, fault in _BY_PHRASE.items() if phrase in lower), FailureClass.UNKNOWN)


def is_gpu_error(text: str) -> bool:
    """Return whether the text of an exception says that a GPU stopped in the middle of a program's work."""
    return any(phrase in text.lower() for phrase in _GPU.split("|"))


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The traces of one failed rank."""

    local_rank: int
    exit_code: int | None
    """Negative is the signal that killed it; None where torchrun was killed before it could tell."""
    message: str = ""
    """The exception as `Name: message`; empty where the rank left none."""
    traceback: tuple[str, ...] = ()
    """The last lines of its traceback or error output."""
    time: float
    """When it failed, seconds since the epoch; torchrun's own figures are whole seconds."""
    waits: bool = False
    """True if it hung in a wait for the other ranks, as its stacks or its words show."""
    step: int | None = None
    """The steps that it had done; None where it gave no sign of life."""
    held: bool = False
    """True if it hung because its process was stopped, or in a read or write of the kernel's that did not end."""

    @property
    def fault(self) -> FailureClass:
        """Its class: by one of our own exit codes, else by its exception or what that came of, else by how it ended."""
        by_code = FailureClass.UNKNOWN if self.exit_code is None else fault_of_exit_code(self.exit_code)
        if self.exit_code in EXIT_CODES.values() and by_code is not FailureClass.UNKNOWN:
            return by_code
        # The first that was raised comes first: what is raised of it may say less.
        chain = [line for line in self.traceback if re.match(r"(?:\w+\.)*\w*(?:Error|Exception)(?::|$)", line)]
        by_words = (fault_of_exception(words) for words in (self.message, *chain))
        return next((fault for fault in by_words if fault is not FailureClass.UNKNOWN), by_code)

    @property
    def secondary(self) -> bool:
        """Return True if it fell because another did: it lost a peer, or was stopped by its own torchrun."""
        return self.fault is FailureClass.NETWORK or (self.exit_code == -Signals.SIGTERM and not self.message)

    def __str__(self) -> str:
        how = "ended" if self.exit_code is None else f"ended with exit code {self.exit_code}"
        if self.exit_code is not None and self.exit_code < 0:
            how = f"was killed by signal {-self.exit_code}"
        return f"local rank {self.local_rank} {how} ({self.fault})" + (f": {self.message}" if self.message else "")


def root_cause(failures: Sequence[RankFailure]) -> RankFailure | None:
    """The failure that explains the others: the earliest that is no secondary's and no wait's, else the earliest.

    Within one second, which is as finely as torchrun tells, one that left a message comes before one that did not.
    torchrun asks ranks to end once one has failed. So where all were ended by SIGTERM and told of no cause, one that
    had nothing at all to tell got it from elsewhere, and was the first.
    """
    if all(one.secondary and one.exit_code == -Signals.SIGTERM for one in failures):
        failures = [one for one in failures if not one.message] or failures
    return min(failures, key=lambda one: (one.secondary, one.waits, int(one.time), not one.message), default=None)


Severity = Literal["error", "unknown", "warning", "info"]
"""`unknown` is what this machine could not look at. A plan goes on without it; a run needs to know, and is refused."""


@dataclass(frozen=True)
class Finding:
    """One thing found, and what to do about it."""

    severity: Severity
    code: str
    """A stable name, `area.problem`, that documentation and scripts may rely on."""
    what: str
    fix: str = ""
    fault: FailureClass = FailureClass.USER
    """The class of the failure that it foretells."""

    @classmethod
    def of(cls, error: Exception, code: str) -> Finding:
        """Return the finding that an error is."""
        if isinstance(error, TrainLitgptError):
            return cls("error", code, error.what, error.fix, error.fault)
        return cls("error", code, str(error))

    @property
    def message(self) -> str:
        """The finding for a reader who knows its severity."""
        return f"[{self.code}] {self.what}" + (f" -> {self.fix}" if self.fix else "")

    def __str__(self) -> str:
        return f"{self.severity} {self.message}"


def fault_of_findings(findings: Iterable[Finding], *, severity: Severity = "error") -> FailureClass | None:
    """Return the class of the failure that the findings of a severity foretell: first the user's, who can mend it."""
    faults = {finding.fault for finding in findings if finding.severity == severity}
    return FailureClass.USER if FailureClass.USER in faults else min(faults, default=None)
