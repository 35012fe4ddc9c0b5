"""The clients of Google's libraries, made when they are first needed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from launcher import google
from launcher.errors import PlatformRefused, PlatformUnreachable

if TYPE_CHECKING:
    from google.cloud.batch_v1 import BatchServiceClient
    from google.cloud.logging_v2.services.logging_service_v2 import LoggingServiceV2Client

# Roles of the submitter: https://cloud.google.com/batch/docs/get-started
BATCH_ROLES = (
    "enable the Batch API in the project and give yourself roles/batch.jobsEditor and roles/logging.viewer, and "
    "roles/iam.serviceAccountUser on the VMs' service account"
)

BATCH = google.Service(
    extra="batch", roles=BATCH_ROLES, settings="platform's", refused=PlatformRefused, away=PlatformUnreachable,
    emulator="BATCH_EMULATOR_HOST",
)  # fmt: skip
LOGGING = replace(BATCH, emulator="LOGGING_EMULATOR_HOST")


class Clients:
    """The clients of one platform; each holds one connection."""

    @cached_property
    def batch(self) -> BatchServiceClient:
        """
        Raises:
            NotInstalled: the extra is not.
            LoginProblem: no credentials.
        """
        with errors_as_ours("signing in"):
            from google.cloud.batch_v1 import BatchServiceClient

            return BatchServiceClient(transport=BATCH.transport(BatchServiceClient))

    @cached_property
    def logging(self) -> LoggingServiceV2Client:
        """
        Raises:
            NotInstalled: the extra is not.
            LoginProblem: no credentials.
        """
        with errors_as_ours("signing in"):
            from google.cloud.logging_v2.services.logging_service_v2 import LoggingServiceV2Client

            return LoggingServiceV2Client(transport=LOGGING.transport(LoggingServiceV2Client))


def errors_as_ours(doing: str) -> AbstractContextManager[None]:
    """Return a context whose errors of Google's libraries are ours, saying what was being done.

    Raises:
        NotInstalled: a library is missing.
        LoginProblem: credentials are missing or were refused.
        PlatformRefused: Google understood, and said no.
        PlatformUnreachable: no answer, or none that says anything.
    """
    return google.google_errors(BATCH, doing)
