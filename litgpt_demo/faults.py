"""Why something ended: fault classes, the exit codes that carry them off a node, and the exceptions that raise them.

    LitgptDemoError
      UserError            what was asked for cannot work          do not retry
      DataError            data or checkpoint is not what it says  do not retry
      NodeError            this machine is not fit for the job     new attempt, elsewhere
      NetworkError         peers cannot be reached                 new attempt
      Preempted            asked to leave; state was saved         new attempt, not counted
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Fault(StrEnum):
    """Class of a failure; each one has exactly one action (launcher.diagnosis)."""

    USER = "user error"
    DATA = "data error"
    OUT_OF_MEMORY = "out of memory"
    NODE = "node fault"
    NETWORK = "network fault"
    PREEMPTED = "preempted"
    HANG = "hang"
    UNKNOWN = "unknown"


# 64..78 belong to sysexits.h, 126.. to shells, 50001.. to GCP Batch; 40..46 collide with none of them
# and fit the single byte that Kubernetes' podFailurePolicy and Batch's lifecyclePolicies compare.
EXIT_CODES: dict[Fault, int] = {
    Fault.UNKNOWN: 1,
    Fault.USER: 40,
    Fault.DATA: 41,
    Fault.OUT_OF_MEMORY: 42,
    Fault.NODE: 43,
    Fault.NETWORK: 44,
    Fault.PREEMPTED: 45,
    Fault.HANG: 46,
}

_FAULTS = {code: fault for fault, code in EXIT_CODES.items()}


class LitgptDemoError(Exception):
    """Something went wrong in a way we know; the message says what was given, why it cannot be, what to do."""

    fault: ClassVar[Fault] = Fault.UNKNOWN


class UserError(LitgptDemoError):
    """What was asked for cannot work, however often it is tried."""

    fault = Fault.USER


class DataError(LitgptDemoError):
    """A corpus, dataset or checkpoint is not what it says it is."""

    fault = Fault.DATA


class NodeError(LitgptDemoError):
    """This machine is not fit for the job."""

    fault = Fault.NODE


class NetworkError(LitgptDemoError):
    """The other nodes cannot be reached."""

    fault = Fault.NETWORK


class Preempted(LitgptDemoError):
    """The machine was asked to leave; the state was saved before."""

    fault = Fault.PREEMPTED


def fault_of_exit_code(code: int) -> Fault:
    """The class that a node's exit code stands for; a negative code is the signal that killed it (as `Popen.returncode`)."""
    if code < 0:
        return Fault.NODE
    return _FAULTS.get(code, Fault.UNKNOWN)


# Wording of torch 2.13, gloo and NCCL, matched in lower case; each phrase is one that their sources print for a lost peer.
_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "socket timeout",
    "broken pipe",
    "remote process exited or there was a network error",
    "ncclremoteerror",
    "ncclsystemerror",
    "distnetworkerror",
    "distbackenderror",
)


def fault_of_exception(error: BaseException | str) -> Fault:
    """The class of an exception raised in a worker, or of its text as torch's error file keeps it."""
    if isinstance(error, LitgptDemoError):
        return error.fault
    if isinstance(error, MemoryError):
        return Fault.OUT_OF_MEMORY
    text = (error if isinstance(error, str) else f"{type(error).__name__}: {error}").lower()
    if "out of memory" in text or "outofmemoryerror" in text or "can't allocate memory" in text:
        return Fault.OUT_OF_MEMORY
    if any(phrase in text for phrase in _LOST_PEER):
        return Fault.NETWORK
    for kind in (UserError, DataError, NodeError, NetworkError, Preempted):
        if f"{kind.__name__.lower()}:" in text:
            return kind.fault
    return Fault.UNKNOWN
