"""The errors of the launching side; litgpt_demo.errors has those of the nodes, and the exit code of each class.

It also converts errors to findings, and the findings that forbid a run to one error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from litgpt_demo.errors import (
    DataError,
    FailureClass,
    Finding,
    NetworkError,
    TrainLitgptError,
    Unreachable,
    fault_of_findings,
)


class LauncherError(TrainLitgptError):
    """A failure on the launching side."""

    fault = FailureClass.USER


class ConfigProblem(LauncherError):
    """The run cannot work as written."""


class NotInstalled(ConfigProblem):
    """A package or a program that the platform needs is not on this machine."""


def install_extra(extra: str) -> str:
    """Return the advice that installs an optional dependency. No package index has a train-litgpt yet."""
    return f"run `pip install '.[{extra}]'` in the checkout of train-litgpt"


class LoginProblem(LauncherError):
    """Credentials are missing or were rejected."""


class NoCredentials(LoginProblem):
    """This machine has no credentials, so nothing can be queried."""


class ImageProblem(LauncherError):
    """The image cannot be built, pushed or found."""


class ImageOutOfSight(ImageProblem):
    """The image cannot be read from this machine: its registry is not reachable, or this account lacks permission.
    Nodes may reach it, and have another account."""


class ImageUnreachable(ImageProblem):
    """The registry or the builder did not answer, or its answer broke off; building again is safe."""

    fault = FailureClass.UNREACHABLE


class PlatformUnreachable(LauncherError):
    """The platform did not answer; the job may still be running."""

    fault = FailureClass.UNREACHABLE


class UnknownRun(LauncherError):
    """No run has that name, or several have it."""

    fault = FailureClass.UNKNOWN_RUN


class RunIsLive(LauncherError):
    """A job of this name is running, which a new one would duplicate or the user may have forgotten."""

    fault = FailureClass.LIVE


class JobCancelled(LauncherError):
    """A user cancelled the job. Its saved checkpoints are kept."""

    fault = FailureClass.CANCELLED


class ServerUnreachable(LauncherError):
    """Prefect's server does not answer, or did not start."""

    fault = FailureClass.SERVER


class PlatformRefused(LauncherError):
    """The platform rejected the request."""

    fault = FailureClass.REFUSED


def rival(job: str, run: str, *, end: str) -> PlatformRefused:
    """Return the refusal to submit next to a job of the same run and root: the run index was deleted while it ran."""
    what = f"{job} trains {run} under the same root, and the run index has no record of it"
    fix = f"wait for its end, or end it: {end}"
    return PlatformRefused(f"{what}: two jobs would overwrite each other's files", fix=fix)


class JobRefused(PlatformRefused):
    """The platform accepted the job, but has refused to run it for too long; waiting will not help."""


class JobFailed(LauncherError):
    """The job failed. The message and the failure class are those of its last attempt's diagnosis."""


UNVERIFIABLE = (
    NoCredentials, NotInstalled, PlatformUnreachable, ImageOutOfSight, ImageUnreachable, NetworkError, Unreachable,
)  # fmt: skip
"""Errors that say nothing about the config: this machine cannot verify it, or cannot verify it now."""


def finding_of(error: Exception, code: str) -> Finding:
    """Return an error as a finding; its severity is `unknown` if the check could not be made."""
    finding = Finding.of(error, code)
    if isinstance(error, UNVERIFIABLE):
        return replace(finding, severity="unknown")
    return finding


def raise_on_errors(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings if none is an error or unknown. Raises ConfigProblem, or DataError for the corpus, with every
    problem and their failure class."""
    findings = list(findings)
    problems = [finding for finding in findings if finding.severity in {"error", "unknown"}]
    if not problems:
        return findings
    fault = fault_of_findings(problems) or fault_of_findings(problems, severity="unknown") or FailureClass.USER
    text = problems[0].message
    if len(problems) > 1:
        text = "\n  ".join([f"{len(problems)} problems:", *(finding.message for finding in problems)])
    if fault is FailureClass.DATA:
        raise DataError(text)
    raise ConfigProblem(text, fault=fault)
