"""Problems as values: preflight, doctor and the diagnosis of failures all speak in findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from launcher.errors import ConfigProblem, NoCredentials, NotInstalled, PlatformUnreachable
from litgpt_demo.errors import DataError, Fault, LitgptDemoError, NetworkError, Unreachable

Severity = Literal["error", "unknown", "warning", "info"]
"""`unknown` is what this machine could not look at. A plan goes on without it; a run needs to know, and is refused."""

OUT_OF_SIGHT = (NoCredentials, NotInstalled, PlatformUnreachable, NetworkError, Unreachable)
"""Errors that say nothing about the config: only that it cannot be looked at from this machine, or not now."""


@dataclass(frozen=True)
class Finding:
    """One thing found, and what to do about it."""

    severity: Severity
    code: str
    """Stable name, `area.problem`, that documentation and scripts may rely on."""
    what: str
    fix: str = ""
    fault: Fault = Fault.USER
    """The class of the failure that it foretells."""

    @property
    def message(self) -> str:
        """The finding for a reader who knows its severity."""
        return f"[{self.code}] {self.what}" + (f" -> {self.fix}" if self.fix else "")

    def __str__(self) -> str:
        return f"{self.severity} {self.message}"


def finding_of(error: Exception, code: str) -> Finding:
    """Return the finding that an error is: `unknown` where it says no more than that we could not look."""
    what, _, fix = str(error).rpartition("; ")
    fault = error.fault if isinstance(error, LitgptDemoError) else Fault.USER
    return Finding(
        "unknown" if isinstance(error, OUT_OF_SIGHT) else "error", code, what or fix, fix * bool(what), fault
    )


def fault_of(findings: Iterable[Finding]) -> Fault | None:
    """Return the class of the failure that these findings foretell, None where they foretell none.

    Whatever is wrong with the config comes first: it is what the user can mend.
    """
    faults = {finding.fault for finding in findings if finding.severity == "error"}
    return Fault.USER if Fault.USER in faults else min(faults, default=None)


def require(findings: Iterable[Finding]) -> list[Finding]:
    """Return all findings if none is an error, and nothing is unknown.

    Raises:
        ConfigProblem: names every problem at once, so that one round of mending is enough.
        DataError: the corpus is all that is wrong.
    """
    found = list(findings)
    problems = [finding for finding in found if finding.severity in {"error", "unknown"}]
    if problems:
        kind = DataError if fault_of(problems) is Fault.DATA else ConfigProblem
        told = [finding.message for finding in problems]
        raise kind(told[0] if len(told) == 1 else "\n  ".join([f"{len(told)} problems:", *told]))
    return found
