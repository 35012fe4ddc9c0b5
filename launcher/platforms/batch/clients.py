"""The clients of Google's libraries, made when they are first needed, and what their exceptions mean to us."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from launcher.errors import LoginProblem, NoCredentials, NotInstalled, PlatformRefused, PlatformUnreachable
from litgpt_demo.errors import words_of
from litgpt_demo.secrets import translating

if TYPE_CHECKING:
    from google.cloud.batch_v1 import BatchServiceClient
    from google.cloud.logging_v2.services.logging_service_v2 import LoggingServiceV2Client

# host:port of stand-ins that speak without TLS and ask for no credentials, as STORAGE_EMULATOR_HOST for the storage.
BATCH_EMULATOR = "BATCH_EMULATOR_HOST"
LOGGING_EMULATOR = "LOGGING_EMULATOR_HOST"

# Roles of the submitter: https://cloud.google.com/batch/docs/get-started
BATCH_ROLES = (
    "enable the Batch API in the project and give yourself roles/batch.jobsEditor and roles/logging.viewer, and "
    "roles/iam.serviceAccountUser on the VMs' service account"
)


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

            return BatchServiceClient(transport=_emulated(BatchServiceClient, BATCH_EMULATOR))

    @cached_property
    def logging(self) -> LoggingServiceV2Client:
        """
        Raises:
            NotInstalled: the extra is not.
            LoginProblem: no credentials.
        """
        with errors_as_ours("signing in"):
            from google.cloud.logging_v2.services.logging_service_v2 import LoggingServiceV2Client

            return LoggingServiceV2Client(transport=_emulated(LoggingServiceV2Client, LOGGING_EMULATOR))


def _emulated(client: Any, variable: str) -> Any:
    """The client's transport to a stand-in, or None for Google's own."""
    address = os.environ.get(variable)
    if not address:
        return None
    import grpc

    return client.get_transport_class("grpc")(channel=grpc.insecure_channel(address))


@translating
def errors_as_ours(doing: str) -> Iterator[None]:
    """Errors of Google's libraries as ours, saying what was being done.

    Raises:
        NotInstalled: a library is missing.
        LoginProblem: credentials are missing or were refused.
        PlatformRefused: Google understood, and said no.
        PlatformUnreachable: no answer, or none that says anything.
    """
    try:
        from google.api_core import exceptions as api
        from google.auth import exceptions as auth
    except ImportError as error:
        raise _not_installed(doing, error) from error
    # Not chained: a traceback may show the headers that were sent, and the token is one of them.
    try:
        yield
    except ImportError as error:
        raise _not_installed(doing, error) from error
    except auth.TransportError as error:
        raise PlatformUnreachable(f"{doing}: {words_of(error)}") from None
    except (auth.GoogleAuthError, api.Unauthenticated) as error:
        kind = NoCredentials if isinstance(error, auth.DefaultCredentialsError) else LoginProblem
        raise kind(
            f"{doing}: {words_of(error)}; run `gcloud auth application-default login`, or name a key in "
            "GOOGLE_APPLICATION_CREDENTIALS"
        ) from None
    except api.PermissionDenied as error:
        raise PlatformRefused(f"{doing}: {words_of(error.message)}; {BATCH_ROLES}") from None
    except (api.TooManyRequests, api.Conflict, api.Cancelled) as error:
        raise PlatformUnreachable(f"{doing}: {words_of(error.message)}") from None
    except api.ClientError as error:  # InvalidArgument, NotFound, FailedPrecondition, OutOfRange: the same again later
        words = words_of(error.message)
        raise PlatformRefused(f"{doing}: {words}; fix what it names in the platform's settings") from None
    except (api.GoogleAPICallError, api.RetryError) as error:
        raise PlatformUnreachable(f"{doing}: {words_of(error)}") from None


def _not_installed(doing: str, error: ImportError) -> NotInstalled:
    return NotInstalled(f'{doing} needs Google\'s libraries ({error}): pip install "train-litgpt[batch]"')
