"""The check and the start of Prefect's server for a command that starts a flow."""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import httpx
from prefect.client.orchestration import get_client
from prefect.context import refresh_global_settings_context
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings

from flows import serving
from launcher.errors import ConfigProblem, ServerUnreachable
from litgpt_demo.errors import one_line
from litgpt_demo.imports import importing
from litgpt_demo.secrets import translating
from litgpt_demo.storage.private import close_folder

T = TypeVar("T")
Pipeline: TypeAlias = Callable[[], Coroutine[Any, Any, T]]

_ANSWER_SECONDS = 5.0


def server_address() -> httpx.URL | None:
    """Return the address of the configured or running server; None if each command starts a server of its own."""
    use_served()
    address = get_current_settings().api.url
    # A password in the address is only for the server.
    return httpx.URL(address).copy_with(username=None, password=None) if address else None


def use_served() -> None:
    """Use the server of `train-litgpt serve` if it runs and no other is configured, and its secret if none is set."""
    api, kept = get_current_settings().api, serving.settings_in(serving.environment_file(serving.serving_home()))
    if not api.url and serving.live("server"):
        _configure(kept)
    if not api.url or serving.AUTH not in kept or api.auth_string or api.key:
        return
    configured, served = httpx.URL(api.url.rstrip("/")), httpx.URL(kept.get("PREFECT_API_URL", "").rstrip("/"))
    is_this_machine = {configured.host, served.host} <= {*serving.LOOPBACK}  # which has two names
    is_same_host = configured.host == served.host or is_this_machine
    if is_same_host and configured.copy_with(host=served.host) == served:
        _configure({serving.AUTH: kept[serving.AUTH]})


def require_server() -> None:
    """Raise ConfigProblem or ServerUnreachable unless the configured server can be used."""
    address = server_address()
    if address is None:
        fix = "run `train-litgpt serve`, or set PREFECT_API_URL to a server that runs"
        raise ConfigProblem("there is no Prefect server", fix=fix)
    try:
        # The engine checks the same, but with retries: it would wait 17 minutes for a firewall that drops packets.
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True, httpx_settings={"timeout": _ANSWER_SECONDS}) as client,
        ):
            client.raise_for_api_version_mismatch()
    except (httpx.HTTPError, RuntimeError, ValueError) as error:
        fix = "Start it with `train-litgpt serve`, or correct the address, which ends in /api"
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in {401, 403}:
            fix = (
                "Set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect Cloud, to the secret that it requires; "
                "`train-litgpt serve` prints the secret of its server"
            )
        raise ServerUnreachable(
            f"PREFECT_API_URL={address} cannot be used as Prefect's server: {_why(error)}. {fix}; or unset it (in "
            "Prefect's settings by `prefect config unset PREFECT_API_URL`), and a training starts a server of its own"
        ) from None  # a traceback may show the headers that were sent


async def run_served(load: Callable[[], Pipeline[T]], *, on_own_server: Callable[[], None]) -> T:
    """Run a pipeline when the server answers. If none is configured, one is started and `on_own_server` is called;
    meanwhile `load` imports the pipeline."""
    own = None
    if server_address() is None:
        own = OwnServer()
        on_own_server()
    with importing():
        pipeline = load()
    await asyncio.to_thread(require_server if own is None else own.wait)
    with server_problems():
        return await pipeline()


class OwnServer:
    """A Prefect server that ends with this command. Prefect's client would start the same one, but only after importing
    all of it into this process (prefect.server.api.server.SubprocessASGIServer of Prefect 3.8)."""

    def __init__(self) -> None:
        settings, home = get_current_settings(), serving.serving_home()
        try:
            close_folder(home)
        except OSError as error:
            raise ServerUnreachable(
                f"Prefect's own server for this run cannot keep its data in PREFECT_HOME={home}: "
                f"{error.strerror or error}. Set PREFECT_HOME to a folder that can be written"
            ) from error
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self._address, secret = f"http://127.0.0.1:{port}/api", serving.new_secret()
        # A permanent server registers the types of blocks; no pipeline needs one.
        environment = {"PREFECT_API_BLOCKS_REGISTER_ON_START": "false"} | os.environ
        environment |= settings.to_environment_variables(exclude_unset=True) | serving.server_environment(port, secret)
        environment |= {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_HOME": str(home)}
        environment["PREFECT__SERVER_FINAL"] = "1"  # there is one server in the process, which saves 50 MB
        command = serving.server_command(port, app="own_server")
        self._process = subprocess.Popen(command, env=environment, umask=0o077, stdin=subprocess.PIPE)
        self._seconds = settings.server.ephemeral.startup_timeout_seconds
        self._deadline = time.monotonic() + self._seconds
        # It ends with its input, after Prefect's threads, which at their end send it the last events.
        atexit.register(self._process.communicate)
        _configure({"PREFECT_API_URL": self._address, serving.AUTH: secret})

    def wait(self) -> None:
        with httpx.Client(trust_env=False, timeout=_ANSWER_SECONDS) as client:
            while time.monotonic() < self._deadline:
                code = self._process.poll()
                if code is not None:
                    raise ServerUnreachable(
                        f"Prefect's own server for this run ended with code {code} before it was up; its output is "
                        "above. Try again, or start a server that stays: `train-litgpt serve`"
                    )
                with suppress(httpx.TransportError):
                    if client.get(f"{self._address}/health").is_success:
                        return
                time.sleep(0.05)
        raise ServerUnreachable(
            f"Prefect's own server for this run was not up after {self._seconds} s. The usual cause is a busy machine, "
            f"or a slow disk below PREFECT_HOME={serving.serving_home()}. Set PREFECT_SERVER_EPHEMERAL_STARTUP_"
            f"TIMEOUT_SECONDS={2 * self._seconds}, or start a server that stays: `train-litgpt serve`"
        )


def _configure(settings: Mapping[str, str]) -> None:
    """Set these in Prefect only for this process: a job that outlives it must inherit neither address nor secret."""
    before = {name: os.environ[name] for name in settings if name in os.environ}
    os.environ |= settings
    try:
        refresh_global_settings_context()
    finally:
        for name in settings:
            del os.environ[name]
        os.environ |= before


@translating
def server_problems() -> Iterator[None]:
    """Turn the loss of the server within this block, after all retries of Prefect's client, into a message."""
    address = server_address()
    try:
        yield
    except httpx.RequestError as error:
        if address is None:
            raise
        with suppress(RuntimeError):  # httpx raises it if the error has no request
            url = error.request.url
            is_server = (url.host, url.port) == (address.host, address.port) and url.path.startswith(address.path)
            if not is_server:
                raise  # the same library connects to other hosts too
        raise ServerUnreachable(
            f"Prefect's server at {address} stopped answering ({_why(error)}). "
            "Run the same command again once a server answers (`train-litgpt serve` starts a permanent one): finished "
            "steps are not repeated, and train-litgpt reattaches to a job that is still running"
        ) from None


def _why(error: BaseException) -> str:
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, httpx.HTTPStatusError):
        return f"it answers {error.response.status_code} {error.response.reason_phrase}"
    if isinstance(error, httpx.TimeoutException):
        return "it gave no answer in time"
    return one_line(error) or type(error).__name__
