"""What can go wrong on the launching side.

LauncherError
  ConfigProblem          the run cannot work as written               do not retry
  LoginProblem           credentials are missing or refused           do not retry
  PlatformRefused        the platform said no; the message has a fix  do not retry
    JobRefused           ... after it had taken the job               do not retry
  PlatformUnreachable    the platform did not answer                  wait and retry
  ImageProblem           the image cannot be built, pushed or found   do not retry
  JobFailed              the job itself ended badly; carries the verdict
  JobCancelled           somebody stopped the job                     do not retry
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.diagnosis import Verdict


class LauncherError(Exception):
    """Base: the message says what was given, why it cannot be, and what to do."""


class ConfigProblem(LauncherError):
    """The run cannot work as written."""


class LoginProblem(LauncherError):
    """Credentials are missing or were refused."""


class PlatformRefused(LauncherError):
    """The platform understood and said no."""


class JobRefused(PlatformRefused):
    """The platform took the job, and refuses for too long to run it: nothing of it will change by waiting."""


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
