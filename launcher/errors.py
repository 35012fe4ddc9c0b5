"""What can go wrong on the launching side.

LauncherError
  ConfigProblem          the run cannot work as written               do not retry
    NotInstalled         a package or program is not on this machine  do not retry
  UnknownRun             no run has that name, or several have        do not retry
  RunIsLive              a job that would be doubled runs already     do not retry
  LoginProblem           credentials are missing or refused           do not retry
    NoCredentials        this machine has none                        do not retry
  PlatformRefused        the platform said no; the message has a fix  do not retry
    JobRefused           ... after it had taken the job               do not retry
  PlatformUnreachable    the platform did not answer                  wait and retry
  ImageProblem           the image cannot be built, pushed or found   do not retry
  JobFailed              the job itself ended badly; carries the verdict
  JobCancelled           somebody stopped the job                     do not retry
  ServerUnreachable      Prefect's server does not answer             do not retry: its client has done so

The command line ends with `exit_code`. Those of a job's own end are in litgpt_demo.errors; these begin behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from litgpt_demo.errors import EXIT_CODES, Fault

if TYPE_CHECKING:
    from launcher.runs.diagnosis import Verdict


class LauncherError(Exception):
    """Base: the message says what was given, why it cannot be, and what to do."""

    exit_code: ClassVar[int] = EXIT_CODES[Fault.USER]
    """The exit code of the command line."""


class ConfigProblem(LauncherError):
    """The run cannot work as written."""


class NotInstalled(ConfigProblem):
    """A package or a program that the platform needs is not on this machine."""


class UnknownRun(LauncherError):
    """No run has that name, or several have; which one is meant cannot be known."""

    exit_code = 51


class RunIsLive(LauncherError):
    """A job runs already that would be doubled, or that the user may have forgotten."""

    exit_code = 52


class LoginProblem(LauncherError):
    """Credentials are missing or were refused."""


class NoCredentials(LoginProblem):
    """This machine has no credentials at all, so that nothing can be asked."""


class PlatformRefused(LauncherError):
    """The platform understood and said no."""


class JobRefused(PlatformRefused):
    """The platform took the job, and refuses for too long to run it: nothing of it will change by waiting."""


class PlatformUnreachable(LauncherError):
    """The platform did not answer; the job may well be running."""

    exit_code = 50


class ImageProblem(LauncherError):
    """The image cannot be built, pushed or found."""


class JobFailed(LauncherError):
    """The job ended badly, and its class says that another attempt is of no use."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class JobCancelled(LauncherError):
    """Somebody stopped the job. What it had saved is kept."""

    exit_code = 53


class ServerUnreachable(LauncherError):
    """Prefect's server does not answer, or did not come up."""

    exit_code = 54
