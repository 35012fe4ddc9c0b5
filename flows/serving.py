"""Prefect servers that train-litgpt starts: their secret and its file, and the server that ends with its command.

Nothing imports Prefect before it is needed, because it reads its settings when it is imported.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from litgpt_demo import PYTHON
from litgpt_demo.imports import importing

CHECKOUT = Path(__file__).resolve().parents[1]
AUTH = "PREFECT_API_AUTH_STRING"
SERVER_AUTH = "PREFECT_SERVER_API_AUTH_STRING"
ORIGINS = "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"
LOOPBACK = ("127.0.0.1", "localhost")


# Settings of Prefect's processes for an installed package. The checkout's pyproject.toml has the same, with reasons.
PREFECT_SETTINGS = {
    "PREFECT_WORKER_QUERY_SECONDS": "2.0",
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
    "PREFECT_RUNNER_CRASH_ON_CANCELLATION_FAILURE": "True",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "False",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "False",
}


def _is_checkout() -> bool:
    return (CHECKOUT / "pyproject.toml").exists()  # an installed package is in site-packages


def workplace() -> Path:
    """Return the folder of the server, the worker and their flow runs: the checkout, else the current folder."""
    return CHECKOUT if _is_checkout() else Path.cwd()


def serving_home() -> Path:
    """Return the folder of these servers: PREFECT_HOME, else .prefect in a writable checkout, else one of the user."""
    own = CHECKOUT / ".prefect"
    if not _is_checkout() or not os.access(own if own.exists() else CHECKOUT, os.W_OK):
        own = Path(os.environ.get("TRAIN_LITGPT_HOME") or "~/.train-litgpt") / "prefect"
    return Path(os.environ.get("PREFECT_HOME") or own).expanduser().absolute()


def environment_file(home: Path) -> Path:
    """Return the file with the settings, the secret among them, that a shell needs to use the server."""
    return home / "serve" / "environment"


def settings_in(file: Path) -> dict[str, str]:
    """Return the settings of such a file; {} if it cannot be read."""
    with suppress(FileNotFoundError, PermissionError, ValueError):  # the last if a user edited it
        return dict(word.split("=", 1) for word in shlex.split(file.read_text(encoding="utf-8")) if "=" in word)
    return {}


def kept_file(name: str) -> Path:
    """Return the file of this name in the folder of the server and the worker of `train-litgpt serve`."""
    return environment_file(serving_home()).with_name(name)


def live(name: str) -> psutil.Process | None:
    """Return the process of the server or the worker that `train-litgpt serve` started; None if it has ended."""
    from litgpt_demo.heartbeat import started  # not for a server, which it costs 50 ms

    with suppress(FileNotFoundError, PermissionError, ValueError, ProcessLookupError, psutil.NoSuchProcess):
        pid, began = kept_file(f"{name}.pid").read_text().split()
        process = psutil.Process(int(pid))
        # A container may have no process that reaps a zombie.
        if started(process.pid) == float(began) and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def served() -> dict[str, str]:
    """Return the settings that a shell needs to use the server of `train-litgpt serve`; {} if it does not run."""
    return settings_in(environment_file(serving_home())) if live("server") else {}


def new_secret() -> str:
    """Return a user name and a random password, in the form of HTTP's basic authentication."""
    return f"litgpt:{secrets.token_urlsafe(32)}"


def server_environment(port: int, secret: str) -> dict[str, str]:
    """Return the settings of a server that accepts only clients with the secret, and only pages of its own UI."""
    # In memory, a lease of slots (flows.sweep_litgpt.gpus) would be lost with the server, and its slots held forever.
    leases = {"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem"}
    return leases | {SERVER_AUTH: secret, ORIGINS: ",".join(f"http://{name}:{port}" for name in LOOPBACK)}


def server_command(port: int, *, app: str) -> list[str]:
    """Return the command line of one of the servers below, which only this machine can reach."""
    options = ["--lifespan", "on", "--log-level", "error", "--host", "127.0.0.1", "--port", str(port)]
    return [*PYTHON, "-m", "uvicorn", "--app-dir", str(CHECKOUT), "--factory", f"flows.serving:{app}", *options]


def server() -> Any:
    """Return Prefect's server, whose transactions on SQLite wait for each other."""
    with importing():
        from prefect.server.api.server import create_app
        from sqlalchemy import Engine, event

    # Prefect begins most transactions as readers. SQLite refuses one at once that writes after another has written,
    # "database is locked", and an event to which this happens five times reaches no automation (Prefect 3.8.8).
    @event.listens_for(Engine, "before_cursor_execute", retval=True)
    def begin_as_writer(_: Any, __: Any, statement: str, values: Any, *___: Any) -> tuple[str, Any]:
        return "BEGIN IMMEDIATE" if statement == "BEGIN DEFERRED" else statement, values

    return create_app()


def own_server() -> Any:
    """Return the same server, in a process whose standard input a command keeps open until it ends."""

    def end_with_command() -> None:  # also if the command was killed
        os.read(0, 1)  # sys.stdin has a lock, which the end of Python would wait for
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)  # the command itself would wait as long
        os._exit(1)

    Thread(target=end_with_command, name="command", daemon=True).start()
    return server()
