"""A Prefect server as `make serve` and other commands start one: its command line, its secret and where that is kept.

Nothing here imports Prefect, which reads its settings when it is imported.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from litgpt_demo.storage.private import write_private

CHECKOUT = Path(__file__).resolve().parents[1]
AUTH = "PREFECT_API_AUTH_STRING"
SERVER_AUTH = "PREFECT_SERVER_API_AUTH_STRING"
ORIGINS = "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"
LOOPBACK = ("127.0.0.1", "localhost")
ENTER = "/enter"
"""The path of the page that logs a browser in."""


def serving_home() -> Path:
    """Return the folder of the server that `make serve` starts: PREFECT_HOME or, without one, next to the code."""
    return Path(os.environ.get("PREFECT_HOME") or CHECKOUT / ".prefect").expanduser().absolute()


def environment_file(home: Path) -> Path:
    """Return the file with the settings that a shell needs to use the server of `make serve`, its secret among them."""
    return home / "serve" / "environment"


def settings_in(file: Path) -> dict[str, str]:
    """Return the settings of such a file; {} where there is none that we can read."""
    try:
        words = shlex.split(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, PermissionError, ValueError):  # the last where somebody edited it
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def write_settings(file: Path, settings: Mapping[str, str]) -> None:
    """Write such a file for its owner alone, so that a reader sees all of it or none."""
    write_private(file, "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items()))


def server_command(port: int, *, log_level: str) -> list[str]:
    """Return the command line of a Prefect server behind our door, which only this machine can reach."""
    # -P: a folder `flows` in the folder where the user is must not be taken for ours.
    program = [sys.executable, "-P", "-m", "uvicorn", "--app-dir", str(CHECKOUT), "--factory"]
    options = ["--lifespan", "on", "--log-level", log_level, "--host", "127.0.0.1", "--port", str(port)]
    return [*program, "flows.front_door:application", *options]


def server_environment(port: int, secret: str) -> dict[str, str]:
    """Return the settings of such a server."""
    return {
        SERVER_AUTH: secret,
        ORIGINS: ",".join(origins_at(port)),
        "PREFECT__SERVER_FINAL": "1",  # there is one server in the process, which saves 50 MB
    }


def new_secret() -> str:
    """Return a user name and a random password, the form that HTTP's basic authentication has."""
    return f"litgpt:{secrets.token_urlsafe(32)}"


def origins_at(port: int) -> list[str]:
    """Return the origins of the UI of a server on this machine."""
    return [f"http://{name}:{port}" for name in LOOPBACK]


def login_link(port: int, secret: str) -> str:
    """Return the address that logs a browser in. It is a secret too, hence nothing for a command line."""
    return f"http://127.0.0.1:{port}{ENTER}#{quote(secret, safe='')}"
