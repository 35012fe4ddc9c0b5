"""The front door of a Prefect server that we start: which requests come in at all, and how a browser brings the secret.

Prefect asks for the secret itself (PREFECT_SERVER_API_AUTH_STRING), but answers under any host name. A stranger's
page whose host name resolves to 127.0.0.1 would share the server's origin, and could read it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from threading import Thread
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.serving import ENTER, LOOPBACK

# Where both of Prefect's UIs keep what a person has pasted into their form. What follows # never reaches a server.
_LOGIN = """<!doctype html><title>Prefect</title><script>
localStorage.setItem("prefect-password", btoa(decodeURIComponent(location.hash.slice(1))));
location.replace("/v2");
</script>
"""


def application() -> ASGIApp:
    """Return Prefect's server behind the door, with the settings of this process's environment."""
    from prefect.server.api.server import create_app
    from prefect.settings import PREFECT_SERVER_CORS_ALLOWED_ORIGINS

    return guarded(create_app(), PREFECT_SERVER_CORS_ALLOWED_ORIGINS.value().split(","))


def application_of_a_command() -> ASGIApp:
    """Return the same for a server that ends with its command, which has the other end of its standard input."""
    Thread(target=_end_with_command, name="command", daemon=True).start()
    return application()


def _end_with_command() -> None:
    """End this process when its command has ended, however that did: a killed one could not say goodbye."""
    os.read(0, 1)  # sys.stdin has a lock, which the end of Python would wait for
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)  # as long as the command itself would wait for it
    os._exit(1)


def guarded(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return the app for pages of these origins and clients without one, under the names of this machine and theirs."""
    names = [urlsplit(origin).hostname or origin for origin in origins]
    return TrustedHostMiddleware(_OwnPages(app, origins), allowed_hosts=[*LOOPBACK, *names], www_redirect=False)


class _OwnPages:
    """An app that only pages of some origins are served from, and that knows the page that logs a browser in."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app, self._origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self._app
        if scope["type"] in ("http", "websocket"):
            origin = Headers(scope=scope).get("origin")
            if origin is not None and origin not in self._origins and "*" not in self._origins:
                answer = PlainTextResponse("Pages of this origin are not served here", status_code=403)
            elif scope["type"] == "http" and scope["path"] == ENTER:
                answer = HTMLResponse(_LOGIN, headers={"Cache-Control": "no-store"})
        await answer(scope, receive, send)
