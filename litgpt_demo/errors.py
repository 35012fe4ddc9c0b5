"""The tree of errors, the class (`FailureClass`) of each, and the exit code of each class.

TrainLitgptError         unknown            1
  UserError              user error         40   the request cannot work, however often it is tried
    Unreachable          user error         40   the Hub or a bucket cannot be reached from this machine
  DataError              data error         41   a corpus, dataset or checkpoint differs from its description
    TooLarge             data error         41   a file has more bytes than any of its kind, and is not read
  NodeError              node fault         43   this machine cannot run the job
  NetworkError           network fault      44   the other nodes cannot be reached
  Preempted              preempted          45   the machine had to leave; the state was saved before
  Hung                   hang               46   a rank gives no sign of life
  DiskFull               disk full          47   a disk, quota or file system has no room; the message has the bytes
  LauncherError          user error         40   the branch of the launching side: launcher.errors draws it

Out of memory (42) has no exception here: torch, the kernel and the platforms raise it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from signal import Signals
from typing import Literal

from litgpt_demo.codes import CODES
from litgpt_demo.secrets import redacted


class FailureClass(StrEnum):
    """The class of a failure, and the exit code that carries it out of a process.

    A job ends with one of `JOB_FAILURE_CLASSES`. Only the launching side uses the others.

    64..78 belong to sysexits.h, 126.. to shells, 50001.. to GCP Batch; 40..55 differ from all of them
    and fit the single byte that Kubernetes' podFailurePolicy and Batch's lifecyclePolicies compare.
    """

    exit_code: int
    meaning: str

    def __new__(cls, name: str, exit_code: int, meaning: str) -> FailureClass:
        fault = str.__new__(cls, name)
        fault._value_, fault.exit_code, fault.meaning = name, exit_code, meaning
        return fault

    USER = "user error", 40, "the settings, the program or a permission is wrong, so another attempt would fail too"
    DATA = "data error", 41, "a corpus, dataset or checkpoint differs from its description"
    OUT_OF_MEMORY = "out of memory", 42, "a GPU or a machine has too little memory"
    NODE = "node fault", 43, "a machine, or a process on it, died or cannot run the job"
    NETWORK = "network fault", 44, "the other nodes cannot be reached"
    PREEMPTED = "preempted", 45, "the platform took the machine away"
    HANG = "hang", 46, "a rank sent no heartbeat for `train.hang_timeout` seconds"
    DISK_FULL = "disk full", 47, "a disk, quota or file system has no room for the bytes that the message names"
    UNKNOWN = "unknown", 1, "a crash in native code, a bug, or an exit code of your own script"
    UNREACHABLE = "platform unreachable", 50, "the platform, a registry or a builder did not answer"
    UNKNOWN_RUN = "unknown run", 51, "no run has that name, or several have it"
    LIVE = "run is live", 52, "a job of this name is running"
    CANCELLED = "cancelled", 53, "a user cancelled the run, whose checkpoints are kept"
    SERVER = "server unreachable", 54, "Prefect's server does not answer, did not start, or rejected the secret"
    REFUSED = "platform refused", 55, "the platform understood the request and rejected it"


EXIT_CODES = {fault: fault.exit_code for fault in FailureClass}
JOB_FAILURE_CLASSES = tuple(fault for fault in FailureClass if fault.exit_code < 50)
"""The classes that a node can end with; each has exactly one action (launcher.runs.diagnosis)."""

# A user's own script may end with 50 and more, so only a node's own codes count.
_FAULTS = {fault.exit_code: fault for fault in JOB_FAILURE_CLASSES}

# GCP Batch's exit codes of lost tasks (https://cloud.google.com/batch/docs/troubleshooting#reserved-exit-codes).
BATCH_CODES: dict[int, tuple[FailureClass, str]] = {
    50001: (FailureClass.PREEMPTED, "its Spot VM was taken away"),
    50002: (FailureClass.NODE, "its VM stopped reporting"),
    50003: (FailureClass.NODE, "its VM was rebooted"),
    50004: (FailureClass.NODE, "its VM does not answer"),
    50005: (FailureClass.USER, "it ran longer than it may"),
    50006: (FailureClass.NODE, "its VM was recreated"),
}


class TrainLitgptError(Exception):
    """A known failure: `what` is the problem with its reason, and `fix` the advice. `str()` has both."""

    fault: FailureClass = FailureClass.UNKNOWN

    def __init__(self, *args: object, fix: str = "", fault: FailureClass | None = None, no_retry: bool = False) -> None:
        """`fault` replaces the class of this kind of error. For `no_retry` see `mark_no_retry`."""
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
    """Mark an error of any kind, so that no caller retries after all useful retries."""
    vars(error)["no_retry"] = True  # other processes get it with the error


def is_marked_no_retry(error: BaseException) -> bool:
    """Return True if no caller may retry, because the waits would multiply."""
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
    """Return the class of an exit code; a negative one is the signal that killed the process, as `Popen.returncode`."""
    if code < 0:
        return FailureClass.NODE
    if code in BATCH_CODES:
        return BATCH_CODES[code][0]
    if code == 2:  # Python itself and argparse reject the command line
        return FailureClass.USER
    return _FAULTS.get(code, FailureClass.UNKNOWN)


def one_line(error: BaseException | str) -> str:
    """Return the message of a foreign error for a sentence: on one line, without full stop and secrets."""
    return " ".join(redacted(str(error)).split()).rstrip(".")


def failure_text(error: BaseException) -> str:
    """Return why work ended: a known failure's message with its fix, or any other exception as `Name: message`."""
    return str(error) if isinstance(error, TrainLitgptError) else f"{type(error).__name__}: {error}"


