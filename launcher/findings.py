"""Problems as values: preflight, doctor and the diagnosis of failures all speak in findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from launcher.errors import ConfigProblem

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One thing found, and what to do about it."""

    severity: Severity
    code: str
    """Stable name, `area.problem`, that documentation and scripts may rely on."""
    what: str
    fix: str = ""

    @property
    def message(self) -> str:
        """The finding for a reader who knows its severity."""
        return f"[{self.code}] {self.what}" + (f" -> {self.fix}" if self.fix else "")

    def __str__(self) -> str:
        return f"{self.severity} {self.message}"


def require(findings: Iterable[Finding]) -> list[Finding]:
    """All findings if none is an error.

    Raises:
        ConfigProblem: names every error at once, so that one round of mending is enough.
    """
    found = list(findings)
    errors = [finding for finding in found if finding.severity == "error"]
    if len(errors) > 1:
        raise ConfigProblem("\n  ".join([f"{len(errors)} problems:", *(finding.message for finding in errors)]))
    if errors:
        raise ConfigProblem(errors[0].message)
    return found
