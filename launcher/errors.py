"""What can go wrong on the launching side.

LauncherError
  ConfigProblem          the run cannot work as written               do not retry
  LoginProblem           credentials are missing or refused           do not retry
  PlatformRefused        the platform said no; the message has a fix  do not retry
  PlatformUnreachable    the platform did not answer                  wait and retry
  ImageProblem           the image cannot be built, pushed or found   do not retry
  JobFailed              the job itself ended badly; carries the verdict
  JobCancelled           somebody stopped the job                     do not retry
  ServerUnreachable      Prefect's server does not answer             do not retry: its client has done so
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from litgpt_demo.faults import EXIT_CODES, Fault

if TYPE_CHECKING:
    from launcher.diagnosis import Verdict


class LauncherError(Exception):
    """Base: the message says what was given, why it cannot be, and what to do."""

    exit_code: ClassVar[int] = EXIT_CODES[Fault.USER]
    """What the command line ends with."""


class ConfigProblem(LauncherError):
    """The run cannot work as written."""


class LoginProblem(LauncherError):
    """Credentials are missing or were refused."""


class PlatformRefused(LauncherError):
    """The platform understood and said no."""


class PlatformUnreachable(LauncherError):
    """The platform did not answer; the job may well be running."""


class ImageProblem(LauncherError):
    """The image cannot be built, pushed or found."""


class JobFailed(LauncherError):
    """The job ended badly, and its class says that another attempt is of no use."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class JobCancelled(LauncherError):
    """Somebody stopped the job. What it had saved is kept."""


class ServerUnreachable(LauncherError):
    """Prefect's server does not answer, or did not come up."""

    exit_code = 47
    """Next to the codes of litgpt_demo.faults, which are those of nodes: no node ends with it."""
