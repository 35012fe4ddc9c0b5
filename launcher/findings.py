"""Findings on the launching side: errors become findings, and findings that forbid a run become one error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from launcher.errors import (
    ConfigProblem,
    ImageOutOfSight,
    ImageUnreachable,
    NoCredentials,
    NotInstalled,
    PlatformUnreachable,
)
from litgpt_demo.errors import DataError, Fault, NetworkError, Unreachable
from litgpt_demo.findings import Finding, fault_of_findings

OUT_OF_SIGHT = (
    NoCredentials, NotInstalled, PlatformUnreachable, ImageOutOfSight, ImageUnreachable, NetworkError, Unreachable,
)  # fmt: skip
"""Errors that say nothing about the config: only that it cannot be looked at from this machine, or not now."""


def finding_of(error: Exception, code: str) -> Finding:
    """Return the finding that an error is: `unknown` where it says no more than that we could not look."""
    finding = Finding.of(error, code)
    return replace(finding, severity="unknown") if isinstance(error, OUT_OF_SIGHT) else finding


def require(findings: Iterable[Finding]) -> list[Finding]:
    """Return all findings if none is an error, and nothing is unknown.

    Raises:
        ConfigProblem: names every problem at once, so that one round of changes is enough; its class is the findings'.
        DataError: the corpus is all that is wrong.
    """
    found = list(findings)
    problems = [finding for finding in found if finding.severity in {"error", "unknown"}]
    if problems:
        fault = fault_of_findings(problems) or fault_of_findings(problems, severity="unknown") or Fault.USER
        messages = [finding.message for finding in problems]
        text = messages[0] if len(messages) == 1 else "\n  ".join([f"{len(messages)} problems:", *messages])
        raise DataError(text) if fault is Fault.DATA else ConfigProblem(text, fault=fault)
    return found