_KINDS = {
    FailureClass.OUT_OF_MEMORY: "MemoryError OutOfMemoryError",
    FailureClass.NETWORK: "DistNetworkError DistStoreError BrokenPipeError ConnectionError ConnectionRefusedError "
    "ConnectionResetError TimeoutError",
    # Mistakes in the program or its settings: each start repeats them.
    FailureClass.USER: "ArgumentError AssertionError AttributeError FileNotFoundError FloatingPointError ImportError "
    "IndentationError IndexError IsADirectoryError KeyError ModuleNotFoundError NameError NotADirectoryError "
    "NotImplementedError OverflowError PermissionError RecursionError SyntaxError TabError TypeError "
    "UnboundLocalError ValueError ZeroDivisionError",
    # Errors of file readers about bytes of another format.
    FailureClass.DATA: "ArrowInvalid BadGzipFile BadZipFile JSONDecodeError LZMAError ReadError SafetensorError "
    "UnicodeDecodeError UnpicklingError",
}
_BY_NAME = {name: fault for fault, names in _KINDS.items() for name in names.split()} | {
    kind.__name__: kind.fault for kind in (UserError, DataError, DiskFull, NodeError, NetworkError, Preempted, Hung)
}

# A GPU that stops in the middle of a kernel or of a library's call. On many GPUs the machine is the likelier cause. A
# mistake of the program does the same, but at the same step on every machine (launcher.runs.restarts).
_GPU = re.compile(
    "an illegal memory access was encountered|an illegal instruction was encountered|unspecified launch failure"
    "|misaligned address|invalid program counter|cuda error: unknown error|cuda driver error"
    "|_status_execution_failed|_status_not_initialized|_status_internal_error|_status_mapping_error"
)

# Messages of torch 2.13, gloo, NCCL, CUDA and the C library in lower case, as in their sources. The first match counts.
_MESSAGES = {
    FailureClass.OUT_OF_MEMORY: "out of memory|outofmemoryerror|can't allocate memory|cannot allocate memory"
    "|_status_alloc_failed|out of shared memory|unable to allocate shared memory",
    # torch.save's zip writer prints the last of these if a write failed; its stream has lost the reason.
    FailureClass.DISK_FULL: r"no space left on device|disk quota exceeded|\. unexpected pos ",
    FailureClass.NODE: "uncorrectable ecc error|uncorrectable nvlink error|no cuda-capable device is detected"
    r"|cuda-capable device\(s\) is/are busy or unavailable|system not yet initialized|hardware stack error"
    "|driver/library version mismatch|input/output error|stale file handle|transport endpoint is not connected"
    f"|is killed by signal|{_GPU.pattern}",
    FailureClass.DATA: "pytorchstreamreader failed|invalid magic number; corrupt file|magic bytes not found"
    "|ran out of input|unexpected eof",
    FailureClass.USER: "shapes cannot be multiplied|is invalid for input of size|must match the size of tensor"
    r"|must match the existing size|expected all tensors to be on the same device|error\(s\) in loading state_dict"
    "|does not require grad and does not have a grad_fn|expected to have finished reduction in the prior iteration"
    "|device-side assert triggered|detected mismatch between collectives",
    FailureClass.HANG: "watchdog caught collective operation timeout|ms for recv operation to complete"
    "|ms for send operation to complete|failed to pass monitoredbarrier",
    FailureClass.NETWORK: "connection closed by peer|connection reset by peer|connection refused|socket timeout"
    "|broken pipe|remote process exited or there was a network error|ncclremoteerror|ncclsystemerror|distnetworkerror"
    "|distbackenderror|name or service not known|temporary failure in name resolution|no route to host",
}


