"""Problems as values: a node's checks, preflight, doctor and the diagnosis of failures all speak in findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from litgpt_demo.errors import Fault, TrainLitgptError

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
    fault: Fault = Fault.USER
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


def fault_of_findings(findings: Iterable[Finding], *, severity: Severity = "error") -> Fault | None:
    """Return the class of the failure that the findings of a severity foretell, None where there are none.

    A mistake in the config comes first: the user can fix it.
    """
    faults = {finding.fault for finding in findings if finding.severity == severity}
    return Fault.USER if Fault.USER in faults else min(faults, default=None)
