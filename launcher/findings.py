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


def fault_of_refusal(findings: Iterable[Finding]) -> Fault | None:
    """Return the class of the failure by which these findings refuse a run, None where they refuse none.

    Where nothing is wrong and all that is unknown is so because somebody did not answer, it helps to wait; anything
    else that cannot be looked at from here is for the user to change.
    """
    found = list(findings)
    unknown = {finding.fault for finding in found if finding.severity == "unknown"}
    if (fault := fault_of_findings(found)) is not None or not unknown:
        return fault
    return Fault.UNREACHABLE if unknown == {Fault.UNREACHABLE} else Fault.USER


def require(findings: Iterable[Finding]) -> list[Finding]:
    """Return all findings if none is an error, and nothing is unknown.

    Raises:
        ConfigProblem: names every problem at once, so that one round of changes is enough; its class is the findings'.
        DataError: the corpus is all that is wrong.
    """
    found = list(findings)
    if (fault := fault_of_refusal(found)) is not None:
        messages = [finding.message for finding in found if finding.severity in {"error", "unknown"}]
        text = messages[0] if len(messages) == 1 else "\n  ".join([f"{len(messages)} problems:", *messages])
        raise DataError(text) if fault is Fault.DATA else ConfigProblem(text, fault=fault)
    return found