def fault_of_exception(error: BaseException | str) -> FailureClass:
    """Return the class of a worker's exception, or of its text (`Name: message`) in torch's error file.

    The name of the exception counts first. Otherwise a phrase of the message decides, as for a lost peer.
    """
    if isinstance(error, TrainLitgptError):
        return error.fault
    text = error if isinstance(error, str) else failure_text(error)
    name = re.match(r"(?:\w+\.)*(\w+)(?::|\s*$)", text)
    if name and name[1] in _BY_NAME:
        return _BY_NAME[name[1]]
    for fault, phrases in _MESSAGES.items():
        if re.search(phrases, text.lower()):
            return fault
    return FailureClass.UNKNOWN


def is_gpu_error(text: str) -> bool:
    """Return True if the text of an exception reports that a GPU stopped in the middle of a program's work."""
    return _GPU.search(text.lower()) is not None


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The evidence of one failed rank."""

    local_rank: int
    exit_code: int | None
    """Negative is the signal that killed it; None if torchrun was killed before it wrote one."""
    message: str = ""
    """The exception as `Name: message`; empty if the rank wrote none."""
    traceback: tuple[str, ...] = ()
    """The last lines of its traceback or error output."""
    time: float
    """When it failed, seconds since the epoch; torchrun's own figures are whole seconds."""
    waits: bool = False
    """True if it hung in a wait for the other ranks, by its stacks or its message."""
    step: int | None = None
    """The steps that it had done; None without a heartbeat."""
    held: bool = False
    """True if it hung because its process was stopped, or in a read or write of the kernel's that did not end."""

    @property
    def fault(self) -> FailureClass:
        """Its class: by one of our own exit codes, else by its exception or that one's cause, else by its exit code."""
        by_code = FailureClass.UNKNOWN if self.exit_code is None else fault_of_exit_code(self.exit_code)
        if self.exit_code in EXIT_CODES.values() and by_code is not FailureClass.UNKNOWN:
            return by_code
        # The first exception of a traceback was raised first. Those that follow from it may be less specific.
        chain = [line for line in self.traceback if re.match(r"(?:\w+\.)*\w*(?:Error|Exception)(?::|$)", line)]
        for line in (self.message, *chain):
            fault = fault_of_exception(line)
            if fault is not FailureClass.UNKNOWN:
                return fault
        return by_code

    @property
    def secondary(self) -> bool:
        """True if another failure caused it: it lost a peer, or was stopped by its own torchrun."""
        return self.fault is FailureClass.NETWORK or (self.exit_code == -Signals.SIGTERM and not self.message)

    def __str__(self) -> str:
        how = "ended"
        if self.exit_code is not None:
            how = f"ended with exit code {self.exit_code}"
            if self.exit_code < 0:
                how = f"was killed by signal {-self.exit_code}"
        message = f": {self.message}" if self.message else ""
        return f"local rank {self.local_rank} {how} ({self.fault}){message}"


def root_cause(failures: Sequence[RankFailure]) -> RankFailure | None:
    """Return the earliest failure that is neither a consequence of another nor a wait for one, else the earliest.

    torchrun's times are whole seconds. Within one, a failure with a message comes first. If all ranks were ended by
    SIGTERM, and some without a message, those got it from elsewhere and come first.
    """
    if all(failure.secondary and failure.exit_code == -Signals.SIGTERM for failure in failures):
        failures = [failure for failure in failures if not failure.message] or failures

    def order(failure: RankFailure) -> tuple[bool, bool, int, bool]:
        return failure.secondary, failure.waits, int(failure.time), not failure.message

    return min(failures, key=order, default=None)


Severity = Literal["error", "unknown", "warning", "info"]
"""`unknown` could not be checked from this machine. A plan continues without it, but a run is refused."""


@dataclass(frozen=True)
class Finding:
    """The result of a check, and the advice."""

    severity: Severity
    code: str
    """A stable name, `area.problem`, of `litgpt_demo.codes`, that documentation and scripts may rely on."""
    what: str
    fix: str = ""
    fault: FailureClass = FailureClass.USER
    """The class of the failure that would follow."""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"Unknown check code {self.code!r}. Add it to CODES in litgpt_demo/codes.py.")

    @classmethod
    def of(cls, error: Exception, code: str) -> Finding:
        """Return an error as a finding."""
        if isinstance(error, TrainLitgptError):
            return cls("error", code, error.what, error.fix, error.fault)
        return cls("error", code, str(error))

    @property
    def message(self) -> str:
        """The finding without its severity."""
        fix = f" -> {self.fix}" if self.fix else ""
        return f"[{self.code}] {self.what}{fix}"

    def __str__(self) -> str:
        return f"{self.severity} {self.message}"


def fault_of_findings(findings: Iterable[Finding], *, severity: Severity = "error") -> FailureClass | None:
    """Return the class of the findings of a severity: first the user's, because the user can fix it."""
    faults = {finding.fault for finding in findings if finding.severity == severity}
    if FailureClass.USER in faults:
        return FailureClass.USER
    return min(faults, default=None)
