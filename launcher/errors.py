"""The launching side's branch of the tree of errors (litgpt_demo.errors has the rest, and the exit code of each).

Errors become findings here, and findings that forbid a run one error.
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


class LoginProblem(LauncherError):
    """Credentials are missing or were refused."""


class NoCredentials(LoginProblem):
    """This machine has no credentials at all, so that nothing can be asked."""


class ImageProblem(LauncherError):
    """The image cannot be built, pushed or found."""


class ImageOutOfSight(ImageProblem):
    """The image cannot be looked at from this machine: no way leads to its registry, or this account may not read it.
    Nodes may have another way and another account."""


class ImageUnreachable(ImageProblem):
    """The registry or the builder did not answer, or stopped in mid-answer; building again is safe."""

    fault = FailureClass.UNREACHABLE


class PlatformUnreachable(LauncherError):
    """The platform did not answer; the job may well be running."""

    fault = FailureClass.UNREACHABLE


class UnknownRun(LauncherError):
    """No run has that name, or several have, so that it is not clear which one is meant."""

    fault = FailureClass.UNKNOWN_RUN


class RunIsLive(LauncherError):
    """A job runs already that would be doubled, or that the user may have forgotten."""

    fault = FailureClass.LIVE


class JobCancelled(LauncherError):
    """Somebody stopped the job. The checkpoints that it had saved are kept."""

    fault = FailureClass.CANCELLED


class ServerUnreachable(LauncherError):
    """Prefect's server does not answer, or did not come up."""

    fault = FailureClass.SERVER


class PlatformRefused(LauncherError):
    """The platform understood and said no."""

    fault = FailureClass.REFUSED


def rival(job: str, run: str, *, end: str) -> PlatformRefused:
    """Return the refusal to submit beside a job of the same run and root: the run index was deleted while it ran."""
    what = f"{job} trains {run} under the same root, and the run index has no record of it"
    fix = f"wait for its end, or end it: {end}"
    return PlatformRefused(f"{what}: two jobs would overwrite each other's files", fix=fix)


class JobRefused(PlatformRefused):
    """The platform took the job, and refuses for too long to run it: waiting will not change that."""


class JobFailed(LauncherError):
    """The job ended badly, with the words and the class of the verdict on its last attempt."""


UNVERIFIABLE = (
    NoCredentials, NotInstalled, PlatformUnreachable, ImageOutOfSight, ImageUnreachable, NetworkError, Unreachable,
)  # fmt: skip
"""Errors that say nothing about the config: only that it cannot be looked at from this machine, or not now."""


def finding_of(error: Exception, code: str) -> Finding:
    """Return the finding that an error is: `unknown` where it says no more than that we could not look."""
    finding = Finding.of(error, code)
    return replace(finding, severity="unknown") if isinstance(error, UNVERIFIABLE) else finding


def raise_on_errors(findings: Iterable[Finding]) -> list[Finding]:
    """Return all findings if none is an error or unknown. Else one ConfigProblem of the findings' class names every
    problem, so that one round of changes is enough; a DataError where the corpus is all that is wrong."""
    found = list(findings)
    problems = [finding for finding in found if finding.severity in {"error", "unknown"}]
    if problems:
        fault = fault_of_findings(problems) or fault_of_findings(problems, severity="unknown") or FailureClass.USER
        messages = [finding.message for finding in problems]
        text = messages[0] if len(messages) == 1 else "\n  ".join([f"{len(messages)} problems:", *messages])
        raise DataError(text) if fault is FailureClass.DATA else ConfigProblem(text, fault=fault)
    return found
