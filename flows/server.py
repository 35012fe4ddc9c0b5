"""Prefect's server, as a command that starts a flow needs it: it answers, or the command ends with a message."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

import httpx
from prefect.client.orchestration import get_client
from prefect.settings import (
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    get_current_settings,
    temporary_settings,
)

from launcher.errors import ConfigProblem, ServerUnreachable
from litgpt_demo.errors import words_of

T = TypeVar("T")

_ANSWER_SECONDS = 5.0
_DATABASE_BYTES = 4_000_000  # more than a fresh database of Prefect 3.8 takes with its journal


def server_address() -> httpx.URL | None:
    """Return the address of the configured server; None where each command starts a server of its own."""
    address = get_current_settings().api.url
    # A password in the address is for the server alone.
    return httpx.URL(address).copy_with(username=None, password=None) if address else None


def require_server() -> None:
    """Ask the server once whether it can be worked with; start one where none is configured.

    Raises:
        ServerUnreachable: it does not answer, is not Prefect's, refuses us, or did not come up.
    """
    if server_address() is None:
        _require_home(get_current_settings().home)
    try:
        # The engine asks the same, but is patient: a firewall that drops packets would hold it up for 17 minutes.
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True, httpx_settings={"timeout": _ANSWER_SECONDS}) as client,
        ):
            client.raise_for_api_version_mismatch()
    except (httpx.HTTPError, RuntimeError, ValueError) as error:
        address = server_address()
        raise _not_started(error) if address is None else _not_there(address, error) from error


def require_configured_server() -> None:
    """Ask the configured server the same, and start none.

    Raises:
        ConfigProblem: none is configured.
        ServerUnreachable: it does not answer, is not Prefect's, or refuses us.
    """
    if server_address() is None:
        raise ConfigProblem("there is no Prefect server: run `make serve` and set PREFECT_API_URL as it says")
    require_server()


def served(pipeline: Callable[[], Coroutine[Any, Any, T]]) -> Callable[[], Coroutine[Any, Any, T]]:
    """Return a pipeline that first sees that there is a server, and ends with a message where it is lost."""

    async def after_the_server() -> T:
        await asyncio.to_thread(require_server)
        with server_problems():
            return await pipeline()

    return after_the_server


@contextmanager
def server_problems() -> Iterator[None]:
    """Turn the loss of the server within this block, after all retries of Prefect's client, into a message.

    Raises:
        ServerUnreachable: a request to the server was not answered.
    """
    address = server_address()
    try:
        yield
    except httpx.RequestError as error:
        if not _was_for_server(error, address):
            raise
        raise ServerUnreachable(
            f"Prefect's server{f' at {address}' if address else ''} stopped answering ({_why(error)}). "
            "Run the same command again once a server answers (`make serve` starts one that stays): steps that are "
            "done are found by their keys, and a job that still runs is adopted"
        ) from error


def _require_home(home: Path) -> None:
    """See that a server of our own can keep its data: where it cannot, it dies, and Prefect starts it again forever."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=home) as probe:
            probe.write(bytes(_DATABASE_BYTES))
            probe.flush()
    except OSError as error:
        why = error.strerror or error
        raise ServerUnreachable(
            f"Prefect's own server for this run cannot keep its data in PREFECT_HOME={home}: {why}. "
            "Make room there, or set PREFECT_HOME to a folder that can be written"
        ) from error


def _was_for_server(error: httpx.RequestError, address: httpx.URL | None) -> bool:
    """Return whether a failed request was one to the server: other hosts are asked through the same library."""
    try:
        asked = error.request.url
    except RuntimeError:  # httpx's way to say that it does not know
        return True
    if address is None:  # a server of our own; Prefect gives it a port of this machine
        return asked.host == "127.0.0.1" and asked.path.startswith("/api/")
    return (asked.host, asked.port) == (address.host, address.port) and asked.path.startswith(address.path)


def _not_there(address: httpx.URL, error: Exception) -> ServerUnreachable:
    if os.environ.get("PREFECT_API_URL"):
        given, unset = f"PREFECT_API_URL={address}", "unset PREFECT_API_URL"
    else:  # a profile's or a prefect.toml's
        given, unset = f"PREFECT_API_URL={address} in Prefect's settings", "prefect config unset PREFECT_API_URL"
    fix = "Start it with `make serve`, or correct the address, which ends in /api"
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in {401, 403}:
        fix = "Set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect Cloud, to the secret that it asks for"
    return ServerUnreachable(
        f"{given} cannot be used as Prefect's server: {_why(error)}. {fix}; or `{unset}`, and a training starts a "
        "server of its own"
    )


def _not_started(error: Exception) -> ServerUnreachable:
    seconds = PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
    return ServerUnreachable(
        f"Prefect's own server for this run was not up after {seconds} s: {_why(error)}. The usual cause is a busy "
        f"machine, or a slow disk below PREFECT_HOME={get_current_settings().home}. Set "
        f"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS={2 * seconds}, or start a server that stays: `make serve`"
    )


def _why(error: BaseException) -> str:
    """Return the innermost reason on one line: Prefect wraps httpx's errors without their words."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, httpx.HTTPStatusError):
        return f"it answers {error.response.status_code} {error.response.reason_phrase}"
    if isinstance(error, httpx.TimeoutException):
        return "it gave no answer in time"
    return words_of(error) or type(error).__name__
