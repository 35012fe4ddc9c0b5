"""The gRPC clients of Google's libraries: their emulators, and our errors for their exceptions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from launcher.errors import LauncherError, LoginProblem, NoCredentials, NotInstalled, install_extra
from litgpt_demo.errors import one_line
from litgpt_demo.secrets import translating


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service of Google's, and our errors for it: `denied_error` if it refuses, else `unavailable_error`."""

    extra: str
    """The extra of this project that installs its client."""
    roles: str
    """The fix for a missing permission."""
    denied_error: type[LauncherError]
    unavailable_error: type[LauncherError]
    emulator: str
    """The variable with host:port of an emulator, which has neither TLS nor credentials."""

    def client(self, name: str) -> Any:
        """Return the client of that name, `module:class`, for Google's own service or its emulator."""
        with google_errors(self, "signing in"):
            kind = resolve_name(name)
            address = os.environ.get(self.emulator)
            if not address:
                return kind()
            import grpc

            return kind(transport=kind.get_transport_class("grpc")(channel=grpc.insecure_channel(address)))


@translating
def google_errors(service: Service, doing: str, *unless: str) -> Iterator[None]:
    """Raise errors of Google's libraries as ours, with what was being done. Those named in `unless` end the block."""
    # Not chained: a traceback may show the headers that were sent, and with them the token.
    try:
        from google.api_core import exceptions as api
        from google.auth import exceptions as auth

        try:
            yield
        except (auth.GoogleAuthError, api.GoogleAPICallError, api.RetryError) as error:
            if type(error).__name__ in unless:
                return
            what = f"{doing}: {one_line(getattr(error, 'message', error))}"
            unknown = isinstance(error, (auth.GoogleAuthError, api.Unauthenticated))
            if unknown and not isinstance(error, auth.TransportError):
                kind = NoCredentials if isinstance(error, auth.DefaultCredentialsError) else LoginProblem
                fix = "run `gcloud auth application-default login`, or name a key in GOOGLE_APPLICATION_CREDENTIALS"
                raise kind(what, fix=fix) from None
            later = isinstance(error, (api.TooManyRequests, api.Conflict, api.Cancelled))
            if isinstance(error, api.ClientError) and not later:
                fix = service.roles if error.code == 403 else "fix what it names in the config"
                raise service.denied_error(what, fix=fix) from None
            raise service.unavailable_error(what) from None
    except ImportError as error:
        what = f"{doing} needs Google's libraries, which are not installed ({error})"
        raise NotInstalled(what, fix=install_extra(service.extra)) from error
